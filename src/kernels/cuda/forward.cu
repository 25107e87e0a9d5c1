// Forward: what every segment adds to the states, all at once; the states carried along each sequence; then all
// segments solved at once, each walking its own chunks.
#include "kernels/cuda/plain.h"
#include "kernels/cuda/tokens.cuh"

namespace gka::kernels::cuda {
namespace {

template <typename T>
struct OwnWorkspace {
  Chunk<T> chunk;
  T *h, *u, *rows;

  __host__ __device__ void allocate(Arena& arena, const Sizes& s) {
    h = arena.take<T>(s.h_size());
    u = arena.take<T>(s.u_size());
    rows = arena.take<T>(s.rows_of_tokens());
    chunk.allocate_hot(arena, s);
    chunk.allocate(arena);
  }
};

/// The state after each segment, had it been zero before, and how much of an earlier one is left. The last segment of a
/// sequence only where its end is asked for.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    own_parts(const __grid_constant__ Problem p, Plan plan, SegmentStates<T> states, Sizes s, Grid grid, bool final) {
  auto& w = own_workspace<OwnWorkspace<T>>(grid, [&](auto& own, Arena& arena) { own.allocate(arena, s); });
  for (std::int64_t task = block(); task < plan.count(p) * p.heads; task += blocks()) {
    const Segment segment = plan.segments[task / p.heads];
    const std::int64_t head = task % p.heads, end = segment.begin + segment.length;
    if (segment.last && !final) continue;
    if (s.solves) fill(w.h, s.h_size(), T{0});
    if (s.remembers) fill(w.u, s.u_size(), T{0});
    double key_zeta = 1, value_zeta = 1;
    for (std::int64_t t = segment.begin; t < end; t += s.chunk) {
      const int len = static_cast<int>(min<std::int64_t>(s.chunk, end - t));
      w.chunk.load(p, segment.batch, t, head, len, {.queries = false, .key_lanes = false});
      if (s.solves) advance<T>(w.chunk, true, w.h, w.rows);
      if (s.remembers) advance<T>(w.chunk, false, w.u, w.rows);
      key_zeta *= w.chunk.key_decay().zeta[len - 1];
      value_zeta *= w.chunk.values_decay().zeta[len - 1];
    }
    alone([&] {
      states.key_zeta[task] = key_zeta;
      states.value_zeta[task] = value_zeta;
    });
    if (s.solves) pack_symmetric<T>(w.h, s.ldh(), s.dim, states.h_at(task / p.heads, head));
    if (s.remembers) pack_matrix<T>(w.u, s.ldu(), s.dim, s.values, states.u_at(task / p.heads, head));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    solve_segments(const __grid_constant__ Problem p, const __grid_constant__ Outputs out, Plan plan,
                   SegmentStates<T> states, Sizes s, Grid grid) {
  auto& w =
      own_workspace<ForwardWorkspace<T>>(grid, [&](auto& own, Arena& arena) { own.allocate(arena, s, p.options); });
  for (std::int64_t task = block(); task < plan.count(p) * p.heads; task += blocks()) {
    const Segment segment = plan.segments[task / p.heads];
    const std::int64_t head = task % p.heads;
    if (s.solves) unpack_matrix(states.h_at(task / p.heads, head), s.dim, s.dim, w.op.h, s.ldh());
    if (s.remembers) unpack_matrix(states.u_at(task / p.heads, head), s.dim, s.values, w.u, s.ldu());
    run_tokens(p, out, w, segment.batch, segment.begin, segment.begin + segment.length, head, false);
  }
}

template <typename T>
void forward_as(const Problem& p, const Outputs& out, const Device& device) {
  const Sizes s = sizes_of(p);
  const std::int64_t segments = segments_of(p), tasks = segments * p.heads;
  const Plan plan = start_plan(p, device);
  SegmentStates<T> states{.h = static_cast<T*>(out.saved.h),
                          .u = static_cast<T*>(out.saved.u),
                          .key_zeta = allocate<double>(device, tasks),
                          .value_zeta = allocate<double>(device, tasks),
                          .heads = p.heads,
                          .dim = p.key_dim,
                          .values = p.value_dim};
  if (s.solves && states.h == nullptr) states.h = allocate<T>(device, tasks * p.key_dim * p.key_dim);
  if (s.remembers && states.u == nullptr) states.u = allocate<T>(device, tasks * p.key_dim * p.value_dim);

  const Grid own =
      plan_grid<OwnWorkspace<T>>(own_parts<T>, tasks, device, [&](auto& w, Arena& arena) { w.allocate(arena, s); });
  const bool final = out.h != nullptr || out.u != nullptr;
  launch(own_parts<T>, own.blocks, own.shared_bytes, device.stream, p, plan, states, s, own, final);
  if (s.solves) {
    start_carry<T>(p, plan, device,
                   {.parts = states.h,
                    .zeta = states.key_zeta,
                    .start = static_cast<const T*>(p.h0),
                    .end = static_cast<T*>(out.h),
                    .rows = p.key_dim,
                    .columns = p.key_dim,
                    .symmetric = true,
                    .backwards = false});
  }
  if (s.remembers) {
    start_carry<T>(p, plan, device,
                   {.parts = states.u,
                    .zeta = states.value_zeta,
                    .start = static_cast<const T*>(p.u0),
                    .end = static_cast<T*>(out.u),
                    .rows = p.key_dim,
                    .columns = p.value_dim,
                    .symmetric = false,
                    .backwards = false});
  }
  const Grid grid = plan_grid<ForwardWorkspace<T>>(solve_segments<T>, tasks, device,
                                                   [&](auto& w, Arena& arena) { w.allocate(arena, s, p.options); });
  launch(solve_segments<T>, grid.blocks, grid.shared_bytes, device.stream, p, out, plan, states, s, grid);
}

}  // namespace

void plain::forward(const Problem& problem, const Outputs& outputs, const Device& device) {
  const CurrentDevice current(device.index);
  with_arithmetic(state_dtype(problem), [&]<typename T>(T) { forward_as<T>(problem, outputs, device); });
}

}  // namespace gka::kernels::cuda
