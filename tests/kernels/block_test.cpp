// The short convolution and the gated RMS norm: every backend against the
// float64 reference over random calls, and what holds whatever the numbers are.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <sstream>

#include "kernels/backends.h"

namespace gka::kernels::test {
namespace {

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::float64: return 1e-13;
    case DType::float32: return 3e-6;
    case DType::float16: return 1e-3;
    case DType::bfloat16: return 6e-3;
  }
  return 0;
}

constexpr DType kTypes[] = {DType::float64, DType::float32, DType::bfloat16, DType::float16};
constexpr Layout kLayouts[] = {Layout::contiguous, Layout::padded, Layout::heads_first};

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}

  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance() { return between(0, 1) == 1; }
  template <typename Options>
  auto one_of(const Options& options) {
    return options[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(std::size(options)) - 1))];
  }
  /// About N(0, 1).
  double number() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(engine_() >> 11) * 0x1p-53;
    return sum;
  }
  void fill(Array& array, double scale = 1, double shift = 0) {
    const auto& s = array.shape();
    for (std::int64_t i = 0; i < s[0]; ++i)
      for (std::int64_t j = 0; j < s[1]; ++j)
        for (std::int64_t k = 0; k < s[2]; ++k)
          for (std::int64_t l = 0; l < s[3]; ++l) array.set(i, j, k, l, shift + scale * number());
  }

 private:
  std::mt19937_64 engine_;
};

// ---- Short convolution
// ------------------------------------------------------------------------------------------

struct ConvSpec {
  DType dtype = DType::float32;
  DType parameters = DType::float32;  // weight, bias and states
  std::int64_t batch = 2, tokens = 9, heads = 2, head_dim = 8, width = 4;
  std::vector<std::int64_t> lengths{};  // packed, if any: they set batch and tokens
  bool bias = true, state = true;
  Activation activation = Activation::silu;
  L2Norm l2_norm = L2Norm::none;
  Layout layout = Layout::contiguous;
  std::uint64_t seed = 1;
};

std::string describe(const ConvSpec& s) {
  std::ostringstream text;
  text << "short_conv: dtype " << int(s.dtype) << ", parameters " << int(s.parameters) << ", [" << s.batch << ", "
       << s.tokens << ", " << s.heads << "·" << s.head_dim << "], width " << s.width << ", bias " << s.bias
       << ", state " << s.state << ", " << name_of(s.activation) << ", " << name_of(s.l2_norm) << ", layout "
       << int(s.layout) << ", seed " << s.seed << ", lengths";
  for (const auto length : s.lengths) text << " " << length;
  return text.str();
}

ConvSpec random_conv(std::uint64_t seed) {
  Draw draw(seed);
  ConvSpec s{.dtype = draw.one_of(kTypes), .seed = seed};
  s.parameters = draw.chance() ? s.dtype : s.dtype == DType::float64 ? DType::float64 : DType::float32;
  s.batch = draw.between(1, 3);
  s.tokens = draw.between(0, 8) == 0 ? draw.between(200, 600) : draw.between(0, 40);
  constexpr std::int64_t kDims[] = {1, 3, 8, 20, 32, 64, 100, 128, 130, 256};
  s.head_dim = draw.one_of(kDims);
  s.heads = draw.between(1, s.tokens > 100 ? 2 : 4);
  s.width = draw.chance() ? 4 : draw.between(1, kMaxConvWidth);
  if (draw.chance()) {
    s.batch = 1;
    s.tokens = 0;
    for (std::int64_t n = draw.between(0, 6); n > 0; --n) s.lengths.push_back(draw.between(0, draw.chance() ? 3 : 60));
    for (const auto length : s.lengths) s.tokens += length;
    if (s.lengths.empty()) s.lengths = {0};
  }
  s.bias = draw.chance();
  s.state = draw.chance();
  s.activation = draw.chance() ? Activation::silu : Activation::none;
  constexpr L2Norm kNorms[] = {L2Norm::none, L2Norm::divide, L2Norm::rsqrt};
  if (s.head_dim > 1) s.l2_norm = draw.one_of(kNorms);  // a single number's direction has no gradient but rounding
  s.layout = draw.one_of(kLayouts);
  return s;
}

/// A call with its arrays. Weights are [C, 1, 1, W], states [N, C, 1, W − 1].
struct ConvCase {
  ConvSpec spec;
  std::vector<std::int64_t> cu_seqlens;
  std::int64_t sequences, channels;
  Array x, weight, bias, initial, d_y, d_final;

