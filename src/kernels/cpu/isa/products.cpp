// x Wᵀ with weights as they are stored. Numbers of a row are lanes: a tile of kRows rows of x and kColumns rows of W
// walks along both, widens the weights in registers and adds up kRows × kColumns vectors, whose lanes are summed at the
// end. One row of x (decoding) reads W at the speed of memory, and so do a few; with many (a prompt) the tiles of W
// stay in the first cache. Tiles of every shape add in the same order, so a row of y has the same bits in each.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/isa/chunk.h"
#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/plan.h"
#include "kernels/products.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

constexpr int kLane = kLanes<float>;
// Accumulators, kColumns weights and one x must fit the register file: 32 registers with AVX-512, 16 before.
constexpr int kRows = kVectorBytes == 64 ? 6 : 3;
constexpr int kColumns = kVectorBytes == 64 ? 4 : 3;
constexpr int kColumnsOfOne = kVectorBytes == 64 ? 8 : 6;  // where there is one row of x
constexpr std::int64_t kTaskBytes = 1 << 16;               // of W
constexpr int kCacheLine = 64;                             // bytes
constexpr std::int64_t kAhead = 24 << 10;  // bytes of W that are asked for before they are needed, at least

template <typename Part>
using Narrow [[gnu::vector_size(kLane * sizeof(Part)), gnu::may_alias]] = Part;

/// The first `n` numbers at p, zeros after them.
template <typename V, typename Part>
V load_some(const Part* p, int n) {
  V v{};
  std::memcpy(&v, p, static_cast<std::size_t>(n) * sizeof(Part));
  return v;
}

struct Float32 {
  static constexpr StoredAs kStored = StoredAs::float32;
  static constexpr bool kScaled = false;
  static constexpr int kLine = kCacheLine / 4;  // numbers in a line of the cache
  static Vec<float> at(const char* row, std::int64_t k) { return load(reinterpret_cast<const float*>(row) + k); }
  static Vec<float> last(const char* row, std::int64_t k, int n) {
    return load_some<Vec<float>>(reinterpret_cast<const float*>(row) + k, n);
  }
};

struct Bfloat16 {
  static constexpr StoredAs kStored = StoredAs::bfloat16;
  static constexpr bool kScaled = false;
  static constexpr int kLine = kCacheLine / 2;  // numbers in a line of the cache
  using Half = Narrow<std::uint16_t>;

  static Vec<float> widened(Half half) {
#if defined(__AVX512F__)  // which the compiler would do in halves
    const auto bits = (Vec<std::uint32_t>)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)half) << 16;
#else
    const auto bits = __builtin_convertvector(half, Vec<std::uint32_t>) << 16;
#endif
    Vec<float> v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  static Vec<float> at(const char* row, std::int64_t k) {
    Half half;
    std::memcpy(&half, row + 2 * k, sizeof half);
    return widened(half);
  }
  static Vec<float> last(const char* row, std::int64_t k, int n) {
    return widened(load_some<Half>(reinterpret_cast<const std::uint16_t*>(row) + k, n));
  }
};

/// A line is a group: its sum is multiplied by the scale, not each number.
struct Int8 {
  static constexpr StoredAs kStored = StoredAs::int8;
  static constexpr bool kScaled = true;
  static constexpr int kLine = kCacheLine / 1;  // numbers in a line of the cache
  static_assert(kLine == kInt8Group);
  using Byte = Narrow<std::int8_t>;

  /// The compiler takes a widening to four times the bits lane by lane, so that has to be spelled out.
  static Vec<std::int32_t> widened(Byte byte) {
#if defined(__AVX512F__)
    return (Vec<std::int32_t>)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)byte);
#elif defined(__AVX2__)
    return (Vec<std::int32_t>)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)byte));
#else
    return __builtin_convertvector(__builtin_convertvector(byte, Narrow<std::int16_t>), Vec<std::int32_t>);
