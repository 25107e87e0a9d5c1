#include "serve/log.h"

#include <chrono>
#include <cstdio>
#include <ctime>

#include "data/unicode.h"

namespace gka::serve {

void Log::say(const std::string& message, const Json& values) {
  if (quiet_) return;
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char time[32];
  std::strftime(time, sizeof(time), json_ ? "%Y-%m-%dT%H:%M:%SZ" : "%H:%M:%S", &parts);
  std::string line;
  if (json_) {
    Json all{{"time", time}, {"message", message}};
    all.update(values);
    line = dumped(all);
  } else {
    line = std::string(time) + " " + message;
    for (const auto& [key, value] : values.items())
      line += " " + key + "=" + (value.is_string() ? value.get<std::string>() : dumped(value));
    line = data::replace_malformed(line);
    for (auto& c : line) c = static_cast<unsigned char>(c) < ' ' ? ' ' : c;  // a client's header cannot start a line
  }
  line += "\n";
  const std::lock_guard lock(mutex_);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace gka::serve
