// Backward: H and U at the start of every chunk, as the forward pass left them or once more from states of segments;
// the solve's right-hand side; the same solve as forward; the gradients.
#include <algorithm>

#include "kernels/cuda/hopper/bwd_passes.cuh"
#include "kernels/cuda/hopper/forward.cuh"
#include "kernels/cuda/hopper/hopper.h"

namespace gka::kernels::cuda::hopper {
namespace {

/// H and U at the start of every chunk, from float32 states at the start of segments.
template <int D>
Cut start_states(const Problem& p, const Saved& saved, const KeptStates& to, const Device& device) {
  const auto [cut, updates] = start_pass(p, 1, device);
  const int dim = static_cast<int>(p.key_dim), values = static_cast<int>(p.value_dim);
  const ChunkHCall call{.updates = updates,
                        .h = {.states = static_cast<float*>(saved.h), .rows = dim, .columns = dim, .chunks = to.h},
                        .u = {.states = static_cast<float*>(saved.u), .rows = dim, .columns = values, .chunks = to.u},
                        .whole_k = whole_units(p.k, p.key_dim),
                        .whole_v = whole_units(p.v, p.value_dim)};
  start_chunk_h<D, true>(p, cut, call, device);
  return cut;
}

/// float32 states at the start of segments, from tiles at the start of chunks.
template <int D>
__global__ void __launch_bounds__(256)
    unpack_states(ChunkStates tiles, std::int64_t segments, std::int64_t heads, float* to) {
  constexpr int kNumbers = D * D;
  for (std::int64_t i = block() * 256 + thread(); i < segments * heads * kNumbers; i += blocks() * 256) {
    const std::int64_t state = i / kNumbers, at = state / heads * 2 * heads + state % heads;
    const int row = static_cast<int>(i % kNumbers / D), column = static_cast<int>(i % D);
    to[i] = __half2float(tiles.tile<D>(at)[bwd::Tile::place(D, row, column)]) * tiles.norm[at];
  }
}

template <typename Shape>
void run_as(const Problem& p, const Saved& saved, bool tiles, const Gradients& out, const Device& device) {
  constexpr int D = Shape::kSize;
  const KeptStates states = tiles ? kept_states<D>(p, saved)
                                  : KeptStates{room_for_states<D>(p, device, 1),
                                               Shape::kValues ? room_for_states<D>(p, device, 1) : ChunkStates{}};
  const Cut cut = tiles ? start_cut(p, 1, device) : start_states<D>(p, saved, states, device);
  const auto given = [](const ChunkStates& of) {
    return bwd::GivenStates<D>{reinterpret_cast<const std::uint16_t*>(of.tiles), of.norm};
  };
  bwd::Scratch<D> scratch{};
  scratch.h = given(states.h);
  scratch.u = given(states.u);
  scratch.trace = states.h.trace;
  scratch.ample = states.h.ample;
  const Schedules schedules = make_schedules(p.options.ridge, p.options.iterations, p.options.refine, p.key_dim);
  scratch.solve = {.pace = schedules.of[0].pace,
                   .headroom = schedules.of[0].headroom,
                   .least_spread = schedules.may_refine ? schedules.least_spread : 0,
                   .least_for_two = schedules.may_refine ? schedules.least_for_two : 0,
                   .float32 = false,
                   .reaches = schedules.reaches};
  std::copy_n(schedules.spread, kReaches, scratch.solve.spread);
  bwd::run<Shape>(p, saved, out, cut.plan, device, scratch, [&](const bwd::Scratch<D>& of) {
    const View rhs{.data = of.udo,
                   .dtype = DType::float32,
                   .batch_stride = p.tokens * p.heads * p.key_dim,
                   .token_stride = p.heads * p.key_dim,
                   .head_stride = p.key_dim};
    const SolveCall call{.rhs = rhs, .x = of.y, .tiles = reinterpret_cast<char*>(of.y_tiles), .tile_down = of.y_down};
    start_solve<D>(p, cut.plan, states.h, call, device, of.systems);
  });
}

/// Calls body with the Shape for a problem of size D. Narrow heads are whole.
template <int D, typename Body>
void with_shape(const Problem& p, bool whole, Body&& body) {
  with_type(p, [&](auto type) {
    constexpr DType kType = decltype(type)::type;
    const auto with_rest = [&](auto constant, auto values) {
      constexpr bool kConstant = decltype(constant)::value, kValues = decltype(values)::value;
      with_known<D, true>(whole,
                          [&](auto is) { body(bwd::Shape<D, kType, decltype(is)::value, kConstant, kValues>{}); });
    };
    with_values<D>(p, [&](auto values) {
      if constexpr (decltype(values)::value) {
        with_ridge<D>(p, [&](auto constant) { with_rest(constant, values); });
      } else {
        with_rest(std::false_type{}, values);
      }
    });
  });
}

/// Whether all that is read and written of tokens lies aligned, in heads of so many channels.
bool all_whole(const Problem& p, const Gradients& g, int size) {
  if (p.key_dim != size || (p.value_dim != size && p.options.part == Part::both)) return false;
  for (const View& view : {p.q, p.k, p.v, g.d_o, g.d_q, g.d_k, g.d_v}) {
    if (!bwd::lies_whole(view, p.q.dtype)) return false;
  }
  return true;
}

void run(const Problem& p, const Saved& saved, bool tiles, const Gradients& out, const Device& device) {
  const CurrentDevice current(device.index);
  with_size(p, is_narrow(p) && all_whole(p, out, kNarrowSize), [&](auto size) {
    constexpr int D = decltype(size)::value;
    with_shape<D>(p, all_whole(p, out, D), [&](auto shape) { run_as<decltype(shape)>(p, saved, tiles, out, device); });
  });
}

}  // namespace

void save_tiles(const Problem& p, const Saved& from, const Saved& to, const Device& device) {
  const CurrentDevice current(device.index);
  with_padded_size(p, [&](auto size) {
    constexpr int D = decltype(size)::value;
    start_states<D>(p, from, kept_states<D>(p, to), device);
  });
}

void restore_states(const Problem& p, const Saved& from, const Saved& to, const Device& device) {
  const CurrentDevice current(device.index);
  with_padded_size(p, [&](auto size) {
    constexpr int D = decltype(size)::value;
    const KeptStates kept = kept_states<D>(p, from);
    const std::int64_t segments = segments_of(p), blocks = segments * p.heads * D * D / 256;
    start<256>(unpack_states<D>, blocks, 0, device, kept.h, segments, p.heads, static_cast<float*>(to.h));
    start<256>(unpack_states<D>, blocks, 0, device, kept.u, segments, p.heads, static_cast<float*>(to.u));
  });
}

void backward(const Problem& problem, const Saved& saved, const Gradients& out, const Device& device) {
  const Problem p = without_values(problem);
  if (p.value_dim > kLargeSize) return backward_in_blocks(p, saved, out, device);
  run(p, saved, keeps_tiles(p), out, device);
}
void backward_from_states(const Problem& p, const Saved& saved, const Gradients& out, const Device& device) {
  run(p, saved, false, out, device);
}

}  // namespace gka::kernels::cuda::hopper
