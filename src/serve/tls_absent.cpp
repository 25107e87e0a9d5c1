#include <stdexcept>

#include "serve/tls.h"

namespace gka::serve::http {

std::unique_ptr<TlsContext> TlsContext::load(const std::string&, const std::string&) {
  throw std::runtime_error(
      "this build has no TLS: install OpenSSL's headers (apt-get install libssl-dev) and build again");
}

}  // namespace gka::serve::http
