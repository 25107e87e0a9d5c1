#include "serve/http_parser.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

namespace gka::serve::http {
namespace {

constexpr std::size_t kMostHeaders = 100;
constexpr std::size_t kLongestChunkLine = 256;

bool is_token(char c) {
  static constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || kMarks.find(c) != std::string_view::npos;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

std::string small(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

int hex(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && hex(text[i + 1]) >= 0 && hex(text[i + 2]) >= 0) {
      out += static_cast<char>(hex(text[i + 1]) * 16 + hex(text[i + 2]));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

std::string Request::parameter(std::string_view name) const {
  for (std::string_view rest(query); !rest.empty();) {
    const auto one = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(one.size() + 1, rest.size()));
    const auto equals = std::min(one.find('='), one.size());
    if (percent_decoded(one.substr(0, equals)) != name) continue;
    std::string value(one.substr(std::min(equals + 1, one.size())));
    std::ranges::replace(value, '+', ' ');  // as forms write it
    return percent_decoded(value);
  }
  return {};
}

std::string_view Request::header(std::string_view name) const {
  const auto found = std::ranges::find_if(headers, [&](const auto& entry) { return entry.first == name; });
  return found == headers.end() ? std::string_view() : std::string_view(found->second);
}

void Parser::fail(int status, std::string problem) {
  state_ = State::failed;
  status_ = status;
  problem_ = std::move(problem);
}

/// Adds to buffer_ up to the next "\n", which ends a line (line_done_).
std::size_t Parser::take_line(std::string_view data) {
  const auto end = data.find('\n');
  const auto taken = end == std::string_view::npos ? data.size() : end + 1;
  const auto limit = state_ == State::head || state_ == State::trailers ? max_head_ : kLongestChunkLine;
  if (buffer_.size() + taken > limit) {
    fail(431, "the request's line and headers have more than " + std::to_string(limit) + " bytes");
    return data.size();
  }
  buffer_ += data.substr(0, taken);
  line_done_ = end != std::string_view::npos;
  return taken;
}

std::size_t Parser::feed(std::string_view data) {
  std::size_t used = 0;
  while (used < data.size() && state_ < State::complete) {
    const auto rest = data.substr(used);
    started_ = true;
    switch (state_) {
      case State::head:
        used += take_line(rest);
        if (buffer_ == "\r\n" || buffer_ == "\n") {  // before a request: some clients send one too many
          buffer_.clear();
          started_ = false;
        } else if (state_ == State::head && line_done_ &&
                   (buffer_.ends_with("\r\n\r\n") || buffer_.ends_with("\n\n"))) {
          parse_head();
        }
        break;
      case State::body:
      case State::chunk_data: {
        const auto taken = std::min(left_, rest.size());
        request_.body += rest.substr(0, taken);
        used += taken;
        left_ -= taken;
        if (left_ == 0) state_ = state_ == State::body ? State::complete : State::chunk_end;
        break;
      }
      case State::chunk_size:
        used += take_line(rest);
        if (state_ == State::chunk_size && line_done_) parse_chunk_size();
        break;
      case State::chunk_end:
        used += take_line(rest);
        if (state_ == State::chunk_end && line_done_) {
          if (buffer_ != "\r\n" && buffer_ != "\n") {
            fail(400, "a chunk of the body is longer than its size says");
          } else {
            buffer_.clear();
            state_ = State::chunk_size;
          }
        }
        break;
      case State::trailers:
        used += take_line(rest);
        if (state_ == State::trailers && line_done_ &&
            (buffer_ == "\r\n" || buffer_ == "\n" || buffer_.ends_with("\n\r\n") || buffer_.ends_with("\n\n"))) {
          state_ = State::complete;
        }
        break;
      case State::complete:
      case State::failed: break;
    }
  }
  return used;
}

void Parser::parse_chunk_size() {
  std::string_view line(buffer_);
  line = trimmed(line.substr(0, line.find_first_of(";\r\n")));
  std::size_t size = 0;
  const auto parsed = std::from_chars(line.data(), line.data() + line.size(), size, 16);
  if (line.empty() || parsed.ec != std::errc() || parsed.ptr != line.data() + line.size()) {
    return fail(400, "a chunk of the body does not start with its size");
  }
  if (size > max_body_ || request_.body.size() + size > max_body_) {
    return fail(413, "the body has more than " + std::to_string(max_body_) + " bytes");
  }
  buffer_.clear();
  left_ = size;
  state_ = size == 0 ? State::trailers : State::chunk_data;
}

bool Parser::parse_request_line(std::string_view line) {
  const auto first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) return false;
  const auto method = line.substr(0, first), target = line.substr(first + 1, last - first - 1),
             version = line.substr(last + 1);
  if (method.empty() || !std::ranges::all_of(method, is_token)) return false;
  if (version != "HTTP/1.1" && version != "HTTP/1.0") return false;
  if (!std::ranges::all_of(target, [](unsigned char c) { return c > ' ' && c != 0x7f; })) return false;
  keep_alive_ = version == "HTTP/1.1";
  request_.chunks = keep_alive_;
  auto path = target;
  if (path.starts_with("http://") || path.starts_with("https://")) {
    const auto slash = path.find('/', path.find("//") + 2);
    path = slash == std::string_view::npos ? "/" : path.substr(slash);
  }
  if (!path.starts_with('/') && path != "*") return false;
  const auto question = path.find('?');
  request_.method = method;
  request_.path = percent_decoded(path.substr(0, question));
  request_.query = question == std::string_view::npos ? "" : std::string(path.substr(question + 1));
  return true;
}

bool Parser::parse_header(std::string_view line) {
  const auto colon = line.find(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const auto name = line.substr(0, colon), value = trimmed(line.substr(colon + 1));
  if (!std::ranges::all_of(name, is_token)) return false;
  const auto control = [](unsigned char c) { return (c < ' ' && c != '\t') || c == 0x7f; };
  if (std::ranges::any_of(value, control)) return false;
  request_.headers.emplace_back(small(name), std::string(value));
  return true;
}

void Parser::parse_head() {
  std::string_view text(buffer_);
  bool first = true;
  while (!text.empty()) {
    const auto end = text.find('\n');
    auto line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) break;
    const bool fine = first ? parse_request_line(line) : parse_header(line);
    if (!fine) return fail(400, first ? "the request line is not HTTP/1.1" : "a header of the request is malformed");
    if (request_.headers.size() > kMostHeaders) return fail(431, "the request has more than 100 headers");
    first = false;
  }
  buffer_.clear();
  begin_body();
}

void Parser::begin_body() {
  const auto count = [&](std::string_view name) {
    return std::ranges::count_if(request_.headers, [&](const auto& entry) { return entry.first == name; });
  };
  const auto connection = small(request_.header("connection"));
  if (connection.find("close") != std::string::npos) keep_alive_ = false;
  if (connection.find("keep-alive") != std::string::npos) keep_alive_ = true;
  request_.keep_alive = keep_alive_;
  const auto encoding = small(request_.header("transfer-encoding"));
  const auto lengths = count("content-length");
  if (!encoding.empty() || count("transfer-encoding") > 0) {
    if (encoding != "chunked" || count("transfer-encoding") > 1 || lengths > 0) {
      return fail(400, "Transfer-Encoding takes chunked alone, without Content-Length");
    }
    expects_ = small(request_.header("expect")) == "100-continue";
    state_ = State::chunk_size;
    return;
  }
  if (lengths == 0) {
    state_ = State::complete;
    return;
  }
  const auto text = request_.header("content-length");
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), left_);
  if (lengths > 1 || text.empty() || parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) {
    return fail(400, "Content-Length takes one whole number");
  }
  if (left_ > max_body_) {
    return fail(413, "the body has " + std::to_string(left_) + " bytes, and at most " + std::to_string(max_body_) +
                         " are taken");
  }
  expects_ = small(request_.header("expect")) == "100-continue";
  state_ = left_ == 0 ? State::complete : State::body;
}

Request Parser::take() {
  auto taken = std::exchange(request_, {});
  state_ = State::head;
  started_ = false;
  expects_ = false;
  buffer_.clear();
  left_ = 0;
  return taken;
}

}  // namespace gka::serve::http
