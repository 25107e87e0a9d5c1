// The first pass of both directions: the states at the start of every segment, carried along each sequence. Rows of a
// state do not depend on each other, so a task is a block of rows of H or of U.
#pragma once

#include <memory>

#include "kernels/cpu/isa/chunk.h"
#include "kernels/cpu/plan.h"

namespace gka::kernels::cpu::GKA_ISA {

inline constexpr int kRowBlock = 128;

/// Where the walk keeps its states: contiguous [segments, heads, D, D] and [segments, heads, D, V].
template <typename T>
struct SegmentStates {
  T* h = nullptr;
  T* u = nullptr;
  std::int64_t heads = 0, dim = 0, values = 0;

  T* h_at(std::int64_t segment, std::int64_t head) const { return h + (segment * heads + head) * dim * dim; }
  T* u_at(std::int64_t segment, std::int64_t head) const { return u + (segment * heads + head) * dim * values; }
};

template <typename T>
SegmentStates<T> segment_states(const Problem& p, void* h, void* u) {
  return {.h = static_cast<T*>(h), .u = static_cast<T*>(u), .heads = p.heads, .dim = p.key_dim, .values = p.value_dim};
}

/// The symmetric part of h0, or 0.
template <typename T>
void load_initial_keys(const Problem& p, std::int64_t sequence, std::int64_t head, T* h, int ld) {
  const auto* h0 = static_cast<const T*>(p.h0);
  const int dim = static_cast<int>(p.key_dim);
  if (h0 != nullptr) h0 += (sequence * p.heads + head) * p.key_dim * p.key_dim;
  unpack_matrix(h0, dim, dim, h, ld);
  if (h0 != nullptr) symmetrise(h, dim, ld);
}

template <typename T>
void load_initial_values(const Problem& p, std::int64_t sequence, std::int64_t head, T* u, int ld) {
  const auto* u0 = static_cast<const T*>(p.u0);
  if (u0 != nullptr) u0 += (sequence * p.heads + head) * p.key_dim * p.value_dim;
  unpack_matrix(u0, static_cast<int>(p.key_dim), static_cast<int>(p.value_dim), u, ld);
}

template <typename T>
struct WalkWorkspace {
  Chunk<T> chunk;
  StatePair<T> state;
  Buffer<T> scratch;

  explicit WalkWorkspace(const Sizes& s)
      : chunk(s), state(s), scratch(static_cast<std::int64_t>(s.chunk) * std::max(chunk.ldk, chunk.ldv)) {}
};

template <typename T>
void walk_rows(const Problem& p, const Plan& plan, const SegmentStates<T>& states, std::int64_t n, std::int64_t head,
               int from, bool keys, WalkWorkspace<T>& w) {
  const int dim = static_cast<int>(p.key_dim), to = std::min(from + kRowBlock, dim);
  const int columns = keys ? dim : static_cast<int>(p.value_dim);
  T* matrix = keys ? w.state.h : w.state.u;
  const int ld = keys ? w.state.ldh : w.state.ldu;
  keys ? load_initial_keys(p, n, head, matrix, ld) : load_initial_values(p, n, head, matrix, ld);
  for (std::int64_t s = plan.begin[n]; s < plan.begin[n + 1]; ++s) {
    const Segment& segment = plan.segments[s];
    T* out = keys ? states.h_at(s, head) : states.u_at(s, head);
    pack_matrix<T>(matrix + static_cast<std::int64_t>(from) * ld, ld, to - from, columns,
                   out + static_cast<std::int64_t>(from) * columns);
    for (std::int64_t t = 0; !segment.last && t < segment.tokens.length; t += w.chunk.size.chunk) {
      const int len = static_cast<int>(std::min<std::int64_t>(w.chunk.size.chunk, segment.tokens.length - t));
      w.chunk.load(p, segment.tokens.batch, segment.tokens.begin + t, head, len,
                   {.queries = false, .key_lanes = false});
      keys ? advance_keys<T>(w.chunk, matrix, matrix, ld, from, to, w.scratch)
           : advance_values<T>(w.chunk, matrix, matrix, ld, from, to, w.scratch);
    }
  }
}

template <typename T>
void walk_states(const Problem& p, const Plan& plan, const SegmentStates<T>& states, const Executor& executor) {
  const Sizes sizes = sizes_of(p);
  const std::int64_t blocks = (p.key_dim + kRowBlock - 1) / kRowBlock;
  const std::int64_t halves = (sizes.solves ? 1 : 0) + (sizes.remembers ? 1 : 0);
  const std::int64_t per_head = halves * blocks;
  parallel_tasks(
      executor, p.sequences * p.heads * per_head, [&] { return std::make_unique<WalkWorkspace<T>>(sizes); },
      [&](std::int64_t task, WalkWorkspace<T>& w) {
        const std::int64_t head = task / per_head % p.heads, n = task / per_head / p.heads;
        const bool keys = sizes.solves && task % per_head < blocks;
        walk_rows(p, plan, states, n, head, static_cast<int>(task % blocks) * kRowBlock, keys, w);
      });
}

}  // namespace gka::kernels::cpu::GKA_ISA
