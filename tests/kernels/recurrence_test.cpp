// The recurrences token by token, on the CPU and by the GPU's own sources on the host with all their threads: against
// the formula in float64, and their gradients against difference quotients of it.
#define cuda cuda_with_threads
#include "kernels/cuda/recurrence.cu"
#undef cuda

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/cpu_support.h"

namespace gka::kernels::test::recurrences {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

struct Case {
  std::vector<std::int64_t> lengths;
  std::int64_t heads, key_dim, value_dim;
  bool delta, decay, per_channel, beta, packed;
};

const Case kCases[]{
    {{11, 11}, 2, 5, 3, true, true, false, true, false},    // Gated DeltaNet
    {{1, 0, 9, 8}, 1, 6, 2, true, true, true, true, true},  // Kimi Delta Attention, packed
    {{9}, 2, 4, 35, true, false, false, true, false},       // DeltaNet, more columns than a block has
    {{7, 10}, 1, 7, 3, false, true, true, false, true},     // GLA
    {{3}, 1, 40, 17, false, true, false, true, false},      // Mamba2, wider keys
    {{2}, 1, 70, 9, true, true, true, true, false},
};

/// More tokens than states are kept for, more columns than a block of vectors has, keys of no whole vectors.
const Case kLongCases[]{
    {{70, 70}, 1, 9, 150, true, true, false, true, false},
    {{64, 3, 33}, 2, 21, 18, true, true, true, true, true},
    {{40}, 1, 33, 5, false, true, true, false, false},
};

enum Input { kQ, kK, kV, kDecay, kBeta, kInitial, kInputs };

struct Problem {
  Case c;
  std::vector<std::int64_t> bounds{0};
  Floats in[kInputs];
  Floats d_o, d_final;

  explicit Problem(const Case& which, unsigned seed) : c(which) {
    for (const auto length : c.lengths) bounds.push_back(bounds.back() + length);
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    const auto draw = [&](std::int64_t count, auto&& map) {
      Floats values(static_cast<std::size_t>(count));
      for (auto& value : values) value = static_cast<float>(map(normal(engine)));
      return values;
    };
    const auto plain = [](float x) { return x; };
    const auto rows = tokens() * c.heads, state = sequences() * c.heads * c.key_dim * c.value_dim;
    const auto unit = [&](float x) { return x / std::sqrt(static_cast<float>(c.key_dim)); };
    in[kQ] = draw(rows * c.key_dim, unit);
    in[kK] = draw(rows * c.key_dim, unit);
    in[kV] = draw(rows * c.value_dim, plain);
    in[kDecay] = draw(c.decay ? rows * (c.per_channel ? c.key_dim : 1) : 0, [](float x) { return -0.3f * x * x; });
    in[kBeta] = draw(c.beta ? rows : 0, [](float x) { return 1 / (1 + std::exp(-x)); });
    in[kInitial] = draw(state, plain);
    d_o = draw(rows * c.value_dim, plain);
    d_final = draw(state, plain);
  }

  std::int64_t tokens() const { return bounds.back(); }