#endif
  }
  static Vec<float> at(const char* row, std::int64_t k) {
    Byte byte;
    std::memcpy(&byte, row + k, sizeof byte);
    return __builtin_convertvector(widened(byte), Vec<float>);
  }
  /// Rows are filled up with zeros.
  static Vec<float> last(const char* row, std::int64_t k, int) { return at(row, k); }
  static float scale(const char* row, std::int64_t in, std::int64_t k) {
    float value;
    std::memcpy(&value, row + int8_groups(in) * kInt8Group + 4 * (k / kInt8Group), sizeof value);
    return value;
  }
};

/// Halves are added until one lane is left.
template <int kWidth>
[[gnu::always_inline]] inline float sum_of(const float* lanes) {
  if constexpr (kWidth == 1) {
    return lanes[0];
  } else {
    float half[kWidth / 2];
    for (int i = 0; i < kWidth / 2; ++i) half[i] = lanes[i] + lanes[i + kWidth / 2];
    return sum_of<kWidth / 2>(half);
  }
}

[[gnu::always_inline]] inline float sum(Vec<float> v) {
  float lanes[kLane];
  std::memcpy(lanes, &v, sizeof v);
  return sum_of<kLane>(lanes);
}

struct Stripe {
  const float* x;
  std::int64_t x_stride;
  const char* w;
  std::int64_t w_stride;  // bytes
  std::int64_t in;
  float* y;
  std::int64_t y_stride;
};

/// Asks for a line of each of kN rows further on: left to itself the hardware would notice each row anew.
template <int kN>
[[gnu::always_inline]] inline void ask_ahead(const char* row, std::int64_t stride) {
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n) __builtin_prefetch(row + n * stride, 0, 2);
}

template <int kM, int kN>
struct Sums {
  Vec<float> of[kM][kN] = {};

  template <typename Weight, typename Input>
  [[gnu::always_inline]] void add(const Stripe& s, const Weight& weight, const Input& input) {
    Vec<float> w[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) w[n] = weight(s.w + n * s.w_stride);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const Vec<float> x = input(s.x + m * s.x_stride);
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) of[m][n] += x * w[n];
    }
  }
};

/// Numbers begin … end − 1 of the rows, at most a line of the cache and from where one begins.
template <typename Weights, int kM, int kN>
[[gnu::always_inline]] inline void add_line(const Stripe& s, std::int64_t begin, std::int64_t end, Sums<kM, kN>& sums) {
  Sums<kM, kN> group;
  auto& to = Weights::kScaled ? group : sums;
  auto k = begin;
#pragma GCC unroll 4
  for (; k + kLane <= end; k += kLane) {
    to.add(s, [&](const char* row) { return Weights::at(row, k); }, [&](const float* row) { return load(row + k); });
  }
  if (const int rest = static_cast<int>(end - k); rest > 0) {
    to.add(
        s, [&](const char* row) { return Weights::last(row, k, rest); },
        [&](const float* row) { return load_some<Vec<float>>(row + k, rest); });
  }
  if constexpr (Weights::kScaled) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      const float scale = Weights::scale(s.w + n * s.w_stride, s.in, begin);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) sums.of[m][n] += group.of[m][n] * scale;
    }
  }
}

template <typename Weights, int kM, int kN>
void tile(const Stripe& s) {
  Sums<kM, kN> sums;
  const auto tile_bytes = kN * s.w_stride;
  const char* const ahead = s.w + (kAhead / tile_bytes + 1) * tile_bytes;
  std::int64_t k = 0, byte = 0;
  for (; k + Weights::kLine <= s.in; k += Weights::kLine, byte += kCacheLine) {
    ask_ahead<kN>(ahead + byte, s.w_stride);
    add_line<Weights>(s, k, k + Weights::kLine, sums);
  }
  for (; byte < s.w_stride; byte += kCacheLine) ask_ahead<kN>(ahead + byte, s.w_stride);
  if (k < s.in) add_line<Weights>(s, k, s.in, sums);
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) s.y[m * s.y_stride + n] = sum(sums.of[m][n]);
  }
}

