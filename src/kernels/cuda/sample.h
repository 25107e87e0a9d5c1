// Draws a token from each row of logits, in one pass over them and one more: the first token at which the running sum
// of e^((logit − most) / temperature) is above the row's share of the whole. With a temperature of 0 the likeliest
// token, of equals the first. Beside it its log-probability, without the temperature.
//
// A row is a block's: what it gives does not depend on the other rows.
#pragma once

#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels::cuda {

struct Sample {
  static constexpr std::int64_t kMostTokens = 1 << 19;

  std::int64_t rows = 0, tokens = 0;  // of a row: from 1 to kMostTokens
  std::int64_t stride = 0;            // from one row to the next
  DType dtype = DType::float32;       // or bfloat16 or float16
  const void* logits = nullptr;
  const double* how = nullptr;  // [rows, 2]: temperature, share in [0, 1)
  double* drawn = nullptr;      // [rows, 2]: token, log-probability
};
void sample(const Sample& s, const Device& device);

}  // namespace gka::kernels::cuda
