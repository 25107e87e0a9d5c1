#include "serve/model.h"

#include "base/files.h"
#include "data/unicode.h"
#include "serve/fields.h"

namespace gka::serve {

Json sampling_defaults(const std::filesystem::path& folder) {
  Json values = Json::object();
  const auto file = folder / "generation_config.json";
  if (!std::filesystem::exists(file)) return values;
  const auto config = Json::parse(read_text(file), nullptr, false);
  if (!config.is_object()) throw std::runtime_error(file.string() + " is not a JSON object");
  for (const auto* name : {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}) {
    const auto found = config.find(name);
    if (found != config.end() && !found->is_null()) values[name] = *found;
  }
  try {
    (void)read_ask(values, kCompletions);
  } catch (const Problem& wrong) {
    throw std::runtime_error(file.string() + ": " + wrong.what());
  }
  return values;
}

Json with_defaults(Json body, const Model& model) {
  for (const auto& [name, value] : model.defaults.items()) {
    if (!body.contains(name) || body[name].is_null()) body[name] = value;
  }
  return body;
}

std::string_view Model::bytes(std::int64_t token) const {
  return token < tokenizer().vocab_size() ? tokenizer().bytes_of(static_cast<data::Token>(token)) : std::string_view();
}

std::string Model::shown(std::int64_t token) const {
  const auto raw = bytes(token);
  if (data::is_utf8(raw)) return std::string(raw);
  static constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "bytes:";
  for (const unsigned char c : raw) text += std::string("\\x") + kDigits[c >> 4] + kDigits[c & 15];
  return text;
}

}  // namespace gka::serve
