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
  const KeyStates h = room_for_states(p, device, 1, 1), u = room_for_states(p, device, 1, 1);
  const int dim = static_cast<int>(p.key_dim), values = static_cast<int>(p.value_dim);
  const Walk call{.fades = start_fades(p, cut.plan, device),
                  .h = {.states = static_cast<float*>(saved.h), .rows = dim, .columns = dim, .spread = h},
                  .u = {.states = static_cast<float*>(saved.u), .rows = dim, .columns = values, .spread = u},
                  .whole_k = whole_units(p.k, p.key_dim),
                  .whole_v = whole_units(p.v, p.value_dim)};
  start_walk<true>(p, cut, call, device);
  const auto given = [](const KeyStates& states) {
    return passes::GivenStates{reinterpret_cast<const std::uint16_t*>(states.tiles), states.norm, states.parts};
  };
  passes::Scratch scratch{};
  scratch.h = given(h);
  scratch.u = given(u);
  passes::run<Shape>(p, saved, out, cut.plan, device, scratch, [&](float* right, float* y) {
    const View rhs{.data = right,
                   .dtype = DType::float32,
                   .batch_stride = p.tokens * p.heads * p.key_dim,
                   .token_stride = p.heads * p.key_dim,
                   .head_stride = p.key_dim};
    start_solve(p, cut.plan, h, {.rhs = rhs, .x = y, .norm = saved.norm, .norms_given = true, .normalise = true},
                device);
  });
}

bool all_whole(const Problem& p, const Gradients& g) {
  for (const View& view : {p.q, p.k, p.v, g.d_o, g.d_q, g.d_k, g.d_v}) {
    if (!passes::lies_whole(view, p.q.dtype)) return false;
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
  const CurrentDevice current(device.index);
  const bool whole = p.key_dim == 128 && p.value_dim == 128 && all_whole(p, out);
  with_type(p, [&](auto type) {
    constexpr DType kType = decltype(type)::type;
    whole ? run_as<passes::Shape<kType, true>>(p, saved, out, device)
          : run_as<passes::Shape<kType, false>>(p, saved, out, device);
  });
}

}  // namespace gka::kernels::cuda::hopper
