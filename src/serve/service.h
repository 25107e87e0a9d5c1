// The API over HTTP: routes, keys, limits, and the models behind them.
//
//   Service service(options);             // listens; /health says 503
//   service.add(model);                   // as many as there are
//   service.ready();
//   service.run();                        // until shutdown(), which lets running answers end
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serve/http.h"
#include "serve/model.h"
#include "serve/response_store.h"

namespace gka::serve {

struct ServiceOptions {
  http::Options http;
  std::vector<std::string> keys;     // none: no key is asked for
  std::vector<std::string> cors;     // origins whose pages may call; "*": any
  std::int64_t streams_per_key = 0;  // requests one key may have running; 0: no limit
  std::size_t queue = 1024;          // requests that may wait to be read
  ResponseStore::Limits stored{};    // responses that are kept
  std::chrono::milliseconds drain_limit{30'000};
  std::chrono::milliseconds heartbeat{15'000};  // a stream that has nothing to say for so long says that it lives
  int threads = 2;                              // that read requests: JSON, templates, tokens
  bool log_json = false, log_text = false, quiet = false;
};

class Service {
 public:
  explicit Service(ServiceOptions options);
  ~Service();

  int port() const;
  /// "http://127.0.0.1:8000"
  std::string address() const;

  void add(std::shared_ptr<Model> model);  // before ready()
  void ready();
  void run();
  /// From any thread: refuses what is new, lets what runs finish within the limit, and makes run() return.
  void shutdown();

 private:
  class Core;
  std::unique_ptr<Core> core_;
};

}  // namespace gka::serve
