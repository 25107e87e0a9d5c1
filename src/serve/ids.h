// Names of answers, items and requests that nobody can guess.
#pragma once

#include <random>
#include <string>

namespace gka::serve {

/// 24 hexadecimal digits from the system's randomness. A generator seeded once would be told by its first few, and with
/// it the name of what another client keeps here.
inline std::string fresh_id() {
  static constexpr const char* kDigits = "0123456789abcdef";
  thread_local std::random_device random;
  std::string id;
  while (id.size() < 24) {
    for (auto bits = random(), i = 0U; i < 8; ++i, bits >>= 4) id += kDigits[bits & 15];
  }
  return id;
}

/// An item of a response's answer has its response's name in its own.
inline std::string item_id(const std::string& prefix, const std::string& response, std::size_t at) {
  return prefix + response + "_" + std::to_string(at);
}

/// That name; "" where it is the id of no such item.
inline std::string response_of_item(const std::string& item) {
  const auto begin = item.find("resp_"), end = item.rfind('_');
  return begin == std::string::npos || end < begin + 5 ? "" : item.substr(begin, end - begin);
}

}  // namespace gka::serve
