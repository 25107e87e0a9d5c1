// Every backend against the float64 reference over random problems: every dtype, size, gate, packing, layout and
// option. A failure prints the case as code.
#include <gtest/gtest.h>

#include "kernels/backends.h"

namespace gka::kernels::test {
namespace {

/// How far apart two backends may be: rounding of the result's own type, and of float32 arithmetic amplified by the
/// solve (κ ≤ 100 in these cases) for everything but float64. Conjugate gradients amplify rounding without bound until
/// they have converged.
double tolerance(const CaseSpec& spec) {
  const bool loose = spec.options.solver == Solver::conjugate_gradient && spec.options.part != Part::memory;
  switch (spec.dtype) {
    case DType::float64: return loose ? 1e-5 : 1e-11;
    case DType::float32: return loose ? 2e-2 : 2e-4;
    case DType::float16:
    case DType::bfloat16: return loose ? 2e-2 : 1e-3;
  }
  return 0;
}

/// Below float64 the gradient through the steps of conjugate gradients is that of other steps than the reference's.
bool comparable_gradients(const CaseSpec& spec) {
  return spec.dtype == DType::float64 || spec.options.solver != Solver::conjugate_gradient ||
         spec.options.gradient == Gradient::implicit || spec.options.part == Part::memory;
}

class Random : public OnEveryBackend {};

TEST_P(Random, ForwardAndBackwardMatchTheReference) {
  for (std::uint64_t seed = 1; seed <= case_count(); ++seed) {
    const Case c(random_spec(seed));
    const OwnedOutputs got = c.outputs(), want = c.outputs();
    const OwnedGradients got_gradients = c.gradients(), want_gradients = c.gradients();
    reference::forward(c.problem(), want.pointers());
    reference::backward(c.problem(), want_gradients.pointers());
    forward(c.problem(), got.pointers());
    backward(c.problem(), got.pointers().saved, got_gradients.pointers());
    // Residuals at convergence are rounding errors; they are compared with the reference in a test of their own.
    for (const auto& [name, error] : compare(got.named(), want.named())) {
      if (name == "residual" || name == "true_residual") continue;
      EXPECT_LE(error, tolerance(c.spec())) << name << " of " << c.describe();
    }
    if (comparable_gradients(c.spec())) {
      expect_close(got_gradients, want_gradients, 3 * tolerance(c.spec()), c.describe());
    }
    if (testing::Test::HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, Random, fast_backends(), backend_name);

}  // namespace
}  // namespace gka::kernels::test
