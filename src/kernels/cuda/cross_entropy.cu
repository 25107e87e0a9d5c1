// The loss of a row of logits, and in their place its gradient. A row that fits shared memory is read once.
#include "kernels/cuda/fused.cuh"

namespace gka::kernels::cuda {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

/// Of some of a row's numbers: the largest, where it is, and Σ exp(number − largest).
template <DType kType>
struct Summary {
  float largest, sum;
  int place;

  __device__ __forceinline__ void join(const Summary& other) {
    if (other.sum == 0) return;  // of no numbers
    if (sum == 0) {
      *this = other;
      return;
    }
    const bool theirs = other.largest > largest || (other.largest == largest && other.place < place);
    const float top = other.largest > largest ? other.largest : largest;
    // Equal ones first: the difference of two infinities is no number.
    const float own = largest == top ? 1.0f : exp_as<kType>(largest - top);
    sum = sum * own + other.sum * (other.largest == top ? 1.0f : exp_as<kType>(other.largest - top));
    largest = top;
    if (theirs) place = other.place;
  }

  /// With the summaries of the lanes that differ in bits below `lanes`.
  __device__ __forceinline__ void join_lanes(int lanes) {
    for (int apart = lanes / 2; apart > 0; apart /= 2) {
      join({from_lane(largest, apart), from_lane(sum, apart), from_lane(place, apart)});
    }
  }
};

/// Of all threads' summaries, the same for every thread.
template <DType kType>
__device__ inline Summary<kType> join_threads(Summary<kType> own) {
  static_assert(kWarps <= kLanes);
  auto* parts = reinterpret_cast<Summary<kType>*>(shared_memory());
  own.join_lanes(kLanes);
  if (lane() == 0) parts[warp()] = own;
  sync();
  if (warp() == 0) {
    own = parts[lane() % kWarps];
    own.join_lanes(kWarps);
    if (lane() == 0) parts[kWarps] = own;
  }
  sync();
  return parts[kWarps];
}

constexpr int kJoinBytes = (kWarps + 1) * static_cast<int>(sizeof(Summary<DType::float32>)) / 16 * 16 + 16;

/// A row's numbers from `at` on, −∞ behind its classes.
template <DType kType>
__device__ __forceinline__ Eight read_classes(const void* row, int at, int classes) {
  Eight logits = read_vector<kType, kN>(row, at);
  if (at + kN > classes) {
#pragma unroll
    for (int i = 0; i < kN; ++i) logits.x[i] = at + i < classes ? logits.x[i] : -kInfinity;
  }
  return logits;
}

/// Of the vectors that this thread has of a row.
template <DType kType>
__device__ inline Summary<kType> own_summary(const void* row, int classes, bool with_place) {
  constexpr int kStride = kThreads * kN;
  Summary<kType> own{-kInfinity, 0, classes};
#pragma unroll 4
  for (int at = thread() * kN; at < classes; at += kStride) {
    const Eight logits = read_classes<kType>(row, at, classes);
#pragma unroll
    for (int i = 0; i < kN; ++i) own.largest = logits.x[i] > own.largest ? logits.x[i] : own.largest;
  }
  const float top = finite(own.largest) ? own.largest : 0;  // ∞ − ∞ is no number
#pragma unroll 4
  for (int at = thread() * kN; at < classes; at += kStride) {
    const Eight logits = read_classes<kType>(row, at, classes);
#pragma unroll
    for (int i = 0; i < kN; ++i) own.sum += exp_as<kType>(logits.x[i] - top);
  }
  for (int at = thread() * kN; with_place && own.place == classes && at < classes; at += kStride) {
    const Eight logits = read_classes<kType>(row, at, classes);
#pragma unroll
    for (int i = kN; i-- > 0;) own.place = logits.x[i] == own.largest ? at + i : own.place;
  }
  return own;
}

/// A row per block. Where kHeld, it lies in shared memory from the first look at it to the last; else it is read from
/// memory three times.
template <DType kType, bool kHeld>
__global__ void __launch_bounds__(kThreads, 2) cross_entropy_rows(const __grid_constant__ CrossEntropy c) {
  constexpr int kBytes = kType == DType::float32 ? 4 : 2;
  const std::int64_t index = block(), label = c.labels[index];
  const int classes = static_cast<int>(c.classes), width = static_cast<int>(c.stride);
  char* const there = static_cast<char*>(c.logits) + index * c.stride * kBytes;
  char* const row = kHeld ? shared_memory() + kJoinBytes : there;
  if constexpr (kHeld) {  // each thread what it will read itself
    for (int at = thread() * kN; at < width; at += kThreads * kN) {
      for (int byte = 0; byte < kN * kBytes; byte += 16)
        copy_async(row + at * kBytes + byte, there + at * kBytes + byte);
    }
    wait_for_copies();
  }
  const auto all = join_threads(own_summary<kType>(row, classes, c.predicted != nullptr));
  const bool counts = label >= 0 && label < c.classes;
  if (thread() == 0) {
    const float chosen = counts ? read_as<float, kType>(there, label) : 0;
    c.losses[index] = counts ? all.largest + log(all.sum) - chosen : 0;
    if (c.predicted != nullptr) c.predicted[index] = all.place;
  }
  if (c.scale == nullptr) return;
  sync();  // the label's logit has been read
  const float scale = counts ? *c.scale : 0, factor = scale / all.sum;
#pragma unroll 2
  for (int at = thread() * kN; at < width; at += kThreads * kN) {
    Eight numbers = read_vector<kType, kN>(row, at);
#pragma unroll
    for (int i = 0; i < kN; ++i) numbers.x[i] = exp_as<kType>(numbers.x[i] - all.largest) * factor;
    if (!counts || at + kN > classes || (label >= at && label < at + kN)) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        numbers.x[i] = at + i < classes && counts ? numbers.x[i] - (at + i == label ? scale : 0) : 0;
      }
    }
    write_vector<kType, kN>(there, at, numbers);
  }
}

}  // namespace

void cross_entropy(const CrossEntropy& c, const Device& device) {
  with_type_of(c.dtype, device, [&](auto type) {
    constexpr DType kType = decltype(type)::type;
    const std::int64_t bytes = kJoinBytes + c.stride * (kType == DType::float32 ? 4 : 2);
    // Two blocks of a multiprocessor, so that one computes while the other's row is on its way.
    constexpr std::int64_t kReserved = 1024;  // of each block, by CUDA
    if (2 * (bytes + kReserved) <= shared_memory_per_block(device.index) + kReserved) {
      launch_blocks_of<kThreads>(cross_entropy_rows<kType, true>, c.rows, static_cast<int>(bytes), device.stream, c);
    } else {
      launch(cross_entropy_rows<kType, false>, c.rows, kJoinBytes, device.stream, c);
    }
  });
}

}  // namespace gka::kernels::cuda
