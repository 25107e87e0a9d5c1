// Which tokens a chunk has. Chunk *slots* are numbered as the plain path numbers its segments of 128 tokens, two to a
// segment: slot 2s + h is half h of segment s.
#pragma once

#include "kernels/cuda/hopper/sizes.h"
#include "kernels/cuda/segments.cuh"

namespace gka::kernels::cuda::hopper {

/// Consecutive tokens of one sequence.
struct Stretch {
  std::int64_t batch, begin, length;
};

/// Half a segment; no tokens, or fewer than none, where it has no such half.
__device__ inline Stretch tokens_of(const Segment& s, int half) {
  const int skip = half * kChunk;
  return {s.batch, s.begin + skip, min<std::int64_t>(s.length - skip, kChunk)};
}
/// The same where sequences are not packed: nobody needs a plan then.
__device__ inline Stretch tokens_of_row(const Problem& p, int slot) {
  const int slots = 2 * static_cast<int>((p.tokens + kSegment - 1) / kSegment), begin = slot % slots * kChunk;
  return {slot / slots, begin, min<std::int64_t>(p.tokens - begin, kChunk)};
}

}  // namespace gka::kernels::cuda::hopper
