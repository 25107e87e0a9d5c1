// Reads requests out of a stream of bytes that arrives in pieces of any size. Strict where laxity has been a hole
// elsewhere: one Content-Length, never beside Transfer-Encoding, no bare CR or LF inside a header, sizes bounded before
// anything is stored.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "serve/http.h"

namespace gka::serve::http {

class Parser {
 public:
  Parser(std::size_t max_head, std::size_t max_body) : max_head_(max_head), max_body_(max_body) {}

  enum class State : std::uint8_t { head, body, chunk_size, chunk_data, chunk_end, trailers, complete, failed };

  /// Takes bytes until a request is complete or wrong, and returns how many it took.
  std::size_t feed(std::string_view data);

  State state() const { return state_; }
  bool started() const { return started_; }
  bool in_body() const { return state_ > State::head && state_ < State::complete; }
  /// The client waits for "100 Continue" before it sends the body. True once.
  bool take_expectation() { return std::exchange(expects_, false); }

  /// Of a complete request; the parser is ready for the next one then.
  Request take();
  bool keep_alive() const { return keep_alive_; }

  /// Of a failed one: what to answer.
  int status() const { return status_; }
  const std::string& problem() const { return problem_; }

 private:
  void fail(int status, std::string problem);
  std::size_t take_line(std::string_view data);
  void parse_head();
  bool parse_request_line(std::string_view line);
  bool parse_header(std::string_view line);
  void begin_body();
  void parse_chunk_size();

  std::size_t max_head_, max_body_;
  State state_ = State::head;
  bool started_ = false, keep_alive_ = true, expects_ = false, line_done_ = false;
  std::string buffer_;  // the head, or a chunk's line
  std::size_t left_ = 0;
  Request request_;
  int status_ = 0;
  std::string problem_;
};

}  // namespace gka::serve::http
