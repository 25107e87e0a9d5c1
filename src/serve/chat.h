// From messages to the tokens a model was trained to read: its chat template, and the care that nobody's message can
// spell a special token.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "serve/jinja/template.h"
#include "serve/problem.h"

namespace gka::serve {

using Tokens = std::vector<std::int64_t>;

class ChatTemplate {
 public:
  /// chat_template.jinja or tokenizer_config.json's chat_template; without either a plain one. Throws one sentence.
  static ChatTemplate load(const std::filesystem::path& folder);

  struct Turn {
    Json messages, tools = nullptr, values = nullptr;
    bool add_generation_prompt = true, continue_final_message = false;
    std::string param = "messages";  // what the request calls them
  };
  /// Throws Problem where the messages are not what they should be, or the template refuses them.
  jinja::Text render(const Turn& turn) const;

  bool plain() const { return plain_; }
  const std::string& source() const { return source_; }
  const std::string& eos() const { return eos_; }
  const std::string& bos() const { return bos_; }
  /// Texts that end an answer besides the model's end token.
  std::vector<std::string> stops() const;
  bool mentions(std::string_view word) const { return source_.find(word) != std::string::npos; }

 private:
  explicit ChatTemplate(jinja::Template parsed) : parsed_(std::move(parsed)) {}

  jinja::Template parsed_;
  std::string source_, bos_, eos_;
  bool plain_ = false;
};

/// Messages as templates expect them: contents as text, arguments of calls as objects. Throws Problem.
Json checked_messages(const Json& messages, const std::string& param);

/// Text to tokens. A special token is one only where no byte of its spelling came from a request.
class Encoder {
 public:
  explicit Encoder(data::Tokenizer tokenizer);
  Tokens encode(const jinja::Text& text) const;
  Tokens encode(const std::string& text, bool add_specials, bool parse_specials) const;
  const data::Tokenizer& tokenizer() const { return tokenizer_; }

 private:
  struct Special {
    std::size_t begin, end;
    bool ours;
  };
  std::vector<Special> find_specials(const jinja::Text& text) const;

  data::Tokenizer tokenizer_;
  std::vector<std::string> spellings_;  // of special tokens, the longest first
};

}  // namespace gka::serve
