// Tokenizers from files: Hugging Face's tokenizer.json, and GPT-2's vocab.json with merges.txt. A part of a
// tokenizer.json that is not carried is refused by its name, never ignored.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/files.h"
#include "base/hash.h"
#include "base/json.h"
#include "data/tokenizer_model.h"

namespace gka::data {
namespace {

using Json = nlohmann::json;
using Model = Tokenizer::Model;

std::runtime_error not_supported(const std::string& what) { return std::runtime_error("not supported: " + what); }

/// A file in which a value is not of the kind it should be.
std::runtime_error damaged(const std::string& what) {
  return std::runtime_error("it is damaged or no tokenizer.json: " + what);
}

const Json& part_of(const Json& object, const char* key) {
  if (!object.is_object() || !object.contains(key))
    throw damaged(std::string("there is no \"") + key + "\" where one belongs");
  return object[key];
}

std::string text_of(const Json& value, const char* what) {
  if (!value.is_string()) throw damaged(std::string(what) + " is not a text");
  return value.get<std::string>();
}

/// Whole, and of a size that a vocabulary has: 5.9, true and 2^32 + 5 are no token numbers.
Token id_of_token(const Json& value, const std::string& name) {
  constexpr std::uint64_t kMost = 1 << 22;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() < kMost)
    return static_cast<Token>(value.get<std::uint64_t>());
  throw damaged("its token '" + name + "' has the number " + value.dump() + "; token numbers are whole, from 0 to " +
                std::to_string(kMost - 1));
}

bool flag(const Json& object, const char* key, bool preset) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return preset;
  if (!found->is_boolean()) throw damaged(std::string("\"") + key + "\" is not true or false");
  return found->get<bool>();
}

const Json& list_of(const Json& value, const char* what) {
  if (!value.is_array()) throw damaged(std::string(what) + " is not a list");
  return value;
}

std::string type_of(const Json& part) {
  if (!part.is_object()) throw damaged("a part of it is not an object");
  return part.contains("type") ? text_of(part["type"], "a type") : "of no type";
}

/// The entries of a Sequence under `key`, or the part itself; nothing where it is null.
std::vector<Json> sequence(const Json& part, const char* key) {
  if (part.is_null()) return {};
  if (type_of(part) != "Sequence") return {part};
  std::vector<Json> all;
  for (const auto& entry : list_of(part_of(part, key), key)) {
    for (auto& inner : sequence(entry, key)) all.push_back(std::move(inner));
  }
  return all;
}

bool read_normalizer(const Json& normalizer) {
  bool nfc = false;
  for (const auto& part : sequence(normalizer, "normalizers")) {
    if (type_of(part) != "NFC") throw not_supported("normalizer " + type_of(part));
    nfc = true;
  }
  return nfc;
}

std::string quoted(const std::string& text) {
  std::string pattern;
  for (const char byte : text) {
    const bool plain = (byte & 0x80) || std::isalnum(static_cast<unsigned char>(byte)) || byte == ' ';
    if (!plain) pattern += '\\';
    pattern += byte;
  }
  return pattern;
}

std::string read_pattern(const Json& pattern) {
  if (pattern.contains("Regex")) return text_of(pattern["Regex"], "a Regex");
  if (pattern.contains("String")) return quoted(text_of(pattern["String"], "a String"));
  throw not_supported("a Split pattern that is neither Regex nor String");
}

PreTokenizerStep read_split(const Json& part) {
  const auto name = text_of(part_of(part, "behavior"), "a behavior");
  const auto behavior = parse_name<SplitBehavior>(name);
  if (!behavior) throw not_supported("Split behavior " + name);
  return {.pattern = Regex(read_pattern(part_of(part, "pattern"))),
          .behavior = *behavior,
          .invert = flag(part, "invert", false)};
}

PreTokenizer read_pre_tokenizer(const Json& pre_tokenizer) {
  std::vector<PreTokenizerStep> steps;
  bool byte_level = false;
  for (const auto& part : sequence(pre_tokenizer, "pretokenizers")) {
    const auto type = type_of(part);
    if (byte_level) throw not_supported("pre-tokenizer " + type + " after ByteLevel");
    if (type == "Split") {
      steps.push_back(read_split(part));
    } else if (type == "Digits") {
      const bool single = flag(part, "individual_digits", false);
      steps.push_back(
          {.pattern = Regex(R"([\p{N}\x{11de0}-\x{11de9}\x{16ff4}-\x{16ff6}])"),  // with those of Unicode 17
           .behavior = single ? SplitBehavior::isolated : SplitBehavior::contiguous});
    } else if (type == "ByteLevel") {
      byte_level = true;
      if (flag(part, "add_prefix_space", true)) steps.emplace_back();
      if (flag(part, "use_regex", true)) steps.push_back({.pattern = Regex(std::string(kGpt2Pattern))});
    } else {
      throw not_supported("pre-tokenizer " + type);
    }
  }
  if (!byte_level) throw not_supported("a tokenizer whose pre-tokenizer has no ByteLevel");
  return PreTokenizer(std::move(steps));
}

