// Backward: H at the start of every chunk once more, from the states that the forward pass saved; the solve's
// right-hand side; the same solve as forward; the gradients.
#include "kernels/cuda/hopper/backward_passes.cuh"
#include "kernels/cuda/hopper/forward.cuh"
#include "kernels/cuda/hopper/hopper.h"

namespace gka::kernels::cuda::hopper {
namespace {

template <typename Shape>
void run_as(const Problem& p, const Saved& saved, const Gradients& out, const Device& device) {
  const Cut cut = start_cut(p, 1, device);
  const KeyStates states = room_for_key_states(p, device);
  start_spread(p, cut, static_cast<const float*>(saved.h), nullptr, states, device);
  passes::Scratch scratch{};
  scratch.tiles = reinterpret_cast<const std::uint16_t*>(states.tiles);
  scratch.norm = states.norm;
  scratch.tile_rows = padded_dim(p);
  passes::run<Shape>(p, saved, out, cut.plan, device, scratch, [&](float* right, float* y) {
    const View rhs{.data = right,
                   .dtype = DType::float32,
                   .batch_stride = p.tokens * p.heads * p.key_dim,
                   .token_stride = p.heads * p.key_dim,
                   .head_stride = p.key_dim};
    start_solve(p, cut.plan, states, {.rhs = rhs, .x = y, .norm = saved.norm, .norms_given = true, .normalise = true},
                device);
  });
}

bool all_whole(const Problem& p, const Gradients& g) {
  for (const View& view : {p.q, p.k, p.v, g.d_o, g.d_q, g.d_k, g.d_v}) {
    if (!passes::lies_whole(view)) return false;
  }
  return true;
}

}  // namespace

bool takes_backward(const Problem& p, const Gradients& g) {
  const auto channels = [](std::int64_t n) { return n % 4 == 0 && n <= 128; };
  const auto writable = [](const View& view) { return view.dtype != DType::float64; };
  return takes(p) && p.options.gradient == Gradient::implicit && channels(p.key_dim) && channels(p.value_dim) &&
         g.d_o.dtype == p.q.dtype && writable(g.d_q) && writable(g.d_k) && writable(g.d_v);
}

void backward(const Problem& p, const Saved& saved, const Gradients& out, const Device& device) {
  constexpr DType bfloat16 = DType::bfloat16;
  const CurrentDevice current(device.index);
  const bool whole = p.key_dim == 128 && p.value_dim == 128 && all_whole(p, out);
  whole ? run_as<passes::Shape<128, bfloat16, true>>(p, saved, out, device)
        : run_as<passes::Shape<128, bfloat16, false>>(p, saved, out, device);
}

}  // namespace gka::kernels::cuda::hopper
