#include <openssl/err.h>
#include <openssl/ssl.h>

#include <stdexcept>

#include "serve/tls.h"

namespace gka::serve::http {
namespace {

std::string last_error() {
  char text[256];
  ERR_error_string_n(ERR_get_error(), text, sizeof(text));
  return text;
}

class Session : public TlsSession {
 public:
  Session(SSL_CTX* context, int socket) : ssl_(SSL_new(context)) {
    SSL_set_fd(ssl_, socket);
    SSL_set_accept_state(ssl_);  // the handshake happens in the first reads and writes
  }
  ~Session() override { SSL_free(ssl_); }
  Session(const Session&) = delete;

  Outcome read(char* into, std::size_t size, std::size_t& got) override {
    ERR_clear_error();
    return outcome(SSL_read_ex(ssl_, into, size, &got));
  }
  Outcome write(const char* from, std::size_t size, std::size_t& sent) override {
    ERR_clear_error();
    return outcome(SSL_write_ex(ssl_, from, size, &sent));
  }

 private:
  Outcome outcome(int result) const {
    if (result > 0) return Outcome::some;
    const int error = SSL_get_error(ssl_, result);
    return error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? Outcome::again : Outcome::closed;
  }

  SSL* ssl_;
};

class Context : public TlsContext {
 public:
  Context(const std::string& certificate, const std::string& key) : context_(SSL_CTX_new(TLS_server_method())) {
    SSL_CTX_set_min_proto_version(context_, TLS1_2_VERSION);
    SSL_CTX_set_mode(context_, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    if (SSL_CTX_use_certificate_chain_file(context_, certificate.c_str()) != 1) {
      fail("the certificate " + certificate + " cannot be read: " + last_error());
    }
    if (SSL_CTX_use_PrivateKey_file(context_, key.c_str(), SSL_FILETYPE_PEM) != 1) {
      fail("the key " + key + " cannot be read, or does not belong to the certificate: " + last_error());
    }
  }
  ~Context() override { SSL_CTX_free(context_); }
  Context(const Context&) = delete;

  std::unique_ptr<TlsSession> accept(int socket) override { return std::make_unique<Session>(context_, socket); }

 private:
  [[noreturn]] void fail(const std::string& sentence) {
    SSL_CTX_free(context_);
    throw std::runtime_error(sentence);
  }

  SSL_CTX* context_;
};

}  // namespace

std::unique_ptr<TlsContext> TlsContext::load(const std::string& certificate, const std::string& key) {
  return std::make_unique<Context>(certificate, key);
}

}  // namespace gka::serve::http
