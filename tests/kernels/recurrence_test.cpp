// The recurrence kernels' own sources on the host, with all their threads: against the recurrence in float64, and their
// gradients against difference quotients of it.
#define cuda cuda_with_threads
#include "kernels/cuda/recurrence.cu"
#undef cuda

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace gka::kernels::test {
namespace {

using cuda_with_threads::Recurrence;
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
    const auto sequences = static_cast<std::int64_t>(c.lengths.size());
    const auto rows = tokens() * c.heads, state = sequences * c.heads * c.key_dim * c.value_dim;
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

  Recurrence recurrence() const {
    const auto pointer = [](const Floats& values) { return values.empty() ? nullptr : values.data(); };
    return {.sequences = static_cast<std::int64_t>(c.lengths.size()),
            .heads = c.heads,
            .key_dim = c.key_dim,
            .value_dim = c.value_dim,
            .length = c.packed ? 0 : c.lengths[0],
            .tokens = tokens(),
            .bounds = c.packed ? bounds.data() : nullptr,
            .delta = c.delta,
            .per_channel = c.per_channel,
            .scale = 0.7f,
            .q = pointer(in[kQ]),
            .k = pointer(in[kK]),
            .v = pointer(in[kV]),
            .log_decay = pointer(in[kDecay]),
            .beta = pointer(in[kBeta]),
            .initial = pointer(in[kInitial])};
  }
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

void expect_near(const Floats& got, const Doubles& wanted, double bound, const char* what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], bound) << what << " " << i;
}

/// [parts, …] summed over the parts, and, for one decay per head, over the channels.
Doubles sum_parts(const Floats& parts, std::size_t size, std::size_t channels = 1) {
  Doubles sums(size);
  for (std::size_t i = 0; i < parts.size(); ++i) sums[i / channels % size] += parts[i];
  return sums;
}

TEST(Recurrence, EqualsItsFormulaInFloat64AndItsGradientsDifferenceQuotients) {
  unsigned seed = 1;
  for (const auto& which : kCases) {
    const Problem p(which, seed++);
    SCOPED_TRACE(seed - 2);
    const auto r = p.recurrence();
    const auto& c = p.c;
    Doubles in[kInputs];
    for (int i = 0; i < kInputs; ++i) in[i].assign(p.in[i].begin(), p.in[i].end());
    const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };

    Floats o(p.d_o.size()), final(p.d_final.size());
    Floats states(size(r.kept_states() * c.heads * c.key_dim * c.value_dim));
    cuda_with_threads::recurrence(r, {.o = o.data(), .states = states.data(), .final = final.data()}, {});
    const auto wanted = reference(p, in);
    expect_near(o, wanted.o, 3e-6, "o");
    expect_near(final, wanted.final, 3e-6, "the final state");

    const auto parts = r.column_blocks(), rows = p.tokens() * c.heads;
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
    const auto whole = [](const Floats& values) { return Doubles(values.begin(), values.end()); };
    const auto channels = c.per_channel ? 1 : size(c.key_dim);
    const Doubles got[kInputs]{sum_parts(d_q, in[kQ].size()),
                               sum_parts(d_k, in[kK].size()),
                               whole(d_v),
                               c.decay ? sum_parts(d_decay, in[kDecay].size(), channels) : Doubles{},
                               c.beta ? sum_parts(d_beta, in[kBeta].size()) : Doubles{},
                               whole(d_initial)};
    for (int i = 0; i < kInputs; ++i) {
      for (std::size_t at = 0; at < in[i].size(); at += 3) {
        constexpr double kStep = 1e-5;
        const double x = in[i][at];
        const auto moved = [&](double to) {
          in[i][at] = to;
          const auto answer = reference(p, in);
          return dot(answer.o, p.d_o) + dot(answer.final, p.d_final);
        };
        const double slope = (moved(x + kStep) - moved(x - kStep)) / (2 * kStep);
        in[i][at] = x;
        ASSERT_NEAR(got[i][at], slope, 2e-5 * (1 + std::abs(slope))) << "input " << i << ", number " << at;
      }
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
