// The case builder itself: a spec is the whole case, and what a backend does wrong to an array is seen.
#include "kernels/case.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "kernels/problem.h"

namespace gka::kernels::test {
namespace {

/// As `values`, with a number in place of −inf so that it compares.
std::vector<double> bounded(const Array& array) {
  auto values = array.values();
  for (double& value : values) value = std::isinf(value) ? -1e300 : value;
  return values;
}

TEST(Case, IsTheSameForTheSameSpec) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Case first(random_spec(seed));
    const Case second(random_spec(seed));
    EXPECT_EQ(first.describe(), second.describe());
    for (const auto member : Case::kByToken) {
      EXPECT_EQ(bounded(first.*member), bounded(second.*member)) << first.describe();
    }
    for (const auto member : Case::kByState) EXPECT_EQ((first.*member).values(), (second.*member).values());
  }
}

TEST(Case, DiffersFromSeedToSeed) {
  std::set<std::string> seen;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CaseSpec spec = random_spec(seed);
    spec.seed = 0;
    seen.insert(describe(spec));
  }
  EXPECT_EQ(seen.size(), 200u);
}

TEST(Case, HoldsTheSameNumbersInEveryLayout) {
  CaseSpec spec{.batch = 2, .tokens = 5, .h0 = true, .forget = 0.3};
  const Case contiguous(spec);
  for (const Layout layout : {Layout::padded, Layout::heads_first}) {
    spec.layout = layout;
    const Case other(spec);
    for (const auto member : Case::kByToken) EXPECT_EQ(bounded(contiguous.*member), bounded(other.*member));
    EXPECT_NE(contiguous.q.view().head_stride, other.q.view().head_stride);
  }
}

TEST(Case, HasUnitKeysAndQueriesAndGatesInRange) {
  const Case c({.tokens = 50, .weakest_decay = 0.01, .strongest_decay = 2.0, .forget = 0.2, .keep = 0.2, .skip = 0.2});
  std::int64_t forgotten = 0, kept = 0, skipped = 0;
  for (std::int64_t t = 0; t < 50; ++t) {
    double square = 0.0;
    for (std::int64_t i = 0; i < 8; ++i) square += c.k.at(0, t, 1, i) * c.k.at(0, t, 1, i);
    EXPECT_NEAR(square, 1.0, 1e-14);
    const double decay = c.log_decay.at(0, t, 1, 0);
    const double beta = c.beta.at(0, t, 1, 0);
    forgotten += std::isinf(decay);
    kept += decay == 0.0;
    skipped += beta == 0.0;
    EXPECT_TRUE(std::isinf(decay) || decay == 0.0 || (decay <= -0.01 && decay >= -2.0)) << decay;
    EXPECT_TRUE(beta >= 0.0 && beta <= 1.0) << beta;
  }
  for (const std::int64_t count : {forgotten, kept, skipped}) EXPECT_TRUE(count > 0 && count < 30) << count;
}

TEST(Case, RandomSpecsCoverWhatBackendsMustTake) {
  std::set<DType> dtypes;
  std::set<Solver> solvers;
  std::set<Part> parts;
  bool empty_sequence = false, no_tokens = false, wide = false, diagonal = false, crosses_segments = false;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const CaseSpec spec = random_spec(seed);
    dtypes.insert(spec.dtype);
    solvers.insert(spec.options.solver);
    parts.insert(spec.options.part);
    for (const std::int64_t length : spec.lengths) empty_sequence |= length == 0;
    no_tokens |= spec.tokens == 0;
    wide |= spec.key_dim > 128;
    diagonal |= spec.ridge_diagonal;
    crosses_segments |= spec.lengths.empty() && spec.tokens > kSegment;
    EXPECT_TRUE(spec.key_dim >= 1 && spec.key_dim <= 256 && spec.value_dim >= 1 && spec.value_dim <= 256);
  }
  EXPECT_EQ(dtypes.size(), 4u);
  EXPECT_EQ(solvers.size(), kSolverNames.size());
  EXPECT_EQ(parts.size(), 3u);
  EXPECT_TRUE(empty_sequence && no_tokens && wide && diagonal && crosses_segments);
}

TEST(Case, SeesAWriteOutsideTheElements) {
  Array array(DType::float32, {2, 3, 2, 4}, Layout::padded);
  EXPECT_TRUE(array.gaps_intact());
  array.set(1, 2, 1, 3, 5.0);
  EXPECT_TRUE(array.gaps_intact());
  static_cast<float*>(array.data())[4] = 1.0f;  // just after the first row
  EXPECT_FALSE(array.gaps_intact());
}

TEST(Case, StartsItsOutputsAsNaN) {
  const Case c({.dtype = DType::bfloat16});
  const auto outputs = c.outputs();
  for (const auto& [name, array] : outputs.named()) {
    for (const double value : array->values()) EXPECT_TRUE(std::isnan(value)) << name;
  }
}

TEST(RelativeError, IsTheNormOfTheDifferenceOverTheNorm) {
  EXPECT_DOUBLE_EQ(relative_error(std::vector{3.0, 4.0}, {3.0, 3.0}), 1.0 / std::sqrt(18.0));
  EXPECT_DOUBLE_EQ(relative_error(std::vector{3e-200, 4e-200}, {3e-200, 3e-200}), 1.0 / std::sqrt(18.0));
  EXPECT_EQ(relative_error(std::vector{0.5}, {0.0}), 0.5);
  EXPECT_EQ(relative_error(std::vector<double>{}, {}), 0.0);
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isinf(relative_error(std::vector{nan}, {nan})));
  EXPECT_TRUE(std::isinf(relative_error(std::vector{1.0}, {1.0, 2.0})));
}

}  // namespace
}  // namespace gka::kernels::test
