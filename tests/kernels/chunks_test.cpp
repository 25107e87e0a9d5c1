// What is true of the backends that cut sequences into chunks: the cut does not show, nor does a memory that has faded.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/backends.h"

namespace gka::kernels::test {
namespace {

class Chunks : public OnEveryBackend {};

INSTANTIATE_TEST_SUITE_P(, Chunks, fast_backends_without_tensor_cores(), backend_name);

TEST_P(Chunks, GiveTheSameAnswerForEveryChunkLength) {
  CaseSpec spec{
      .tokens = 150, .heads = 1, .key_dim = 13, .value_dim = 6, .h0 = true, .u0 = true, .d_h = true, .d_u = true};
  spec.forget = 0.02;
  const Case c(spec);
  const OwnedOutputs want = c.outputs();
  const OwnedGradients want_gradients = c.gradients();
  reference::forward(c.problem(), want.pointers());
  reference::backward(c.problem(), want_gradients.pointers());
  for (std::int64_t chunk = 1; chunk <= 64; ++chunk) {
    spec.options.chunk = chunk;
    const Case cut(spec);
    const OwnedOutputs got = cut.outputs();
    const OwnedGradients got_gradients = cut.gradients();
    forward(cut.problem(), got.pointers());
    backward(cut.problem(), got.pointers().saved, got_gradients.pointers());
    expect_close(got.o, want.o, 1e-12, "o with chunks of " + std::to_string(chunk));
    expect_close(got.h, want.h, 1e-12, "h with chunks of " + std::to_string(chunk));
    expect_close(got_gradients, want_gradients, 1e-11, "chunks of " + std::to_string(chunk));
  }
}

TEST_P(Chunks, ReportResidualsAsSmallAsTheirArithmeticAllows) {
  CaseSpec spec{.tokens = 100, .key_dim = 32, .value_dim = 16};
  for (const auto& [dtype, rounding] : {std::pair{DType::float64, 1e-13}, std::pair{DType::float32, 1e-5}}) {
    spec.dtype = dtype;
    spec.options.iterations = 200;
    const Case c(spec);
    const OwnedOutputs got = forward(c);
    for (const double residual : got.residual.values()) EXPECT_LE(residual, rounding);
  }
}

TEST_P(Chunks, ReportTheResidualsOfTheReferenceBeforeConvergence) {
  CaseSpec spec{.tokens = 60, .key_dim = 20, .value_dim = 8};
  spec.options.iterations = 5;
  for (const auto& [name, solver] : kSolverNames) {
    if (solver == Solver::exact) continue;
    spec.options.solver = solver;
    const Case c(spec);
    const OwnedOutputs got = forward(c), want = c.outputs();
    reference::forward(c.problem(), want.pointers());
    expect_close(got.residual, want.residual, 1e-10, std::string(name));
    expect_close(got.true_residual, want.true_residual, 1e-10, std::string(name));
  }
}

TEST_P(Chunks, AnswerFromAMemoryThatFadedToTheEdgeOfFloat32) {
  // Written once, then 25 tokens of γ = e⁻³ with nothing written: ‖H‖ is 1e-32 and its square 0, the answer the same.
  CaseSpec spec{.dtype = DType::float32, .tokens = 40, .heads = 1, .alpha = false};
  Case c(spec);
  for (std::int64_t t = 0; t < 40; ++t) {
    c.log_decay.set(0, t, 0, 0, t < 15 ? -0.1 : -3.0);
    c.beta.set(0, t, 0, 0, t < 15 ? 0.5 : 0.0);
    for (std::int64_t i = 0; i < spec.key_dim; ++i) c.q.set(0, t, 0, i, c.q.at(0, 0, 0, i));
  }
  for (const std::int64_t chunk : {1, 8, 64}) {
    spec.options.chunk = chunk;
    Problem p = c.problem();
    p.options.chunk = chunk;
    const OwnedOutputs out = c.outputs();
    const OwnedGradients gradients = c.gradients();
    forward(p, out.pointers());
    backward(p, out.pointers().saved, gradients.pointers());
    EXPECT_LT(out.norm.at(0, 39, 0, 0), 1e-31);
    for (std::int64_t j = 0; j < spec.value_dim; ++j) {
      EXPECT_NEAR(out.o.at(0, 39, 0, j), out.o.at(0, 14, 0, j), 1e-5) << "chunks of " << chunk;
    }
    for (const auto& [name, array] : gradients.named()) {
      for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value)) << name << ", chunks of " << chunk;
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
