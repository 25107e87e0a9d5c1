// dk and dv where heads share keys and values. The passes write those of every head by itself; these are their sums, in
// the order of the heads, so that the same input gives the same bits.
#pragma once

#include "kernels/cuda/segments.cuh"

namespace gka::kernels::cuda {

/// `by_head`: [batch, tokens, heads, n]; `out` has heads / group heads. Sums are of T.
template <typename T>
__global__ void sum_groups(const __grid_constant__ Problem p, const __grid_constant__ View by_head, std::int64_t n,
                           std::int64_t group, const __grid_constant__ View out) {
  const std::int64_t shared = p.heads / group, count = p.batch * p.tokens * shared * n;
  for (std::int64_t i = block() * kThreads + thread(); i < count; i += blocks() * kThreads) {
    const std::int64_t channel = i % n, head = i / n % shared, row = i / n / shared;
    const std::int64_t b = row / p.tokens, t = row % p.tokens;
    const auto of = [&](std::int64_t member) {
      return read<T>(by_head, offset(by_head, b, t, head * group + member) + channel);
    };
    T total = of(0);
    for (std::int64_t member = 1; member < group; ++member) total += of(member);
    write(out, offset(out, b, t, head) + channel, total);
  }
}

template <typename T>
void start_group_sums(const Problem& p, const View& by_head, std::int64_t n, std::int64_t group, const View& out,
                      const Device& device) {
  const std::int64_t tiles = (p.batch * p.tokens * p.heads / group * n + kThreads - 1) / kThreads;
  launch(sum_groups<T>, min<std::int64_t>(tiles, 1 << 16), 0, device.stream, p, by_head, n, group, out);
}

}  // namespace gka::kernels::cuda
