// Where elements lie, for every backend: constexpr, so that device code may call it too.
#pragma once

#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels {

constexpr std::int64_t offset(const View& view, std::int64_t batch, std::int64_t token, std::int64_t head) {
  return batch * view.batch_stride + token * view.token_stride + head * view.head_stride;
}

/// [batch, tokens, heads, channels] of T (float or double), contiguous.
template <typename T>
constexpr View contiguous_view(const Problem& p, void* data, std::int64_t channels) {
  return {.data = data,
          .dtype = sizeof(T) == 8 ? DType::float64 : DType::float32,
          .batch_stride = p.tokens * p.heads * channels,
          .token_stride = p.heads * channels,
          .head_stride = channels};
}

}  // namespace gka::kernels
