#include "train/token_files.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <vector>

#include "base/files.h"
#include "data/model_tokenizer.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;

/// Of each source of token files, of this one or of those that it mixes: its first file, or all of them.
std::vector<fs::path> token_files(const Json& source, std::size_t most = 1) {
  if (!source.is_object()) return {};
  std::vector<fs::path> found;
  if (const auto parts = source.find("sources"); parts != source.end() && parts->is_array()) {
    for (const auto& part : *parts) std::ranges::copy(token_files(part, most), std::back_inserter(found));
  }
  if (!source.contains("files")) return found;
  const auto& files = source["files"];
  const auto listed = files.is_array() ? files : Json::array({files});
  for (std::size_t i = 0; i < std::min(most, listed.size()); ++i) {
    const auto& path = listed[i].is_object() && listed[i].contains("path") ? listed[i]["path"] : listed[i];
    if (path.is_string()) found.emplace_back(path.get<std::string>());
  }
  return found;
}

std::optional<fs::path> first_token_file(const Json& source) {
  const auto files = token_files(source);
  return files.empty() ? std::nullopt : std::optional(files.front());
}

}  // namespace

std::optional<std::string> tokenizer_of(const Json& source) {
  const auto file = first_token_file(source);
  if (!file) return std::nullopt;
  if (const auto beside = data::tokenizer_beside(*file); fs::exists(beside)) return read_text(beside);
  const bool bytes = data::TokenFile(*file).header().tokenizer == data::Tokenizer::load("bytes").fingerprint();
  return bytes ? std::optional(data::byte_tokenizer_file()) : std::nullopt;
}

Config with_end_token(Config config, const std::function<void(const std::string&)>& say) {
  const auto file = first_token_file(config.data);
  if (!file) return config;
  const auto end = data::TokenFile(*file).header().end_of_document;
  auto& eos = config.model["eos_token_id"];
  const bool same = eos.is_array() ? std::ranges::find(eos, Json(end)) != eos.end() : eos == end;
  if (end < 0 || same) return config;
  if (!eos.is_null()) {
    say("note: documents in " + file->string() + " end with token " + std::to_string(end) +
        ", so that is the model's eos_token_id, not " + shown(eos));
  }
  eos = end;
  return config;
}

void check_tokenizer(const Config& config, const fs::path& folder) {
  for (const auto* source : {&config.data, &config.eval_data}) {
    for (const auto& file : token_files(*source)) {
      data::check_model_tokenizer(folder, data::TokenFile(file).header().tokenizer, file.string());
    }
  }
}

Json sources_of(const Config& config) { return {{"sources", Json::array({config.data, config.eval_data})}}; }

Json checksums_of_data(const Json& source) {
  Json sums = Json::object();
  for (const auto& file : token_files(source, std::numeric_limits<std::size_t>::max())) {
    sums[file.string()] = data::TokenFile(file).header().header_hash;
  }
  return sums;
}

void check_same_data(const Json& source, const Json& before, std::int64_t step, const fs::path& run) {
  const auto now = checksums_of_data(source);
  for (const auto& [file, sum] : before.items()) {
    if (!now.contains(file) || now[file] == sum) continue;
    throw std::runtime_error("the token file '" + file + "' is not the one that the run had up to step " +
                             std::to_string(step) +
                             "; put that one back, or start a new run from the weights with --from " + run.string() +
                             " --set output=FOLDER.");
  }
}

}  // namespace gka::train
