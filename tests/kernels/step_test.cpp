// The one-token step at the sizes that have kernels of their own.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "gka/block_kernels.h"
#include "kernels/backends.h"

namespace gka::kernels::test {
namespace {

struct StepCase {
  CaseSpec spec;
  std::vector<std::int64_t> slots{};       // if any: a pool of eight
  std::vector<std::int32_t> iterations{};  // if any: per sequence
};

CaseSpec spec_of(DType dtype, std::int64_t key_dim, std::int64_t value_dim, std::uint64_t seed) {
  CaseSpec spec{.dtype = dtype,
                .batch = 2,
                .tokens = 1,
                .heads = 2,
                .key_dim = key_dim,
                .value_dim = value_dim,
                .h0 = true,
                .u0 = true,
                .full_rank_h0 = true,
                .seed = seed};
  spec.float32_gates = dtype != DType::float32;
  spec.options.refine = false;  // all iterations, as the reference takes them
  return spec;
}

std::vector<StepCase> step_cases() {
  std::vector<StepCase> cases;
  for (const DType dtype : {DType::bfloat16, DType::float32, DType::float16}) {
    cases.push_back({.spec = spec_of(dtype, 128, 128, 1)});
  }
  cases.push_back({.spec = spec_of(DType::float32, 64, 64, 2), .slots = {5, 2}, .iterations = {7, 70}});
  cases.push_back({.spec = spec_of(DType::bfloat16, 64, 128, 3), .slots = {7, 0}});
  cases.push_back({.spec = spec_of(DType::bfloat16, 128, 64, 4), .iterations = {0, 33}});
  StepCase plain{.spec = spec_of(DType::float32, 128, 128, 5)};
  plain.spec.log_decay = plain.spec.beta = plain.spec.alpha = false;
  plain.spec.layout = Layout::padded;
  cases.push_back(plain);
  StepCase forgets{.spec = spec_of(DType::float32, 64, 64, 6)};
  forgets.spec.forget = 0.5;
  forgets.spec.skip = 0.5;
  forgets.spec.options = {.scale = 0.3, .ridge = 0.1, .decay_keys = false};
  cases.push_back(forgets);
  return cases;
}

struct Stepped {
  Array o, h, u, certainty;
  std::vector<NamedArray> named() const { return {{"o", &o}, {"h", &h}, {"u", &u}, {"certainty", &certainty}}; }
};

void clear(Stepped& stepped) {
  for (Array* state : {&stepped.h, &stepped.u})
    std::memset(state->data(), 0, static_cast<std::size_t>(state->size()) * 4);
}

/// The token of a case as a step; `change` may do something to the state before.
template <typename Run, typename Change>
Stepped run_step(const StepCase& c, const Case& inputs, Run&& run, Change&& change) {
  const std::int64_t pool = c.slots.empty() ? c.spec.batch : 8;
  Stepped result{.o = inputs.outputs().o,
                 .h = Array(DType::float32, {pool, c.spec.heads, c.spec.key_dim, c.spec.key_dim}),
                 .u = Array(DType::float32, {pool, c.spec.heads, c.spec.key_dim, c.spec.value_dim}),
                 .certainty = Array(DType::float64, {c.spec.batch, 1, c.spec.heads, 1})};
  clear(result);
  for (std::int64_t b = 0; b < c.spec.batch; ++b) {
    const std::int64_t slot = c.slots.empty() ? b : c.slots[static_cast<std::size_t>(b)];
    copy_slice(inputs.h0, 0, b, 1, result.h, slot);
    copy_slice(inputs.u0, 0, b, 1, result.u, slot);
  }
  change(result);
  Step step = step_at(inputs.problem(), 0, result.o.view(), result.h.data(), result.u.data());
  if (!c.slots.empty()) step.state_indices = c.slots.data();
  if (!c.iterations.empty()) step.iterations = c.iterations.data();
  step.certainty = static_cast<double*>(result.certainty.data());
  run(step);
  return result;
}

using enum StepShape;
constexpr int kOne = 1, kTwo = 2, kMany = 16;  // multiprocessors: for four heads a crowd's, a few's, a lone one's

void with_few_heads(const Step& step) { ASSERT_EQ(CudaWithThreads::step(step, kTwo), few); }
void with_a_crowd(const Step& step) { ASSERT_EQ(CudaWithThreads::step(step, kOne), crowd); }
void with_a_lone_head(const Step& step) { ASSERT_EQ(CudaWithThreads::step(step, kMany), lone); }

class Steps : public OnEveryBackend {};

constexpr Backend in_registers(const char* name, void (*step)(const Step&)) {
  return {.name = name,
          .forward = nullptr,
          .backward = nullptr,
          .step = step,
          .short_conv = nullptr,
          .short_conv_backward = nullptr,
          .short_conv_step = nullptr,
          .gated_rms_norm = nullptr,
          .gated_rms_norm_backward = nullptr};
}
constexpr Backend kInRegisters[] = {in_registers("few_heads", with_few_heads), in_registers("crowd", with_a_crowd),
                                    in_registers("lone", with_a_lone_head)};

TEST_P(Steps, MatchTheReferenceAtTheSizesOfDecoding) {
  for (const StepCase& c : step_cases()) {
    const Case inputs(c.spec);
    const auto nothing = [](Stepped&) {};
    const Stepped want = run_step(c, inputs, reference::step, nothing);
    const Stepped got = run_step(c, inputs, GetParam().step, nothing);
    const double rounding = c.spec.dtype == DType::float32 ? 2e-5 : c.spec.dtype == DType::float16 ? 5e-4 : 2e-3;
    expect_close(got.o, want.o, rounding, "o of " + inputs.describe());
    expect_close(got.h, want.h, 1e-6, "h of " + inputs.describe());
    expect_close(got.u, want.u, 1e-6, "u of " + inputs.describe());
    expect_close(got.certainty, want.certainty, 2e-5, "certainty of " + inputs.describe());
  }
}

/// A solve does not see scale, whether or not squares of float32 do.
TEST_P(Steps, AnswerFromFadedAndFromEnormousMemories) {
  const StepCase c{.spec = spec_of(DType::float32, 128, 128, 8)};
  Case inputs(c.spec);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t head = 0; head < 2; ++head) inputs.beta.set(b, 0, head, 0, 0);
  }
  for (const float scale : {1e-25f, 1e20f}) {
    const auto fade = [&](Stepped& s) {
      for (Array* state : {&s.h, &s.u}) {
        auto* numbers = static_cast<float*>(state->data());
        for (std::int64_t i = 0; i < state->size(); ++i) numbers[i] *= scale;
      }
    };
    expect_close(run_step(c, inputs, GetParam().step, fade).o, run_step(c, inputs, reference::step, fade).o, 5e-5, "o");
  }
}

