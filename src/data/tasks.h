// Synthetic tasks, made on the fly: what a sequence looks like depends on its options and its random name alone.
//
// Each task is a line in the table in tasks.cpp with the options it reads. Token 0 is "nothing", a few small numbers
// are marks, and the rest of the vocabulary is shared out to keys, values and filler, so that a token's role can be
// told from its number.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/accuracy.h"
#include "data/random.h"
#include "gka/types.h"

namespace gka::data {

/// What stands where nothing else does: token 0, or any token (MQAR: of the whole vocabulary, as it is published; the
/// others: of a part of it kept for filler).
enum class Filler : std::uint8_t { zeros, random };

inline constexpr std::array<NameTable<Filler>, 2> kFillerNames{{
    {"zeros", Filler::zeros},
    {"random", Filler::random},
}};
constexpr const auto& names_of(Filler) { return kFillerNames; }

struct TaskOptions {
  std::int64_t tokens = 128;  // T, the length of a sequence
  std::int64_t vocab_size = 8192;
  Filler filler = Filler::random;
  std::int64_t pairs = 8;         // key-value pairs to store, each asked for once
  double power = 0.01;            // a of the gaps between storing and asking, p ∝ a·i^(a−1)
  std::int64_t needles = 4;       // key-value needles in the haystack
  std::int64_t values = 4;        // needles that share the key
  std::int64_t queries = 2;       // needles asked for, one after the other
  std::int64_t value_tokens = 1;  // tokens in a value
  std::int64_t chains = 2;        // chains of variables, one of which is asked for
  std::int64_t hops = 3;          // assignments from one variable to the next in a chain
  std::int64_t symbols = 16;      // tokens to remember

  template <typename Self, typename Visit>
  static void fields(Self& o, Visit&& visit) {
    visit("tokens", o.tokens);
    visit("vocab_size", o.vocab_size);
    visit("filler", o.filler);
    visit("pairs", o.pairs);
    visit("power", o.power);
    visit("needles", o.needles);
    visit("values", o.values);
    visit("queries", o.queries);
    visit("value_tokens", o.value_tokens);
    visit("chains", o.chains);
    visit("hops", o.hops);
    visit("symbols", o.symbols);
  }
};

/// inputs and targets have options.tokens entries each; targets are kIgnoredLabel but for the answers.
using Generate = void (*)(const TaskOptions& options, Random& random, std::span<std::int64_t> inputs,
                          std::span<std::int64_t> targets);

struct Task {
  std::string_view name;
  std::string_view summary;
  std::span<const std::string_view> options;                  // the fields of TaskOptions it reads
  std::int64_t (*tokens_needed)(const TaskOptions& options);  // the shortest sequence that holds it
  Generate generate;
  TaskOptions defaults{};

  bool reads(std::string_view option) const { return std::ranges::find(options, option) != options.end(); }
};

std::span<const Task> tasks();

/// By name; throws with the nearest name.
const Task& find_task(std::string_view name);

/// Throws where the options are out of range or the sequence is too short for them.
void check(const Task& task, const TaskOptions& options);

/// One size of a mixture.
struct TaskSize {
  TaskOptions options{};
  double weight = 1.0;        // how often a batch has this size
  std::int64_t examples = 0;  // a fixed set of so many sequences, seen again each epoch; 0: always new ones
};

/// Batches of a task, each of one size of the mixture. With fixed sets (all sizes or none have `examples`) an epoch
/// goes through each set once, in batches shuffled together; otherwise sizes are drawn by weight.
class TaskStream {
 public:
  TaskStream(const Task& task, std::vector<TaskSize> sizes, std::uint64_t seed);

  /// Fills batch · T entries each, and returns T. `position` counts sequences; batches start at multiples of `batch`.
  std::int64_t fill(std::int64_t position, std::int64_t batch, std::vector<std::int64_t>& inputs,
                    std::vector<std::int64_t>& targets) const;

  std::int64_t epoch() const;  // sequences in the fixed sets, 0 without
  std::int64_t vocab_size() const;
  std::int64_t longest() const;
  std::string describe() const;

 private:
  struct Choice {
    std::size_t size;    // which of sizes_
    std::int64_t first;  // place of the batch's first sequence in the order of this epoch's set
    std::uint64_t epoch;
  };
  Choice choose(std::int64_t batch_number, std::int64_t batch) const;

  const Task& task_;
  std::vector<TaskSize> sizes_;
  std::uint64_t seed_;
  bool fixed_;
};

}  // namespace gka::data
