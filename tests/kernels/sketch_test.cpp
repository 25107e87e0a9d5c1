// Between queries or keys and their sketch: the kernels' own source on the host, with all its threads, against sums in
// float64 over the same bfloat16 numbers.
#define cuda cuda_with_threads
#include "kernels/cuda/sketch.cu"
#undef cuda

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/memory_reference.h"

namespace gka::kernels::test {
namespace {

using cuda_with_threads::MemoryRows;
using cuda_with_threads::Sketch;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Rows of heads with a gap behind each token's.
struct Rows {
  std::int64_t heads, width, stride;
  Halves bits;

  Rows(std::int64_t tokens, std::int64_t head_count, std::int64_t numbers, std::int64_t gap, std::mt19937& random)
      : heads(head_count), width(numbers), stride(head_count * numbers + gap), bits(size(tokens * stride)) {
    std::normal_distribution<float> normal;
    for (auto& half : bits) half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16);
  }
  MemoryRows rows() const { return {bits.data(), stride, width}; }
  double at(std::int64_t token, std::int64_t head, std::int64_t channel) const {
    return widened(bits[size(token * stride + head * width + channel)]);
  }
};

struct SketchCase {
  std::int64_t tokens, heads, wide, low;
  bool mixes;
};

struct SketchProblem {
  SketchCase c;
  std::mt19937 random;
  Rows base, low, d;
  Halves p;
  Floats alpha;

  explicit SketchProblem(const SketchCase& which)
      : c(which),
        random(7),
        base(c.tokens, c.heads, c.wide, 16, random),
        low(c.tokens, c.heads, c.low, 8, random),
        d(c.tokens, c.heads, c.wide, 0, random),
        p(Rows(1, c.heads, c.low * c.wide, 0, random).bits) {
    std::uniform_real_distribution<float> uniform;
    alpha.resize(size(c.tokens * c.heads));
    for (auto& open : alpha) open = uniform(random);
  }
  Sketch call() const {
    return {.tokens = c.tokens,
            .heads = c.heads,
            .wide = c.wide,
            .low = c.low,
            .p = p.data(),
            .alpha = c.mixes ? alpha.data() : nullptr};
  }
  double sketch(std::int64_t head, std::int64_t row, std::int64_t channel) const {
    return widened(p[size((head * c.low + row) * c.wide + channel)]);
  }
  double open(std::int64_t token, std::int64_t head) const {
    return c.mixes ? alpha[size(token * c.heads + head)] : 1.0;
  }
  /// body(token, head, i) for all rows of `width` numbers, i the number's place in a contiguous array.
  template <typename Body>
  void each(std::int64_t width, Body&& body) const {
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      for (std::int64_t h = 0; h < c.heads; ++h) {
        for (std::int64_t i = 0; i < width; ++i) body(t, h, i, size((t * c.heads + h) * width + i));
      }
    }
  }
  /// (P d)[row] of a token and head.
  double inside(std::int64_t t, std::int64_t h, std::int64_t row) const {
    double sum = 0;
    for (std::int64_t i = 0; i < c.wide; ++i) sum += sketch(h, row, i) * d.at(t, h, i);
    return sum;
  }
};

/// Of a number that is rounded to bfloat16 once.
double slack(double want) { return 4e-3 * std::abs(want) + 1e-4; }

constexpr std::uint16_t kNone = 0x7fc0;  // NaN, where nothing is written

const SketchCase kCases[]{
    {.tokens = 130,
     .heads = 3,
     .wide = 128,
     .low = 32,
     .mixes = true},  // two blocks of a head, the second nearly empty
    {.tokens = 17, .heads = 1, .wide = 64, .low = 32, .mixes = false},
    {.tokens = 9, .heads = 2, .wide = 192, .low = 64, .mixes = true},
    {.tokens = 1, .heads = 2, .wide = 256, .low = 64, .mixes = false},
};

