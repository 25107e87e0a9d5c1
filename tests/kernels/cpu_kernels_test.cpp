// What is true of the CPU kernels alone: they cut sequences into chunks and work into threads, and neither may show.
#include <array>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "kernels/cpu_support.h"

namespace gka::kernels::test {
namespace {

class CpuKernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!forced_.available()) GTEST_SKIP() << "this machine has no " << GetParam();
  }

  struct Results {
    OwnedOutputs outputs;
    OwnedGradients gradients;
  };

  static Results run(const Case& c, const Executor& threads) {
    Results results{c.outputs(), c.gradients()};
    cpu::forward(c.problem(), results.outputs.pointers(), threads);
    cpu::backward(c.problem(), results.outputs.pointers().saved, results.gradients.pointers(), threads);
    return results;
  }

 private:
  ForcedInstructionSet forced_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(, CpuKernels, testing::ValuesIn(kInstructionSets),
                         [](const auto& info) { return info.param; });

TEST_P(CpuKernels, GiveTheSameBitsWhateverTheNumberOfThreads) {
  CaseSpec spec{.dtype = DType::float32, .batch = 2, .tokens = 300, .heads = 3, .key_dim = 24, .value_dim = 20};
  spec.h0 = spec.u0 = spec.d_h = spec.d_u = true;
  for (const Gradient gradient : {Gradient::implicit, Gradient::unrolled}) {
    spec.options.gradient = gradient;
    const Case c(spec);
    const Results one = run(c, thread_executor(1));
    for (const int threads : {2, 3, 8}) {
      const Results many = run(c, thread_executor(threads));
      expect_close(many.outputs, one.outputs, 0.0, std::to_string(threads) + " threads");
      expect_close(many.gradients, one.gradients, 0.0, std::to_string(threads) + " threads");
    }
  }
}

TEST_P(CpuKernels, GiveTheSameAnswerForEveryChunkLength) {
  CaseSpec spec{
      .tokens = 150, .heads = 1, .key_dim = 13, .value_dim = 6, .h0 = true, .u0 = true, .d_h = true, .d_u = true};
  spec.forget = 0.02;
  const Case c(spec);
  OwnedOutputs want = c.outputs();
  OwnedGradients want_gradients = c.gradients();
  reference::forward(c.problem(), want.pointers());
  reference::backward(c.problem(), want_gradients.pointers());
  for (std::int64_t chunk = 1; chunk <= 64; ++chunk) {
    spec.options.chunk = chunk;
    const Case cut(spec);
    const Results got = run(cut, executor());
    expect_close(got.outputs.o, want.o, 1e-12, "o with chunks of " + std::to_string(chunk));
    expect_close(got.outputs.h, want.h, 1e-12, "h with chunks of " + std::to_string(chunk));
    expect_close(got.gradients, want_gradients, 1e-11, "chunks of " + std::to_string(chunk));
  }
}

TEST_P(CpuKernels, ReportResidualsAsSmallAsTheirArithmeticAllows) {
  CaseSpec spec{.tokens = 100, .key_dim = 32, .value_dim = 16};
  for (const auto& [dtype, rounding] : {std::pair{DType::float64, 1e-13}, std::pair{DType::float32, 1e-5}}) {
    spec.dtype = dtype;
    spec.options.iterations = 200;
    const Case c(spec);
    const OwnedOutputs got = c.outputs();
    cpu::forward(c.problem(), got.pointers(), executor());
    for (const double residual : got.residual.values()) EXPECT_LE(residual, rounding);
  }
}

TEST_P(CpuKernels, ReportTheResidualsOfTheReferenceBeforeConvergence) {
  CaseSpec spec{.tokens = 60, .key_dim = 20, .value_dim = 8};
  spec.options.iterations = 5;
  for (const auto& [name, solver] : kSolverNames) {
    if (solver == Solver::exact) continue;
    spec.options.solver = solver;
    const Case c(spec);
    const OwnedOutputs got = c.outputs(), want = c.outputs();
    cpu::forward(c.problem(), got.pointers(), executor());
    reference::forward(c.problem(), want.pointers());
    expect_close(got.residual, want.residual, 1e-10, std::string(name));
    expect_close(got.true_residual, want.true_residual, 1e-10, std::string(name));
  }
}

TEST_P(CpuKernels, AnswerFromAMemoryThatFadedToTheEdgeOfFloat32) {
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
    cpu::forward(p, out.pointers(), executor());
    cpu::backward(p, out.pointers().saved, gradients.pointers(), executor());
    EXPECT_LT(out.norm.at(0, 39, 0, 0), 1e-31);
    for (std::int64_t j = 0; j < spec.value_dim; ++j) {
      EXPECT_NEAR(out.o.at(0, 39, 0, j), out.o.at(0, 14, 0, j), 1e-5) << "chunks of " << chunk;
    }
    for (const auto& [name, array] : gradients.named()) {
      for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value)) << name << ", chunks of " << chunk;
    }
  }
}

TEST(CpuDispatch, NamesAnInstructionSetItDoesNotKnow) {
  const ForcedInstructionSet forced("sse9");
  try {
    cpu::instruction_set();
    FAIL() << "sse9 was accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("it takes one of"), std::string::npos) << error.what();
  }
}

TEST(ThreadExecutor, RunsEveryTaskOnceAndPassesOnAnException) {
  const Executor threads = thread_executor(4);
  std::array<std::atomic<int>, 9> counts{};
  threads.run(9, [&](int i) { ++counts[static_cast<std::size_t>(i)]; });
  for (const auto& count : counts) EXPECT_EQ(count, 1);
  EXPECT_THROW(threads.run(3,
                           [](int i) {
                             if (i == 2) throw std::runtime_error("no");
                           }),
               std::runtime_error);
}

}  // namespace
}  // namespace gka::kernels::test