  template <typename T>
  Recurrence<T> recurrence(const std::vector<T> (&arrays)[kInputs]) const {
    const auto pointer = [](const std::vector<T>& values) { return values.empty() ? nullptr : values.data(); };
    return {.sequences = sequences(),
            .heads = c.heads,
            .key_dim = c.key_dim,
            .value_dim = c.value_dim,
            .length = c.packed ? 0 : c.lengths[0],
            .tokens = tokens(),
            .bounds = c.packed ? bounds.data() : nullptr,
            .delta = c.delta,
            .per_channel = c.per_channel,
            .scale = T(0.7f),
            .q = pointer(arrays[kQ]),
            .k = pointer(arrays[kK]),
            .v = pointer(arrays[kV]),
            .log_decay = pointer(arrays[kDecay]),
            .beta = pointer(arrays[kBeta]),
            .initial = pointer(arrays[kInitial])};
  }
  std::int64_t sequences() const { return static_cast<std::int64_t>(c.lengths.size()); }
};

struct Answer {
  Doubles o, final;
};

/// The recurrence as it is written.
Answer reference(const Problem& p, const Doubles (&in)[kInputs]) {
  const auto& c = p.c;
  Answer answer{Doubles(p.d_o.size()), in[kInitial]};
  for (std::size_t n = 0; n < c.lengths.size(); ++n) {
    for (std::int64_t head = 0; head < c.heads; ++head) {
      double* s = answer.final.data() + (static_cast<std::int64_t>(n) * c.heads + head) * c.key_dim * c.value_dim;
      for (std::int64_t token = p.bounds[n]; token < p.bounds[n + 1]; ++token) {
        const auto row = token * c.heads + head;
        const auto at = [&](Input which, std::int64_t i) { return in[which][static_cast<std::size_t>(i)]; };
        for (std::int64_t i = 0; i < c.key_dim && c.decay; ++i) {
          const double decay = std::exp(at(kDecay, c.per_channel ? row * c.key_dim + i : row));
          for (std::int64_t j = 0; j < c.value_dim; ++j) s[i * c.value_dim + j] *= decay;
        }
        for (std::int64_t j = 0; j < c.value_dim; ++j) {
          double write = at(kV, row * c.value_dim + j), o = 0;
          for (std::int64_t i = 0; i < c.key_dim && c.delta; ++i) {
            write -= at(kK, row * c.key_dim + i) * s[i * c.value_dim + j];
          }
          if (c.beta) write *= at(kBeta, row);
          for (std::int64_t i = 0; i < c.key_dim; ++i) {
            s[i * c.value_dim + j] += at(kK, row * c.key_dim + i) * write;
            o += at(kQ, row * c.key_dim + i) * s[i * c.value_dim + j];
          }
          answer.o[static_cast<std::size_t>(row * c.value_dim + j)] = 0.7f * o;
        }
      }
    }
  }
  return answer;
}

double dot(const Doubles& a, const Floats& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void expect_near(const Doubles& got, const Doubles& wanted, double bound, const char* what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], bound) << what << " " << i;
}

/// What kernels make of a problem.
struct Found {
  Answer answer;
  Doubles gradients[kInputs];
};

template <typename To, typename From>
std::vector<To> as(const std::vector<From>& values) {
  return std::vector<To>(values.begin(), values.end());
}
std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

/// [parts, …] summed over the parts, and, for one decay per head, over the channels.
Doubles sum_parts(const Floats& parts, std::size_t size, std::size_t channels = 1) {
  Doubles sums(size);
  for (std::size_t i = 0; i < parts.size(); ++i) sums[i / channels % size] += parts[i];
  return sums;
}

Found by_the_gpus_sources(const Problem& p) {
  const auto& c = p.c;
  const auto r = p.recurrence<float>(p.in);
  Floats o(p.d_o.size()), final(p.d_final.size());
  Floats states(size(r.kept_states(cuda_with_threads::kRecurrenceSegment) * c.heads * c.key_dim * c.value_dim));
  cuda_with_threads::recurrence(r, {.o = o.data(), .states = states.data(), .final = final.data()}, {});

  const auto parts = cuda_with_threads::recurrence_parts(r), rows = p.tokens() * c.heads;
  Floats d_q(size(parts * rows * c.key_dim)), d_k(d_q), d_decay(d_q), d_beta(size(parts * rows));
  Floats d_v(p.in[kV].size()), d_initial(p.in[kInitial].size());
  cuda_with_threads::recurrence_backward(r,
                                         {.d_o = p.d_o.data(),
                                          .d_final = p.d_final.data(),
                                          .states = states.data(),
                                          .d_q = d_q.data(),
                                          .d_k = d_k.data(),
                                          .d_v = d_v.data(),
                                          .d_log_decay = c.decay ? d_decay.data() : nullptr,
                                          .d_beta = c.beta ? d_beta.data() : nullptr,
                                          .d_initial = d_initial.data()},
                                         {});
  const auto channels = c.per_channel ? 1 : size(c.key_dim);
  return {.answer = {as<double>(o), as<double>(final)},
          .gradients = {sum_parts(d_q, p.in[kQ].size()), sum_parts(d_k, p.in[kK].size()), as<double>(d_v),
                        c.decay ? sum_parts(d_decay, p.in[kDecay].size(), channels) : Doubles{},
                        c.beta ? sum_parts(d_beta, p.in[kBeta].size()) : Doubles{}, as<double>(d_initial)}};
}