TEST(Sketch, ComesBackAsItsFormula) {
  for (const auto& which : kCases) {
    const SketchProblem problem(which);
    const auto& c = problem.c;
    Halves to(size(c.tokens * c.heads * c.wide) + 8, kNone);
    cuda_with_threads::from_sketch(problem.call(), problem.base.rows(), problem.low.rows(), to.data(), {});
    problem.each(c.wide, [&](std::int64_t t, std::int64_t h, std::int64_t i, std::size_t at) {
      double back = 0;
      for (std::int64_t s = 0; s < c.low; ++s) back += problem.sketch(h, s, i) * problem.low.at(t, h, s);
      const double open = problem.open(t, h), kept = c.mixes ? 1 - open : 1;
      const double want = kept * problem.base.at(t, h, i) + open * back;
      ASSERT_NEAR(widened(to[at]), want, slack(want)) << t << ' ' << h << ' ' << i;
    });
    for (std::size_t i = to.size() - 8; i < to.size(); ++i) EXPECT_EQ(to[i], kNone);  // what lies behind stays
  }
}

TEST(Sketch, HasTheGradientsOfItsFormula) {
  for (const auto& which : kCases) {
    if (!which.mixes) continue;
    const SketchProblem problem(which);
    const auto& c = problem.c;
    Halves d_base(size(c.tokens * c.heads * c.wide) + 8, kNone), d_low(size(c.tokens * c.heads * c.low) + 8, kNone);
    Floats d_alpha(size(c.tokens * c.heads) + 1, -77);
    cuda_with_threads::from_sketch_backward(problem.call(),
                                            {.d = problem.d.rows(),
                                             .base = problem.base.rows(),
                                             .low = problem.low.rows(),
                                             .d_base = d_base.data(),
                                             .d_low = d_low.data(),
                                             .d_alpha = d_alpha.data()},
                                            {});
    problem.each(c.wide, [&](std::int64_t t, std::int64_t h, std::int64_t i, std::size_t at) {
      const double want = (1 - problem.open(t, h)) * problem.d.at(t, h, i);
      ASSERT_NEAR(widened(d_base[at]), want, slack(want)) << t << ' ' << h << ' ' << i;
    });
    problem.each(c.low, [&](std::int64_t t, std::int64_t h, std::int64_t s, std::size_t at) {
      const double want = problem.open(t, h) * problem.inside(t, h, s);
      ASSERT_NEAR(widened(d_low[at]), want, slack(want)) << t << ' ' << h << ' ' << s;
    });
    problem.each(1, [&](std::int64_t t, std::int64_t h, std::int64_t, std::size_t at) {
      double want = 0;
      for (std::int64_t s = 0; s < c.low; ++s) want += problem.low.at(t, h, s) * problem.inside(t, h, s);
      for (std::int64_t i = 0; i < c.wide; ++i) want -= problem.base.at(t, h, i) * problem.d.at(t, h, i);
      ASSERT_NEAR(d_alpha[at], want, 1e-2) << t << ' ' << h;
    });
    EXPECT_EQ(d_base.back(), kNone);
    EXPECT_EQ(d_low.back(), kNone);
    EXPECT_EQ(d_alpha.back(), -77);
  }
}

TEST(Sketch, HasTheSumsOverTokensOfProducts) {
  const SketchCase cases[]{
      {.tokens = 1061, .heads = 1, .wide = 64, .low = 32, .mixes = true},  // two stretches
      {.tokens = 30, .heads = 2, .wide = 128, .low = 64, .mixes = false},
      {.tokens = 70, .heads = 1, .wide = 192, .low = 32, .mixes = true},
  };
  for (const auto& which : cases) {
    const SketchProblem problem(which);
    const auto& c = problem.c;
    const auto numbers = size(c.heads * c.low * c.wide), stretches = size(problem.call().stretches());
    ASSERT_EQ(stretches, c.tokens > 1024 ? 2U : 1U);
    Floats parts(stretches * numbers, std::nanf(""));
    cuda_with_threads::sketch_products(problem.call(), problem.low.rows(), problem.base.rows(), parts.data(), {});
    for (std::int64_t h = 0; h < c.heads; ++h) {
      for (std::int64_t s = 0; s < c.low; ++s) {
        for (std::int64_t i = 0; i < c.wide; ++i) {
          double want = 0, squares = 0, got = 0;
          for (std::int64_t t = 0; t < c.tokens; ++t) {
            const double product = problem.open(t, h) * problem.low.at(t, h, s) * problem.base.at(t, h, i);
            want += product;
            squares += product * product;
          }
          for (std::size_t part = 0; part < stretches; ++part) {
            got += parts[part * numbers + size((h * c.low + s) * c.wide + i)];
          }
          ASSERT_NEAR(got, want, 1e-2 * std::sqrt(squares) + 1e-4) << h << ' ' << s << ' ' << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
