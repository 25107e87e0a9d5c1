// The CPU kernels against the float64 reference over random problems: every dtype, size, gate, packing, layout, option
// and instruction set. A failure prints the case as code.
#include <cstdlib>
#include <string>

#include "kernels/cpu_support.h"

namespace gka::kernels::test {
namespace {

/// How far apart two backends may be: rounding of the result's own type, and of float32 arithmetic amplified by the
/// solve (κ ≤ 100 in these cases) for everything but float64.
double tolerance(const CaseSpec& spec) {
  switch (spec.dtype) {
    case DType::float64: return 1e-9;
    case DType::float32: return 2e-4;
    case DType::float16: return 2e-3;
    case DType::bfloat16: return 1e-2;
  }
  return 0;
}

class CpuRandom : public testing::TestWithParam<const char*> {};

TEST_P(CpuRandom, ForwardAndBackwardMatchTheReference) {
  const ForcedInstructionSet forced(GetParam());
  if (!forced.available()) GTEST_SKIP() << "this machine has no " << GetParam();
  for (std::uint64_t seed = 1; seed <= case_count(); ++seed) {
    const Case c(random_spec(seed));
    const OwnedOutputs got = c.outputs(), want = c.outputs();
    const OwnedGradients got_gradients = c.gradients(), want_gradients = c.gradients();
    reference::forward(c.problem(), want.pointers());
    reference::backward(c.problem(), want_gradients.pointers());
    cpu::forward(c.problem(), got.pointers(), executor());
    cpu::backward(c.problem(), got.pointers().saved, got_gradients.pointers(), executor());
    // Residuals at convergence are rounding errors; they are compared with the reference in a test of their own.
    for (const auto& [name, error] : compare(got.named(), want.named())) {
      if (name == "residual" || name == "true_residual") continue;
      EXPECT_LE(error, tolerance(c.spec())) << name << " of " << c.describe();
    }
    expect_close(got_gradients, want_gradients, 3 * tolerance(c.spec()), c.describe());
    if (testing::Test::HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, CpuRandom, testing::ValuesIn(kInstructionSets), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gka::kernels::test
