// The passes of the Hopper backward on the host, with the products of warpgroup.cuh's stand-in, against the
// reference. What is left out is the solve, which is the plain kernels' here: the passes themselves are then off by the
// 11 bits of their operands, and by nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#define cuda cuda_on_host
#include "kernels/cuda/group_sums.cuh"
#include "kernels/cuda/hopper/bwd_passes.cuh"
#undef cuda

#include "kernels/cuda_on_host/scratch.h"
#include "kernels/cuda_support.h"
#include "kernels/expect.h"

namespace gka::kernels::test {
namespace {

namespace bwd = cuda_on_host::hopper::bwd;
using cuda_on_host::Device;
using cuda_on_host::Plan;
using cuda_on_host::Segment;

using cuda_on_host::hopper::kChunk;
using cuda_on_host::hopper::SystemLayout;

/// H (or U) in the middle of a segment from that at its start, of rows of `columns` numbers; `right` is k (or v), that
/// of head `right_head`.
void advance(const Problem& p, const View& right, std::int64_t right_head, std::int64_t columns, const Segment& segment,
             std::int64_t head, std::vector<double>& state) {
  for (std::int64_t t = segment.begin; t < segment.begin + std::min<std::int64_t>(segment.length, 64); ++t) {
    const auto read = [&](const View& view, std::int64_t of, std::int64_t i) {
      return cuda_on_host::read<double>(view, offset(view, segment.batch, t, of) + i);
    };
    const double gamma = p.log_decay ? std::exp(read(p.log_decay, head, 0)) : 1;
    const double beta = p.beta ? read(p.beta, head, 0) : 1;
    for (std::int64_t i = 0; i < p.key_dim * columns; ++i) {
      double& x = state[static_cast<std::size_t>(i)];
      x = (gamma == 0 ? 0 : gamma * x) +
          beta * read(p.k, key_head(p, head), i / columns) * read(right, right_head, i % columns);
    }
  }
}

bwd::Place place_of_task(const Problem& p, const cuda_on_host::Plan& plan, std::int64_t task) {
  const auto slot = static_cast<int>(task / p.heads);
  return bwd::place_of(cuda_on_host::hopper::tokens_of(plan.segments[slot / 2], slot % 2), task % p.heads);
}

/// States at the start of every half segment, from those of segments, as the forward pass's walk leaves them: divided
/// by their norms, in float16, swizzled.
template <int D>
bwd::GivenStates<D> state_tiles(const Problem& p, const float* saved, const View& right, std::int64_t group,
                                std::int64_t columns, const Plan& plan, const Device& device) {
  const std::int64_t tiles = 2 * plan.count(p) * p.heads, numbers = p.key_dim * columns, size = D * D;
  const std::int64_t room = 2 * cuda_on_host::segments_of(p) * p.heads;  // kernels ask for it before they know theirs
  auto* const parts = cuda_on_host::allocate<std::uint16_t>(device, room * size);
  auto* const norms = cuda_on_host::allocate<float>(device, room);
  std::fill_n(parts, tiles * size, std::uint16_t{0});
  for (std::int64_t task = 0; task < tiles; ++task) {
    const std::int64_t slot = task / p.heads, head = task % p.heads;
    const float* start = saved + (slot / 2 * p.heads + head) * numbers;
    std::vector<double> state(start, start + numbers);
    if (slot % 2 == 1) advance(p, right, head / group, columns, plan.segments[slot / 2], head, state);
    double square = 0;
    for (const double x : state) square += x * x;
    norms[task] = static_cast<float>(std::sqrt(square));
    if (!(square > 0)) continue;
    for (std::int64_t i = 0; i < numbers; ++i) {
      const int row = static_cast<int>(i / columns), column = static_cast<int>(i % columns);
      const auto value = static_cast<float>(state[static_cast<std::size_t>(i)] / std::sqrt(square));
      parts[task * size + bwd::Tile::place(D, row, column)] = cuda_on_host::float_to_half(value);
    }
  }
  return {.tiles = parts, .norm = norms};
}

/// U_c do_c as float32 vectors, from the systems of the solve.
template <int D>
void take_right_sides(const Problem& p, const Plan& plan, const bwd::Scratch<D>& scratch) {
  for (std::int64_t task = 0; task < 2 * plan.count(p) * p.heads; ++task) {
    const bwd::Place place = place_of_task(p, plan, task);
    bwd::Wide<D> rows;
    rows.take(scratch.packed(task, SystemLayout<D>::kRhs));
    const auto to = place.field(p, scratch.udo, static_cast<int>(p.key_dim));
    rows.each([&](const bwd::At& at, float x, float y) {
      if (at.row >= place.len || at.column >= p.key_dim) return;
      to.at(at.row, at.column)[0] = x * scratch.rows(task).unscale[at.row];
      to.at(at.row, at.column)[1] = y * scratch.rows(task).unscale[at.row];
    });
  }
}
/// ŷ as the solve leaves it: as tiles.
template <int D>
void leave_tiles(const Problem& p, const Plan& plan, const bwd::Scratch<D>& scratch) {
  for (std::int64_t task = 0; task < 2 * plan.count(p) * p.heads; ++task) {
    const bwd::Place place = place_of_task(p, plan, task);
    const auto from = place.field(p, static_cast<const float*>(scratch.y), static_cast<int>(p.key_dim));
    bwd::Wide<D> rows;
    rows.each([&](const bwd::At& at, float& x, float& y) {
      const bool inside = at.row < place.len && at.column < p.key_dim;
      x = inside ? from.at(at.row, at.column)[0] : 0;
      y = inside ? from.at(at.row, at.column)[1] : 0;
    });
    std::uint32_t tops[kChunk] = {};
    rows.row_tops(tops);
    rows.store_rows({scratch.y_tiles + task * kChunk * D, kChunk},
                    [&](int row) { return bwd::scale_of(tops[row]).up; });
    for (int c = 0; c < kChunk; ++c) scratch.y_down[task * kChunk + c] = bwd::scale_of(tops[c]).down;
  }
}

/// kWide: as if all chunks were refined, U_c do_c and ŷ_c are passed on in float32.
template <int D, DType kType, bool kWide>
void run_passes_of(const Problem& p, const Saved& saved, const Gradients& out) {
  with_scratch<Device>([&](const Device& device) {
    const Plan plan = cuda_on_host::start_plan(p, device);
    bwd::Scratch<D> given{};
    given.h = state_tiles<D>(p, static_cast<const float*>(saved.h), p.k, p.key_group, p.key_dim, plan, device);
    given.u = state_tiles<D>(p, static_cast<const float*>(saved.u), p.v, p.value_group, p.value_dim, plan, device);
    given.solve = {.pace = 1, .headroom = 1, .least_spread = 0, .float32 = kWide};
    const auto solve_plainly = [&](const bwd::Scratch<D>& scratch) {
      if (!kWide) take_right_sides<D>(p, plan, scratch);
      View vectors{.data = scratch.udo,
                   .dtype = DType::float32,
                   .batch_stride = p.tokens * p.heads * p.key_dim,
                   .token_stride = p.heads * p.key_dim,
                   .head_stride = p.key_dim};
      Problem solve = p;
      solve.options.part = Part::solve;
      solve.q = vectors;
      vectors.data = scratch.y;
      CudaOnHost::forward(solve, {.o = vectors});
      if (!kWide) leave_tiles<D>(p, plan, scratch);
    };
    bwd::run<bwd::Shape<D, kType, false>>(p, saved, out, plan, device, given, solve_plainly);
  });
}
template <DType kType, bool kWide = true>
void run_passes(const Problem& p, const Saved& saved, const Gradients& out) {
  const bool small = cuda_on_host::hopper::size_for(p.key_dim, p.value_dim) == 64;
  (small ? run_passes_of<64, kType, kWide> : run_passes_of<128, kType, kWide>)(p, saved, out);
}

CaseSpec spec_with(void (*change)(CaseSpec&)) {
  CaseSpec spec{.dtype = DType::bfloat16, .batch = 1, .tokens = 200, .heads = 2, .key_dim = 64, .value_dim = 48};
  spec.h0 = spec.u0 = spec.d_h = spec.d_u = spec.float32_gates = true;
  change(spec);
  return spec;
}

template <bool kWide = true>
void expect_gradients(const CaseSpec& spec, double tolerance = 3e-3) {
  const Case c(spec);
  const OwnedOutputs kept = c.outputs();
  CudaOnHost::forward(c.problem(), kept.pointers());
  const OwnedGradients want = c.gradients(DType::float64), got = c.gradients(DType::float32);
  reference::backward(c.problem(), want.pointers());
  const auto run =
      spec.dtype == DType::float16 ? run_passes<DType::float16, kWide> : run_passes<DType::bfloat16, kWide>;
  run(c.problem(), kept.pointers().saved, got.pointers());
  expect_close(got, want, tolerance, c.describe());
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
TEST(HopperBackwardPasses, MatchTheReferenceWhereNothingIsRefined) {
  expect_gradients<false>(spec_with([](CaseSpec& s) {
    s.keys = Keys::silu;
    s.heads = 1;
    s.key_dim = 96;
    s.value_dim = 128;
  }));
}
TEST(HopperBackwardPasses, MatchTheReferenceAtTheSmallSize) {
  const CaseSpec spec = spec_with([](CaseSpec& s) {
    s.keys = Keys::silu;
    s.key_dim = s.value_dim = 64;
  });
  expect_gradients(spec);
  expect_gradients<false>(spec);
}
TEST(HopperBackwardPasses, LoseNothingToStrongDecay) {
  CaseSpec spec = spec_with([](CaseSpec& s) {
    s.keys = Keys::silu;
    s.weakest_decay = 0.5;
    s.strongest_decay = 1.5;
  });
  for (const std::int64_t values : {48, 96}) {  // of both sizes
    spec.value_dim = values;
    expect_gradients(spec);
  }
}
TEST(HopperBackwardPasses, ForgetAndSkipExactly) {
  // With few keys behind every γ = 0 the two halves of dg cancel: that is where 11 bits show most.
  expect_gradients(spec_with([](CaseSpec& s) {
                     s.layout = Layout::padded;
                     s.forget = 0.05;
                     s.skip = 0.1;
                     s.key_dim = 32;
                     s.value_dim = 96;
                     s.asymmetric_h0 = true;
                   }),
                   5e-3);
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

TEST(HopperBackwardPasses, ReadWhatHeadsShareAndLeaveGradientsOfEveryHeadToSum) {
  const CaseSpec spec = spec_with([](CaseSpec& s) {
    s.tokens = 150;
    s.heads = 4;
    s.key_group = 2;
    s.value_group = 4;
    s.key_dim = s.value_dim = 32;
  });
  const Case c(spec);
  const Problem& p = c.problem();
  const OwnedOutputs kept = c.outputs();
  CudaOnHost::forward(p, kept.pointers());
  const OwnedGradients want = c.gradients(DType::float64), got = c.gradients(DType::float32);
  reference::backward(p, want.pointers());
  const Array d_k(DType::float32, {1, spec.tokens, 4, 32}), d_v(DType::float32, {1, spec.tokens, 4, 32});
  Gradients by_head = got.pointers();
  by_head.d_k = d_k.view();
  by_head.d_v = d_v.view();
  run_passes<DType::bfloat16>(p, kept.pointers().saved, by_head);
  with_scratch<Device>([&](const Device& device) {
    cuda_on_host::start_group_sums<float>(p, by_head.d_k, 32, p.key_group, got.d_k.view(), device);
    cuda_on_host::start_group_sums<float>(p, by_head.d_v, 32, p.value_group, got.d_v.view(), device);
  });
  expect_close(got, want, 3e-3, c.describe());
}

/// A case of 150 tokens and one head with γ = 0 at two of them.
Case fenced(std::int64_t begin, std::int64_t end, std::int64_t values = 32) {
  CaseSpec spec = spec_with([](CaseSpec& s) {
    s.tokens = 150;
    s.heads = 1;
    s.key_dim = 32;
  });
  spec.value_dim = values;
  Case c(spec);
  for (const std::int64_t cut : {begin, end}) c.log_decay.set(0, cut, 0, 0, -std::numeric_limits<double>::infinity());
  return c;
}
OwnedGradients gradients_of(const Case& c) {
  const OwnedOutputs kept = c.outputs();
  OwnedGradients got = c.gradients(DType::float32);
  CudaOnHost::forward(c.problem(), kept.pointers());
  run_passes<DType::bfloat16>(c.problem(), kept.pointers().saved, got.pointers());
  return got;
}

TEST(HopperBackwardPasses, BehindADecayOfZeroNotABitDependsOnWhatCameBefore) {
  constexpr std::int64_t kCut = 70, kEnd = 140;
  const Case one = fenced(kCut, kEnd);
  Case other = fenced(kCut, kEnd);
  for (const auto input : {&Case::k, &Case::v, &Case::log_decay, &Case::beta, &Case::d_o}) {
    for (std::int64_t t = 60; t < kCut; ++t) (other.*input).set(0, t, 0, 0, 0.7 * (other.*input).at(0, t, 0, 0));
  }
  const OwnedGradients want = gradients_of(one), got = gradients_of(other);
  const auto of = got.named(), wanted = want.named();
  for (std::size_t i = 0; i < of.size(); ++i) {
    const Array &a = *of[i].array, &b = *wanted[i].array;
    if (b.shape()[1] != one.problem().tokens) continue;  // of a state
    for (std::int64_t t = kCut; t < b.shape()[1]; ++t) {
      for (std::int64_t e = 0; e < b.shape()[3]; ++e) {
        ASSERT_EQ(a.at(0, t, 0, e), b.at(0, t, 0, e)) << of[i].name << " of token " << t;
      }
    }
  }
}

TEST(HopperBackwardPasses, ANaNStaysBetweenTwoDecaysOfZero) {
  struct Fence {
    std::int64_t begin, poison, end, values;
  };
  constexpr Fence kFences[] = {{20, 23, 40, 32}, {50, 60, 100, 96}, {3, 70, 140, 32}, {3, 70, 140, 96}};
  constexpr std::pair<const char*, Array Case::*> kPoisons[] = {
      {"q", &Case::q},       {"k", &Case::k},         {"v", &Case::v},    {"log_decay", &Case::log_decay},
      {"beta", &Case::beta}, {"alpha", &Case::alpha}, {"d_o", &Case::d_o}};
  for (const auto& [begin, poison, end, values] : kFences) {
    const Case clean = fenced(begin, end, values);
    const OwnedGradients want = gradients_of(clean);
    for (const auto& [name, input] : kPoisons) {
      Case poisoned = fenced(begin, end, values);
      (poisoned.*input).set(0, poison, 0, 0, std::numeric_limits<double>::quiet_NaN());
      const OwnedGradients got = gradients_of(poisoned);
      const auto of = got.named(), wanted = want.named();
      bool seen = false;
      for (std::size_t i = 0; i < of.size(); ++i) {
        const Array &a = *of[i].array, &b = *wanted[i].array;
        const bool tokens = b.shape()[1] == clean.problem().tokens;
        for (std::int64_t t = 0; t < b.shape()[1]; ++t) {
          for (std::int64_t e = 0; e < b.shape()[2] * b.shape()[3]; ++e) {
            const double x = a.at(0, t, e / b.shape()[3], e % b.shape()[3]);
            if (tokens && t >= begin && t < end) {
              seen |= std::isnan(x);
            } else {
              ASSERT_EQ(x, b.at(0, t, e / b.shape()[3], e % b.shape()[3]))
                  << of[i].name << " of " << t << ", NaN in " << name << " of " << poison;
            }
          }
        }
      }
      EXPECT_TRUE(seen) << "NaN in " << name;
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
