// Forward: what every group of segments adds to the states; the states carried from group to group; H spread over the
// chunks; every chunk solved; the answers.
#include "kernels/cuda/hopper/forward.cuh"

#include "kernels/cuda/hopper/hopper.h"

namespace gka::kernels::cuda::hopper {
namespace {

/// As long as the card stays busy: long groups mean fewer states to carry. Of sizes alone, so that the same problem is
/// always cut in the same way.
int segments_per_group(const Problem& p) {
  constexpr std::int64_t kBusy = 256;
  int per_group = 1;
  while (per_group < 16 && segments_of(p) * p.heads / (2 * per_group) >= kBusy) per_group *= 2;
  return per_group;
}

template <bool kKeys>
void start_own_parts(const Problem& p, const Cut& cut, float* states, double* zeta, bool final, const Device& device) {
  with_shape(p, [&](auto dim, auto type) {
    constexpr int kDim = decltype(dim)::value, kColumns = kKeys ? kDim : 128;
    constexpr DType kType = decltype(type)::type;
    const Walk call{.states = states,
                    .zeta = zeta,
                    .rows = static_cast<int>(p.key_dim),
                    .columns = static_cast<int>(kKeys ? p.key_dim : p.value_dim),
                    .skip_last = !final,
                    .whole_k = whole_units(p.k, p.key_dim),
                    .whole_v = whole_units(p.v, p.value_dim)};
    const std::int64_t across = (call.columns + kColumns - 1) / kColumns;
    start(walk<kDim, kColumns, kKeys, false, kType>, cut.room * p.heads * across,
          kWalkBytes<kDim, kColumns, kKeys, false>, device, p, cut, call);
  });
}

}  // namespace

const char* unsupported(const Problem& p) {
  const Options& o = p.options;
  if (p.q.dtype != DType::bfloat16) return "the Hopper kernels take bfloat16";
  if (o.part != Part::both) return "the Hopper kernels run the whole operator only";
  if (o.solver != Solver::chebyshev) return "the Hopper kernels solve by Chebyshev only";
  if (o.ridge_mode != RidgeMode::adaptive) return "the Hopper kernels take the adaptive ridge only";
  if (!o.decay_keys) return "the Hopper kernels decay H and U alike";
  if (p.key_dim > 128) return "the Hopper kernels take up to 128 key channels";
  if (o.iterations > 32) return "the Hopper kernels take up to 32 iterations";
  if (o.chunk != 0 && o.chunk != kTokens) return "the Hopper kernels have chunks of 64 tokens";
  return nullptr;
}

bool runs_on(int device) {
  return attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor, device) == 0;
}

void forward(const Problem& p, const Outputs& out, const Device& device) {
  const CurrentDevice current(device.index);
  const Cut cut = start_cut(p, segments_per_group(p), device);
  const std::int64_t groups = cut.room * p.heads, per_token = p.batch * p.tokens * p.heads;
  auto* const h = allocate<float>(device, groups * p.key_dim * p.key_dim);
  auto* const u = allocate<float>(device, groups * p.key_dim * p.value_dim);
  auto* const key_zeta = allocate<double>(device, groups);
  auto* const value_zeta = allocate<double>(device, groups);
  start_own_parts<true>(p, cut, h, key_zeta, out.h != nullptr, device);
  start_own_parts<false>(p, cut, u, value_zeta, out.u != nullptr, device);
  const Plan along{.segments = nullptr, .begin = cut.group_begin, .most = cut.room};
  start_carry<float>(p, along, device,
                     {.parts = h,
                      .zeta = key_zeta,
                      .start = static_cast<const float*>(p.h0),
                      .end = static_cast<float*>(out.h),
                      .rows = p.key_dim,
                      .columns = p.key_dim,
                      .symmetric = true,
                      .backwards = false});
  start_carry<float>(p, along, device,
                     {.parts = u,
                      .zeta = value_zeta,
                      .start = static_cast<const float*>(p.u0),
                      .end = static_cast<float*>(out.u),
                      .rows = p.key_dim,
                      .columns = p.value_dim,
                      .symmetric = false,
                      .backwards = false});
  const KeyStates states = room_for_key_states(p, device);
  start_spread(p, cut, h, static_cast<float*>(out.saved.h), states, device);
  const SolveCall call{.rhs = p.q,
                       .x = static_cast<float*>(out.saved.x),
                       .norm = out.saved.norm != nullptr ? out.saved.norm : allocate<double>(device, per_token),
                       .norms_given = false,
                       .normalise = false,
                       .z = allocate<uint4>(device, 2 * segments_of(p) * p.heads * padded_dim(p) / 8 * kWarpgroup)};
  start_solve<true>(p, cut.plan, states, call, device);
  const RecallCall answers{.o = out.o,
                           .z = call.z,
                           .states = u,
                           .saved = static_cast<float*>(out.saved.u),
                           .whole_k = whole_units(p.k, p.key_dim),
                           .whole_v = whole_units(p.v, p.value_dim),
                           .o_pairs = whole_pairs(out.o, p.value_dim)};
  with_shape(p, [&](auto dim, auto type) {
    constexpr int kDim = decltype(dim)::value;
    constexpr DType kType = decltype(type)::type;
    const std::int64_t across = (p.value_dim + kValues - 1) / kValues;
    start(recall<kDim, kType>, groups * across, kRecallBytes<kDim, kType>, device, p, cut, answers);
  });
}

}  // namespace gka::kernels::cuda::hopper
