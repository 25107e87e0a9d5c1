// Time is lost here where memory stands still: between kernels. So each lets the next begin at once, and a kernel's
// first act, before it waits for those ahead of it, is to start copies of its weights into shared memory: of all of
// them where that is enough. A warp of a block has a slice of the depth, the same for all outputs, and its own ring of
// pieces of it.
//
// Eight outputs at a time are the columns of a product on tensor cores whose rows are x's: up to eight cost what one
// does. What the warps have of their slices is added up in shared memory, in their order.
#include "kernels/cuda/small_products.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/held_products.cuh"
#include "kernels/cuda/memory/mma.cuh"
#include "kernels/cuda/vectors.cuh"
#include "kernels/products.h"

namespace gka::kernels::cuda {
namespace few {

using memory::Bits;

constexpr auto kType = DType::bfloat16;
constexpr int kTogether = 8;  // numbers that a lane copies at a time
constexpr int kOwnWarps = 8, kOwnThreads = kOwnWarps * kLanes;
constexpr int kColumns = 8;                      // outputs of a product
constexpr int kRows = SmallProducts::kMostRows;  // of x
constexpr int kPiece = 128;                      // of the depth, that are copied together
constexpr int kPieces = 6;                       // under way
constexpr int kDeep = 32;                        // of the depth, at a time
constexpr int kRowLanes = kLanes / kColumns;     // that copy an output's numbers

/// Eight rows of weights of x's own type: a piece of each.
struct Plain {
  static constexpr int kGranule = kDeep;
  struct Slot {
    Bits numbers[kColumns][kPiece + memory::kPad];
  };
  __device__ static __forceinline__ void fetch(Slot& slot, const void* weight, std::int64_t depth, std::int64_t outputs,
                                               std::int64_t first, std::int64_t from, int count) {
    const int row = lane() / kRowLanes, filled = (count + kGranule - 1) / kGranule * kGranule;
    const bool mine = first + row < outputs;
    const Bits* numbers = static_cast<const Bits*>(weight) + (mine ? (first + row) * depth + from : 0);
    for (int at = lane() % kRowLanes * kTogether; at < filled; at += kRowLanes * kTogether) {
      const bool there = mine && at < count;
      copy_async_or_zero<16>(&slot.numbers[row][at], numbers + (there ? at : 0), there);
    }
  }
  /// sums += x Wᵀ of the piece; `x` is where the lane's row and block of it begin.
  __device__ static __forceinline__ void multiply(float (&sums)[4], const Slot& slot, const Bits* x, int count) {
    const Bits* weights = &slot.numbers[lane() % 8][lane() / 8 * 8];
    const Bits* rows = x + lane() / 8 * 8;
#pragma unroll
    for (int at = 0; at < kPiece; at += kDeep) {
      if (at >= count) break;
      std::uint32_t a[4], b[4];
      memory::load_blocks<false>(a, rows + at);
      memory::load_blocks<false>(b, weights + at);
      memory::multiply_add(sums, {a[0], 0, a[1], 0}, b[0], b[1]);
      memory::multiply_add(sums, {a[2], 0, a[3], 0}, b[2], b[3]);
    }
  }
};

/// Bytes with a scale for each group, which follow the row's numbers. Rows begin at multiples of four bytes. All bytes
/// are numbers of bfloat16 as they are; the scales come after the products of a group.
struct Bytes {
  static constexpr int kGranule = kInt8Group, kGroups = kPiece / kInt8Group;
  struct Slot {
    std::int8_t numbers[kColumns][kPiece + 16];
    float scales[kColumns][kGroups];
  };
  __device__ static __forceinline__ void fetch(Slot& slot, const void* weight, std::int64_t depth, std::int64_t outputs,
                                               std::int64_t first, std::int64_t from, int count) {
    const int row = lane() / kRowLanes, filled = (count + kGranule - 1) / kGranule * kGranule;
    const std::int64_t groups = (depth + kInt8Group - 1) / kInt8Group, row_bytes = groups * (kInt8Group + 4);
    const bool mine = first + row < outputs;
    const char* own = static_cast<const char*>(weight) + (mine ? (first + row) * row_bytes : 0);
    if (row_bytes % 16 == 0) {
      copy<16>(&slot.numbers[row][0], own + from, filled, mine);
    } else {
      copy<4>(&slot.numbers[row][0], own + from, filled, mine);
    }
    copy<4>(&slot.scales[row][0], own + groups * kInt8Group + from / kInt8Group * 4, filled / kInt8Group * 4, mine);
  }
  __device__ static __forceinline__ void multiply(float (&sums)[4], const Slot& slot, const Bits* x, int count) {
    // Which number of sixteen stands where in a product is free, as long as both sides agree: a lane takes four
    // neighbours.
    const int four = lane() % 4 * 4;
    const std::int8_t* weights = &slot.numbers[lane() / 4][four];
    const Bits* rows = x + four;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group * kInt8Group >= count) break;
      float part[4] = {};
#pragma unroll
      for (int at = group * kInt8Group; at < (group + 1) * kInt8Group; at += 16) {
        const auto* of_x = reinterpret_cast<const std::uint32_t*>(rows + at);
        const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(weights + at);
        memory::multiply_add(part, {of_x[0], 0, of_x[1], 0}, two_bfloat16(byte(word, 0), byte(word, 1)),
                             two_bfloat16(byte(word, 2), byte(word, 3)));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[i] += slot.scales[lane() % 4 * 2 + i][group] * part[i];
    }
  }

