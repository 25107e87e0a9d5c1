// What lies in Saved on a GPU, by path, and that it fits the room the caller has made (saved_segments).
//
//   plain    H and U at the start of every segment, in the accumulation type
//   tiles    of Hopper, D = V = 64 or 128: H and U at the start of every chunk as float16 tiles divided by their norms
//            (two chunks to a segment, half the bytes to a number: as many bytes as plain), and behind the tiles the
//            numbers that belong to them: norms and traces of H, norms of U, and which chunks have enough keys beside
//            an outlier
#pragma once

#include <cstdint>

#include "gka/kernels.h"
#include "kernels/cuda/hopper/sizes.h"

namespace gka::kernels::cuda {

struct SavedBytes {
  std::int64_t h = 0, u = 0;

  constexpr bool fits(const SavedBytes& room) const { return h <= room.h && u <= room.u; }
};

constexpr SavedBytes bytes_of_states(const Problem& p, std::int64_t segments) {
  const std::int64_t rows = segments * p.heads * p.key_dim * bytes_of(state_dtype(p));
  return {.h = rows * p.key_dim, .u = rows * p.value_dim};
}
constexpr std::int64_t segments_of(const Problem& p) {
  return max_segments(p.cu_seqlens != nullptr, p.batch, p.tokens, p.sequences);
}

/// What the caller provides.
constexpr SavedBytes saved_room(const Problem& p) {
  return bytes_of_states(p, saved_segments(p.cu_seqlens != nullptr, p.batch, p.tokens, p.sequences));
}
constexpr SavedBytes plain_saved(const Problem& p) { return bytes_of_states(p, segments_of(p)); }

namespace hopper {

/// Chunks of heads that a problem has room for: two to a segment.
constexpr std::int64_t slots_of(const Problem& p) { return 2 * segments_of(p) * p.heads; }

struct SavedTiles {
  std::int64_t slots = 0, dim = 0;

  constexpr std::int64_t h_norm() const { return slots * 2 * dim * dim; }  // bytes from Saved::h on
  constexpr std::int64_t h_trace() const { return h_norm() + 4 * slots; }
  constexpr std::int64_t u_norm() const { return slots * 2 * dim * dim; }  // from Saved::u on
  constexpr std::int64_t ample() const { return u_norm() + 4 * slots; }
  constexpr SavedBytes bytes() const { return {.h = h_trace() + 4 * slots, .u = ample() + 4 * slots}; }
};

/// Whether Saved has H and U as tiles: where nothing is padded, and they fit (with D = 64 up to 262,144 tokens).
constexpr bool keeps_tiles(const Problem& p) {
  if (p.options.part != Part::both) return false;
  const int size = size_for(p.key_dim, p.value_dim);
  if (p.key_dim != size || p.value_dim != size) return false;
  return SavedTiles{.slots = slots_of(p), .dim = size}.bytes().fits(saved_room(p));
}

}  // namespace hopper

}  // namespace gka::kernels::cuda