TEST_P(Steps, AnEmptyMemoryAnswersFromTheTokenAloneAndANaNStaysInItsHead) {
  const StepCase c{.spec = spec_of(DType::float32, 64, 128, 9)};
  const Case inputs(c.spec);
  const auto spoil = [](Stepped& s) { s.h.set(0, 1, 3, 4, std::numeric_limits<double>::quiet_NaN()); };
  expect_close(run_step(c, inputs, GetParam().step, clear).o, run_step(c, inputs, reference::step, clear).o, 2e-4, "o");
  const Stepped clean = run_step(c, inputs, GetParam().step, [](Stepped&) {});
  const Stepped spoilt = run_step(c, inputs, GetParam().step, spoil);
  for (std::int64_t j = 0; j < 128; ++j) {
    EXPECT_TRUE(std::isnan(spoilt.o.at(0, 0, 1, j)));
    EXPECT_EQ(spoilt.o.at(0, 0, 0, j), clean.o.at(0, 0, 0, j));
    EXPECT_EQ(spoilt.o.at(1, 0, 1, j), clean.o.at(1, 0, 1, j));
  }
}

/// The same bits on both sides of the diagonal, so that who reads one half knows the other.
TEST_P(Steps, KeepHSymmetric) {
  for (const std::int64_t dim : {64, 128}) {
    const StepCase c{.spec = spec_of(DType::float32, dim, 64, 11)};
    const Case inputs(c.spec);
    const Array h = run_step(c, inputs, GetParam().step, [](Stepped&) {}).h;
    std::int64_t different = 0;
    for (std::int64_t head = 0; head < c.spec.heads; ++head)
      for (std::int64_t i = 0; i < dim; ++i)
        for (std::int64_t j = 0; j < i; ++j) different += h.at(1, head, i, j) != h.at(1, head, j, i);
    EXPECT_EQ(different, 0);
  }
}

