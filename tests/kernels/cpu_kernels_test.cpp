// What is true of the CPU kernels alone: they cut work into threads, which may not show, and pick an instruction set.
#include <array>
#include <atomic>
#include <stdexcept>
#include <utility>

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
  for (const bool decay_keys : {true, false}) {
    // Both ways of working: a worker that walks a sequence, and segments spread over the workers.
    spec.options.gradient = decay_keys ? Gradient::implicit : Gradient::unrolled;
    spec.options.decay_keys = decay_keys;
    const Case c(spec);
    const Results one = run(c, thread_executor(1));
    for (const int threads : {2, 3, 8}) {
      const Results many = run(c, thread_executor(threads));
      expect_close(many.outputs, one.outputs, 0.0, std::to_string(threads) + " threads");
      expect_close(many.gradients, one.gradients, 0.0, std::to_string(threads) + " threads");
    }
  }
}

TEST_P(CpuKernels, SumWhatHeadsShareToTheSameBitsWhateverTheNumberOfThreads) {
  CaseSpec spec{.dtype = DType::bfloat16, .batch = 3, .tokens = 300, .heads = 6, .key_dim = 24, .value_dim = 20};
  spec.h0 = spec.u0 = spec.d_h = spec.d_u = true;
  spec.options.iterations = 8;
  for (const auto& [keys, values] : {std::pair{2, 2}, std::pair{3, 1}, std::pair{2, 3}}) {
    spec.key_group = keys;
    spec.value_group = values;
    const Case c(spec);
    const Results one = run(c, thread_executor(1));
    for (const int threads : {2, 5}) {
      const Results many = run(c, thread_executor(threads));
      expect_close(many.outputs, one.outputs, 0.0, std::to_string(threads) + " threads");
      expect_close(many.gradients, one.gradients, 0.0, std::to_string(threads) + " threads");
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
