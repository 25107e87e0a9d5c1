#include "data/documents.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/files.h"
#include "base/nearest.h"
#include "data/unicode.h"

namespace gka::data {
namespace {

using Json = nlohmann::json;

/// Takes the front of `rest` up to the separator, which goes too.
std::string_view take(std::string_view& rest, std::string_view separator) {
  const auto end = rest.find(separator);
  const auto piece = rest.substr(0, end);
  rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + separator.size());
  return piece;
}

bool blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == std::string_view::npos; }

}  // namespace

DocumentReader::DocumentReader(std::vector<std::string> paths, DocumentOptions options)
    : paths_(std::move(paths)), options_(std::move(options)) {
  if (options_.separator && options_.separator->empty()) throw std::runtime_error("the separator must not be empty");
  for (const auto& path : paths_) {
    std::error_code error;
    const auto size = std::filesystem::file_size(path, error);
    if (error) throw std::runtime_error("cannot read " + path + ": " + error.message());
    total_bytes_ += static_cast<std::int64_t>(size);
  }
}

std::optional<std::string> DocumentReader::field_of(const std::string& path) const {
  if (options_.field) return options_.field;
  const auto ending = std::filesystem::path(path).extension();
  return ending == ".jsonl" || ending == ".ndjson" ? std::optional<std::string>("text") : std::nullopt;
}

void DocumentReader::read(std::size_t batch_bytes, const Sink& sink) const {
  std::int64_t bytes_before = 0;
  for (std::size_t file = 0; file < paths_.size(); ++file) {
    const MappedFile map(paths_[file]);
    const bool lines = field_of(paths_[file]).has_value();
    const auto separator = lines ? "\n" : options_.separator.value_or("");
    auto rest = map.text();
    std::vector<RawDocument> batch;
    std::size_t held = 0;
    std::int64_t line = 0;
    while (!rest.empty()) {
      const auto bytes = separator.empty() ? std::exchange(rest, {}) : take(rest, separator);
      ++line;
      const bool nothing = separator.empty() ? false : blank(bytes);
      if (!nothing) {
        batch.push_back({bytes, file, line});
        held += bytes.size();
      }
      if (held < batch_bytes && !rest.empty()) continue;
      if (!batch.empty() && !sink(batch, bytes_before + static_cast<std::int64_t>(map.size() - rest.size()))) return;
      batch.clear();
      held = 0;
    }
    bytes_before += static_cast<std::int64_t>(map.size());
  }
}

std::string DocumentReader::text(const RawDocument& document) const {
  const auto& path = paths_[document.file];
  const auto field = field_of(path);
  if (!field) return std::string(document.bytes);
  const auto where = path + " line " + std::to_string(document.line);
  Json json;
  try {
    json = is_utf8(document.bytes) ? Json::parse(document.bytes) : Json::parse(replace_malformed(document.bytes));
  } catch (const Json::exception&) {
    throw std::runtime_error(where + " is not JSON: each line must be one object, such as {\"text\": \"…\"}");
  }
  const auto found = json.is_object() ? json.find(*field) : json.end();
  if (!json.is_object() || found == json.end()) {
    std::vector<std::string_view> keys;
    if (json.is_object()) {
      for (const auto& [key, value] : json.items()) keys.push_back(key);
    }
    const auto guess = nearest(*field, keys);
    const auto other = guess ? guess : keys.empty() ? std::nullopt : std::optional(keys.front());
    throw std::runtime_error(where + " has no field \"" + *field + "\"" +
                             (other ? "; it has \"" + std::string(*other) + "\", which --field would name" : ""));
  }
  if (!found->is_string()) throw std::runtime_error(where + ": the field \"" + *field + "\" is not a text");
  return found->get<std::string>();
}

}  // namespace gka::data
