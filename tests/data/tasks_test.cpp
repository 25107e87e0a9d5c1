// What each synthetic task promises about its sequences.
#include "data/tasks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "support.h"

namespace gka::data {
namespace {

using Numbers = std::vector<std::int64_t>;

struct Sequence {
  Numbers inputs, targets;
};

Sequence make(std::string_view name, const TaskOptions& options, std::uint64_t index) {
  const auto& task = find_task(name);
  check(task, options);
  const auto length = static_cast<std::size_t>(options.tokens);
  Sequence made{Numbers(length, -1), Numbers(length, -1)};
  Random random({index});
  task.generate(options, random, made.inputs, made.targets);
  return made;
}

/// The runs of targets.
std::vector<Numbers> answers(const Sequence& sequence) {
  std::vector<Numbers> runs;
  bool open = false;
  for (const auto target : sequence.targets) {
    if (target != kIgnoredLabel && !open) runs.emplace_back();
    if (target != kIgnoredLabel) runs.back().push_back(target);
    open = target != kIgnoredLabel;
  }
  return runs;
}

class EveryTask : public testing::TestWithParam<std::string_view> {};

TEST_P(EveryTask, has_tokens_and_targets_within_its_vocabulary) {
  const auto& task = find_task(GetParam());
  for (std::uint64_t index = 0; index < 50; ++index) {
    const auto made = make(task.name, task.defaults, index);
    int targets = 0;
    for (std::size_t t = 0; t < made.inputs.size(); ++t) {
      EXPECT_GE(made.inputs[t], 0);
      EXPECT_LT(made.inputs[t], task.defaults.vocab_size);
      targets += made.targets[t] != kIgnoredLabel;
      EXPECT_TRUE(made.targets[t] == kIgnoredLabel ||
                  (made.targets[t] > 0 && made.targets[t] < task.defaults.vocab_size));
    }
    EXPECT_GT(targets, 0);
  }
}

TEST_P(EveryTask, is_the_same_for_the_same_index_and_another_for_another) {
  const auto& task = find_task(GetParam());
  EXPECT_EQ(make(task.name, task.defaults, 7).inputs, make(task.name, task.defaults, 7).inputs);
  EXPECT_NE(make(task.name, task.defaults, 7).inputs, make(task.name, task.defaults, 8).inputs);
}

TEST_P(EveryTask, fits_into_the_shortest_length_it_allows_and_refuses_a_shorter_one) {
  const auto& task = find_task(GetParam());
  auto options = task.defaults;
  options.tokens = task.tokens_needed(options);
  const auto tight = make(task.name, options, 1);
  EXPECT_EQ(answers(tight).empty(), false);
  --options.tokens;
  EXPECT_TRUE(has(complaint([&] { check(task, options); }), "too short for these options, which need at least"));
}

TEST_P(EveryTask, refuses_a_vocabulary_that_is_too_small) {
  const auto& task = find_task(GetParam());
  auto options = task.defaults;
  options.vocab_size = 6;
  EXPECT_TRUE(has(complaint([&] { check(task, options); }), "vocab_size 6 is too small"));
}

INSTANTIATE_TEST_SUITE_P(Tasks, EveryTask, testing::ValuesIn([] {
                           std::vector<std::string_view> names;
                           for (const auto& task : tasks()) names.push_back(task.name);
                           return names;
                         }()));

TEST(Mqar, stores_pairs_first_and_asks_for_each_key_once) {
  for (const auto filler : {Filler::zeros, Filler::random}) {
    const TaskOptions options{.tokens = 64, .vocab_size = 512, .filler = filler, .pairs = 8};
    for (std::uint64_t index = 0; index < 100; ++index) {
      const auto [inputs, targets] = make("mqar", options, index);
      std::map<std::int64_t, std::int64_t> pairs;
      std::set<std::int64_t> values;
      for (std::size_t i = 0; i < 16; i += 2) {
        EXPECT_TRUE(inputs[i] >= 1 && inputs[i] < 256 && inputs[i + 1] >= 256 && inputs[i + 1] < 512);
        EXPECT_TRUE(pairs.emplace(inputs[i], inputs[i + 1]).second) << "each key once";
        values.insert(inputs[i + 1]);
      }
      EXPECT_EQ(values.size(), 8U);
      std::set<std::int64_t> asked;
      for (std::size_t t = 0; t < 64; ++t) {
        if (targets[t] == kIgnoredLabel) continue;
        EXPECT_GE(t, 16U);
        EXPECT_EQ(pairs.at(inputs[t]), targets[t]);
        asked.insert(inputs[t]);
      }
      EXPECT_EQ(asked.size(), 8U);
      if (filler == Filler::zeros) {
        EXPECT_EQ(std::ranges::count(inputs, 0), 64 - 24);
      }
    }
  }
}

TEST(Mqar, gaps_follow_the_power_law) {
  // One pair, T = 42: twenty places, p_i ∝ i^(a−1).
  const TaskOptions options{.tokens = 42, .vocab_size = 64, .pairs = 1, .power = 0.01};
  std::vector<double> counts(20, 0), expected(20, 0);
  constexpr int kDraws = 40000;
  for (std::uint64_t index = 0; index < kDraws; ++index) {
    const auto targets = make("mqar", options, index).targets;
    const auto at =
        std::ranges::find_if(targets, [](auto target) { return target != kIgnoredLabel; }) - targets.begin();
    EXPECT_EQ(at % 2, 0);
    ++counts[static_cast<std::size_t>((at - 2) / 2)];
  }
  double sum = 0;
  for (std::size_t i = 0; i < 20; ++i) sum += expected[i] = std::pow(static_cast<double>(i + 1), -0.99);
  for (std::size_t i = 0; i < 20; ++i) {
    const double mean = kDraws * expected[i] / sum;
    EXPECT_NEAR(counts[i], mean, 5 * std::sqrt(mean)) << "place " << i;
  }
}

TEST(Needles, the_answer_is_the_value_that_stands_behind_the_key) {
  const TaskOptions options{.tokens = 200, .vocab_size = 300, .needles = 6, .queries = 3, .value_tokens = 2};
  for (std::uint64_t index = 0; index < 100; ++index) {
    const auto made = make("needle_multi_query", options, index);
    const auto& inputs = made.inputs;
    std::map<std::int64_t, Numbers> needles;
    for (std::size_t t = 0; t + 3 < inputs.size(); ++t) {
      if (inputs[t] == 1) needles[inputs[t + 1]] = {inputs[t + 2], inputs[t + 3]};
    }
    EXPECT_EQ(needles.size(), 6U);
    std::vector<Numbers> wanted;
    for (std::size_t t = 0; t + 1 < inputs.size(); ++t) {
      if (inputs[t] == 2) wanted.push_back(needles.at(inputs[t + 1]));
    }
    EXPECT_EQ(wanted.size(), 3U);
    EXPECT_EQ(answers(made), wanted);
  }
}

TEST(Needles, of_one_key_are_asked_for_in_their_order) {
  const TaskOptions options{.tokens = 100, .vocab_size = 300, .filler = Filler::zeros, .values = 5};
  for (std::uint64_t index = 0; index < 100; ++index) {
    const auto made = make("needle_multi_value", options, index);
    Numbers values;
    for (std::size_t t = 0; t + 2 < made.inputs.size(); ++t) {
      if (made.inputs[t] == 1) values.push_back(made.inputs[t + 2]);
    }
    EXPECT_EQ(answers(made), std::vector<Numbers>{values});
  }
}

TEST(Needles, lie_anywhere_in_the_haystack) {
  std::vector<int> thirds(3, 0);
  for (std::uint64_t index = 0; index < 3000; ++index) {
    const auto inputs = make("needle_single", {.tokens = 300, .vocab_size = 300}, index).inputs;
    ++thirds[static_cast<std::size_t>((std::ranges::find(inputs, 1) - inputs.begin()) / 100)];
  }
  for (const int count : thirds) EXPECT_NEAR(count, 1000, 150);
}

TEST(VariableTracking, names_the_variables_that_hold_the_value) {
  const TaskOptions options{.tokens = 120, .vocab_size = 300, .chains = 3, .hops = 4};
  for (std::uint64_t index = 0; index < 100; ++index) {
    const auto made = make("variable_tracking", options, index);
    const auto& inputs = made.inputs;
    std::map<std::int64_t, std::int64_t> holds;  // variable → value
    Numbers order;
    std::int64_t asked = -1;
    for (std::size_t t = 0; t + 1 < inputs.size(); ++t) {
      if (inputs[t] == 2) asked = inputs[t + 1];
      if (inputs[t] != 3 || t + 2 >= inputs.size()) continue;
      const auto source = holds.find(inputs[t + 2]);
      holds[inputs[t + 1]] = source == holds.end() ? inputs[t + 2] : source->second;
      order.push_back(inputs[t + 1]);
    }
    EXPECT_EQ(holds.size(), 15U);
    std::erase_if(order, [&](std::int64_t variable) { return holds.at(variable) != asked; });
    EXPECT_EQ(answers(made), std::vector<Numbers>{order});
  }
}

TEST(Copy, says_the_symbols_again) {
  const auto made = make("copy", {.tokens = 40, .vocab_size = 20, .symbols = 10}, 1);
  const auto& [inputs, targets] = made;
  EXPECT_EQ(inputs[30], 4) << "the separator";
  EXPECT_EQ(answers(made), std::vector<Numbers>{Numbers(inputs.begin() + 20, inputs.begin() + 30)});
}

TEST(SelectiveCopy, says_the_symbols_and_not_the_filler) {
  for (const auto filler : {Filler::zeros, Filler::random}) {
    const auto made = make("selective_copy", {.tokens = 64, .vocab_size = 41, .filler = filler, .symbols = 8}, 1);
    Numbers symbols;
    std::ranges::copy_if(made.inputs, std::back_inserter(symbols), [](auto token) { return token >= 5 && token < 23; });
    EXPECT_EQ(symbols.size(), 8U);
    EXPECT_EQ(answers(made), std::vector<Numbers>{symbols});
  }
}

TEST(TaskStream, draws_sizes_by_weight_and_never_one_without) {
  const auto& task = find_task("mqar");
  const auto size = [](std::int64_t tokens, double weight) {
    return TaskSize{.options = {.tokens = tokens, .pairs = 4}, .weight = weight};
  };
  const TaskStream stream(task, {size(16, 0), size(32, 3), size(64, 1), size(128, 0)}, 5);
  Numbers inputs, targets;
  std::map<std::int64_t, int> drawn;
  for (int batch = 0; batch < 4000; ++batch) ++drawn[stream.fill(batch * 2, 2, inputs, targets)];
  EXPECT_EQ(drawn.size(), 2U);
  EXPECT_NEAR(drawn[32], 3000, 150);
}

TEST(TaskStream, with_fixed_sets_shows_each_sequence_once_an_epoch) {
  const auto& task = find_task("copy");
  const auto size = [](std::int64_t tokens, std::int64_t examples) {
    return TaskSize{.options = {.tokens = tokens, .symbols = 8}, .examples = examples};
  };
  const TaskStream stream(task, {size(16, 12), size(20, 8)}, 5);
  EXPECT_EQ(stream.epoch(), 20);
  const auto epoch = [&](std::int64_t number) {
    std::multiset<Numbers> seen;
    Numbers inputs, targets;
    for (int batch = 0; batch < 5; ++batch) {
      const auto length = stream.fill(20 * number + 4 * batch, 4, inputs, targets);
      for (auto at = inputs.begin(); at != inputs.end(); at += length) seen.insert(Numbers(at, at + length));
    }
    return seen;
  };
  const auto first = epoch(0);
  EXPECT_EQ(first, epoch(1));
  EXPECT_EQ(std::set<Numbers>(first.begin(), first.end()).size(), 20U);
}

TEST(TaskStream, tells_a_wrong_task_name_from_a_right_one) {
  EXPECT_TRUE(has(complaint([] { find_task("mkar"); }), "no task 'mkar'; did you mean 'mqar'?"));
}

TEST(Accuracy, an_answer_counts_when_all_of_it_is_right) {
  const Numbers targets{kIgnoredLabel, 1, 2, kIgnoredLabel, 3, kIgnoredLabel, 4, 5, kIgnoredLabel, kIgnoredLabel};
  const auto right = score(targets, 5, Numbers{1, 2, 3, 4, 5});
  EXPECT_EQ(right.answers, 3);
  EXPECT_EQ(right.exact_match(), 1);
  EXPECT_EQ(right.sequence_accuracy(), 1);
  const auto partly = score(targets, 5, Numbers{1, 9, 3, 4, 5});
  EXPECT_EQ(partly.right_answers, 2);
  EXPECT_EQ(partly.right_tokens, 4);
  EXPECT_EQ(partly.right_sequences, 1);
  auto sum = right;
  sum += partly;
  EXPECT_EQ(sum.answers, 6);
  EXPECT_DOUBLE_EQ(sum.exact_match(), 5.0 / 6);
}

TEST(Accuracy, an_answer_ends_with_its_sequence) {
  EXPECT_EQ(score(Numbers{kIgnoredLabel, 1, 2, kIgnoredLabel}, 2, Numbers{1, 2}).answers, 2);
}

TEST(Accuracy, needs_a_prediction_for_every_target) {
  EXPECT_TRUE(has(complaint([] { score(Numbers{1, 2}, 2, Numbers{1}); }), "fewer predictions"));
  EXPECT_TRUE(has(complaint([] { score(Numbers{1, 2}, 2, Numbers{1, 2, 3}); }), "more predictions"));
}

}  // namespace
}  // namespace gka::data
