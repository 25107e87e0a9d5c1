// The passes of the Hopper backward on the host, with the products of backward_tiles.cuh's stand-in, against the
// reference. What is left out is the solve, which is the plain kernels' here: the passes themselves are then off by the
// 16 bits of their operands, and by nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#define cuda cuda_on_host
#include "kernels/cuda/hopper/backward_passes.cuh"
#undef cuda

#include "kernels/cuda_on_host/scratch.h"
#include "kernels/cuda_support.h"
#include "kernels/expect.h"

namespace gka::kernels::test {
namespace {

namespace passes = cuda_on_host::hopper::passes;
using cuda_on_host::Device;
using cuda_on_host::Plan;
using cuda_on_host::Segment;

constexpr int kDim = 128;

/// H in the middle of a segment from H at its start.
void advance(const Problem& p, const Segment& segment, std::int64_t head, std::vector<double>& h) {
  const auto dim = static_cast<std::size_t>(p.key_dim);
  std::vector<double> k(dim);
  for (std::int64_t t = segment.begin; t < segment.begin + std::min<std::int64_t>(segment.length, 64); ++t) {
    const auto read = [&](const View& view, std::int64_t i) {
      const std::int64_t at = segment.batch * view.batch_stride + t * view.token_stride + head * view.head_stride + i;
      return cuda_on_host::read<double>(view, at);
    };
    const double gamma = p.log_decay ? std::exp(read(p.log_decay, 0)) : 1, beta = p.beta ? read(p.beta, 0) : 1;
    for (std::size_t i = 0; i < dim; ++i) k[i] = read(p.k, static_cast<std::int64_t>(i));
    for (std::size_t i = 0; i < dim * dim; ++i) h[i] = gamma * h[i] + beta * k[i / dim] * k[i % dim];
  }
}

/// H at the start of every half segment, as the solve's kernels leave it: H/‖H‖ in two parts of float16, swizzled.
passes::Scratch key_tiles(const Problem& p, const Saved& saved, const Plan& plan, const Device& device) {
  const std::int64_t tiles = 2 * plan.count(p) * p.heads, dim = p.key_dim, size = kDim * kDim;
  auto* const parts = cuda_on_host::allocate<std::uint16_t>(device, tiles * 2 * size);
  auto* const norms = cuda_on_host::allocate<float>(device, tiles);
  std::fill_n(parts, tiles * 2 * size, std::uint16_t{0});
  for (std::int64_t task = 0; task < tiles; ++task) {
    const std::int64_t slot = task / p.heads, head = task % p.heads;
    const float* start = static_cast<const float*>(saved.h) + (slot / 2 * p.heads + head) * dim * dim;
    std::vector<double> h(start, start + dim * dim);
    if (slot % 2 == 1) advance(p, plan.segments[slot / 2], head, h);
    double square = 0;
    for (const double x : h) square += x * x;
    norms[task] = static_cast<float>(std::sqrt(square));
    if (square == 0) continue;
    std::uint16_t* hi = parts + task * 2 * size;
    for (std::int64_t i = 0; i < dim * dim; ++i) {
      const std::int64_t row = i / dim, column = i % dim;
      const std::int64_t at = (column / 64 * kDim + row) * 64 + (column % 64 / 8 ^ row % 8) * 8 + column % 8;
      const auto value = static_cast<float>(h[static_cast<std::size_t>(i)] / std::sqrt(square));
      hi[at] = cuda_on_host::float_to_half(value);
      hi[size + at] = cuda_on_host::float_to_half(value - cuda_on_host::half_to_float(hi[at]));
    }
  }
  passes::Scratch scratch{};
  scratch.tiles = parts;
  scratch.norm = norms;
  scratch.tile_rows = kDim;
  return scratch;
}

template <DType kType>
void run_passes(const Problem& p, const Saved& saved, const Gradients& out) {
  with_scratch<Device>([&](const Device& device) {
    const Plan plan = cuda_on_host::start_plan(p, device);
    const passes::Scratch scratch = key_tiles(p, saved, plan, device);
    passes::run<passes::Shape<kDim, kType, false>>(p, saved, out, plan, device, scratch, [&](float* right, float* y) {
      View vectors{.data = right,
                   .dtype = DType::float32,
                   .batch_stride = p.tokens * p.heads * p.key_dim,
                   .token_stride = p.heads * p.key_dim,
                   .head_stride = p.key_dim};
      Problem solve = p;
      solve.options.part = Part::solve;
      solve.q = vectors;
      vectors.data = y;
      CudaOnHost::forward(solve, {.o = vectors});
    });
  });
}

CaseSpec spec_with(void (*change)(CaseSpec&)) {
  CaseSpec spec{.dtype = DType::bfloat16, .batch = 1, .tokens = 200, .heads = 2, .key_dim = 64, .value_dim = 48};
  spec.h0 = spec.u0 = spec.d_h = spec.d_u = spec.float32_gates = true;
  change(spec);
  return spec;
}

void expect_gradients(const CaseSpec& spec) {
  const Case c(spec);
  const OwnedOutputs kept = c.outputs();
  CudaOnHost::forward(c.problem(), kept.pointers());
  const OwnedGradients want = c.gradients(DType::float64), got = c.gradients(DType::float32);
  reference::backward(c.problem(), want.pointers());
  const auto run = spec.dtype == DType::float16 ? run_passes<DType::float16> : run_passes<DType::bfloat16>;
  run(c.problem(), kept.pointers().saved, got.pointers());
  expect_close(got, want, 2e-3, c.describe());
}

TEST(HopperBackwardPasses, MatchTheReferenceWithStatesAtBothEnds) {
  expect_gradients(spec_with([](CaseSpec&) {}));
}
TEST(HopperBackwardPasses, MatchTheReferenceAtFullSize) {
  expect_gradients(spec_with([](CaseSpec& s) {
    s.keys = Keys::silu;
    s.batch = s.heads = 1;
    s.key_dim = s.value_dim = 128;
  }));
}
TEST(HopperBackwardPasses, LoseNothingToStrongDecay) {
  expect_gradients(spec_with([](CaseSpec& s) {
    s.keys = Keys::silu;
    s.weakest_decay = 0.5;
    s.strongest_decay = 1.5;
  }));
}
TEST(HopperBackwardPasses, ForgetAndSkipExactly) {
  expect_gradients(spec_with([](CaseSpec& s) {
    s.layout = Layout::padded;
    s.forget = 0.05;
    s.skip = 0.1;
    s.key_dim = 32;
    s.value_dim = 96;
    s.asymmetric_h0 = true;
  }));
}
TEST(HopperBackwardPasses, MatchTheReferenceOnPackedFloat16) {
  expect_gradients(spec_with([](CaseSpec& s) {
    s.dtype = DType::float16;
    s.lengths = {70, 0, 128, 1, 200};
    s.key_dim = s.value_dim = 32;
  }));
}
TEST(HopperBackwardPasses, TakeARidgeAsConstantAndNoGates) {
  expect_gradients(spec_with([](CaseSpec& s) {
    s.log_decay = s.beta = s.alpha = false;
    s.options.scale = 0.3;
    s.options.ridge_gradient = false;
    s.key_dim = s.value_dim = 32;
  }));
}

}  // namespace
}  // namespace gka::kernels::test
