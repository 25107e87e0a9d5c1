// The sizes that the Hopper kernels are compiled for; smaller problems are padded to them.
#pragma once

namespace gka::kernels::cuda::hopper {

inline constexpr int kChunk = 64;   // of a chunk
inline constexpr int kDim = 128;    // key channels
inline constexpr int kWidth = 128;  // value channels that a pass has at a time

}  // namespace gka::kernels::cuda::hopper