  explicit ConvCase(ConvSpec s) : spec(std::move(s)), sequences(spec.batch), channels(spec.heads * spec.head_dim) {
    if (!spec.lengths.empty()) {
      cu_seqlens = {0};
      for (const auto length : spec.lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
      sequences = static_cast<std::int64_t>(spec.lengths.size());
    }
    Draw draw(spec.seed + 1000);
    x = by_token(spec.dtype);
    d_y = by_token(spec.dtype);
    weight = Array(spec.parameters, {channels, 1, 1, spec.width});
    if (spec.bias) bias = Array(spec.parameters, {1, 1, 1, channels});
    if (spec.state) {
      initial = state();
      d_final = state();
    }
    for (auto* array : {&x, &d_y, &initial, &d_final}) draw.fill(*array);
    draw.fill(weight, 0.5);
    draw.fill(bias, 0.3);
  }

  Array by_token(DType dtype) const { return {dtype, {spec.batch, spec.tokens, 1, channels}, spec.layout}; }
  Array state() const { return {spec.parameters, {sequences, channels, 1, spec.width - 1}}; }

  ShortConv conv() const {
    return {.batch = spec.batch,
            .tokens = spec.tokens,
            .channels = channels,
            .width = spec.width,
            .sequences = sequences,
            .cu_seqlens = cu_seqlens.empty() ? nullptr : cu_seqlens.data(),
            .x = x.view(),
            .weight = weight.view(),
            .bias = bias.view(),
            .initial_state = initial.view(),
            .activation = spec.activation,
            .l2_norm = spec.l2_norm,
            .head_dim = spec.head_dim,
            .eps = 1e-6};
  }
};

struct ConvResults {
  Array y, final_state, d_x, d_weight, d_bias, d_initial;

  explicit ConvResults(const ConvCase& c)
      : y(c.by_token(c.spec.dtype)),
        final_state(c.state()),
        d_x(c.by_token(c.spec.dtype)),
        d_weight(c.spec.parameters, {c.channels, 1, 1, c.spec.width}),
        d_bias(c.spec.parameters, {1, 1, 1, c.channels}),
        d_initial(c.state()) {}

