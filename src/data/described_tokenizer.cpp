#include "data/described_tokenizer.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>

#include "data/added_tokens.h"
#include "data/pre_tokenizer.h"

namespace gka::data {
namespace {

using Json = nlohmann::ordered_json;

/// A rule by the names that files have for it.
struct Words {
  std::array<std::string_view, 4> names;
  std::string_view pattern;  // of kKnownPatterns; empty: GPT-2's, which ByteLevel has itself
  bool single_digits;
  bool whole_words_first;  // a word that is a token is that token, whatever the merges say
};
constexpr std::array kWords{
    Words{{"gpt-2", "gpt2", "default", ""}, "", false, false},
    Words{{"smollm", "", "", ""}, "", true, false},
    Words{{"llama-bpe", "llama3", "llama-v3", ""}, "llama3", false, true},
    Words{{"qwen2", "", "", ""}, "qwen2", false, false},
};

const Words& words_named(const std::string& name) {
  std::string known;
  for (const auto& words : kWords) {
    if (!name.empty() && std::ranges::find(words.names, name) != words.names.end()) return words;
    known += (known.empty() ? "" : ", ") + std::string(words.names.front());
  }
  throw std::runtime_error("its tokenizer cuts text into words by the rule '" + name +
                           "', which gka does not have; it has " + known);
}

const KnownPattern& pattern_named(std::string_view name) {
  return *std::ranges::find(kKnownPatterns, name, &KnownPattern::name);
}

Json pre_tokenizer(const Words& words) {
  Json steps = Json::array();
  if (words.single_digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  if (!words.pattern.empty()) {
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", pattern_named(words.pattern).pattern}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
  }
  steps.push_back({{"type", "ByteLevel"},
                   {"add_prefix_space", false},
                   {"trim_offsets", true},
                   {"use_regex", words.pattern.empty()}});
  return steps.size() == 1 ? steps[0] : Json{{"type", "Sequence"}, {"pretokenizers", steps}};
}

Json added_tokens(const DescribedTokenizer& described) {
  Json added = Json::array();
  for (std::size_t id = 0; id < described.kinds.size(); ++id) {
    const auto kind = described.kinds[id];
    if (kind != DescribedKind::control && kind != DescribedKind::user_defined) continue;
    const bool special = kind == DescribedKind::control;
    added.push_back(added_token_entry<Json>(static_cast<std::int64_t>(id), described.tokens[id], special));
  }
  return added;
}

/// A template that puts one token before a text.
Json post_processor(const DescribedTokenizer& described) {
  if (!described.first) return nullptr;
  const auto& name = described.tokens.at(static_cast<std::size_t>(*described.first));
  const Json first{{"SpecialToken", {{"id", name}, {"type_id", 0}}}};
  const auto text = [](const char* id, int type) { return Json{{"Sequence", {{"id", id}, {"type_id", type}}}}; };
  return {{"type", "TemplateProcessing"},
          {"single", {first, text("A", 0)}},
          {"pair", {first, text("A", 0), text("B", 1)}},
          {"special_tokens", {{name, {{"id", name}, {"ids", {*described.first}}, {"tokens", {name}}}}}}};
}

Json model(const DescribedTokenizer& described, const Words& words) {
  Json vocabulary = Json::object();
  for (std::size_t id = 0; id < described.tokens.size(); ++id) {
    if (!vocabulary.emplace(described.tokens[id], id).second) {
      throw std::runtime_error("its tokenizer has the token '" + described.tokens[id] + "' twice");
    }
  }
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", words.whole_words_first},
          {"vocab", std::move(vocabulary)},
          {"merges", described.merges}};
}

void check(const DescribedTokenizer& described) {
  if (described.model != "gpt2") {
    throw std::runtime_error("its tokenizer is of the kind '" + described.model +
                             "'; gka has byte-level BPE alone, which is called 'gpt2'");
  }
  if (!described.kinds.empty() && described.kinds.size() != described.tokens.size()) {
    throw std::runtime_error("its tokenizer has " + std::to_string(described.tokens.size()) + " tokens and says of " +
                             std::to_string(described.kinds.size()) + " what they are");
  }
  if (described.first && (*described.first < 0 || *described.first >= std::ssize(described.tokens))) {
    throw std::runtime_error("its tokenizer begins texts with the token " + std::to_string(*described.first) +
                             ", which it does not have");
  }
}

}  // namespace

std::string tokenizer_json(const DescribedTokenizer& described) {
  check(described);
  const auto& words = words_named(described.words);
  const bool nfc = !words.pattern.empty() && pattern_named(words.pattern).nfc;
  const Json file{
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", added_tokens(described)},
      {"normalizer", nfc ? Json{{"type", "NFC"}} : Json(nullptr)},
      {"pre_tokenizer", pre_tokenizer(words)},
      {"post_processor", post_processor(described)},
      {"decoder", {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}}},
      {"model", model(described, words)}};
  try {
    return file.dump();
  } catch (const Json::exception&) {
    throw std::runtime_error("its tokenizer has a token that is not text in UTF-8");
  }
}

}  // namespace gka::data
