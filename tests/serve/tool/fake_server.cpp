// The server over an engine without a model, for the tests in Python: gka_fake_server key=value …
//   folder=   with tokenizer files (none: bytes, and the plain chat template)     keys=a,b      step_us=   slots=
//   queue=    streams=   max_body=   drain_ms=   cors=   context=   head_ms=   body_ms=   certificate=   key=   port=
//   beat_ms=  host=    responses=   response_bytes=
// Prints the address once it listens, and stops on SIGTERM as `gka serve` does.
#include <csignal>
#include <filesystem>
#include <iostream>
#include <map>
#include <sstream>

#include "fake_engine.h"
#include "serve/service.h"
#include "serve/signals.h"

using namespace gka::serve;

namespace {

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> given;
  for (int i = 1; i < argc; ++i) {
    const std::string argument(argv[i]);
    given[argument.substr(0, argument.find('='))] = argument.substr(argument.find('=') + 1);
  }
  const auto number = [&](const char* name, std::int64_t otherwise) {
    return given.count(name) != 0 ? std::stoll(given[name]) : otherwise;
  };
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  ServiceOptions options;
  options.keys = parts_of(given["keys"]);
  options.cors = parts_of(given["cors"]);
  options.streams_per_key = number("streams", 0);
  options.http.max_body = static_cast<std::size_t>(number("max_body", 1 << 20));
  options.http.head_limit = std::chrono::milliseconds(number("head_ms", 10'000));
  options.http.body_limit = std::chrono::milliseconds(number("body_ms", 10'000));
  options.drain_limit = std::chrono::milliseconds(number("drain_ms", 10'000));
  options.heartbeat = std::chrono::milliseconds(number("beat_ms", 15'000));
  options.stored = {.responses = static_cast<std::size_t>(number("responses", 1000)),
                    .bytes = static_cast<std::size_t>(number("response_bytes", 64 << 20))};
  if (given.count("host") != 0) options.http.host = given["host"];
  options.http.port = static_cast<int>(number("port", 0));
  options.http.certificate = given["certificate"];
  options.http.key = given["key"];
  Service service(options);
  const auto tokenizer =
      gka::data::Tokenizer::load(given.count("folder") != 0 && given.count("bpe") != 0 ? given["folder"] : "bytes");
  auto engine = std::make_unique<gka::serve::testing::FakeEngine>(
      gka::serve::testing::FakeEngine::Options{.slots = number("slots", 4),
                                               .queue = number("queue", 64),
                                               .context = number("context", 4096),
                                               .step = std::chrono::microseconds(number("step_us", 0))});
  service.add(std::make_shared<Model>(Model{.name = "fake",
                                            .folder = given["folder"],
                                            .encoder = Encoder(tokenizer),
                                            .chat = ChatTemplate::load(given["folder"]),
                                            .engine = std::move(engine),
                                            .end_tokens = {256}}));
  const SignalWatch watch(service, signals);
  service.ready();
  std::cout << service.address() << std::endl;
  service.run();
}