void check_decoder(const Json& decoder) {
  for (const auto& part : sequence(decoder, "decoders")) {
    if (type_of(part) != "ByteLevel") throw not_supported("decoder " + type_of(part));
  }
}

std::vector<AddedToken> read_added(const Json& list) {
  std::vector<AddedToken> tokens;
  for (const auto& entry : list_of(list, "added_tokens")) {
    const auto content = text_of(part_of(entry, "content"), "the content of an added token");
    const bool special = flag(entry, "special", false);
    tokens.push_back({.content = content,
                      .id = id_of_token(part_of(entry, "id"), content),
                      .single_word = flag(entry, "single_word", false),
                      .lstrip = flag(entry, "lstrip", false),
                      .rstrip = flag(entry, "rstrip", false),
                      .normalized = flag(entry, "normalized", !special),
                      .special = special});
  }
  return tokens;
}

/// The ids before and after the text in a template for one text.
void read_template(const Json& part, Model::Parts& parts) {
  bool text_seen = false;
  for (const auto& piece : list_of(part_of(part, "single"), "the template's \"single\"")) {
    if (piece.is_object() && piece.contains("Sequence")) {
      text_seen = true;
      continue;
    }
    const auto name = text_of(part_of(part_of(piece, "SpecialToken"), "id"), "a special token's id");
    const auto& special = part_of(part_of(part, "special_tokens"), name.c_str());
    auto& side = text_seen ? parts.after : parts.before;
    for (const auto& id : list_of(part_of(special, "ids"), "ids")) {
      side.push_back(id_of_token(id, name));
      if (static_cast<std::size_t>(side.back()) < parts.spelling.size()) continue;
      throw damaged("its template has the token " + id.dump() + ", and its vocabulary does not");
    }
  }
}

void read_post_processor(const Json& post_processor, Model::Parts& parts) {
  for (const auto& part : sequence(post_processor, "processors")) {
    const auto type = type_of(part);
    if (type == "TemplateProcessing") {
      read_template(part, parts);
    } else if (type != "ByteLevel") {  // which only moves offsets
      throw not_supported("post-processor " + type);
    }
  }
}

void check_model(const Json& model) {
  const auto type = model.is_object() && !model.contains("type") ? std::string("BPE") : type_of(model);
  if (type != "BPE") throw not_supported("model " + type);
  const auto is_set = [&](const char* key) {
    const auto found = model.find(key);
    return found != model.end() && !found->is_null() && *found != "" && *found != false && *found != 0.0;
  };
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
    if (is_set(key)) throw not_supported(std::string(key) + " in a BPE model");
  }
}

/// "a b", or ["a", "b"].
std::pair<std::string, std::string> read_merge(const Json& merge) {
  if (merge.is_array() && merge.size() == 2)
    return {text_of(merge[0], "half a merge"), text_of(merge[1], "half a merge")};
  const auto text = text_of(merge, "a merge");
  const auto space = text.find(' ');
  if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
    throw std::runtime_error("its merge '" + text + "' is not two tokens with a space between");
  }
  return {text.substr(0, space), text.substr(space + 1)};
}

void place(Model::Parts& parts, Token id, const std::string& name) {
  const auto index = static_cast<std::size_t>(id);
  if (index >= parts.spelling.size()) {
    parts.spelling.resize(index + 1);
    parts.special.resize(index + 1, false);
  }
  parts.spelling[index] = bytes_of_letters(name).value_or(name);
  parts.by_name[name] = id;
}

/// Vocabulary, merges and what else the model says. `parts` gets the names; the added tokens come later.
Bpe read_bpe(const Json& model, Model::Parts& parts) {
  check_model(model);
  BpeOptions options;
  options.bytes.fill(Bpe::kMissing);
  const bool words_first = flag(model, "ignore_merges", false);
  const auto& vocabulary = part_of(model, "vocab");
  if (!vocabulary.is_object()) throw damaged("its vocabulary is not an object");
  for (const auto& [name, number] : vocabulary.items()) {
    const auto id = id_of_token(number, name);
    place(parts, id, name);
    const auto bytes = bytes_of_letters(name);
    if (!bytes) continue;
    if (bytes->size() == 1) options.bytes[static_cast<unsigned char>(bytes->front())] = id;
    if (words_first) options.words[*bytes] = id;
  }
  const auto id_of = [&](const std::string& name) {
    const auto found = parts.by_name.find(name);
    if (found == parts.by_name.end()) throw std::runtime_error("its merges use '" + name + "', which is no token");
    return found->second;
  };
  for (const auto& entry : list_of(part_of(model, "merges"), "merges")) {
    const auto [left, right] = read_merge(entry);
    options.merges.push_back({id_of(left), id_of(right), id_of(left + right)});
  }
  if (const auto unknown = model.find("unk_token"); unknown != model.end() && unknown->is_string()) {
    options.unknown = id_of(*unknown);
    options.fuse_unknown = flag(model, "fuse_unk", false);
  }
  return Bpe(std::move(options));
}

