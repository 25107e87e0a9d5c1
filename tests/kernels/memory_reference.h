// Random problems for memories with a decay per head and token, or one for each key channel, and what the recurrence
// itself answers in float64:
//
//   S ← γ ∘ S + k uᵀ,   u = β (v − (γ ∘ S)ᵀ k) with the delta rule, else β v,   o = scale · Sᵀ q
//
// with the gradients of Σ o·do + Σ S_final·d_final.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace gka::kernels::test {

using Halves = std::vector<std::uint16_t>;  // bfloat16
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline float widened(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
inline Floats widened(const Halves& values) {
  Floats wide(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) wide[i] = widened(values[i]);
  return wide;
}

struct MemoryCase {
  std::vector<std::int64_t> lengths;
  std::int64_t heads = 1, key_dim = 0, value_dim = 0;
  bool delta = true, decay = true, beta = true, packed = false;
  bool shared_keys = false;  // all heads have the same queries and keys
  bool strong = false;       // decays down to e^(−10,000), and to 0
  bool per_channel = false;  // a decay for each key channel
  bool weak = false;         // hardly any decay
};

struct MemoryProblem {
  static constexpr float kScale = 0.7f;
  MemoryCase c;
  std::vector<std::int64_t> bounds{0};
  Halves q, k, v, d_o;
  Floats log_decay, beta, initial, d_final;

  MemoryProblem(const MemoryCase& which, unsigned seed) : c(which) {
    for (const auto length : c.lengths) bounds.push_back(bounds.back() + length);
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    const auto draw = [&](std::int64_t count, auto&& map) {
      Floats values(static_cast<std::size_t>(count));
      for (auto& value : values) value = static_cast<float>(map(normal(engine)));
      return values;
    };
    const auto half = [](const Floats& values) {
      Halves bits;
      for (const float x : values) {
        const auto wide = std::bit_cast<std::uint32_t>(x);
        bits.push_back(static_cast<std::uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16));
      }
      return bits;
    };
    const auto plain = [](float x) { return x; };
    const auto rows = tokens() * c.heads, key_rows = c.shared_keys ? tokens() : rows;
    const auto states = sequences() * c.heads * c.key_dim * c.value_dim;
    const auto unit = [&](float x) { return x / std::sqrt(static_cast<float>(c.key_dim)); };
    q = half(draw(key_rows * c.key_dim, unit));
    k = half(draw(key_rows * c.key_dim, unit));
    v = half(draw(rows * c.value_dim, plain));
    d_o = half(draw(rows * c.value_dim, plain));
    log_decay = draw(rows * decays(), [&](float x) {
      if (c.weak) return -1e-4f * x * x;
      if (!c.strong) return -0.3f * x * x;
      return x > 1 ? -std::numeric_limits<float>::infinity() : x > 0.5f ? -1e4f : -0.5f * x * x;
    });
    beta = draw(rows, [](float x) { return 1 / (1 + std::exp(-x)); });
    initial = draw(states, plain);
    d_final = draw(states, plain);
  }

  std::int64_t tokens() const { return bounds.back(); }
  /// Of a head and token.
  std::int64_t decays() const { return c.per_channel ? c.key_dim : 1; }
  std::int64_t sequences() const { return static_cast<std::int64_t>(c.lengths.size()); }
};

struct MemoryResult {
  Floats o{}, final{}, d_q{}, d_k{}, d_v{}, d_log_decay{}, d_beta{}, d_initial{};
};

/// One sequence and head of the reference.
class MemoryReference {
 public:
  MemoryReference(const MemoryProblem& problem, std::size_t sequence, std::int64_t head, MemoryResult& to)
      : p_(problem), c_(problem.c), n_(sequence), head_(head), to_(to) {}

  void run() {
    const auto first = p_.bounds[n_], end = p_.bounds[n_ + 1];
    const auto own = state_at();
    Doubles s(p_.initial.begin() + own, p_.initial.begin() + own + size());
    std::vector<Doubles> faded, after;
    for (auto t = first; t < end; ++t) forward(t, s, faded, after);
    std::copy(s.begin(), s.end(), to_.final.begin() + own);
    Doubles d(p_.d_final.begin() + own, p_.d_final.begin() + own + size());
    for (auto t = end - 1; t >= first; --t) {
      const auto i = static_cast<std::size_t>(t - first);
      backward(t, faded[i], after[i], d);
    }
    std::copy(d.begin(), d.end(), to_.d_initial.begin() + own);
  }

 private:
  std::int64_t size() const { return c_.key_dim * c_.value_dim; }
  std::int64_t state_at() const { return (static_cast<std::int64_t>(n_) * c_.heads + head_) * size(); }
  std::size_t row(std::int64_t t) const { return static_cast<std::size_t>(t * c_.heads + head_); }
  double key(const Halves& x, std::int64_t t, std::int64_t i) const {
    return widened(x[static_cast<std::size_t>((c_.shared_keys ? t : t * c_.heads + head_) * c_.key_dim + i)]);
  }
  double value(const Halves& x, std::int64_t t, std::int64_t j) const {
    return widened(x[row(t) * static_cast<std::size_t>(c_.value_dim) + static_cast<std::size_t>(j)]);
  }
  double beta(std::int64_t t) const { return c_.beta ? static_cast<double>(p_.beta[row(t)]) : 1; }
  /// Where key channel i's log decay stands.
  std::size_t decay_at(std::int64_t t, std::int64_t i) const {
    return row(t) * static_cast<std::size_t>(p_.decays()) + static_cast<std::size_t>(c_.per_channel ? i : 0);
  }
  double decay(std::int64_t t, std::int64_t i) const {
    return c_.decay ? std::exp(static_cast<double>(p_.log_decay[decay_at(t, i)])) : 1;
  }
  std::size_t at(std::int64_t i, std::int64_t j) const { return static_cast<std::size_t>(i * c_.value_dim + j); }