template <typename T>
Found on_the_cpu(const Problem& p, const Executor& executor = {}) {
  const auto& c = p.c;
  std::vector<T> in[kInputs], d[kInputs];
  for (int i = 0; i < kInputs; ++i) {
    in[i] = as<T>(p.in[i]);
    d[i].assign(in[i].size(), T(NAN));  // whatever is not written shows
  }
  const auto r = p.recurrence<T>(in);
  const auto d_o = as<T>(p.d_o), d_final = as<T>(p.d_final);
  std::vector<T> o(d_o.size(), T(NAN)), final(d_final.size(), T(NAN));
  std::vector<T> states(size(r.kept_states(cpu::kRecurrenceSegment) * c.heads * c.key_dim * c.value_dim), T(NAN));
  cpu::recurrence<T>(r, {.o = o.data(), .states = states.data(), .final = final.data()}, executor);
  const auto room = [](std::vector<T>& values) { return values.empty() ? nullptr : values.data(); };
  cpu::recurrence_backward<T>(r,
                              {.d_o = d_o.data(),
                               .d_final = d_final.data(),
                               .states = states.data(),
                               .d_q = room(d[kQ]),
                               .d_k = room(d[kK]),
                               .d_v = room(d[kV]),
                               .d_log_decay = room(d[kDecay]),
                               .d_beta = room(d[kBeta]),
                               .d_initial = room(d[kInitial])},
                              executor);
  Found found{.answer = {as<double>(o), as<double>(final)}, .gradients = {}};
  for (int i = 0; i < kInputs; ++i) found.gradients[i] = as<double>(d[i]);
  return found;
}

/// `bound`: of a number of order 1.
void expect_right(const Problem& p, const Found& found, double bound, std::size_t every = 3) {
  Doubles in[kInputs];
  for (int i = 0; i < kInputs; ++i) in[i] = as<double>(p.in[i]);
  const auto wanted = reference(p, in);
  expect_near(found.answer.o, wanted.o, bound, "o");
  expect_near(found.answer.final, wanted.final, bound, "the final state");
  for (int i = 0; i < kInputs; ++i) {
    ASSERT_EQ(found.gradients[i].size(), in[i].size()) << "input " << i;
    for (std::size_t at = 0; at < in[i].size(); at += every) {
      constexpr double kStep = 1e-5;
      const double x = in[i][at];
      const auto moved = [&](double to) {
        in[i][at] = to;
        const auto answer = reference(p, in);
        return dot(answer.o, p.d_o) + dot(answer.final, p.d_final);
      };
      const double slope = (moved(x + kStep) - moved(x - kStep)) / (2 * kStep);
      in[i][at] = x;
      ASSERT_NEAR(found.gradients[i][at], slope, 2e-5 * (1 + std::abs(slope))) << "input " << i << ", number " << at;
    }
  }
}

TEST(Recurrence, EqualsItsFormulaInFloat64AndItsGradientsDifferenceQuotients) {
  unsigned seed = 1;
  for (const auto& which : kCases) {
    const Problem p(which, seed++);
    SCOPED_TRACE(seed - 2);
    expect_right(p, by_the_gpus_sources(p), 3e-6);
  }
}

class RecurrenceOnTheCpu : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!forced_.available()) GTEST_SKIP() << "this machine has no " << GetParam();
  }

 private:
  ForcedInstructionSet forced_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(, RecurrenceOnTheCpu, testing::ValuesIn(kInstructionSets),
                         [](const auto& info) { return info.param; });

TEST_P(RecurrenceOnTheCpu, EqualsItsFormulaInFloat64AndItsGradientsDifferenceQuotients) {
  unsigned seed = 1;
  for (const auto& which : kCases) {
    const Problem p(which, seed++);
    SCOPED_TRACE(seed - 2);
    expect_right(p, on_the_cpu<float>(p), 3e-6);
    expect_right(p, on_the_cpu<double>(p), 1e-14);
  }
}