TEST(StepInRegisters, TakesTheKernelThatSuitsTheHeadsOfAMultiprocessor) {
  const StepCase c{.spec = spec_of(DType::float32, 64, 64, 10)};  // four heads
  const Case inputs(c.spec);
  const auto shape_on = [&](int multiprocessors) {
    StepShape shape{};
    const auto run = [&](const Step& s) { shape = CudaWithThreads::step(s, multiprocessors); };
    run_step(c, inputs, run, [](Stepped&) {});
    return shape;
  };
  EXPECT_EQ(shape_on(1), crowd);
  EXPECT_EQ(shape_on(2), few);
  EXPECT_EQ(shape_on(4), lone);
}

TEST_P(Steps, SpendABudgetOfIterationsWithinTheBoundsOfWholeSequences) {
  for (StepCase c : step_cases()) {
    c.spec.options.refine = true;
    const Case inputs(c.spec);
    const auto nothing = [](Stepped&) {};
    const Stepped want = run_step(c, inputs, reference::step, nothing);
    const Stepped got = run_step(c, inputs, GetParam().step, nothing);
    expect_close(got.o, want.o, 5e-3, "o of " + inputs.describe());
    expect_close(got.certainty, want.certainty, 3e-3, "certainty of " + inputs.describe());
  }
}

/// A memory of `keys` unit keys, and what 22, or fewer, steps leave of a solve.
StepCase early_case(DType dtype, std::int64_t dim) { return {.spec = spec_of(dtype, dim, 64, 12)}; }

/// By how much o of a memory of so many keys is off the exact solve's.
double early_error(DType dtype, std::int64_t dim, int keys, Options options) {
  StepCase c = early_case(dtype, dim);
  c.spec.options = options;
  const Case inputs(c.spec);
  const auto write = [&](Stepped& s) {
    clear(s);
    std::mt19937 random(13);
    std::normal_distribution<double> normal;
    for (int n = 0; n < keys; ++n) {
      std::vector<double> key(static_cast<std::size_t>(dim)), value(64);
      double square = 0;
      for (double& x : key) square += (x = normal(random), x * x);
      for (double& x : key) x /= std::sqrt(square);
      for (double& x : value) x = normal(random);
      for (std::int64_t i = 0; i < dim; ++i) {
        const double ki = key[static_cast<std::size_t>(i)];
        for (std::int64_t j = 0; j < dim; ++j) {
          s.h.set(0, 0, i, j, s.h.at(0, 0, i, j) + ki * key[static_cast<std::size_t>(j)]);
        }
        for (std::int64_t j = 0; j < 64; ++j) {
          s.u.set(0, 0, i, j, s.u.at(0, 0, i, j) + ki * value[static_cast<std::size_t>(j)]);
        }
      }
    }
    for (std::int64_t i = 0; i < dim; ++i)
      for (std::int64_t j = 0; j < i; ++j) s.h.set(0, 0, i, j, s.h.at(0, 0, j, i));
  };
  StepCase exact = c;
  exact.spec.options.iterations = 400;
  const Stepped want = run_step(exact, inputs, reference::step, write);
  const Stepped got = run_step(c, inputs, [](const Step& step) { CudaWithThreads::step(step, kTwo); }, write);
  double error = 0, size = 0;
  for (std::int64_t j = 0; j < 64; ++j) {
    const double apart = got.o.at(0, 0, 0, j) - want.o.at(0, 0, 0, j);
    error += apart * apart;
    size += want.o.at(0, 0, 0, j) * want.o.at(0, 0, 0, j);
  }
  return std::sqrt(error / size);
}

/// Whatever H is made of: one key, a few, as many as there are dimensions, many more.
TEST(StepInRegisters, EarlyStepsAreEnoughForWhateverIsRemembered) {
  for (const std::int64_t dim : {64, 128}) {
    for (const int keys : {0, 3, 20, 3000}) {
      for (const double ridge : {0.01, 0.05}) {
        const Options options{.ridge = ridge, .iterations = 60};
        EXPECT_LT(early_error(DType::bfloat16, dim, keys, options), 5e-3) << dim << " " << keys;
      }
    }
  }
}

/// All iterations: of float32, where they are asked for, where there are few, and where the ridge is next to nothing.
TEST(StepInRegisters, EarlyStepsAreTakenOnlyOfABudgetThatMayBeLeft) {
  const auto same = [](DType dtype, const Options& options) {
    Options all = options;
    all.refine = false;
    return early_error(dtype, 64, 3000, options) == early_error(dtype, 64, 3000, all);
  };
  EXPECT_FALSE(same(DType::bfloat16, {.iterations = 30}));
  EXPECT_TRUE(same(DType::float32, {.iterations = 30}));
  EXPECT_TRUE(same(DType::bfloat16, {.iterations = 19}));
  EXPECT_TRUE(same(DType::bfloat16, {.ridge = 1e-20, .iterations = 30}));
}