  /// v − γ Sᵀ k, or v.
  double residual(std::int64_t t, const Doubles& faded, std::int64_t j) const {
    double r = value(p_.v, t, j);
    for (std::int64_t i = 0; i < c_.key_dim && c_.delta; ++i) r -= key(p_.k, t, i) * faded[at(i, j)];
    return r;
  }

  void forward(std::int64_t t, Doubles& s, std::vector<Doubles>& faded, std::vector<Doubles>& after) {
    for (std::int64_t i = 0; i < c_.key_dim; ++i) {
      for (std::int64_t j = 0; j < c_.value_dim; ++j) s[at(i, j)] *= decay(t, i);
    }
    faded.push_back(s);
    for (std::int64_t j = 0; j < c_.value_dim; ++j) {
      const double u = beta(t) * residual(t, faded.back(), j);
      double o = 0;
      for (std::int64_t i = 0; i < c_.key_dim; ++i) {
        s[at(i, j)] += key(p_.k, t, i) * u;
        o += key(p_.q, t, i) * s[at(i, j)];
      }
      to_.o[row(t) * static_cast<std::size_t>(c_.value_dim) + static_cast<std::size_t>(j)] =
          static_cast<float>(MemoryProblem::kScale * o);
    }
    after.push_back(s);
  }

  void backward(std::int64_t t, const Doubles& faded, const Doubles& after, Doubles& d) {
    const auto keys = static_cast<std::size_t>(c_.key_dim);
    Doubles d_q(keys), d_k(keys), d_decay(keys);
    double d_beta = 0;
    for (std::int64_t j = 0; j < c_.value_dim; ++j) {
      const double out = MemoryProblem::kScale * value(p_.d_o, t, j), r = residual(t, faded, j);
      double d_u = 0;
      for (std::int64_t i = 0; i < c_.key_dim; ++i) {
        d[at(i, j)] += out * key(p_.q, t, i);
        d_q[static_cast<std::size_t>(i)] += out * after[at(i, j)];
        d_k[static_cast<std::size_t>(i)] += beta(t) * r * d[at(i, j)];
        d_u += key(p_.k, t, i) * d[at(i, j)];
      }
      const double d_r = beta(t) * d_u;
      d_beta += r * d_u;
      to_.d_v[row(t) * static_cast<std::size_t>(c_.value_dim) + static_cast<std::size_t>(j)] = static_cast<float>(d_r);
      for (std::int64_t i = 0; i < c_.key_dim; ++i) {
        auto& slope = d[at(i, j)];
        if (c_.delta) {
          d_k[static_cast<std::size_t>(i)] -= d_r * faded[at(i, j)];
          slope -= d_r * key(p_.k, t, i);
        }
        d_decay[static_cast<std::size_t>(i)] += slope * faded[at(i, j)];
        slope *= decay(t, i);
      }
    }
    for (std::size_t i = 0; i < keys; ++i) {
      to_.d_q[row(t) * keys + i] = static_cast<float>(d_q[i]);
      to_.d_k[row(t) * keys + i] = static_cast<float>(d_k[i]);
    }
    to_.d_beta[row(t)] = static_cast<float>(d_beta);
    for (std::size_t i = 0; i < keys; ++i) {
      to_.d_log_decay[decay_at(t, static_cast<std::int64_t>(i))] += static_cast<float>(d_decay[i]);
    }
  }

  const MemoryProblem& p_;
  const MemoryCase& c_;
  std::size_t n_;
  std::int64_t head_;
  MemoryResult& to_;
};

/// d_q and d_k are per head also where heads share their keys.
inline MemoryResult reference(const MemoryProblem& p) {
  const auto rows = static_cast<std::size_t>(p.tokens() * p.c.heads);
  const auto keys = rows * static_cast<std::size_t>(p.c.key_dim),
             values = rows * static_cast<std::size_t>(p.c.value_dim);
  MemoryResult result{.o = Floats(values),
                      .final = Floats(p.initial.size()),
                      .d_q = Floats(keys),
                      .d_k = Floats(keys),
                      .d_v = Floats(values),
                      .d_log_decay = Floats(rows * static_cast<std::size_t>(p.decays())),
                      .d_beta = Floats(rows),
                      .d_initial = Floats(p.initial.size())};
  for (std::size_t n = 0; n < p.c.lengths.size(); ++n) {
    for (std::int64_t head = 0; head < p.c.heads; ++head) MemoryReference(p, n, head, result).run();
  }
  return result;
}

/// ‖a − b‖ / ‖b‖.
inline double distance(const Floats& a, const Floats& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

inline void expect_close(const MemoryResult& got, const MemoryResult& wanted, const MemoryProblem& p, double bound) {
  const auto expect = [&](const Floats& a, const Floats& b, const char* what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    EXPECT_LT(distance(a, b), bound) << what;
  };
  expect(got.o, wanted.o, "o");
  expect(got.final, wanted.final, "the final state");
  expect(got.d_q, wanted.d_q, "dq");
  expect(got.d_k, wanted.d_k, "dk");
  expect(got.d_v, wanted.d_v, "dv");
  if (p.c.decay) expect(got.d_log_decay, wanted.d_log_decay, "dlog_decay");
  if (p.c.beta) expect(got.d_beta, wanted.d_beta, "dbeta");
  expect(got.d_initial, wanted.d_initial, "the initial state's gradient");
}

}  // namespace gka::kernels::test
