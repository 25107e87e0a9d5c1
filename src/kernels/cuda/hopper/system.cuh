// What a chunk's solve begins with, as it lies in memory: `chunk_system` leaves it for the forward pass, `bwd_rhs_du`
// for the backward pass.
#pragma once

#include "kernels/cuda/hopper/stretch.cuh"

namespace gka::kernels::cuda::hopper {

inline constexpr int kBadToken = 1, kForgetsAll = 2;

/// Of each token, for the solve.
struct alignas(16) SystemRows {
  float t[kChunk];       // of the state
  float factor[kChunk];  // of x. 0: nothing remembered; NaN: lost
  float inverse_norm[kChunk];
  float alpha[kChunk];
  float row[kChunk];                // G_c − log f_c: m_cj = exp(row + column) for from_c ≤ j ≤ c
  alignas(8) float column[kChunk];  // log β_j − G_j, both G since the last γ = 0
  float unscale[kChunk];            // what the right-hand side was divided by
  int from[kChunk];
  // For o: M_jc β_j k_j = exp(since_c + reading_j) of the scaled key.
  float since[kChunk];
  alignas(8) float reading[kChunk];
  float zeta[kChunk];
  int flags[kChunk];  // kBadToken: its key or its gates are not numbers; kForgetsAll: γ = 0
  Stretch chunk;      // no tokens: a slot without a chunk
  int refined;        // how: Refined of schedule.h
  int schedule;       // of Schedules, where it is not refined
};

/// Where the parts of a system lie, in bytes.
template <int D>
struct SystemLayout {
  static constexpr int kMask = kChunk * D * 2, kRhs = kMask + kChunk * kChunk * 2, kRows = kRhs + kChunk * D * 2;
  static constexpr int kBytes = kRows + static_cast<int>(sizeof(SystemRows));
  static_assert(kBytes % 16 == 0);
};

}  // namespace gka::kernels::cuda::hopper
