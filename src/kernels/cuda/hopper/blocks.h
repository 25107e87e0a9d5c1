// How many blocks share the chunks of all heads, where a block takes every so-manieth.
#pragma once

#include <cstdint>
#include <numeric>

namespace gka::kernels::cuda::hopper {

/// At most `blocks`. A head's tasks lie `heads` apart, and a head that forgets fast costs twice what another does (its
/// chunks are refined). A number of blocks with no divisor in common gives each some of every head; as long as nobody
/// has a task more for it, or few more.
constexpr std::int64_t blocks_for_heads(std::int64_t blocks, std::int64_t tasks, std::int64_t heads) {
  constexpr std::int64_t kMany = 16;
  const auto rounds = [tasks](std::int64_t n) { return (tasks + n - 1) / n; };
  std::int64_t fewer = blocks;
  while (fewer > 1 && std::gcd(fewer, heads) > 1) --fewer;
  return fewer < 1 || rounds(fewer) > rounds(blocks) + rounds(blocks) / kMany ? blocks : fewer;
}

}  // namespace gka::kernels::cuda::hopper