 private:
  template <int kBytes>
  __device__ static __forceinline__ void copy(void* to, const char* from, int bytes, bool there) {
    for (int at = lane() % kRowLanes * kBytes; at < bytes; at += kRowLanes * kBytes) {
      copy_async_or_zero<kBytes>(static_cast<char*>(to) + at, from + (there ? at : 0), there);
    }
  }
  /// By the digits of 2²³ + n, where n is what lies there plus 128.
  __device__ static __forceinline__ float byte(std::uint32_t word, int which) {
    return bits_to_float(0x4b000000u | ((word ^ 0x80808080u) >> (8 * which) & 0xffu)) - 8388736.0f;
  }
};

/// How x lies in shared memory: rows as long as the depth up to a whole number of steps, and the padding of products.
__device__ __host__ constexpr std::int64_t filled_up(std::int64_t depth) {
  return (depth + kInt8Group - 1) / kInt8Group * kInt8Group;
}
__device__ __host__ constexpr std::int64_t pitch_of(std::int64_t depth) { return filled_up(depth) + memory::kPad; }

/// What the warps have of their slices; behind it lie x, [rows, pitch_of(depth)], and the rings.
template <int kMatrices>
struct Sums {
  float of[2][kMatrices][kOwnWarps][kRows * kColumns];
};

/// How the products are cut: columns of kColumns outputs go round the blocks, slices of the depth to the warps, and a
/// slice is multiplied in pieces. The host sizes the rings by it, and a warp finds its own.
template <typename Stored, int kMatrices>
struct Cut {
  static constexpr int kAhead = kPieces / kMatrices;
  static constexpr int kAll = kOwnWarps * Stored::kGranule;

  /// Of all matrices; the two of a gated product go together.
  __device__ __host__ static __forceinline__ std::int64_t columns(const SmallProducts& p) {
    std::int64_t columns = 0;
    for (int i = 0; i < (kMatrices == 2 ? 1 : p.count); ++i) columns += (p.of[i].outputs + kColumns - 1) / kColumns;
    return columns;
  }
  __device__ __host__ static __forceinline__ int slice(const SmallProducts& p) {
    return static_cast<int>((p.depth + kAll - 1) / kAll) * Stored::kGranule;
  }
  __device__ __host__ static __forceinline__ int parts(int slice) { return (slice + kPiece - 1) / kPiece; }
  /// Pieces that a warp's ring has room for, a slot for each matrix: kAhead, or all that a block has at most.
  __device__ __host__ static __forceinline__ std::int64_t ring(std::int64_t columns, int parts, std::int64_t blocks) {
    const std::int64_t most = (columns + blocks - 1) / blocks * parts;
    return most < kAhead ? most : kAhead;
  }
};

/// What the block multiplies, in order: columns of outputs, and of each the pieces of this warp's slice of the depth.
template <typename Stored, int kMatrices>
struct Pieces {
  static constexpr int kAhead = Cut<Stored, kMatrices>::kAhead;
  const SmallProducts& p;
  typename Stored::Slot* ring;
  int slice, parts, total;  // of the depth; pieces of the slice; of all

  __device__ __forceinline__ Pieces(const SmallProducts& products, char* rings) : p(products) {
    using Own = Cut<Stored, kMatrices>;
    const std::int64_t columns = Own::columns(p);
    const std::int64_t mine = columns > block() ? (columns - block() + blocks() - 1) / blocks() : 0;
    slice = Own::slice(p);
    parts = Own::parts(slice);
    total = static_cast<int>(mine) * parts;
    const std::int64_t room = Own::ring(columns, parts, blocks());
    ring = reinterpret_cast<typename Stored::Slot*>(rings) + warp() * room * kMatrices;
  }
  __device__ __forceinline__ typename Stored::Slot& slot(int piece, int matrix) const {
    return ring[piece % kAhead * kMatrices + matrix];
  }

