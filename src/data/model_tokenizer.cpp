#include "data/model_tokenizer.h"

#include <optional>
#include <stdexcept>

#include "data/tokenizer.h"

namespace gka::data {
namespace {

std::optional<Tokenizer> own_tokenizer(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder / "tokenizer.json") && !std::filesystem::exists(folder / "vocab.json")) {
    return std::nullopt;
  }
  try {
    return Tokenizer::load(folder.string());
  } catch (const std::exception&) {
    return std::nullopt;  // nothing to compare with
  }
}

}  // namespace

void check_model_tokenizer(const std::filesystem::path& folder, std::uint64_t fingerprint, const std::string& what) {
  const auto own = own_tokenizer(folder);
  if (!own || own->fingerprint() == fingerprint) return;
  throw std::runtime_error(what + " is of another tokenizer than the one the model " + folder.string() +
                           " keeps in its folder (" + own->describe() + "), whose numbers mean other texts to it.");
}

}  // namespace gka::data
