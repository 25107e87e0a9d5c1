#include "data/documents.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/files.h"
#include "base/json.h"
#include "base/nearest.h"
#include "data/text_input.h"
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
    if (path == kStandardInput) continue;  // nobody knows how long it will be
    total_bytes_ += static_cast<std::int64_t>(open_regular(path).size());
    is_compressed(path);  // refuses what is no text before any work is done
  }
}

/// By the name without what compression has added to it.
std::optional<std::string> DocumentReader::field_of(const std::string& path) const {
  if (options_.field) return options_.field;
  std::filesystem::path name(path);
  if (name.extension() == ".gz" || name.extension() == ".zst" || name.extension() == ".xz") name = name.stem();
  const auto ending = name.extension();
  return ending == ".jsonl" || ending == ".ndjson" ? std::optional<std::string>("text") : std::nullopt;
}

std::string DocumentReader::separator_of(std::size_t file) const {
  return field_of(paths_[file]) ? "\n" : options_.separator.value_or("");
}

namespace {

/// Gathers documents until there are enough for a batch.
class Gatherer {
 public:
  Gatherer(std::size_t file, bool separated, std::size_t batch_bytes)
      : file_(file), separated_(separated), batch_bytes_(batch_bytes) {}

  void add(std::string_view bytes) {
    ++line_;
    if (separated_ && blank(bytes)) return;
    batch_.push_back({bytes, file_, line_});
    held_ += bytes.size();
  }
  bool full() const { return held_ >= batch_bytes_; }
  /// False: the sink has had enough.
  void hand_over(const DocumentReader::Sink& sink, std::int64_t bytes_done) {
    if (!batch_.empty()) sink(batch_, bytes_done);
    batch_.clear();
    held_ = 0;
  }

 private:
  std::size_t file_;
  bool separated_;
  std::size_t batch_bytes_;
  std::vector<RawDocument> batch_;
  std::size_t held_ = 0;
  std::int64_t line_ = 0;
};

}  // namespace

void DocumentReader::read_mapped(std::size_t file, std::size_t batch_bytes, std::int64_t bytes_before,
                                 const Sink& sink) const {
  const MappedFile map(paths_[file]);
  const auto separator = separator_of(file);
  Gatherer documents(file, !separator.empty(), batch_bytes);
  auto rest = map.text();
  while (!rest.empty()) {
    documents.add(separator.empty() ? std::exchange(rest, {}) : take(rest, separator));
    if (!documents.full() && !rest.empty()) continue;
    documents.hand_over(sink, bytes_before + static_cast<std::int64_t>(map.size() - rest.size()));
  }
}

void DocumentReader::read_stream(std::size_t file, std::size_t batch_bytes, std::int64_t bytes_before,
                                 const Sink& sink) const {
  const auto input = open_text(paths_[file]);
  const auto separator = separator_of(file);
  Gatherer documents(file, !separator.empty(), batch_bytes);
  std::string held;
  for (bool more = true; more;) {
    while ((separator.empty() || held.size() < batch_bytes) && (more = append(*input, held))) {
    }
    // All that is known to be whole: up to the last separator, or, at the end, everything.
    const auto last = separator.empty() ? std::string::npos : held.rfind(separator);
    if (more && last == std::string::npos) {
      batch_bytes *= 2;  // one document is longer than a batch
      continue;
    }
    const auto whole = more ? last + separator.size() : held.size();
    auto rest = std::string_view(held).substr(0, whole);
    while (!rest.empty()) documents.add(separator.empty() ? std::exchange(rest, {}) : take(rest, separator));
    documents.hand_over(sink, bytes_before + input->taken());
    held.erase(0, whole);
  }
}

void DocumentReader::read(std::size_t batch_bytes, const Sink& sink) const {
  std::int64_t bytes_before = 0;
  for (std::size_t file = 0; file < paths_.size(); ++file) {
    const bool stream = paths_[file] == kStandardInput || is_compressed(paths_[file]);
    stream ? read_stream(file, batch_bytes, bytes_before, sink) : read_mapped(file, batch_bytes, bytes_before, sink);
    if (paths_[file] != kStandardInput) bytes_before += static_cast<std::int64_t>(open_regular(paths_[file]).size());
  }
}

std::string DocumentReader::text(const RawDocument& document) const {
  const auto& path = paths_[document.file];
  const auto field = field_of(path);
  if (!field) return std::string(document.bytes);
  const auto where = path + " line " + std::to_string(document.line);
  Json json;
  try {
    json = is_utf8(document.bytes) ? parse_json<Json>(document.bytes, where)
                                   : parse_json<Json>(replace_malformed(document.bytes), where);
  } catch (const std::runtime_error&) {
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