/// All that a block does with a token between its projections, for two sequences in a pool of eight.
struct BlockCase {
  static constexpr std::int64_t kBatch = 2, kHeads = 4, kPool = 8, kWidth = 4;

  DType dtype;
  std::int64_t key_dim, value_dim;
  std::array<std::int64_t, 3> own_heads;  // of q, k and v
  Array x[3], taps[3], kept[3], projected, gate, weight, h, u, y, certainty;
  std::vector<float> bias = {0.3f, -0.4f, 0.1f, 0}, a_log = {0.2f, -1.0f, 0, -0.5f};
  std::vector<std::int64_t> slots = {6, 1};

  BlockCase(DType type, std::int64_t d, std::int64_t v, std::array<std::int64_t, 3> heads = {kHeads, kHeads, kHeads})
      : dtype(type), key_dim(d), value_dim(v), own_heads(heads) {
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    const auto fill = [&](DType of, std::array<std::int64_t, 4> shape, double by) {
      Array array(of, shape);
      for (std::int64_t i = 0; i < shape[0]; ++i)
        for (std::int64_t j = 0; j < shape[1]; ++j)
          for (std::int64_t k = 0; k < shape[2]; ++k)
            for (std::int64_t l = 0; l < shape[3]; ++l) array.set(i, j, k, l, by * normal(random));
      return array;
    };
    for (int i = 0; i < 3; ++i) {
      const std::int64_t channels = channels_of(i);
      x[i] = fill(dtype, {kBatch, 1, 1, channels}, 1);
      taps[i] = fill(DType::float32, {1, 1, channels, kWidth}, 0.5);
      kept[i] = fill(dtype, {kPool, 1, channels, kWidth - 1}, 1);
    }
    projected = fill(dtype, {kBatch, 1, 1, 3 * kHeads}, 1);
    gate = fill(dtype, {kBatch, 1, kHeads, value_dim}, 1);
    weight = fill(DType::float32, {1, 1, 1, value_dim}, 1);
    h = Array(DType::float32, {kPool, kHeads, key_dim, key_dim});
    u = fill(DType::float32, {kPool, kHeads, key_dim, value_dim}, 1);
    for (std::int64_t slot = 0; slot < kPool; ++slot)
      for (std::int64_t head = 0; head < kHeads; ++head)
        for (std::int64_t i = 0; i < key_dim; ++i)
          for (std::int64_t j = 0; j <= i; ++j) {
            const double value = (i == j ? 3 : 0) + 0.1 * normal(random);
            h.set(slot, head, i, j, value);
            h.set(slot, head, j, i, value);
          }
    y = Array(dtype, {kBatch, 1, kHeads, value_dim});
    certainty = Array(DType::float64, {kBatch, 1, kHeads, 1});
  }

  std::int64_t dim(int i) const { return i < 2 ? key_dim : value_dim; }
  std::int64_t channels_of(int i) const { return own_heads[static_cast<std::size_t>(i)] * dim(i); }
  Step step() {
    return {.batch = kBatch,
            .heads = kHeads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .h = h.data(),
            .u = u.data(),
            .state_indices = slots.data(),
            .certainty = static_cast<double*>(certainty.data())};
  }
  ShortConvStep conv(int i) {
    return {.conv = {.batch = kBatch,
                     .tokens = 1,
                     .channels = channels_of(i),
                     .width = kWidth,
                     .sequences = kBatch,
                     .x = x[i].view(),
                     .weight = taps[i].view(),
                     .l2_norm = i < 2 ? L2Norm::divide : L2Norm::none,
                     .head_dim = dim(i)},
            .y = {},
            .state = kept[i].view(),
            .state_indices = slots.data()};
  }
  GatedRmsNorm norm() {
    return {
        .batch = kBatch, .tokens = 1, .heads = kHeads, .dim = value_dim, .gate = gate.view(), .weight = weight.view()};
  }