  struct Place {
    int matrix;
    std::int64_t output;  // the first
  };
  __device__ __forceinline__ Place place_of(int unit) const {
    Place place{0, (block() + blocks() * unit) * kColumns};
    if (kMatrices == 1) {
      while (place.output >= p.of[place.matrix].outputs) {
        place.output -= (p.of[place.matrix++].outputs + kColumns - 1) / kColumns * kColumns;
      }
    }
    return place;
  }
  /// Of the depth: where a piece begins, and how much of it there is.
  __device__ __forceinline__ int from(int part) const { return warp() * slice + part * kPiece; }
  __device__ __forceinline__ int count(int part) const {
    const int in_slice = slice - part * kPiece, left = static_cast<int>(p.depth) - from(part);
    const int most = in_slice < kPiece ? in_slice : kPiece;
    return left < most ? left : most;
  }
  __device__ __forceinline__ void fetch(int piece) const {
    const int part = piece % parts;
    if (piece < total && count(part) > 0) {
      const Place place = place_of(piece / parts);
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        const SmallProducts::Matrix& matrix = p.of[place.matrix + m];
        Stored::fetch(slot(piece, m), matrix.weight, p.depth, matrix.outputs, place.output, from(part), count(part));
      }
    }
    end_group();
  }
};

/// x, or norm ⊙ x / rms(x) as add_norm has it, into shared memory, a row by each warp. The first of the norm's weights
/// are in registers before x is there, and x stays in them, as far as they go.
struct Rows {
  static constexpr int kHeld = 4, kStep = kLanes * kTogether;
  Numbers<kTogether> weights[kHeld] = {};

  __device__ static __forceinline__ int channel(int v) { return lane() * kTogether + v * kStep; }

  __device__ __forceinline__ void prepare(const SmallProducts& p) {
    if (p.norm == nullptr || warp() >= p.rows) return;
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (channel(v) < p.depth) weights[v] = read_vector<DType::float32, kTogether>(p.norm, channel(v));
    }
  }

  __device__ __forceinline__ void write(const SmallProducts& p, Bits* x) const {
    const int depth = static_cast<int>(p.depth), row = warp();
    if (row >= p.rows) return;
    const std::int64_t first = row * p.depth;
    Bits* own = x + row * pitch_of(depth);
    for (int at = depth + lane(); at < filled_up(depth); at += kLanes) own[at] = 0;
    Words<kTogether> held[kHeld] = {};
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (channel(v) < depth) held[v] = hold_vector<kType, kTogether>(p.x, first + channel(v));
    }
    if (p.norm == nullptr) {
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        if (channel(v) < depth) *reinterpret_cast<Words<kTogether>*>(own + channel(v)) = held[v];
      }
#pragma unroll 4
      for (int at = channel(kHeld); at < depth; at += kStep) {
        *reinterpret_cast<Words<kTogether>*>(own + at) = hold_vector<kType, kTogether>(p.x, first + at);
      }
      return;
    }
    float squares = 0;
    const auto add = [&](const Numbers<kTogether>& numbers) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) squares += numbers.x[i] * numbers.x[i];
    };
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (channel(v) < depth) add(unpack<kType>(held[v]));
    }
#pragma unroll 4
    for (int at = channel(kHeld); at < depth; at += kStep) add(read_vector<kType, kTogether>(p.x, first + at));
    const float mean = sum_lanes(squares) / static_cast<float>(depth);
    const float root = inverse_as<kType>(sqrt_as<kType>(mean + p.eps));
    const auto put = [&](int at, Numbers<kTogether> numbers, const Numbers<kTogether>& weight) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) numbers.x[i] *= root * weight.x[i];
      write_vector<kType, kTogether>(own, at, numbers);
    };
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (channel(v) < depth) put(channel(v), unpack<kType>(held[v]), weights[v]);
    }
#pragma unroll 4
    for (int at = channel(kHeld); at < depth; at += kStep) {
      put(at, read_vector<kType, kTogether>(p.x, first + at), read_vector<DType::float32, kTogether>(p.norm, at));
    }
  }
};

__device__ __forceinline__ float rounded_one(float value) { return rounded<kType>(Numbers<2>{{value, 0}}).x[0]; }