/// All rows of x with kN rows of W.
template <typename Weights, int kN>
void all_rows(Stripe s, std::int64_t rows) {
  const auto step = [&](auto count) {
    constexpr int kM = decltype(count)::value;
    for (; rows >= kM; rows -= kM) {
      tile<Weights, kM, kN>(s);
      s.x += kM * s.x_stride;
      s.y += kM * s.y_stride;
    }
  };
  // Groups are summed by themselves and need registers of their own.
  if constexpr (kRows <= 4 || !Weights::kScaled) step(Constant<kRows>{});
  if constexpr (kRows > 4) step(Constant<4>{});
  step(Constant<2>{});
  step(Constant<1>{});
}

template <typename Weights>
struct Kernel {
  const Products& p;
  const StoredMatrix& matrix;
  std::int64_t bytes = row_bytes(Weights::kStored, p.in);

  Stripe stripe(std::int64_t n) const {
    return {.x = p.x,
            .x_stride = p.x_stride,
            .w = static_cast<const char*>(matrix.data) + n * bytes,
            .w_stride = bytes,
            .in = p.in,
            .y = matrix.y + n,
            .y_stride = matrix.y_stride};
  }

  /// Rows begin … end − 1 of W.
  void run(std::int64_t begin, std::int64_t end) const {
    const auto steps = [&](auto columns) {
      constexpr int kN = decltype(columns)::value;
      for (; begin + kN <= end; begin += kN) all_rows<Weights, kN>(stripe(begin), p.rows);
    };
    if (p.rows == 1) steps(Constant<kColumnsOfOne>{});
    steps(Constant<kColumns>{});
    steps(Constant<1>{});
  }
};

struct Task {
  const StoredMatrix* matrix;
  std::int64_t begin, end;
};

std::vector<Task> tasks_of(const Products& p) {
  std::vector<Task> tasks;
  for (const auto& matrix : p.matrices) {
    const auto rows = std::max<std::int64_t>(1, kTaskBytes / row_bytes(matrix.type, p.in) / 8) * 8;
    for (std::int64_t n = 0; n < matrix.out; n += rows) {
      tasks.push_back({.matrix = &matrix, .begin = n, .end = std::min(n + rows, matrix.out)});
    }
  }
  return tasks;
}

void run_task(const Products& p, const Task& task) {
  switch (task.matrix->type) {
    case StoredAs::float32: return Kernel<Float32>{p, *task.matrix}.run(task.begin, task.end);
    case StoredAs::bfloat16: return Kernel<Bfloat16>{p, *task.matrix}.run(task.begin, task.end);
    case StoredAs::int8: return Kernel<Int8>{p, *task.matrix}.run(task.begin, task.end);
  }
}

/// Each worker walks a stretch of its own, so that what it asks for ahead is what it reads next, and then helps others
/// with what is left of theirs.
template <typename Run>
void run_in_stretches(const Executor& executor, const std::vector<Task>& tasks, const Run& run) {
  struct alignas(kCacheLine) Stretch {
    std::atomic<std::int64_t> next;
    std::int64_t end;
  };
  const auto count = std::ssize(tasks);
  const auto workers = static_cast<int>(std::min<std::int64_t>(std::max(executor.threads, 1), count));
  std::vector<Stretch> stretches(static_cast<std::size_t>(workers));
  for (int i = 0; i < workers; ++i) {
    auto& stretch = stretches[static_cast<std::size_t>(i)];
    stretch.next = count * i / workers;
    stretch.end = count * (i + 1) / workers;
  }
  const auto worker = [&](int first) {
    for (int i = 0; i < workers; ++i) {
      auto& stretch = stretches[static_cast<std::size_t>((first + i) % workers)];
      for (auto n = stretch.next++; n < stretch.end; n = stretch.next++) run(tasks[static_cast<std::size_t>(n)]);
    }
  };
  if (workers > 1) return executor.run(workers, worker);
  if (workers == 1) worker(0);
}

}  // namespace

void products(const Products& p, const Executor& executor) {
  std::int64_t numbers = 0;
  for (const auto& matrix : p.matrices) numbers += matrix.out * p.in;
  run_in_stretches(for_elements(executor, numbers), tasks_of(p), [&](const Task& task) { run_task(p, task); });
}

}  // namespace gka::kernels::cpu::GKA_ISA
