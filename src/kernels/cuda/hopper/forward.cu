// Forward: what every group of segments adds to the states; the states carried from group to group; H and U at the
// start of every chunk; every chunk solved; o.
#include "kernels/cuda/hopper/forward.cuh"

#include "kernels/cuda/hopper/hopper.h"

namespace gka::kernels::cuda::hopper {
namespace {

/// As long as the card stays busy: long groups mean fewer states to carry. Of sizes alone, so that the same problem is
/// always cut in the same way.
template <int D>
int segments_per_group(const Problem& p) {
  constexpr std::int64_t kBusy = 128 * kChunkHBlocks<D> / kStateBlocks<D>;
  int per_group = 1;
  while (per_group < 32 && segments_of(p) * p.heads / (2 * per_group) >= kBusy) per_group *= 2;
  return per_group;
}

/// The systems of a forward pass, in scratch, and ‖H_t‖_F for every token.
template <int D>
char* start_systems(const Problem& p, const Plan& plan, const ChunkGates* gates, const ChunkStates& states,
                    double* norm, const Device& device) {
  const Schedules schedules = schedules_of(p);
  auto* const systems = allocate<char>(device, slots_of(p) * SystemLayout<D>::kBytes);
  with_type(p, [&](auto type) {
    with_ridge<D>(p, [&](auto constant) {
      constexpr auto kernel = chunk_system<D, decltype(type)::type, decltype(constant)::value>;
      start_each(kernel, slots_of(p), kSystemBytes<D>, device, p, plan, gates, states, norm, schedules, systems,
                 whole_units(p.k, p.key_dim), whole_pairs(p.q, p.key_dim));
    });
  });
  return systems;
}

/// x = σ x̃, the keys' part's answer.
__global__ void __launch_bounds__(256)
    write_x(const __grid_constant__ Problem p, const float* x, const double* norm, const __grid_constant__ View to) {
  const std::int64_t rows = p.batch * p.tokens * p.heads;
  for (std::int64_t i = block() * 256 + thread(); i < rows * p.key_dim; i += blocks() * 256) {
    const std::int64_t row = i / p.key_dim, token = row / p.heads;
    const auto sigma = static_cast<float>(system_scale(p.options, norm[row], 1, 1e38, false).sigma);
    write(to, offset(to, token / p.tokens, token % p.tokens, row % p.heads) + i % p.key_dim, x[i] * sigma);
  }
}

template <int D>
void forward_as(const Problem& p, const Outputs& out, const Device& device) {
  const auto [cut, updates] = start_pass(p, segments_per_group<D>(p), device);
  const std::int64_t groups = cut.room * p.heads, per_token = p.batch * p.tokens * p.heads;
  const std::int64_t slots = slots_of(p);
  const int dim = static_cast<int>(p.key_dim), width = static_cast<int>(p.value_dim);
  auto* const h = allocate<float>(device, groups * dim * dim);
  auto* const u = allocate<float>(device, groups * dim * width);
  auto* const zeta = allocate<float>(device, groups);
  ChunkHCall call{.updates = updates,
                  .h = {.states = h, .rows = dim, .columns = dim},
                  .u = {.states = u, .rows = dim, .columns = width},
                  .zeta = zeta,
                  .skip_last = out.h == nullptr && out.u == nullptr,
                  .whole_k = whole_units(p.k, p.key_dim),
                  .whole_v = whole_units(p.v, p.value_dim)};
  const bool values = p.options.part == Part::both;
  start_chunk_h<D, false>(p, cut, call, device);
  const GroupStates of_h{.parts = h,
                         .start = static_cast<const float*>(p.h0),
                         .end = static_cast<float*>(out.h),
                         .rows = dim,
                         .columns = dim,
                         .symmetric = true};
  const GroupStates of_u{.parts = u,
                         .start = static_cast<const float*>(p.u0),
                         .end = static_cast<float*>(out.u),
                         .rows = dim,
                         .columns = width};
  const std::int64_t elements = p.sequences * p.heads * (dim * dim + dim * width + 2048);
  const auto carry = [&](auto kernel, int own) {
    start<256>(kernel, elements / (256 * own), 0, device, p, cut, of_h, of_u, static_cast<const float*>(zeta));
  };
  lies_in_fours(of_h) && lies_in_fours(of_u) ? carry(carry_groups<4>, 4) : carry(carry_groups<1>, 1);
  if (out.saved.h != nullptr && keeps_tiles(p)) {
    const KeptStates kept = kept_states<D>(p, out.saved);
    call.h.chunks = kept.h;
    call.u.chunks = kept.u;
  } else {
    call.h.chunks = room_for_states<D>(p, device, kStateBlocks<D>);
    call.h.saved = static_cast<float*>(out.saved.h);
    if (values) call.u.chunks = room_for_states<D>(p, device, (width + kStateColumns<D> - 1) / kStateColumns<D>);
    call.u.saved = static_cast<float*>(out.saved.u);
  }
  start_chunk_h<D, true>(p, cut, call, device);
  auto* const norm = out.saved.norm != nullptr ? out.saved.norm : allocate<double>(device, per_token);
  const char* const systems = start_systems<D>(p, cut.plan, updates.gates, call.h.chunks, norm, device);
  auto* const x = static_cast<float*>(out.saved.x);
  const SolveCall queries{.rhs = p.q,
                          .x = x != nullptr || values ? x : allocate<float>(device, per_token * dim),
                          .z = allocate<uint4>(device, slots * D / 8 * kWarpgroup),
                          .z_scale = allocate<float>(device, slots * kChunk),
                          .certainty = out.report.certainty};
  if constexpr (D == kWideSize) {
    start_wide_solve<true>(p, cut.plan, call.h.chunks, queries, device, systems);
  } else {
    start_solve<D, true>(p, cut.plan, call.h.chunks, queries, device, systems);
  }
  if (!values) {
    start<256>(write_x, (per_token * dim + 255) / 256, 0, device, p, queries.x, norm, out.o);
    return;
  }
  const OutputCall output{.o = out.o,
                          .systems = systems,
                          .z = queries.z,
                          .z_scale = queries.z_scale,
                          .states = call.u.chunks,
                          .whole_v = call.whole_v,
                          .o_pairs = whole_pairs(out.o, p.value_dim),
                          .whole_o = out.o.dtype == p.q.dtype && whole_units(out.o, p.value_dim)};
  with_type(p, [&](auto type) {
    start_each(chunk_o<D, decltype(type)::type>, slots * output.states.across, kOutputBytes<D>, device, p, cut.plan,
               output);
  });
}

}  // namespace

void forward(const Problem& p, const Outputs& out, const Device& device) {
  const CurrentDevice current(device.index);
  const Problem own = without_values(p);
  if (own.key_dim > kLargeSize) return forward_as<kWideSize>(own, out, device);
  with_size(own, is_narrow(own), [&](auto size) { forward_as<decltype(size)::value>(own, out, device); });
}

}  // namespace gka::kernels::cuda::hopper