template <typename Stored, int kMatrices>
__global__ void __launch_bounds__(kOwnThreads, 3) multiply_few(const __grid_constant__ SmallProducts p) {
  using Own = Pieces<Stored, kMatrices>;
  let_next_start();
  auto& sums_of_slices = *reinterpret_cast<Sums<kMatrices>*>(shared_memory());
  Bits* kept = reinterpret_cast<Bits*>(shared_memory() + sizeof(Sums<kMatrices>));
  const Own pieces(p, reinterpret_cast<char*>(kept + p.rows * pitch_of(p.depth)));
#pragma unroll
  for (int i = 0; i < Own::kAhead; ++i) pieces.fetch(i);
  Rows rows;
  rows.prepare(p);
  wait_for_earlier();
  rows.write(p, kept);
  sync();

  // Rows that there are not are the last one again.
  const auto row_of = [&](int row) { return row < p.rows ? row : static_cast<int>(p.rows) - 1; };
  const Bits* x = kept + row_of(std::is_same_v<Stored, Plain> ? lane() % 8 : lane() / 4) * pitch_of(p.depth);
  const int row = thread() / kColumns, column = thread() % kColumns;
  int piece = 0;
  for (int unit = 0; piece < pieces.total; ++unit) {
    const typename Own::Place place = pieces.place_of(unit);
    const SmallProducts::Matrix& matrix = p.of[place.matrix];
    const bool mine = row < p.rows && place.output + column < matrix.outputs;
    const std::int64_t at = row * matrix.outputs + place.output + column;
    const float before = mine && p.onto != nullptr ? read_as<float, kType>(p.onto, at) : 0;
    float sums[kMatrices][4] = {};
    for (int part = 0; part < pieces.parts; ++part, ++piece) {
      wait_for_groups_but<Own::kAhead - 1>();
      sync_warp();
      const int count = pieces.count(part);
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        if (count > 0) {
          Stored::multiply(sums[m], pieces.slot(piece, m), x + pieces.from(part), count);
        }
      }
      sync_warp();
      pieces.fetch(piece + Own::kAhead);
    }
    auto& sums_of = sums_of_slices.of[unit % 2];
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sums_of[m][warp()][lane() / 4 * kColumns + lane() % 4 * 2 + i] = sums[m][i];
    }
    sync();
    if (!mine) continue;
    float total[kMatrices] = {};
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
      for (int w = 0; w < kOwnWarps; ++w) total[m] += sums_of[m][w][thread()];
      total[m] = rounded_one(total[m]);  // as a product by itself would be
    }
    const float y = kMatrices == 1 ? before + total[0] : total[0] * sigmoid_as<kType>(total[0]) * total[kMatrices - 1];
    static_cast<Bits*>(matrix.y)[at] = static_cast<Bits>(two_bfloat16(y, 0));
  }
  wait_for_copies();
}

template <typename Stored, int kMatrices>
void start(const SmallProducts& p, const Device& device) {
  using Own = Cut<Stored, kMatrices>;
  const std::int64_t columns = Own::columns(p), grid = std::min<std::int64_t>(multiprocessors(device.index), columns);
  const std::int64_t slots = kOwnWarps * kMatrices * Own::ring(columns, Own::parts(Own::slice(p)), grid);
  const std::size_t bytes = sizeof(Sums<kMatrices>) + static_cast<std::size_t>(p.rows * pitch_of(p.depth)) * 2 +
                            static_cast<std::size_t>(slots) * sizeof(typename Stored::Slot);
  launch_early<kOwnThreads>(multiply_few<Stored, kMatrices>, grid, static_cast<int>(bytes), device.index, device.stream,
                            p);
}

template <typename Stored>
void start_with(const SmallProducts& p, const Device& device) {
  p.gated ? start<Stored, 2>(p, device) : start<Stored, 1>(p, device);
}

}  // namespace few

void small_products(const SmallProducts& p, const Device& device) {
  if (p.rows < 1 || p.rows > SmallProducts::kMostRows || p.count > SmallProducts::kMostMatrices ||
      p.depth % few::kTogether != 0 || !has_small_products(p.rows, p.depth) ||
      (p.onto != nullptr && (p.gated || p.count != 1))) {
    throw std::logic_error("gka: small_products was called with more than it takes");
  }
  const CurrentDevice current(device.index);
  if (held::start(p, device)) return;
  p.int8 ? few::start_with<few::Bytes>(p, device) : few::start_with<few::Plain>(p, device);
}

}  // namespace gka::kernels::cuda
