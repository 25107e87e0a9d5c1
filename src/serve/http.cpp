#include "serve/http.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <unordered_map>

#include "base/files.h"
#include "serve/http_parser.h"
#include "serve/tls.h"

namespace gka::serve::http {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array<std::pair<int, std::string_view>, 20> kReasons{{
    {100, "Continue"},
    {200, "OK"},
    {201, "Created"},
    {204, "No Content"},
    {304, "Not Modified"},
    {400, "Bad Request"},
    {401, "Unauthorized"},
    {403, "Forbidden"},
    {404, "Not Found"},
    {405, "Method Not Allowed"},
    {408, "Request Timeout"},
    {409, "Conflict"},
    {413, "Content Too Large"},
    {415, "Unsupported Media Type"},
    {422, "Unprocessable Content"},
    {429, "Too Many Requests"},
    {431, "Request Header Fields Too Large"},
    {500, "Internal Server Error"},
    {501, "Not Implemented"},
    {503, "Service Unavailable"},
}};

std::string system_reason() { return std::generic_category().message(errno); }

std::string peer_name(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text, sizeof(text));
  } else if (address.ss_family == AF_INET6) {
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr, text, sizeof(text));
  }
  return text;
}

Descriptor listen_on(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  const auto service = std::to_string(port);
  const int failure = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), service.c_str(), &hints, &found);
  if (failure != 0) throw std::runtime_error("--host '" + host + "' is no address: " + ::gai_strerror(failure));
  std::string why = "no address";
  Descriptor listener;
  for (const auto* entry = found; entry != nullptr && !listener.open(); entry = entry->ai_next) {
    Descriptor candidate(::socket(entry->ai_family, entry->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int yes = 1;
    if (candidate.open()) ::setsockopt(candidate.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (candidate.open() && ::bind(candidate.get(), entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::listen(candidate.get(), SOMAXCONN) == 0) {
      listener = std::move(candidate);
    } else {
      const bool taken = errno == EADDRINUSE;
      why = system_reason() + (taken ? "; --port 0 takes any that is free" : "");
    }
  }
  ::freeaddrinfo(found);
  if (!listener.open()) {
    throw std::runtime_error("cannot listen on " + host + ":" + service + ": " + why);
  }
  return listener;
}

int port_of(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

/// How many of `wanted` connections the system lets this process have, after asking it for more.
std::size_t connections_that_fit(std::size_t wanted) {
  constexpr rlim_t kOthers = 128;  // files that are no connections: weights, memories, libraries
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  if (limit.rlim_cur < wanted + kOthers) {
    auto more = limit;
    more.rlim_cur = std::min<rlim_t>(limit.rlim_max, wanted + kOthers);
    if (::setrlimit(RLIMIT_NOFILE, &more) == 0) limit = more;
  }
  const auto room = limit.rlim_cur - std::min(kOthers, limit.rlim_cur / 2);
  return std::clamp<std::size_t>(room, 1, wanted);
}

std::string hexadecimal(std::size_t number) {
  char text[20];
  std::snprintf(text, sizeof(text), "%zx", number);
  return text;
}

}  // namespace

std::string_view reason(int status) {
  for (const auto& [known, text] : kReasons) {
    if (known == status) return text;
  }
  return "Unknown";
}

/// What a connection needs of its server.
class Host {
 public:
  virtual ~Host() = default;
  virtual const Options& options() const = 0;
  virtual void handle(const std::shared_ptr<Exchange>& exchange) = 0;
  virtual std::string refusal(int status, const std::string& problem) const = 0;
  /// Whether the socket wants to be told when it can be written, and read.
  virtual void watch(Connection& connection) = 0;
  virtual void later(const std::shared_ptr<Connection>& connection) = 0;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Host& host, Descriptor socket, std::string peer, std::unique_ptr<TlsSession> tls)
      : host_(host),
        socket_(std::move(socket)),
        peer_(std::move(peer)),
        tls_(std::move(tls)),
        parser_(host.options().max_head, host.options().max_body) {
    wait_for(host_.options().idle_limit);
  }

  int socket() const { return socket_.get(); }
  bool closed() const { return closed_; }
  bool wants_write() const { return !out_.empty() || tls_wants_write_; }
  /// While an answer is being made, what the client sends next stays in the socket; that it goes away is noticed.
  bool wants_read() const { return !exchange_ || in_.size() < kAhead; }
  std::size_t unsent() const { return out_.size() - sent_; }
  Clock::time_point deadline() const { return deadline_; }

  void on_readable() {
    char buffer[64 << 10];
    // Of TLS everything is read: what its library has taken off the socket, epoll knows nothing of.
    for (int round = 0; (tls_ || round < 4) && !closed_ && wants_read(); ++round) {
      std::size_t got = 0;
      const auto outcome = read_some(buffer, sizeof(buffer), got);
      if (outcome == Outcome::again) break;
      if (outcome == Outcome::closed) return close();
      if (closing_) continue;  // answered already; what still comes is not read
      in_.append(buffer, got);
      if (!exchange_) process();
    }
  }

  void on_writable() {
    flush();
    if (!closed_ && tls_) on_readable();  // a handshake goes both ways
  }

  void on_deadline() {
    if (exchange_) {  // the answer takes its time; only a client that reads nothing is late
      if (unsent() == 0) return wait_for(host_.options().idle_limit);
      return close();
    }
    if (parser_.started()) refuse(408, "the request did not arrive in time");
    close();
  }

  void send(std::string_view data) {
    if (closed_) return;
    if (sent_ > (std::size_t{1} << 16)) {
      out_.erase(0, sent_);
      sent_ = 0;
    }
    out_ += data;
    flush();
  }

  /// The same, unless the client has left too much unread of what came before. What comes now may be of any size: an
  /// answer that is large is nobody's slowness.
  void send_if_read(std::string_view data) {
    if (exchange_ && unsent() > host_.options().max_unsent) return close();
    send(data);
  }

  /// The exchange's answer is complete.
  void completed() {
    exchange_.reset();
    served_ = true;
    if (!keep_alive_) closing_ = true;
    flush();
    if (closed_) return;
    wait_for(host_.options().idle_limit);
    host_.later(shared_from_this());  // the next request may be here already
  }

  void close_after_this() { keep_alive_ = false; }
  /// Between two requests, with none on its way: a client that has just come has a second for its first one.
  bool idle() const {
    if (closed_ || closing_ || exchange_ || parser_.started() || !in_.empty() || !out_.empty()) return false;
    const auto since = Clock::now() - (deadline_ - host_.options().idle_limit);
    char byte = 0;
    return (served_ || since > std::chrono::seconds(1)) && ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0;
  }

  /// A client for which there is no room.
  void turn_away() {
    refuse(503, "the server has as many connections as it can; try again in a moment");
    finish_then_close();
  }

  /// After an answer: the next request may have come meanwhile.
  void resume() {
    process();
    if (tls_ && !closed_) on_readable();
  }

  void process() {
    while (!closed_ && !closing_ && !exchange_ && !in_.empty()) {
      const bool fresh = !parser_.started(), headless = !parser_.in_body();
      in_.erase(0, parser_.feed(in_));
      if (fresh && parser_.started()) wait_for(host_.options().head_limit);
      if (headless && parser_.in_body()) wait_for(host_.options().body_limit);
      if (parser_.take_expectation()) send("HTTP/1.1 100 Continue\r\n\r\n");
      if (parser_.state() == Parser::State::failed) {
        refuse(parser_.status(), parser_.problem());
        return finish_then_close();
      }
      if (parser_.state() == Parser::State::complete) begin();
    }
    if (!closed_) host_.watch(*this);
  }

  void close() {
    if (std::exchange(closed_, true)) return;
    const auto exchange = std::exchange(exchange_, nullptr);
    if (exchange && !exchange->done_) {
      exchange->done_ = true;
      if (const auto gone = std::exchange(exchange->gone_, nullptr)) gone();
    }
    host_.later(shared_from_this());
  }

 private:
  static constexpr std::size_t kAhead = 64 << 10;

  void begin() {
    keep_alive_ = parser_.keep_alive();
    auto request = parser_.take();
    request.peer = peer_;
    wait_for(host_.options().idle_limit);
    exchange_ = std::make_shared<Exchange>(std::move(request), weak_from_this());
    const auto keep = exchange_;
    host_.handle(keep);
  }

  void refuse(int status, const std::string& problem) {
    const auto body = host_.refusal(status, problem);
    send("HTTP/1.1 " + std::to_string(status) + " " + std::string(reason(status)) +
         "\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\n\r\n" + body);
  }

  /// What the client still sends is read and dropped for a while: closing at once would make its system throw away our
  /// answer.
  void finish_then_close() {
    if (closed_) return;
    closing_ = true;
    in_.clear();
    flush();
  }

  void wait_for(std::chrono::milliseconds time) { deadline_ = Clock::now() + time; }

  Outcome read_some(char* into, std::size_t size, std::size_t& got) {
    if (tls_) return tls_->read(into, size, got);
    const auto count = ::recv(socket_.get(), into, size, 0);
    if (count > 0) {
      got = static_cast<std::size_t>(count);
      return Outcome::some;
    }
    return count < 0 && (errno == EAGAIN || errno == EINTR) ? Outcome::again : Outcome::closed;
  }

  Outcome write_some(std::size_t& sent) {
    if (tls_) return tls_->write(out_.data() + sent_, out_.size() - sent_, sent);
    const auto count = ::send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (count >= 0) {
      sent = static_cast<std::size_t>(count);
      return Outcome::some;
    }
    return errno == EAGAIN || errno == EINTR ? Outcome::again : Outcome::closed;
  }

  void flush() {
    while (!closed_ && sent_ < out_.size()) {
      std::size_t count = 0;
      const auto outcome = write_some(count);
      if (outcome == Outcome::closed) return close();
      if (outcome == Outcome::again) break;
      sent_ += count;
      wait_for(host_.options().idle_limit);
    }
    if (sent_ == out_.size()) {
      out_.clear();
      sent_ = 0;
      if (closing_ && !exchange_ && !half_closed_) {
        half_closed_ = true;
        if (tls_) return close();
        ::shutdown(socket_.get(), SHUT_WR);
        wait_for(std::chrono::milliseconds(500));
      }
    }
    if (!closed_) host_.watch(*this);
  }

  Host& host_;
  Descriptor socket_;
  std::string peer_;
  std::unique_ptr<TlsSession> tls_;
  Parser parser_;
  std::string in_, out_;
  std::size_t sent_ = 0;  // of out_
  std::shared_ptr<Exchange> exchange_;
  Clock::time_point deadline_;
  bool keep_alive_ = true, closing_ = false, half_closed_ = false, closed_ = false, tls_wants_write_ = false,
       served_ = false;
};

// --- exchange

Exchange::Exchange(Request request, std::weak_ptr<Connection> connection)
    : request_(std::move(request)), connection_(std::move(connection)) {}

std::string Exchange::head(int status, std::string_view type, const Headers& headers) const {
  std::string text = "HTTP/1.1 " + std::to_string(status) + " " + std::string(reason(status)) + "\r\n";
  if (!type.empty()) text += "Content-Type: " + std::string(type) + "\r\n";
  for (const auto* list : {&headers_, &headers}) {
    for (const auto& [name, value] : *list) text += name + ": " + value + "\r\n";
  }
  // A client of HTTP/1.0 takes an answer without this word for one that ends where the connection does.
  if (!request_.keep_alive || !request_.chunks)
    text += request_.keep_alive ? "Connection: keep-alive\r\n" : "Connection: close\r\n";
  return text;
}

void Exchange::send(std::string_view data) {
  if (const auto connection = connection_.lock()) connection->send_if_read(data);
  bytes_ += data.size();
}

void Exchange::reply(int status, std::string_view type, std::string_view body, const Headers& headers) {
  if (done_) return;
  status_ = status;
  auto text = head(status, type, headers) + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n";
  if (request_.method != "HEAD") text += body;
  done_ = true;
  send(text);
  if (const auto connection = connection_.lock()) connection->completed();
}

void Exchange::start(int status, std::string_view type, const Headers& headers) {
  if (done_ || started_) return;
  started_ = true;
  status_ = status;
  if (!request_.chunks) {  // the body ends where the connection does
    request_.keep_alive = false;
    if (const auto connection = connection_.lock()) connection->close_after_this();
  }
  send(head(status, type, headers) + (request_.chunks ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n"));
}

void Exchange::write(std::string_view data) {
  if (done_ || data.empty()) return;
  send(request_.chunks ? hexadecimal(data.size()) + "\r\n" + std::string(data) + "\r\n" : std::string(data));
}

void Exchange::finish() {
  if (std::exchange(done_, true)) return;
  const auto connection = connection_.lock();
  if (!connection) return;
  if (request_.chunks) connection->send("0\r\n\r\n");  // whatever is unread yet: nothing comes after it
  connection->completed();
}

std::size_t Exchange::unsent() const {
  const auto connection = connection_.lock();
  return connection ? connection->unsent() : 0;
}

// --- the loop

class Server::Loop : public Host {
 public:
  Loop(Options options, Handler handler, std::function<std::string(int, const std::string&)> refuse)
      : options_(std::move(options)),
        handler_(std::move(handler)),
        refuse_(std::move(refuse)),
        listener_(listen_on(options_.host, options_.port)),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (options_.certificate.empty() != options_.key.empty()) {
      throw std::runtime_error("TLS takes a certificate and its key, and got one of them");
    }
    if (!options_.certificate.empty()) tls_ = TlsContext::load(options_.certificate, options_.key);
    options_.max_connections = connections_that_fit(options_.max_connections);
    port_ = port_of(listener_.get());
    add(listener_.get(), EPOLLIN);
    add(wake_.get(), EPOLLIN);
  }

  ~Loop() override {
    for (auto& [socket, connection] : connections_) connection->close();
  }

  int port() const { return port_; }
  bool tls() const { return tls_ != nullptr; }
  std::size_t size() const { return count_; }

  void run() {
    while (!stopped_) {
      epoll_event events[256];
      const int count = ::epoll_wait(epoll_.get(), events, 256, wait_time());
      bool knock = false;
      for (int i = 0; i < count; ++i) knock |= !handle_event(events[i]);
      run_tasks();
      run_timers();
      run_later();
      if (knock) accept_all();  // last, so that those who have left make room
    }
  }

  void stop() {
    stopped_ = true;
    wake();
  }

  void close_listener() {
    if (!listener_.open()) return;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
    listener_.close();
  }

  void post(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    if (!awake_.exchange(true)) wake();
  }

  void every(std::chrono::milliseconds period, std::function<void()> task) {
    timers_.push_back({Clock::now() + period, period, std::move(task)});
  }

  const Options& options() const override { return options_; }
  void handle(const std::shared_ptr<Exchange>& exchange) override { handler_(exchange); }
  std::string refusal(int status, const std::string& problem) const override { return refuse_(status, problem); }

  void watch(Connection& connection) override {
    epoll_event event{};
    event.data.fd = connection.socket();
    event.events = EPOLLRDHUP | (connection.wants_read() ? EPOLLIN : 0U) | (connection.wants_write() ? EPOLLOUT : 0U);
    auto& watched = watched_[connection.socket()];
    if (watched == event.events) return;
    watched = event.events;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket(), &event);
  }

  void later(const std::shared_ptr<Connection>& connection) override { later_.push_back(connection); }

 private:
  struct Timer {
    Clock::time_point next;
    std::chrono::milliseconds period;
    std::function<void()> task;
  };

  void add(int descriptor, std::uint32_t events) {
    epoll_event event{};
    event.data.fd = descriptor;
    event.events = events;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event);
  }

  void wake() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
  }

  int wait_time() const {
    if (!later_.empty()) return 0;
    constexpr int kLongest = 250;  // deadlines of connections are looked at this often
    auto wait = std::chrono::milliseconds(kLongest);
    if (accept_again_) wait = std::chrono::milliseconds(20);
    for (const auto& timer : timers_) {
      wait = std::min(wait, std::chrono::duration_cast<std::chrono::milliseconds>(timer.next - Clock::now()));
    }
    return static_cast<int>(std::max<std::int64_t>(wait.count(), 0));
  }

  /// False: somebody new is there.
  bool handle_event(const epoll_event& event) {
    if (event.data.fd == wake_.get()) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof(count));
      return true;
    }
    if (event.data.fd == listener_.get()) return false;
    const auto found = connections_.find(event.data.fd);
    if (found == connections_.end()) return true;
    const auto connection = found->second;
    if ((event.events & EPOLLIN) != 0) connection->on_readable();
    if ((event.events & EPOLLOUT) != 0) connection->on_writable();
    if ((event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) connection->close();
    return true;
  }

  void accept_all() {
    for (int round = 0; round < 64 && listener_.open(); ++round) {
      const bool crowded = connections_.size() >= options_.max_connections;
      const auto idle = crowded ? longest_idle() : nullptr;
      if (crowded && !idle && !full_for_long()) return stop_accepting();
      if (!crowded || idle) full_since_.reset();
      sockaddr_storage address{};
      socklen_t size = sizeof(address);
      Descriptor socket(
          ::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket.open()) {
        const bool nobody = errno == EAGAIN || errno == EWOULDBLOCK, gone = errno == ECONNABORTED || errno == EINTR;
        if (gone) continue;
        if (!nobody) out_of_descriptors();
        return;
      }
      if (idle) idle->close();
      const int yes = 1;
      ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
      const int number = socket.get();
      auto session = tls_ ? tls_->accept(number) : nullptr;
      connections_[number] =
          std::make_shared<Connection>(*this, std::move(socket), peer_name(address), std::move(session));
      watched_[number] = EPOLLIN | EPOLLRDHUP;
      add(number, EPOLLIN | EPOLLRDHUP);
      count_ = connections_.size();
      if (crowded && !idle) connections_[number]->turn_away();
    }
  }

  /// The connection that has waited longest for a next request, or none. Where it is closed, its descriptor is given
  /// back before the next look at events.
  std::shared_ptr<Connection> longest_idle() const {
    std::shared_ptr<Connection> oldest;
    for (const auto& [socket, connection] : connections_) {
      if ((!oldest || connection->deadline() < oldest->deadline()) && connection->idle()) oldest = connection;
    }
    return oldest;
  }

  /// Clients wait at the door for a moment, as in a burst; whoever comes when it has been full for longer is told.
  bool full_for_long() {
    if (!full_since_) full_since_ = Clock::now();
    return Clock::now() - *full_since_ > std::chrono::seconds(1);
  }

  /// No descriptor is left: accept fails, and the client stays at the door.
  void out_of_descriptors() {
    const auto idle = longest_idle();
    idle ? idle->close() : stop_accepting();
  }

  /// For a little while: to ask again at once would take all of a processor's time.
  void stop_accepting() {
    epoll_event event{};
    event.data.fd = listener_.get();
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
    accept_again_ = Clock::now() + std::chrono::milliseconds(20);
  }

  void start_accepting() {
    accept_again_.reset();
    if (!listener_.open()) return;
    epoll_event event{};
    event.data.fd = listener_.get();
    event.events = EPOLLIN;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
  }

  void run_tasks() {
    awake_ = false;
    std::vector<std::function<void()>> tasks;
    {
      const std::lock_guard lock(mutex_);
      tasks.swap(tasks_);
    }
    for (auto& task : tasks) task();
  }

  void run_timers() {
    const auto now = Clock::now();
    if (accept_again_ && *accept_again_ <= now) start_accepting();
    for (std::size_t i = 0; i < timers_.size(); ++i) {
      if (timers_[i].next > now) continue;
      timers_[i].next = now + timers_[i].period;
      timers_[i].task();
    }
    if (now < next_sweep_) return;
    next_sweep_ = now + std::chrono::milliseconds(250);
    std::vector<std::shared_ptr<Connection>> late;
    for (const auto& [socket, connection] : connections_) {
      if (connection->deadline() < now) late.push_back(connection);
    }
    for (const auto& connection : late) connection->on_deadline();
  }

  /// Connections that closed, and those whose next request may have come while the last was answered.
  void run_later() {
    auto waiting = std::exchange(later_, {});
    for (const auto& connection : waiting) {
      if (!connection->closed()) {
        connection->resume();
        continue;
      }
      const auto found = connections_.find(connection->socket());
      if (found == connections_.end() || found->second != connection) continue;
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection->socket(), nullptr);
      watched_.erase(connection->socket());
      connections_.erase(found);
      count_ = connections_.size();
      full_since_.reset();
    }
  }

  Options options_;
  Handler handler_;
  std::function<std::string(int, const std::string&)> refuse_;
  std::unique_ptr<TlsContext> tls_;
  Descriptor listener_, epoll_, wake_;
  int port_ = 0;
  std::unordered_map<int, std::shared_ptr<Connection>> connections_;
  std::unordered_map<int, std::uint32_t> watched_;
  std::vector<std::shared_ptr<Connection>> later_;
  std::vector<Timer> timers_;
  Clock::time_point next_sweep_{};
  std::optional<Clock::time_point> accept_again_, full_since_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  std::atomic<bool> awake_ = false, stopped_ = false;
  std::atomic<std::size_t> count_ = 0;
};

Server::Server(const Options& options, Handler handler, std::function<std::string(int, const std::string&)> refuse)
    : loop_(std::make_unique<Loop>(options, std::move(handler), std::move(refuse))) {}
Server::~Server() = default;

int Server::port() const { return loop_->port(); }
bool Server::tls() const { return loop_->tls(); }
void Server::run() { loop_->run(); }
void Server::stop() { loop_->stop(); }
void Server::close_listener() { loop_->close_listener(); }
void Server::post(std::function<void()> task) { loop_->post(std::move(task)); }
void Server::every(std::chrono::milliseconds period, std::function<void()> task) {
  loop_->every(period, std::move(task));
}
std::size_t Server::connections() const { return loop_->size(); }

}  // namespace gka::serve::http
