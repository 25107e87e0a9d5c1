// What is true of the CPU kernels alone: they cut work into threads, which may not show, and pick an instruction set.
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "gka/block_kernels.h"
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

/// What the call is refused with; empty where it is not.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

TEST(CpuChecks, ACallThatForgetsASizeOrAnArrayIsRefusedAndNotLeftUndone) {
  const Case c(CaseSpec{.dtype = DType::float32, .batch = 2, .tokens = 5, .heads = 1, .key_dim = 4, .value_dim = 3});
  const auto one = thread_executor(1);
  const auto wrong = [&](const std::function<void(Problem&)>& spoil) {
    auto results = c.outputs();
    auto problem = c.problem();
    spoil(problem);
    return refusal([&] { cpu::forward(problem, results.pointers(), one); });
  };
  const std::array<std::int64_t, 3> falling{0, 7, 5}, short_of{0, 2, 4};
  EXPECT_EQ(wrong([](Problem&) {}), "");
  EXPECT_EQ(wrong([](Problem& p) { p.sequences = 0; }), "sequences takes batch where there is no cu_seqlens");
  EXPECT_EQ(wrong([](Problem& p) { p.key_dim = 300; }), "key_dim takes 1 to 256, got 300");
  EXPECT_EQ(wrong([](Problem& p) { p.value_dim = 0; }), "value_dim takes 1 to 256, got 0");
  EXPECT_EQ(wrong([](Problem& p) { p.options.iterations = -1; }), "options.iterations takes 0 to 10000, got -1");
  EXPECT_EQ(wrong([](Problem& p) { p.options.chunk = -3; }), "options.chunk takes at least 0, got -3");
  for (const double ridge : {-0.1, std::nan(""), HUGE_VAL}) {
    EXPECT_EQ(wrong([&](Problem& p) { p.options.ridge = ridge; }), "options.ridge takes a finite number of at least 0");
  }
  EXPECT_EQ(wrong([](Problem& p) { p.v = {}; }).substr(0, 11), "q, k and v ");
  EXPECT_EQ(wrong([](Problem& p) { p.k.dtype = DType::float64; }), "q, k and v take one type for all of them");
  EXPECT_EQ(wrong([&](Problem& p) { p.cu_seqlens = falling.data(); }), "batch takes 1 where there is cu_seqlens");
  const auto packed = [&](const std::array<std::int64_t, 3>& bounds) {
    return wrong([&](Problem& p) {
      p.batch = 1;
      p.sequences = 2;
      p.cu_seqlens = bounds.data();
    });
  };
  EXPECT_EQ(packed(falling), "cu_seqlens takes numbers that never decrease");
  EXPECT_EQ(packed(short_of), "cu_seqlens takes tokens as its last number");
  EXPECT_EQ(wrong([](Problem& p) { p.key_group = 0; }), "key_group takes a divisor of heads");
  EXPECT_EQ(wrong([](Problem& p) { p.value_group = 2; }), "value_group takes a divisor of heads");
  EXPECT_EQ(wrong([](Problem& p) { p.tokens = -1; }), "tokens takes at least 0, got -1");
  const auto huge = [](Problem& p) { p.tokens = p.heads = std::int64_t{1} << 30; };
  EXPECT_EQ(wrong(huge), "the sizes are those of more numbers than memory can hold");
  const std::array<double, 4> ridges{};
  EXPECT_EQ(wrong([&](Problem& p) { p.options.ridge_diagonal = ridges.data(); }).substr(0, 22),
            "options.ridge_diagonal");
}

TEST(CpuChecks, AChoiceThatHasNoNameIsRefused) {
  const Case c(CaseSpec{.dtype = DType::float32, .batch = 1, .tokens = 5, .heads = 1, .key_dim = 4, .value_dim = 3});
  const auto said = [&](const std::function<void(Problem&, Outputs&)>& spoil) {
    auto results = c.outputs();
    auto problem = c.problem();
    auto outputs = results.pointers();
    spoil(problem, outputs);
    return refusal([&] { cpu::forward(problem, outputs, {}); });
  };
  EXPECT_EQ(said([](auto& p, auto&) { p.options.solver = static_cast<Solver>(99); }),
            "options.solver takes one of " + list_names<Solver>() + ", got number 99");
  EXPECT_EQ(said([](auto& p, auto&) { p.options.part = static_cast<Part>(3); }),
            "options.part takes one of both, solve, memory, got number 3");
  EXPECT_EQ(said([](auto& p, auto&) { p.beta.dtype = static_cast<DType>(7); }),
            "beta.dtype takes one of float64, float32, bfloat16, float16, got number 7");
  EXPECT_EQ(said([](auto&, auto& out) { out.o.dtype = static_cast<DType>(4); }).substr(0, 7), "o.dtype");
}

