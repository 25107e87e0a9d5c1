// A tokenizer.json from a description of a byte-level BPE: lists of tokens and merges, and the name of the rule that
// cuts text into words. It is how GGUF files keep tokenizers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gka::data {

/// What a token of the list is, with GGUF's own numbers.
enum class DescribedKind : std::uint8_t {
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6
};

struct DescribedTokenizer {
  std::string model;                  // "gpt2" is the byte-level BPE, and all that is taken
  std::string words;                  // "gpt-2", "smollm", "llama-bpe", "qwen2": how words are cut
  std::vector<std::string> tokens;    // in the order of their numbers, in GPT-2's letters for bytes
  std::vector<DescribedKind> kinds;   // of each token; empty: all normal
  std::vector<std::string> merges;    // "a b"
  std::optional<std::int64_t> first;  // a token put before every text
};

/// The file's text. Throws one sentence for a model or a rule that gka does not have.
std::string tokenizer_json(const DescribedTokenizer& described);

}  // namespace gka::data
