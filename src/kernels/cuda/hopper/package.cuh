// What a chunk's solve begins with, as it lies in memory: `prepare` leaves it for the forward pass, `answers` for the
// backward pass.
#pragma once

#include "kernels/cuda/block.cuh"
#include "kernels/cuda/hopper/sizes.h"

namespace gka::kernels::cuda::hopper {

/// Consecutive tokens of one sequence.
struct Stretch {
  std::int64_t batch, begin, length;
};

inline constexpr int kBadToken = 1, kForgetsAll = 2;

/// Of each token, for the solve.
struct alignas(16) ChunkRows {
  float t[kTokens];       // of the state
  float factor[kTokens];  // of the answer. 0: nothing remembered; NaN: lost
  float inverse_norm[kTokens];
  float alpha[kTokens];
  float row[kTokens];                // G_c − log f_c: m_cj = exp(row + column) for from_c ≤ j ≤ c
  alignas(8) float column[kTokens];  // log β_j − G_j, both G since the last γ = 0
  float unscale[kTokens];            // what the right-hand side was divided by
  int from[kTokens];
  // For the answers: M_jc β_j k_j = exp(since_c + reading_j) of the scaled key.
  float since[kTokens];
  alignas(8) float reading[kTokens];
  float zeta[kTokens];
  int flags[kTokens];  // kBadToken: its key or its gates are not numbers; kForgetsAll: γ = 0
  Stretch chunk;       // no tokens: a slot without a chunk
  int refined;         // whether the chunk is refined
  int schedule;        // of Schedules, where it is not refined
};

/// Where the parts of a package lie, in bytes.
template <int D>
struct Package {
  static constexpr int kMask = kTokens * D * 2, kRhs = kMask + kTokens * kTokens * 2, kRows = kRhs + kTokens * D * 2;
  static constexpr int kBytes = kRows + static_cast<int>(sizeof(ChunkRows));
  static_assert(kBytes % 16 == 0);
};

}  // namespace gka::kernels::cuda::hopper
