#include "cli/bench_http.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/json.h"
#include "data/tokenizer.h"
#include "serve/service.h"

namespace gka::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// Counts tokens from when every stream has one until the first stream is over.
class Meter {
 public:
  explicit Meter(std::size_t streams) : came_(streams, 0), over_(streams, false) {}

  void token(std::size_t stream, std::int64_t count) {
    const std::lock_guard lock(mutex_);
    if (came_[stream] == 0 && ++begun_ == came_.size()) start_ = Clock::now();
    came_[stream] += count;
    if (begun_ == came_.size() && ended_ == 0) counted_ += count;
  }

  void end(std::size_t stream, const std::string& error) {
    const std::lock_guard lock(mutex_);
    if (over_[stream]) return;
    over_[stream] = true;
    if (ended_++ == 0) stop_ = Clock::now();
    if (error_.empty()) error_ = error;
    changed_.notify_all();
  }

  double rate() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ == came_.size(); });
    if (!error_.empty()) throw std::runtime_error(error_);
    if (begun_ < came_.size()) throw std::runtime_error("a stream ended without a token");
    return static_cast<double>(counted_) / std::chrono::duration<double>(stop_ - start_).count();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::int64_t> came_;
  std::vector<bool> over_;
  std::size_t begun_ = 0, ended_ = 0;
  std::int64_t counted_ = 0;
  Clock::time_point start_, stop_;
  std::string error_;
};

infer::Request request_of(const std::vector<std::int64_t>& prompt, std::int64_t tokens, std::uint64_t seed) {
  infer::Request request{.prompt = prompt, .sampling = {.seed = seed}, .max_tokens = tokens};
  request.ignore_eos = true;
  return request;
}

double engine_rate(infer::Engine& engine, const std::vector<std::vector<std::int64_t>>& prompts, std::int64_t tokens) {
  Meter meter(prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    engine.submit(
        request_of(prompts[i], tokens, i),
        {.on_token = [&meter, i](const infer::TokenEvent&) { meter.token(i, 1); },
         .on_end = [&meter, i](infer::Finish, const infer::Usage&, const std::string& error) { meter.end(i, error); }});
  }
  return meter.rate();
}

/// A connection that has sent its request and counts the events that come back.
class Stream {
 public:
  Stream(int port, const std::string& body) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      throw std::runtime_error(std::string("cannot connect to the server: ") + std::strerror(errno));
    }
    const auto request =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nContent-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body;
    for (std::size_t sent = 0; sent < request.size();) {
      const auto now = ::send(socket_, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
      if (now <= 0) throw std::runtime_error("the server hung up while it was sent a request");
      sent += static_cast<std::size_t>(now);
    }
  }
  Stream(const Stream&) = delete;
  ~Stream() { ::close(socket_); }

  int socket() const { return socket_; }

  /// Takes what is there: how many tokens came, or −1 at the end.
  std::int64_t take() {
    std::array<char, 65536> buffer;
    const auto got = ::recv(socket_, buffer.data(), buffer.size(), 0);
    if (got <= 0) return -1;
    text_.append(buffer.data(), static_cast<std::size_t>(got));
    if (head_.empty()) head_ = text_.substr(0, 15);
    std::int64_t events = 0;
    std::size_t at = 0;
    for (auto found = text_.find(kEvent); found != std::string::npos; found = text_.find(kEvent, at)) {
      ++events;
      at = found + kEvent.size();
    }
    text_.erase(0, std::max(at, text_.size() - std::min(text_.size(), kEvent.size() - 1)));
    return events;
  }

  std::string trouble() const { return head_.find("200") != std::string::npos ? "" : "the server answered " + head_; }

 private:
  static constexpr std::string_view kEvent = "data: {";
  int socket_;
  std::string text_, head_;
};

double client_rate(int port, const std::vector<std::vector<std::int64_t>>& prompts, std::int64_t tokens) {
  Meter meter(prompts.size());
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<pollfd> waiting;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const Json body{
        {"prompt", prompts[i]}, {"max_tokens", tokens}, {"stream", true}, {"ignore_eos", true}, {"seed", i}};
    streams.push_back(std::make_unique<Stream>(port, body.dump()));
    waiting.push_back({.fd = streams.back()->socket(), .events = POLLIN, .revents = 0});
  }
  for (auto open = streams.size(); open > 0;) {
    if (::poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) throw std::runtime_error("poll failed");
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].revents == 0) continue;
      const auto came = streams[i]->take();
      if (came > 0) meter.token(i, came);
      if (came >= 0) continue;
      meter.end(i, streams[i]->trouble());
      waiting[i].fd = -1;
      --open;
    }
  }
  return meter.rate();
}

}  // namespace

HttpRates http_rates(std::unique_ptr<infer::Engine> engine, const std::vector<std::vector<std::int64_t>>& prompts,
                     std::int64_t tokens) {
  auto& model = *engine;
  serve::ServiceOptions options;
  options.http.port = 0;
  options.quiet = true;
  serve::Service service(options);
  service.add(std::make_shared<serve::Model>(serve::Model{.name = "model",
                                                          .folder = {},
                                                          .encoder = serve::Encoder(data::Tokenizer::load("bytes")),
                                                          .chat = serve::ChatTemplate::load("/nowhere"),
                                                          .engine = std::move(engine)}));
  service.ready();
  std::thread server([&] { service.run(); });
  HttpRates rates;
  std::string failure;
  try {
    engine_rate(model, prompts, tokens);  // steps are recorded, memory is there
    rates.engine = engine_rate(model, prompts, tokens);
    rates.http = client_rate(service.port(), prompts, tokens);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  service.shutdown();
  server.join();
  if (!failure.empty()) throw std::runtime_error(failure);
  return rates;
}

}  // namespace gka::cli
