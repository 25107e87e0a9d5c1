// What lies in Saved on a GPU, by path, and that it fits the room the caller has made (saved_segments).
//
//   plain    H and U at the start of every segment, in the accumulation type
//   tiles    of Hopper, D = V = 128: H and U at the start of every chunk as float16 tiles divided by their norms (two
//            chunks to a segment, half the bytes to a number: as many bytes as plain), and behind the tiles of H the
//            numbers that belong to tiles: norms of H, traces of H, norms of U, and
//            which chunks have enough keys beside an outlier
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
  static constexpr std::int64_t kTileBytes = std::int64_t{2} * kDim * kWidth, kNumbers = 4;
  std::int64_t slots = 0;

  constexpr std::int64_t h_norm() const { return slots * kTileBytes; }  // bytes from Saved::h on
  constexpr std::int64_t h_trace() const { return h_norm() + 4 * slots; }
  constexpr std::int64_t u_norm() const { return h_trace() + 4 * slots; }
  constexpr std::int64_t ample() const { return u_norm() + 4 * slots; }
  constexpr SavedBytes bytes() const { return {.h = slots * (kTileBytes + 4 * kNumbers), .u = slots * kTileBytes}; }
};

}  // namespace hopper

}  // namespace gka::kernels::cuda