  ShortConvOutputs outputs() const { return {.y = y.view(), .final_state = final_state.view()}; }
  /// As a layer in training asks: nothing but x and the weight.
  ShortConvGradients plain_gradients(const ConvCase& c) const {
    return {.d_y = c.d_y.view(), .d_x = d_x.view(), .d_weight = d_weight.view()};
  }
  ShortConvGradients gradients(const ConvCase& c) const {
    return {.d_y = c.d_y.view(),
            .d_final_state = c.d_final.view(),
            .d_x = d_x.view(),
            .d_weight = d_weight.view(),
            .d_bias = d_bias.view(),
            .d_initial_state = d_initial.view()};
  }
  std::vector<NamedArray> named() const {
    return {{"y", &y},           {"final_state", &final_state},  {"d_x", &d_x}, {"d_weight", &d_weight},
            {"d_bias", &d_bias}, {"d_initial_state", &d_initial}};
  }
};

class ShortConvolution : public OnEveryBackend {
 protected:
  ConvResults run(const ConvCase& c) const {
    ConvResults results(c);
    GetParam().short_conv(c.conv(), results.outputs());
    GetParam().short_conv_backward(c.conv(), results.gradients(c));
    return results;
  }
};

TEST_P(ShortConvolution, MatchesTheReferenceForwardAndBackward) {
  for (std::uint64_t seed = 1; seed <= case_count() / 2; ++seed) {
    const ConvCase c(random_conv(seed));
    const ConvResults want(c), got = run(c);
    reference::short_conv(c.conv(), want.outputs());
    reference::short_conv_backward(c.conv(), want.gradients(c));
    expect_close(got, want, tolerance(c.spec.dtype), describe(c.spec));
    if (testing::Test::HasFailure()) return;
  }
}

TEST_P(ShortConvolution, MatchesTheReferenceWithoutStatesAndBias) {
  for (const auto dtype : {DType::float32, DType::bfloat16}) {
    for (const auto norm : {L2Norm::none, L2Norm::divide, L2Norm::rsqrt}) {
      for (const std::int64_t head_dim : {4, 32, 128}) {
        const ConvCase c({.dtype = dtype,
                          .tokens = 150,
                          .heads = 3,
                          .head_dim = head_dim,
                          .bias = false,
                          .state = false,
                          .l2_norm = norm});
        const ConvResults want(c), got(c);
        GetParam().short_conv(c.conv(), {.y = got.y.view()});
        GetParam().short_conv_backward(c.conv(), got.plain_gradients(c));
        reference::short_conv(c.conv(), {.y = want.y.view()});
        reference::short_conv_backward(c.conv(), want.plain_gradients(c));
        for (const auto result : {&ConvResults::y, &ConvResults::d_x, &ConvResults::d_weight}) {
          expect_close(got.*result, want.*result, tolerance(dtype), describe(c.spec));
        }
      }
    }
  }
}

TEST_P(ShortConvolution, StepsAfterAPrefixGiveTheRestOfTheSequence) {
  std::vector<ConvSpec> specs;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) specs.push_back(random_conv(seed));
  for (const auto dtype : {DType::float32, DType::bfloat16}) {  // what decoding has
    for (const auto norm : {L2Norm::none, L2Norm::divide, L2Norm::rsqrt}) {
      for (const std::int64_t head_dim : {4, 64, 128}) {
        specs.push_back({.dtype = dtype, .parameters = dtype, .head_dim = head_dim, .bias = false, .l2_norm = norm});
      }
    }
  }
  for (ConvSpec spec : specs) {
    spec.lengths.clear();
    spec.batch = 3;
    spec.tokens = 6;
    const ConvCase c(spec);
    const ConvResults want = run(c);
    ConvCase pool(spec);
    pool.initial = Array(spec.parameters, {5, c.channels, 1, spec.width - 1});
    const std::vector<std::int64_t> slots = {4, 0, 2};
    for (std::int64_t b = 0; b < 3; ++b) {
      for (std::int64_t i = 0; i < c.channels * (spec.width - 1); ++i) {
        const std::int64_t ch = i / (spec.width - 1), j = i % (spec.width - 1);
        pool.initial.set(slots[static_cast<std::size_t>(b)], ch, 0, j, spec.state ? c.initial.at(b, ch, 0, j) : 0);
      }
    }
    const ConvResults got(c);
    const auto token = [](View view, std::int64_t t, DType dtype) {
      const std::int64_t bytes = bytes_of(dtype);
      view.data = static_cast<char*>(view.data) + t * view.token_stride * bytes;
      return view;
    };
    for (std::int64_t t = 0; t < spec.tokens; ++t) {
      ShortConvStep step{.conv = c.conv(),
                         .y = token(got.y.view(), t, spec.dtype),
                         .state = pool.initial.view(),
                         .state_indices = slots.data()};
      step.conv.x = token(c.x.view(), t, spec.dtype);
      step.conv.initial_state = {};
      GetParam().short_conv_step(step);
    }
    expect_close(got.y, want.y, tolerance(spec.dtype), describe(spec));
    for (std::int64_t b = 0; b < 3; ++b) {
      for (std::int64_t ch = 0; ch < c.channels; ++ch) {
        for (std::int64_t j = 0; j < spec.width - 1; ++j) {
          ASSERT_EQ(pool.initial.at(slots[static_cast<std::size_t>(b)], ch, 0, j), want.final_state.at(b, ch, 0, j))
              << describe(spec);
        }
      }
    }
  }
}

TEST_P(ShortConvolution, ANaNStaysInItsSequence) {
  for (const auto norm : {L2Norm::none, L2Norm::divide}) {
    const ConvSpec spec{.head_dim = 16, .lengths = {5, 3, 7}, .l2_norm = norm};
    ConvSpec sized = spec;
    sized.batch = 1;
    sized.tokens = 15;
    ConvCase c(sized);
    const ConvResults clean = run(c);
    c.x.set(0, 6, 0, 3, std::numeric_limits<double>::quiet_NaN());
    const ConvResults got = run(c);
    for (std::int64_t t = 0; t < 15; ++t) {
      const bool inside = t >= 5 && t < 8;
      for (std::int64_t ch = 0; ch < c.channels && !inside; ++ch) {
        ASSERT_EQ(got.y.at(0, t, 0, ch), clean.y.at(0, t, 0, ch)) << t;
        ASSERT_EQ(got.d_x.at(0, t, 0, ch), clean.d_x.at(0, t, 0, ch)) << t;
      }
    }
    EXPECT_TRUE(std::isnan(got.y.at(0, 6, 0, 3)));
    EXPECT_EQ(got.y.at(0, 5, 0, 3), clean.y.at(0, 5, 0, 3));
  }
}

