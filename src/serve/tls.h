// TLS on a socket that does not block, where the build found OpenSSL; otherwise asking for it throws a sentence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace gka::serve::http {

/// How reading or writing went: bytes, or why there are none.
enum class Outcome : std::uint8_t { some, again, closed };

/// One connection's encryption.
class TlsSession {
 public:
  virtual ~TlsSession() = default;
  virtual Outcome read(char* into, std::size_t size, std::size_t& got) = 0;
  virtual Outcome write(const char* from, std::size_t size, std::size_t& sent) = 0;
};

class TlsContext {
 public:
  virtual ~TlsContext() = default;
  virtual std::unique_ptr<TlsSession> accept(int socket) = 0;

  /// Throws one sentence where a file is missing or wrong, or the build has no OpenSSL.
  static std::unique_ptr<TlsContext> load(const std::string& certificate, const std::string& key);
};

}  // namespace gka::serve::http
