// One token. It costs what reading and writing the states costs, so each is read once: a block holds kColumns columns
// of one head's S in registers, its threads eight to a row with four columns each, and sums over rows meet in shared
// memory.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/memory/memory.h"

namespace gka::kernels::cuda::memory {
namespace one_token {

inline constexpr int kBlock = 256;
inline constexpr int kColumns = 32, kWidth = 4;                   // columns of a block, of a thread
inline constexpr int kRowThreads = kBlock / (kColumns / kWidth);  // threads that share the rows

struct alignas(16) Four {
  float x[kWidth];
};

struct Shared {
  Four sums[2][kRowThreads][kColumns / kWidth];
};

struct Float32 {
  using type = float;
  __device__ static float widen(float x) { return x; }
  __device__ static float round(float x) { return x; }
};
struct BFloat16 {
  using type = std::uint16_t;
  __device__ static float widen(std::uint16_t x) { return bits_to_float(static_cast<std::uint32_t>(x) << 16); }
  __device__ static std::uint16_t round(float x) { return static_cast<std::uint16_t>(two_bfloat16(x, 0)); }
};
struct Float16 {
  using type = std::uint16_t;
  __device__ static float widen(std::uint16_t x) { return half_to_float(x); }
  __device__ static std::uint16_t round(float x) { return float_to_half(x); }
};

/// The sum over all rows of this thread's columns, the same bits in each thread.
__device__ __forceinline__ Four sum_rows(Four (&parts)[kRowThreads][kColumns / kWidth], const Four& own) {
  const int column = thread() % (kColumns / kWidth);
  parts[thread() / (kColumns / kWidth)][column] = own;
  sync();
  Four total{};
#pragma unroll 8
  for (int r = 0; r < kRowThreads; ++r) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total.x[j] += parts[r][column].x[j];
  }
  return total;
}

template <typename Type, int kRows>
__global__ void __launch_bounds__(kBlock) run_step(const __grid_constant__ MemoryStep s) {
  auto& shared = *reinterpret_cast<Shared*>(shared_memory());
  const std::int64_t parts = (s.value_dim + kColumns - 1) / kColumns,
                     unit = block() / parts;  // unit: of [batch, heads]
  const std::int64_t b = unit / s.heads, head = unit % s.heads;
  const std::int64_t column = block() % parts * kColumns + thread() % (kColumns / kWidth) * kWidth;
  const bool there = column < s.value_dim;
  const std::int64_t slot = s.slots != nullptr ? s.slots[b] : b;
  float* state = s.pool + (slot * s.heads + head) * s.key_dim * s.value_dim + column;
  const auto array = [&](const void* data, std::int64_t width) {
    return static_cast<const typename Type::type*>(data) + unit * width;
  };
  const auto *q = array(s.q, s.key_dim), *k = array(s.k, s.key_dim), *v = array(s.v, s.value_dim);

  Four rows[kRows], held{}, asked{};
  float keys[kRows], both = 0;
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    const int i = thread() / (kColumns / kWidth) + n * kRowThreads;
    rows[n] = i < s.key_dim && there ? *reinterpret_cast<const Four*>(state + i * s.value_dim) : Four{};
  }
  const float one_decay = s.log_decay != nullptr && !s.per_channel ? expf(s.log_decay[unit]) : 1;
  const float beta = s.beta != nullptr ? s.beta[unit] : 1;
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    const int i = thread() / (kColumns / kWidth) + n * kRowThreads;
    const bool row = i < s.key_dim;
    const float query = row ? Type::widen(q[i]) : 0;
    const float decay = s.per_channel && row ? expf(s.log_decay[unit * s.key_dim + i]) : one_decay;
    keys[n] = row ? Type::widen(k[i]) : 0;
    both += query * keys[n];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      rows[n].x[j] *= decay;
      held.x[j] += keys[n] * rows[n].x[j];
      asked.x[j] += query * rows[n].x[j];
    }
  }
  // q·k is needed whole: it rides along in the second sum as q·(S + k uᵀ) = q·S + (q·k) u.
  if (s.delta) held = sum_rows(shared.sums[0], held);
  Four write{};
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (there) write.x[j] = beta * (Type::widen(v[column + j]) - (s.delta ? held.x[j] : 0));
    asked.x[j] += both * write.x[j];
  }
  asked = sum_rows(shared.sums[1], asked);
  if (!there) return;
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    const int i = thread() / (kColumns / kWidth) + n * kRowThreads;
    if (i >= s.key_dim) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) rows[n].x[j] += keys[n] * write.x[j];
    *reinterpret_cast<Four*>(state + i * s.value_dim) = rows[n];
  }
  if (thread() / (kColumns / kWidth) != 0) return;
  auto* o = static_cast<typename Type::type*>(s.o) + unit * s.value_dim + column;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) o[j] = Type::round(s.scale * asked.x[j]);
}

template <typename Type>
void launch_step(const MemoryStep& s, void* stream) {
  const std::int64_t grid = s.batch * s.heads * ((s.value_dim + kColumns - 1) / kColumns);
  const auto launch = [&](auto kernel) { launch_blocks_of<kBlock>(kernel, grid, sizeof(Shared), stream, s); };
  if (s.key_dim <= 64) {
    launch(run_step<Type, 64 / kRowThreads>);
  } else if (s.key_dim <= 128) {
    launch(run_step<Type, 128 / kRowThreads>);
  } else {
    launch(run_step<Type, MemoryStep::kMaxKeys / kRowThreads>);
  }
}

}  // namespace one_token
}  // namespace gka::kernels::cuda::memory

namespace gka::kernels::cuda {

void memory_step(const MemoryStep& step, const Device& device) {
  const CurrentDevice current(device.index);
  switch (step.dtype) {
    case DType::float64: throw std::invalid_argument("gka: memory_step has no float64");
    case DType::float32: return memory::one_token::launch_step<memory::one_token::Float32>(step, device.stream);
    case DType::bfloat16: return memory::one_token::launch_step<memory::one_token::BFloat16>(step, device.stream);
    case DType::float16: return memory::one_token::launch_step<memory::one_token::Float16>(step, device.stream);
  }
}

}  // namespace gka::kernels::cuda