  /// One part after the other.
  void run_parts() {
    Array heads[3], log_decay(DType::float32, {kBatch, 1, kHeads, 1}), beta = log_decay, alpha = log_decay, o = y;
    for (int i = 0; i < 3; ++i) {
      const std::int64_t own = own_heads[static_cast<std::size_t>(i)];
      Array convolved(dtype, {kBatch, 1, own, dim(i)});
      ShortConvStep one = conv(i);
      one.y = convolved.view();
      reference::short_conv_step(one);
      heads[i] = Array(dtype, {kBatch, 1, kHeads, dim(i)});
      for (std::int64_t b = 0; b < kBatch; ++b)
        for (std::int64_t head = 0; head < kHeads; ++head)
          for (std::int64_t j = 0; j < dim(i); ++j)
            heads[i].set(b, 0, head, j, convolved.at(b, 0, head / (kHeads / own), j));
    }
    for (std::int64_t b = 0; b < kBatch; ++b)
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const auto at = static_cast<std::size_t>(head);
        const auto z = [&](std::int64_t kind) { return projected.at(b, 0, 0, kind * kHeads + head) + bias[at]; };
        const auto sigmoid = [](double of) { return 1 / (1 + std::exp(-of)); };
        beta.set(b, 0, head, 0, sigmoid(z(0)));
        log_decay.set(b, 0, head, 0, -std::exp(a_log[at]) * std::log1p(std::exp(z(1))));
        alpha.set(b, 0, head, 0, sigmoid(z(2)));
      }
    Step all = step();
    all.q = heads[0].view();
    all.k = heads[1].view();
    all.v = heads[2].view();
    all.log_decay = log_decay.view();
    all.beta = beta.view();
    all.alpha = alpha.view();
    all.o = o.view();
    reference::step(all);
    GatedRmsNorm last = norm();
    last.x = o.view();
    reference::gated_rms_norm(last, y.view());
  }

  StepShape run_at_once(int multiprocessors = 1) {
    const Step all = step();
    const ShortConvStep convs[] = {conv(0), conv(1), conv(2)};
    const GatedRmsNorm last = norm();
    const BlockStep block{.step = all,
                          .convs = convs,
                          .projected = projected.view(),
                          .bias = bias.data(),
                          .a_log = a_log.data(),
                          .norm = last,
                          .y = y.view()};
    return CudaWithThreads::step_block(block, multiprocessors);
  }
};

void expect_as_parts(const BlockCase& c, StepShape shape, int multiprocessors = 1) {
  BlockCase want = c, got = c;
  want.run_parts();
  ASSERT_EQ(got.run_at_once(multiprocessors), shape);
  const double rounding = c.dtype == DType::float32 ? 2e-5 : c.dtype == DType::float16 ? 2e-3 : 1e-2;
  const double memory = c.dtype == DType::float32 ? 2e-6 : 1e-3;
  expect_close(got.y, want.y, rounding, "y");
  expect_close(got.h, want.h, memory, "h");
  expect_close(got.u, want.u, memory, "u");
  expect_close(got.certainty, want.certainty, 1e-3, "certainty");
  for (int i = 0; i < 3; ++i) expect_close(got.kept[i], want.kept[i], 0, "a convolution's state");
}

TEST(StepOfABlock, IsConvolutionsGatesMemoryAndNormOneAfterTheOther) {
  const BlockCase cases[] = {{DType::float32, 128, 128},
                             {DType::bfloat16, 128, 128},
                             {DType::bfloat16, 64, 64},
                             {DType::float16, 64, 128},
                             {DType::float32, 128, 64}};
  for (const BlockCase& c : cases) {
    expect_as_parts(c, few);
    {
      const Forced trial("GKA_TRIAL", "crowd_step");
      expect_as_parts(c, crowd);
    }
    expect_as_parts(c, lone, kMany);
  }
}

TEST(StepOfABlock, TakesHeadsThatShareAKey) {
  const BlockCase cases[] = {{DType::float32, 128, 128, {4, 2, 2}},
                             {DType::bfloat16, 128, 128, {4, 1, 1}},
                             {DType::bfloat16, 64, 64, {2, 2, 4}},
                             {DType::float16, 64, 128, {4, 2, 1}},
                             {DType::float32, 128, 64, {4, 4, 2}}};
  for (const BlockCase& c : cases) {
    expect_as_parts(c, few);
    {
      const Forced trial("GKA_TRIAL", "crowd_step");
      expect_as_parts(c, crowd);
    }
    expect_as_parts(c, lone, kMany);
  }
}

INSTANTIATE_TEST_SUITE_P(, Steps, fast_backends_without_tensor_cores(), backend_name);
INSTANTIATE_TEST_SUITE_P(Registers, Steps, testing::ValuesIn(kInRegisters), backend_name);

}  // namespace
}  // namespace gka::kernels::test