TEST_P(RecurrenceOnTheCpu, IsRightAcrossSegmentsAndBlocksOfColumns) {
  unsigned seed = 11;
  for (const auto& which : kLongCases) {
    const Problem p(which, seed++);
    SCOPED_TRACE(seed - 12);
    const auto exact = on_the_cpu<double>(p), found = on_the_cpu<float>(p);
    expect_right(p, exact, 1e-13, 501);
    for (int i = 0; i < kInputs; ++i) {
      double error = 0, all = 0;
      for (std::size_t at = 0; at < exact.gradients[i].size(); ++at) {
        error += std::pow(found.gradients[i][at] - exact.gradients[i][at], 2);
        all += std::pow(exact.gradients[i][at], 2);
      }
      EXPECT_LE(std::sqrt(error), 2e-6 * std::sqrt(all)) << "input " << i;
    }
  }
}

TEST_P(RecurrenceOnTheCpu, GivesTheSameBitsWhateverTheNumberOfThreads) {
  const Problem p({{200, 9}, 3, 40, 90, true, true, true, true, true}, 5);
  const auto one = on_the_cpu<float>(p), several = on_the_cpu<float>(p, thread_executor(3));
  EXPECT_EQ(one.answer.o, several.answer.o);
  EXPECT_EQ(one.answer.final, several.answer.final);
  for (int i = 0; i < kInputs; ++i) EXPECT_EQ(one.gradients[i], several.gradients[i]) << i;
}

TEST_P(RecurrenceOnTheCpu, StepsAreTheWholeSequenceToTheBit) {
  const Problem p({{37, 37}, 2, 21, 70, true, true, false, true, false}, 6);
  const auto whole = on_the_cpu<float>(p);
  const auto all = p.recurrence<float>(p.in);
  const auto rows = p.c.heads * all.sequences;
  Floats pool(3 * p.in[kInitial].size() / 2), o(size(rows * p.c.value_dim));
  const std::int64_t slots[]{2, 0};
  const auto state = p.in[kInitial].size() / 2;
  for (const std::size_t n : {0, 1}) {
    std::copy_n(p.in[kInitial].begin() + static_cast<std::ptrdiff_t>(n * state), state,
                pool.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(slots[n]) * state));
  }
  for (std::int64_t t = 0; t < 37; ++t) {
    Floats now[kInputs];
    for (const int i : {kQ, kK, kV, kDecay, kBeta}) {
      const auto width = static_cast<std::ptrdiff_t>(p.in[i].size()) / (2 * 37);
      for (const std::int64_t n : {0, 1}) {
        const auto from = p.in[i].begin() + (n * 37 + t) * width;
        now[i].insert(now[i].end(), from, from + width);
      }
    }
    auto call = p.recurrence<float>(now);
    call.length = 1;
    call.tokens = 2;
    cpu::recurrence_step<float>({.call = call, .slots = slots, .pool = pool.data(), .o = o.data()}, {});
    const auto width = o.size() / 2;
    for (const std::size_t n : {0, 1}) {
      for (std::size_t i = 0; i < width; ++i) {
        ASSERT_EQ(o[n * width + i], whole.answer.o[(n * 37 + static_cast<std::size_t>(t)) * width + i]) << t;
      }
    }
  }
  for (const std::size_t n : {0, 1}) {
    for (std::size_t i = 0; i < state; ++i) {
      ASSERT_EQ(pool[static_cast<std::size_t>(slots[n]) * state + i], whole.answer.final[n * state + i]);
    }
  }
}

TEST_P(RecurrenceOnTheCpu, ForgetsEverythingWhereNothingIsKept) {
  Problem p({{40}, 1, 5, 3, true, true, false, true, false}, 7);
  p.in[kDecay][20] = -INFINITY;
  const auto found = on_the_cpu<float>(p);
  Problem q = p;
  for (std::size_t i = 0; i < 20 * 3; ++i) q.in[kV][i] += 1;
  const auto other = on_the_cpu<float>(q);
  for (std::size_t i = 0; i < 40 * 3; ++i) {
    if (i < 20 * 3) {
      ASSERT_NE(found.answer.o[i], other.answer.o[i]);
    } else {
      ASSERT_EQ(found.answer.o[i], other.answer.o[i]);
    }
  }
  for (int i = 0; i < kInputs; ++i) {
    for (const double slope : found.gradients[i]) ASSERT_TRUE(std::isfinite(slope)) << i;
  }
  for (const double slope : found.gradients[kInitial]) ASSERT_TRUE(std::isfinite(slope));
  EXPECT_EQ(found.gradients[kDecay][20], 0);
}

}  // namespace
}  // namespace gka::kernels::test::recurrences