TEST_P(ShortConvolution, AZeroHeadStaysZeroAndHasAFiniteGradient) {
  for (const auto norm : {L2Norm::divide, L2Norm::rsqrt}) {
    ConvCase c({.bias = false, .state = false, .l2_norm = norm});
    for (std::int64_t i = 0; i < c.x.size(); ++i) {
      c.x.set(i / (9 * c.channels), i / c.channels % 9, 0, i % c.channels, 0);
    }
    const ConvResults got = run(c);
    for (const double y : got.y.values()) ASSERT_EQ(y, 0);
    for (const double d : got.d_x.values()) ASSERT_TRUE(std::isfinite(d));
  }
}

INSTANTIATE_TEST_SUITE_P(, ShortConvolution, fast_backends_without_tensor_cores(), backend_name);

TEST(ShortConvolutionOnCpu, GivesTheSameBitsOnAnyNumberOfThreads) {
  const ConvCase c({.dtype = DType::bfloat16, .batch = 2, .tokens = 1000, .heads = 3, .head_dim = 128});
  const ConvResults one(c), three(c);
  for (const auto& [results, threads] : {std::pair(&one, 1), std::pair(&three, 3)}) {
    cpu::short_conv(c.conv(), results->outputs(), thread_executor(threads));
    cpu::short_conv_backward(c.conv(), results->gradients(c), thread_executor(threads));
  }
  for (std::size_t i = 0; i < one.named().size(); ++i) {
    EXPECT_EQ(one.named()[i].array->values(), three.named()[i].array->values()) << one.named()[i].name;
  }
}

// ---- Gated RMS norm
// ---------------------------------------------------------------------------------------------

struct NormSpec {
  DType dtype = DType::float32;
  DType parameters = DType::float32;  // gate and weight
  std::int64_t batch = 2, tokens = 5, heads = 3, dim = 16;
  bool gate = true, weight = true;
  std::int64_t beside = 0;  // heads behind the gate's of each token, that are no part of it
  Activation activation = Activation::silu;
  Layout layout = Layout::contiguous;
  std::uint64_t seed = 1;
};

std::string describe(const NormSpec& s) {
  std::ostringstream text;
  text << "gated_rms_norm: dtype " << int(s.dtype) << ", parameters " << int(s.parameters) << ", [" << s.batch << ", "
       << s.tokens << ", " << s.heads << ", " << s.dim << "], gate " << s.gate << ", beside it " << s.beside
       << ", weight " << s.weight << ", " << name_of(s.activation) << ", layout " << int(s.layout) << ", seed "
       << s.seed;
  return text.str();
}

NormSpec random_norm(std::uint64_t seed) {
  Draw draw(seed);
  NormSpec s{.dtype = draw.one_of(kTypes), .seed = seed};
  s.parameters = draw.chance() ? s.dtype : s.dtype == DType::float64 ? DType::float64 : DType::float32;
  constexpr std::int64_t kDims[] = {1, 4, 7, 16, 64, 100, 128, 130, 256, 500, 513, 1000, 2048};
  s.batch = draw.between(0, 3);
  s.tokens = draw.between(1, 30);
  s.heads = draw.between(1, 4);
  s.dim = draw.one_of(kDims);
  s.gate = draw.chance();
  s.weight = draw.chance();
  constexpr Activation kActivations[] = {Activation::none, Activation::silu, Activation::sigmoid};
  s.activation = draw.one_of(kActivations);
  s.layout = draw.one_of(kLayouts);
  s.beside = draw.between(0, 2);
  return s;
}

struct NormCase {
  NormSpec spec;
  Array x, gate, weight, d_y;

  explicit NormCase(const NormSpec& s) : spec(s) {
    Draw draw(spec.seed + 1000);
    x = rows(spec.dtype);
    d_y = rows(spec.dtype);
    if (spec.gate) gate = gates();
    if (spec.weight) weight = Array(spec.parameters, {1, 1, 1, spec.dim});
    for (auto* array : {&x, &gate, &d_y}) draw.fill(*array);
    draw.fill(weight, 0.2, 1);
  }
  Array rows(DType dtype) const { return {dtype, {spec.batch, spec.tokens, spec.heads, spec.dim}, spec.layout}; }
  Array gates() const {
    return {spec.parameters, {spec.batch, spec.tokens, spec.heads + spec.beside, spec.dim}, spec.layout};
  }
  GatedRmsNorm norm() const {
    return {.batch = spec.batch,
            .tokens = spec.tokens,
            .heads = spec.heads,
            .dim = spec.dim,
            .x = x.view(),
            .gate = gate.view(),
            .weight = weight.view(),
            .activation = spec.activation,
            .eps = 1e-5};
  }
};

