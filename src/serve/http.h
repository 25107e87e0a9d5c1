// HTTP/1.1 for many clients at once: one thread that owns every connection (epoll), and the caller's handlers.
//
// Why not a library that gives each connection a thread: a stream waits for tokens most of its life, a thousand of them
// are a thousand idle threads, and a sender that trickles bytes holds one for ever. Here a connection costs its
// buffers, every wait has a deadline, and a client that goes away is noticed at once, which is what frees its slot.
//
// Handlers run on that thread and must return quickly: they hand work to other threads, which answer through
// Server::post. An Exchange is used on the server's thread only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gka::serve::http {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct Request {
  std::string method, path, query;
  Headers headers;  // names in small letters
  std::string body;
  std::string peer;                       // the client's address
  bool chunks = true, keep_alive = true;  // whether the client reads a body in chunks, and sends more afterwards

  /// The first of that name (given in small letters), or "".
  std::string_view header(std::string_view name) const;
  /// The first of that name behind the path's question mark, or "".
  std::string parameter(std::string_view name) const;
};

class Connection;

/// One request and its answer: `reply` once, or `start`, any number of `write`, and `finish`. After the client has gone
/// all of them do nothing.
class Exchange {
 public:
  Exchange(Request request, std::weak_ptr<Connection> connection);

  const Request& request() const { return request_; }
  /// Added to whatever is answered.
  void add_header(std::string name, std::string value) { headers_.emplace_back(std::move(name), std::move(value)); }

  void reply(int status, std::string_view type, std::string_view body, const Headers& headers = {});
  void start(int status, std::string_view type, const Headers& headers = {});  // a chunked body
  void write(std::string_view data);
  void finish();

  /// Called when the client goes away before the answer is complete.
  void on_gone(std::function<void()> call) { gone_ = std::move(call); }
  bool open() const { return !connection_.expired() && !done_; }
  /// Bytes written and not sent yet: a client that does not read.
  std::size_t unsent() const;
  int status() const { return status_; }
  std::size_t bytes_sent() const { return bytes_; }

 private:
  friend class Connection;
  std::string head(int status, std::string_view type, const Headers& headers) const;
  void send(std::string_view data);

  Request request_;
  Headers headers_;
  std::weak_ptr<Connection> connection_;
  std::function<void()> gone_;
  bool started_ = false, done_ = false;
  int status_ = 0;
  std::size_t bytes_ = 0;
};

struct Options {
  std::string host = "127.0.0.1";
  int port = 0;                                   // 0: any that is free
  std::size_t max_body = std::size_t{32} << 20;   // bytes
  std::size_t max_head = std::size_t{32} << 10;   // of the request line and headers
  std::size_t max_connections = 4096;             // fewer where the system does not let a process have so many files
  std::size_t max_unsent = std::size_t{4} << 20;  // what a client may leave unread when more comes
  std::chrono::milliseconds head_limit{10'000};   // from a request's first byte to its headers' end
  std::chrono::milliseconds body_limit{60'000};   // and to its body's end
  std::chrono::milliseconds idle_limit{60'000};   // between requests
  std::string certificate, key;                   // TLS: PEM files; both or none
};

class Server {
 public:
  using Handler = std::function<void(const std::shared_ptr<Exchange>&)>;

  /// Binds and listens; throws one sentence where it cannot. `too_large` and the like are answered by `refuse`, which
  /// gives a body for a status and a sentence.
  Server(const Options& options, Handler handler, std::function<std::string(int, const std::string&)> refuse);
  ~Server();

  int port() const;
  bool tls() const;

  /// Until stop(): serves on the calling thread.
  void run();
  /// From any thread, a signal handler's included.
  void stop();
  /// No new connections; requests on the open ones are still handled.
  void close_listener();
  /// Runs `task` on the server's thread; from any thread.
  void post(std::function<void()> task);
  /// Runs `task` on the server's thread about every `period`.
  void every(std::chrono::milliseconds period, std::function<void()> task);

  std::size_t connections() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

/// "OK", "Not Found", …
std::string_view reason(int status);

}  // namespace gka::serve::http
