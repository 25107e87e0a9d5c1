#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/products.h"

namespace gka::kernels {
namespace {

constexpr float kMost = 127;

std::int64_t scales_at(std::int64_t in) { return int8_groups(in) * kInt8Group; }

}  // namespace

void to_int8(const float* from, std::int64_t in, void* row) {
  auto* numbers = static_cast<std::int8_t*>(row);
  for (std::int64_t g = 0; g < int8_groups(in); ++g) {
    const std::int64_t begin = g * kInt8Group, end = std::min(begin + kInt8Group, in);
    float largest = 0;
    for (auto i = begin; i < end; ++i) largest = std::max(largest, std::abs(from[i]));
    const float scale = largest / kMost;
    // A group so small that its scale is 0, or not a normal number, is zero: 1/scale would be infinite.
    const float by = scale >= 0x1p-126f ? 1 / scale : 0;
    for (auto i = begin; i < end; ++i) {
      numbers[i] = static_cast<std::int8_t>(std::clamp(std::nearbyint(from[i] * by), -kMost, kMost));
    }
    std::memset(numbers + end, 0, static_cast<std::size_t>(begin + kInt8Group - end));
    std::memcpy(numbers + scales_at(in) + 4 * g, &scale, sizeof scale);
  }
}

void from_int8(const void* row, std::int64_t in, float* to) {
  const auto* numbers = static_cast<const std::int8_t*>(row);
  for (std::int64_t i = 0; i < in; ++i) {
    float scale = 0;
    std::memcpy(&scale, numbers + scales_at(in) + 4 * (i / kInt8Group), sizeof scale);
    to[i] = static_cast<float>(numbers[i]) * scale;
  }
}

}  // namespace gka::kernels