struct NormResults {
  Array y, d_x, d_gate, d_weight;

  explicit NormResults(const NormCase& c) : y(c.rows(c.spec.dtype)), d_x(c.rows(c.spec.dtype)) {
    if (c.spec.gate) Draw(1).fill(d_gate = c.gates(), 0, 7);  // what lies beside it stays
    if (c.spec.weight) d_weight = Array(c.spec.parameters, {1, 1, 1, c.spec.dim});
  }
  GatedRmsNormGradients gradients(const NormCase& c) const {
    return {.d_y = c.d_y.view(), .d_x = d_x.view(), .d_gate = d_gate.view(), .d_weight = d_weight.view()};
  }
  std::vector<NamedArray> named() const {
    return {{"y", &y}, {"d_x", &d_x}, {"d_gate", &d_gate}, {"d_weight", &d_weight}};
  }
};

class RmsNorm : public OnEveryBackend {
 protected:
  NormResults run(const NormCase& c) const {
    NormResults results(c);
    GetParam().gated_rms_norm(c.norm(), results.y.view());
    GetParam().gated_rms_norm_backward(c.norm(), results.gradients(c));
    return results;
  }
};

TEST_P(RmsNorm, MatchesTheReferenceForwardAndBackward) {
  for (std::uint64_t seed = 1; seed <= case_count() / 2; ++seed) {
    const NormCase c(random_norm(seed));
    const NormResults want(c), got = run(c);
    reference::gated_rms_norm(c.norm(), want.y.view());
    reference::gated_rms_norm_backward(c.norm(), want.gradients(c));
    expect_close(got, want, tolerance(c.spec.dtype), describe(c.spec));
    if (testing::Test::HasFailure()) return;
  }
}

TEST_P(RmsNorm, ANaNStaysInItsRow) {
  NormCase c({});
  const NormResults clean = run(c);
  c.x.set(1, 2, 1, 4, std::numeric_limits<double>::quiet_NaN());
  const NormResults got = run(c);
  EXPECT_TRUE(std::isnan(got.y.at(1, 2, 1, 0)));
  EXPECT_EQ(got.y.at(1, 2, 2, 0), clean.y.at(1, 2, 2, 0));
  EXPECT_EQ(got.d_x.at(1, 2, 0, 5), clean.d_x.at(1, 2, 0, 5));
}

INSTANTIATE_TEST_SUITE_P(, RmsNorm, fast_backends_without_tensor_cores(), backend_name);

TEST(RmsNormOnCpu, GivesTheSameBitsOnAnyNumberOfThreads) {
  const NormCase c({.dtype = DType::bfloat16, .tokens = 700, .dim = 128});
  const NormResults one(c), three(c);
  for (const auto& [results, threads] : {std::pair(&one, 1), std::pair(&three, 3)}) {
    cpu::gated_rms_norm(c.norm(), results->y.view(), thread_executor(threads));
    cpu::gated_rms_norm_backward(c.norm(), results->gradients(c), thread_executor(threads));
  }
  for (std::size_t i = 0; i < one.named().size(); ++i) {
    EXPECT_EQ(one.named()[i].array->values(), three.named()[i].array->values()) << one.named()[i].name;
  }
}

TEST(RmsNormOnGpu, WhatIsWrittenOnceMoreAlongWithTheGradientsHasTheSameBits) {
  for (const std::int64_t dim : {8, 128}) {  // by vectors and by lanes
    const NormCase c({.dtype = DType::bfloat16, .tokens = 70, .dim = dim});
    const NormResults plain(c), again(c);
    CudaOnHost::gated_rms_norm(c.norm(), plain.y.view());
    CudaOnHost::gated_rms_norm_backward(c.norm(), plain.gradients(c));
    CudaOnHost::gated_rms_norm_backward(c.norm(), again.gradients(c), again.y.view());
    for (std::size_t i = 0; i < plain.named().size(); ++i) {
      EXPECT_EQ(again.named()[i].array->values(), plain.named()[i].array->values())
          << plain.named()[i].name << " of rows of " << dim;
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
