// Where elements lie, for every backend: constexpr, so that device code may call it too.
#pragma once

#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels {

constexpr std::int64_t offset(const View& view, std::int64_t batch, std::int64_t token, std::int64_t head) {
  return batch * view.batch_stride + token * view.token_stride + head * view.head_stride;
}

/// The head that `head` reads of an array that groups of heads share. In 32 bits, and not at all where nothing is
/// shared: divisions take a GPU long.
constexpr std::int64_t shared_head(std::int64_t head, std::int64_t group) {
  return group == 1 ? head : static_cast<std::int32_t>(head) / static_cast<std::int32_t>(group);
}
/// Of k, and of v, of a Problem or a Step.
template <typename Call>
constexpr std::int64_t key_head(const Call& call, std::int64_t head) {
  return shared_head(head, call.key_group);
}
template <typename Call>
constexpr std::int64_t value_head(const Call& call, std::int64_t head) {
  return shared_head(head, call.value_group);
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
