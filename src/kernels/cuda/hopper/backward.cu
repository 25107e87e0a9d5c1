// Backward: H and U at the start of every chunk, as the forward pass left them or once more from states of segments;
// the solve's right-hand side; the same solve as forward; the gradients.
#include "kernels/cuda/hopper/backward.cuh"

#include "kernels/cuda/hopper/hopper.h"

namespace gka::kernels::cuda::hopper {
namespace {

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
  scratch.solve = solve_numbers(p, false);
  bwd::run<Shape>(p, saved, out, cut.plan, device, scratch, [&](const bwd::Scratch<D>& of) {
    start_solve<D>(p, cut.plan, states.h, second_solve(p, of), device, of.systems);
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

void run(const Problem& p, const Saved& saved, bool tiles, const Gradients& out, const Device& device) {
  const CurrentDevice current(device.index);
  if (p.key_dim > kLargeSize) return backward_wide(p, saved, out, device);
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
  if (p.value_dim > widest_values(p)) return backward_in_blocks(p, saved, out, device);
  run(p, saved, keeps_tiles(p), out, device);
}
void backward_from_states(const Problem& p, const Saved& saved, const Gradients& out, const Device& device) {
  run(p, saved, false, out, device);
}

}  // namespace gka::kernels::cuda::hopper