TEST(CpuChecks, RoomForAPartOfWhatIsSavedAndAnExecutorThatRunsNothingAreRefused) {
  const Case c(CaseSpec{.dtype = DType::float32, .batch = 2, .tokens = 5, .heads = 1, .key_dim = 4, .value_dim = 3});
  auto results = c.outputs();
  auto outputs = results.pointers();
  EXPECT_EQ(refusal([&] { cpu::forward(c.problem(), outputs, {.threads = 2}); }),
            "an executor of several threads takes a function `run`");
  EXPECT_EQ(refusal([&] { cpu::forward(c.problem(), outputs, {}); }), "");
  outputs.saved.norm = nullptr;
  EXPECT_EQ(refusal([&] { cpu::forward(c.problem(), outputs, {}); }),
            "saved takes room for x, norm and h, or for nothing");
}

TEST(CpuChecks, TheReferenceRefusesWhatTheKernelsDo) {
  const Case c(CaseSpec{.dtype = DType::float32, .batch = 2, .tokens = 5, .heads = 1, .key_dim = 4, .value_dim = 3});
  auto results = c.outputs();
  auto problem = c.problem();
  problem.sequences = 0;
  EXPECT_EQ(refusal([&] { reference::forward(problem, results.pointers()); }),
            "sequences takes batch where there is no cu_seqlens");
}

TEST(CpuChecks, TheBlocksSmallOperationsNeedTheirSizesAndArrays) {
  std::array<float, 64> numbers{};
  const View view{.data = numbers.data()};
  ShortConv conv{.batch = 1, .tokens = 2, .channels = 4, .width = 9, .sequences = 1, .x = view, .weight = view};
  const auto said = [&] { return refusal([&] { cpu::short_conv(conv, {.y = view}, {}); }); };
  EXPECT_EQ(said(), "width takes 1 to 8, got 9");
  conv.width = 3;
  conv.l2_norm = L2Norm::divide;
  EXPECT_EQ(said(), "head_dim takes 1 to 256, got 0");
  conv.head_dim = 3;
  EXPECT_EQ(said(), "head_dim takes a divisor of channels");
  conv.head_dim = 2;
  conv.weight = {};
  EXPECT_EQ(said().substr(0, 12), "x and weight");
  EXPECT_EQ(refusal([&] { cpu::short_conv_step({.conv = conv, .y = view}, {}); }).substr(0, 12), "x and weight");
  GatedRmsNorm norm{.batch = 1, .tokens = 1, .heads = 1, .dim = 0, .x = view};
  EXPECT_EQ(refusal([&] { cpu::gated_rms_norm(norm, view, {}); }), "dim takes 1 to 8192, got 0");
  norm.dim = 4;
  EXPECT_EQ(refusal([&] { cpu::gated_rms_norm(norm, {}, {}); }),
            "y takes the address of its first number, and is null");
  EXPECT_EQ(refusal([&] { cpu::gated_rms_norm(norm, view, {}); }), "");
}

TEST(CpuChecks, ABackwardPassNeedsWhatTheForwardPassLeft) {
  const Case c(CaseSpec{.dtype = DType::float32, .batch = 1, .tokens = 5, .heads = 1, .key_dim = 4, .value_dim = 3});
  auto gradients = c.gradients();
  EXPECT_EQ(refusal([&] { cpu::backward(c.problem(), {}, gradients.pointers(), thread_executor(1)); }),
            "saved takes what forward left in its x, norm and h");
}

TEST(CpuChecks, AStepWithoutAStateOrWithTooLargeAHeadIsRefused) {
  std::array<float, 300> numbers{};
  const View view{.data = numbers.data()};
  Step step{.batch = 1, .heads = 1, .key_dim = 300, .value_dim = 2, .q = view, .k = view, .v = view, .o = view};
  const auto said = [&] { return refusal([&] { cpu::step(step, thread_executor(1)); }); };
  EXPECT_EQ(said(), "key_dim takes 1 to 256, got 300");
  step.key_dim = 2;
  EXPECT_EQ(said().substr(0, 10), "o, h and u");
  step.h = step.u = numbers.data();
  const std::int64_t nowhere = -1;
  step.state_indices = &nowhere;
  EXPECT_EQ(said(), "state_indices takes at least 0, got -1");
  step.state_indices = nullptr;
  const std::int32_t endless = 1'000'000;
  step.iterations = &endless;
  EXPECT_EQ(said(), "iterations takes 0 to 10000, got 1000000");
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