/// Of everything that decides about tokens.
std::uint64_t fingerprint(const Json& file) {
  Hash64 hash;
  for (const char* part : {"added_tokens", "normalizer", "pre_tokenizer", "post_processor"}) {
    hash.add(file.value(part, Json()).dump());
  }
  const auto& model = file.at("model");
  hash.add(model.at("vocab").dump());  // sorted by name
  for (const auto& entry : model.at("merges")) {
    const auto [left, right] = read_merge(entry);
    hash.add(left + " " + right + "\n");
  }
  for (const char* key : {"ignore_merges", "unk_token", "fuse_unk"}) hash.add(model.value(key, Json()).dump());
  return hash.value();
}

/// Numbers may have gaps, but memory is for tokens: a number far beyond them is a mistake.
void check_gaps(const Json& file) {
  const auto& vocabulary = part_of(part_of(file, "model"), "vocab");
  const auto added = file.value("added_tokens", Json());
  const auto most = 16 * (vocabulary.size() + added.size()) + 65536;
  const auto check = [&](const Json& id) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() < most) return;
    throw damaged("it has a token with the number " + id.dump() + ", far beyond its " +
                  std::to_string(vocabulary.size() + added.size()) + " tokens");
  };
  for (const auto& id : vocabulary) check(id);
  for (const auto& entry : added) {
    if (entry.is_object() && entry.contains("id")) check(entry["id"]);
  }
}

Json byte_file() {
  Json vocabulary = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[letter_of(static_cast<unsigned char>(byte))] = byte;
  const Json byte_level{
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}, {"trim_offsets", false}};
  const auto end = added_token_entry<Json>(256, "<|endoftext|>", /*special=*/true);
  return {{"version", "1.0"},
          {"added_tokens", {end}},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", Json::array()}}}};
}

std::shared_ptr<const Model> from_json(const Json& file) {
  if (file == byte_file()) return byte_model();
  check_gaps(file);
  Model::Parts parts;
  parts.bpe = read_bpe(part_of(file, "model"), parts);
  const auto added = file.value("added_tokens", Json());
  if (!added.is_null()) parts.added = read_added(added);
  for (const auto& token : parts.added) {
    place(parts, token.id, token.content);
    parts.special[static_cast<std::size_t>(token.id)] = token.special;
  }
  parts.nfc = read_normalizer(file.value("normalizer", Json()));
  parts.pre_tokenizer = read_pre_tokenizer(file.value("pre_tokenizer", Json()));
  check_decoder(file.value("decoder", Json()));
  read_post_processor(file.value("post_processor", Json()), parts);
  parts.fingerprint = fingerprint(file);
  return std::make_shared<const Model>(std::move(parts));
}

Json read_json(const std::filesystem::path& path) { return read_json_file<Json>(path); }

/// merges.txt: a pair a line, and a first line that says so.
Json read_merges(const std::filesystem::path& path) {
  Json merges = Json::array();
  const MappedFile file(path);
  auto rest = file.text();
  while (!rest.empty()) {
    const auto end = std::min(rest.find('\n'), rest.size());
    auto line = rest.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!line.empty() && !line.starts_with("#version")) merges.push_back(line);
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return merges;
}

/// GPT-2's two files as the tokenizer.json they amount to.
Json from_gpt2(const std::filesystem::path& folder) {
  Json file{
      {"model",
       {{"type", "BPE"}, {"vocab", read_json(folder / "vocab.json")}, {"merges", read_merges(folder / "merges.txt")}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"added_tokens", Json::array()}};
  const auto& vocabulary = file["model"]["vocab"];
  if (const auto end = vocabulary.find("<|endoftext|>"); end != vocabulary.end()) {
    file["added_tokens"].push_back({{"content", "<|endoftext|>"}, {"id", *end}, {"special", true}});
  }
  return file;
}

/// The file, and how to read it.
Json read_any(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return read_json(path);
  if (std::filesystem::exists(path / "tokenizer.json")) return read_json(path / "tokenizer.json");
  if (std::filesystem::exists(path / "vocab.json") && std::filesystem::exists(path / "merges.txt"))
    return from_gpt2(path);
  throw std::runtime_error("the folder has neither tokenizer.json nor vocab.json with merges.txt");
}

}  // namespace

std::string byte_tokenizer_file() { return byte_file().dump(2) + "\n"; }

std::shared_ptr<const Model> load_model(const std::string& path) {
  if (!std::filesystem::exists(path)) {
    throw std::runtime_error("there is no tokenizer '" + path +
                             "'; name a tokenizer.json, a folder with one, or \"bytes\"");
  }
  try {
    return from_json(read_any(path));
  } catch (const Json::exception&) {
    throw std::runtime_error("the tokenizer " + path + " cannot be read: it is damaged or no tokenizer.json");
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("the tokenizer " + path + " cannot be used: " + error.what());
  }
}

}  // namespace gka::data
