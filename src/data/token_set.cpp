#include "data/token_set.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "data/random.h"

namespace gka::data {
namespace {

/// Where evaluation starts.
std::int64_t cut(const TokenFile& file, double eval_fraction) {
  const auto wanted =
      file.tokens() - static_cast<std::int64_t>(std::llround(eval_fraction * static_cast<double>(file.tokens())));
  const auto offsets = file.offsets();
  const auto after = std::ranges::lower_bound(offsets, static_cast<std::uint64_t>(wanted));
  if (after == offsets.end()) return wanted;
  const auto document = static_cast<std::int64_t>(*after);
  return 2 * (document - wanted) <= file.tokens() - wanted ? document : wanted;  // keeps at least half of the wanted
}

void check(const TokenSetOptions& options) {
  if (options.files.empty()) throw std::runtime_error("a token data set needs at least one file; files is empty.");
  if (!(options.eval_fraction >= 0 && options.eval_fraction < 1)) {
    throw std::runtime_error("eval_fraction must be at least 0 and below 1, got " +
                             std::to_string(options.eval_fraction) + ".");
  }
  if (options.part == Part::eval && options.eval_fraction == 0) {
    throw std::runtime_error(
        "eval_fraction is 0, so nothing is kept for evaluation; set data.eval_fraction (0.01, say), "
        "name other files in eval_data, or set eval_every=0.");
  }
  const auto weighted = std::ranges::count_if(options.files, [](const auto& file) { return file.weight > 0; });
  const bool bad =
      std::ranges::any_of(options.files, [](const auto& f) { return !(f.weight >= 0) || std::isinf(f.weight); });
  if (bad || (weighted != 0 && weighted != static_cast<std::ptrdiff_t>(options.files.size()))) {
    throw std::runtime_error("weights must be positive numbers, for all files or for none.");
  }
}

}  // namespace

TokenSet::TokenSet(const TokenSetOptions& options)
    : part_(options.part), seed_(options.seed), shuffle_(options.shuffle) {
  check(options);
  for (const auto& [path, weight] : options.files) {
    TokenFile file(path);
    if (options.verify) file.verify_once();
    const auto middle = options.eval_fraction == 0 ? file.tokens() : cut(file, options.eval_fraction);
    const bool train = options.part == Part::train;
    files_.push_back({file, train ? 0 : middle, train ? middle : file.tokens() - middle});
    const auto& first = files_.front().file;
    if (first.header().tokenizer != file.header().tokenizer) {
      throw std::runtime_error(file.path().string() + " was made with another tokenizer than " + first.path().string() +
                               "; make both with the same one.");
    }
  }
  if (options.files.front().weight == 0) return;
  std::vector<double> weights;
  for (const auto& file : options.files) weights.push_back(file.weight);
  turns_ = Turns(weights, mix({seed_, 2}));
}

std::int64_t TokenSet::windows_of(const File& file, std::int64_t tokens) const {
  return std::max<std::int64_t>(0, (file.count - 1) / tokens);
}

std::int64_t TokenSet::windows(std::int64_t tokens) const {
  std::int64_t all = 0;
  for (const auto& file : files_) all += windows_of(file, tokens);
  return all;
}

void TokenSet::check_length(std::int64_t tokens) const {
  if (turns_.empty()) return check_all(tokens);
  for (const auto& file : files_) check_file(file, tokens);
}

void TokenSet::check_all(std::int64_t tokens) const {
  if (windows(tokens) > 0) return;
  const bool held_out = part_ == Part::eval;
  fail_too_few("the token files (" + files_.front().file.path().string() + (files_.size() > 1 ? ", …" : "") +
                   (held_out ? "; what eval_fraction keeps of them) have " : ") have "),
               this->tokens(), tokens);
}

void TokenSet::check_file(const File& file, std::int64_t tokens) const {
  if (windows_of(file, tokens) == 0) fail_too_few(file.file.path().string() + " has ", file.count, tokens);
}

void TokenSet::fail_too_few(const std::string& what, std::int64_t count, std::int64_t tokens) const {
  throw std::runtime_error(what + std::to_string(count) + " tokens here, too few for a window of " +
                           std::to_string(tokens + 1) + "; use shorter sequences" +
                           (part_ == Part::eval ? ", a larger eval_fraction" : "") + " or more data.");
}

TokenSet::Place TokenSet::find_in_all(std::int64_t index, std::int64_t tokens) const {
  check_all(tokens);
  const auto all = windows(tokens);
  const auto epoch = static_cast<std::uint64_t>(index / all);
  auto window = index % all;
  if (shuffle_) window = Permutation(all, mix({seed_, 1, epoch}))(window);
  std::size_t file = 0;
  while (window >= windows_of(files_[file], tokens)) window -= windows_of(files_[file++], tokens);
  return {file, window, epoch};
}

TokenSet::Place TokenSet::find_by_weight(std::int64_t index, std::int64_t tokens) const {
  const auto [file, drawn] = turns_(index);
  check_file(files_[file], tokens);
  const auto all = windows_of(files_[file], tokens);
  const auto epoch = static_cast<std::uint64_t>(drawn / all);
  auto window = drawn % all;
  if (shuffle_) window = Permutation(all, mix({seed_, 3, file, epoch}))(window);
  return {file, window, epoch};
}

TokenSet::Place TokenSet::find(std::int64_t index, std::int64_t tokens) const {
  return turns_.empty() ? find_in_all(index, tokens) : find_by_weight(index, tokens);
}

std::vector<std::int64_t> TokenSet::fill(std::int64_t index, std::span<std::int64_t> inputs,
                                         std::span<std::int64_t> targets) const {
  const auto tokens = static_cast<std::int64_t>(inputs.size());
  const auto place = find(index, tokens);
  const auto& [file, begin, count] = files_[place.file];

  // What does not fill a window is left out at another end every epoch.
  const auto spare = count - 1 - windows_of(files_[place.file], tokens) * tokens;
  const auto shift = shuffle_ ? Random({seed_, 4, place.file, place.epoch}).below(spare + 1) : 0;
  const auto first = begin + shift + place.window * tokens;
  file.read(first, inputs);
  file.read(first + 1, targets);

  std::vector<std::int64_t> starts;
  const auto offsets = file.offsets();
  for (auto at = std::ranges::upper_bound(offsets, static_cast<std::uint64_t>(first)); at != offsets.end(); ++at) {
    const auto start = static_cast<std::int64_t>(*at) - first;
    if (start > tokens) break;
    if (starts.empty() || starts.back() != start) starts.push_back(start);  // empty documents start where others do
  }
  return starts;
}

std::int64_t TokenSet::tokens() const {
  std::int64_t all = 0;
  for (const auto& file : files_) all += file.count;
  return all;
}

std::int64_t TokenSet::documents() const {
  std::int64_t all = 0;
  for (const auto& [file, first, count] : files_) {
    const auto offsets = file.offsets();
    const auto from = std::ranges::lower_bound(offsets, static_cast<std::uint64_t>(first));
    const auto to = std::ranges::lower_bound(offsets, static_cast<std::uint64_t>(first + count));
    all += to - from;
  }
  return all;
}

std::int64_t TokenSet::vocab_size() const { return static_cast<std::int64_t>(files_.front().file.header().vocab_size); }

}  // namespace gka::data
