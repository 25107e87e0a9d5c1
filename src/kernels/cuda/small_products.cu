// Time is lost here where memory stands still: between kernels. So each lets the next begin at once, and a kernel's
// first act, before it waits for those ahead of it, is to start copies of its weights into shared memory: of all of
// them where that is enough. A warp has some rows of the weights and its own ring of pieces of them, and asks nobody.
// Only x is shared by the block, normed once if it is to be.
//
// Lanes take 8 numbers each, side by side, and add up what they have; the sum over the lanes comes last.
#include "kernels/cuda/small_products.h"

#include <algorithm>

#include "kernels/cuda/vectors.cuh"
#include "kernels/products.h"

namespace gka::kernels::cuda {
namespace {

constexpr int kTogether = 8;                    // numbers that a lane reads at a time
constexpr int kOwnWarps = kLanes == 1 ? 1 : 8;  // of a block
constexpr int kOwnThreads = kOwnWarps * kLanes;
constexpr int kPiece = 1024;  // numbers of a row that are copied together
constexpr int kSlots = 6;     // pieces that a warp has under way

/// Rows of weights of x's own type, and a piece of one in shared memory.
template <DType kType>
struct Plain {
  static constexpr int kSlotBytes = 2 * kPiece;
  __device__ static __forceinline__ void fetch(char* slot, const char* weight, std::int64_t depth, std::int64_t row,
                                               std::int64_t first, int count) {
    const char* from = weight + 2 * (row * depth + first);
    for (int at = 16 * lane(); at < 2 * count; at += 16 * kLanes) copy_async(slot + at, from + at);
  }
  __device__ static __forceinline__ Numbers<kTogether> read(const char* slot, int at) {
    return read_vector<kType, kTogether>(slot, at);
  }
};

/// Bytes with a scale for each group, which follow the row's numbers. Rows begin at multiples of four bytes.
struct Bytes {
  static constexpr int kSlotBytes = kPiece + kPiece / kInt8Group * 4;
  static_assert(kTogether == 8 && kInt8Group % kTogether == 0 && kPiece % kInt8Group == 0);
  __device__ static __forceinline__ void fetch(char* slot, const char* weight, std::int64_t depth, std::int64_t row,
                                               std::int64_t first, int count) {
    const std::int64_t groups = (depth + kInt8Group - 1) / kInt8Group;
    const char* numbers = weight + row * groups * (kInt8Group + 4);
    const int filled = (count + kInt8Group - 1) / kInt8Group * kInt8Group;
    copy(slot, numbers + first, filled);
    copy(slot + kPiece, numbers + groups * kInt8Group + first / kInt8Group * 4, filled / kInt8Group * 4);
  }
  __device__ static __forceinline__ Numbers<kTogether> read(const char* slot, int at) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(slot + at);
    const std::uint32_t word[2] = {words[0], words[1]};
    const float scale = reinterpret_cast<const float*>(slot + kPiece)[at / kInt8Group];
    Numbers<kTogether> numbers;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      numbers.x[i] = scale * static_cast<float>(static_cast<std::int8_t>(word[i / 4] >> (i % 4 * 8) & 0xff));
    }
    return numbers;
  }

 private:
  __device__ static __forceinline__ void copy(char* to, const char* from, int bytes) {
    if ((reinterpret_cast<std::uintptr_t>(from) | static_cast<unsigned>(bytes)) % 16 == 0) {
      for (int at = 16 * lane(); at < bytes; at += 16 * kLanes) copy_async(to + at, from + at);
    } else {
      for (int at = 4 * lane(); at < bytes; at += 4 * kLanes) copy_async_or_zero<4>(to + at, from + at, true);
    }
  }
};

/// What a warp multiplies, in order: outputs, the same pieces of one row or of a pair's two, one after another.
template <typename Stored, int kOutputs>
struct Pieces {
  const SmallProducts& p;
  char* ring;
  int parts, total;  // of a row; of the warp

  __device__ __forceinline__ Pieces(const SmallProducts& products, char* own_ring) : p(products), ring(own_ring) {
    std::int64_t outputs = 0;
    for (int i = 0; i < (kOutputs == 2 ? 1 : p.count); ++i) outputs += p.of[i].outputs;
    const std::int64_t mine = block() + blocks() * warp(), step = blocks() * kOwnWarps;
    parts = static_cast<int>((p.depth + kPiece - 1) / kPiece);
    total = mine < outputs ? static_cast<int>((outputs - mine + step - 1) / step) * parts : 0;
  }

  struct Place {
    int matrix;
    std::int64_t output;
  };
  __device__ __forceinline__ Place place_of(int unit) const {
    Place place{0, block() + blocks() * (warp() + std::int64_t{kOwnWarps} * unit)};
    if (kOutputs == 1) {
      while (place.output >= p.of[place.matrix].outputs) place.output -= p.of[place.matrix++].outputs;
    }
    return place;
  }
  __device__ __forceinline__ char* slot(int piece, int o) const {
    return ring + (piece * kOutputs + o) % (kSlots / kOutputs * kOutputs) * Stored::kSlotBytes;
  }
  __device__ __forceinline__ int numbers_in(int part) const {
    const std::int64_t left = p.depth - std::int64_t{part} * kPiece;
    return left < kPiece ? static_cast<int>(left) : kPiece;
  }
  __device__ __forceinline__ void fetch(int piece) const {
    if (piece < total) {
      const Place place = place_of(piece / parts);
      const int part = piece % parts;
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        Stored::fetch(slot(piece, o), static_cast<const char*>(p.of[place.matrix + o].weight), p.depth, place.output,
                      std::int64_t{part} * kPiece, numbers_in(part));
      }
    }
    end_group();
  }
};

template <DType kType>
__device__ __forceinline__ void put(void* y, std::int64_t at, float value) {
  const Words<2> both = pack<kType>(Numbers<2>{{value, 0}});
  static_cast<std::uint16_t*>(y)[at] = static_cast<std::uint16_t>(both.x[0]);
}
template <DType kType>
__device__ __forceinline__ float rounded_one(float value) {
  return rounded<kType>(Numbers<2>{{value, 0}}).x[0];
}

/// norm ⊙ x / rms(x), rounded, a row by each warp: as add_norm has it. The first of the norm's weights are in registers
/// before x is there, and x stays in them, as far as they go.
template <DType kType>
struct NormedRows {
  static constexpr int kHeld = 4, kStep = kLanes * kTogether;
  Numbers<kTogether> weights[kHeld] = {};

  __device__ static __forceinline__ int channel(int v) { return lane() * kTogether + v * kStep; }

  __device__ __forceinline__ void prepare(const SmallProducts& p) {
    if (warp() >= p.rows) return;
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (channel(v) < p.depth) weights[v] = read_vector<DType::float32, kTogether>(p.norm, channel(v));
    }
    for (std::int64_t at = lane() * kLineBytes; at < 4 * p.depth; at += kLanes * kLineBytes) {
      ask_for(reinterpret_cast<const char*>(p.norm) + at);
    }
  }

  __device__ __forceinline__ void write(const SmallProducts& p, std::uint16_t* normed) const {
    const int depth = static_cast<int>(p.depth);
    for (int row = warp(); row < p.rows; row += kOwnWarps) {
      const std::int64_t first = row * p.depth;
      Words<kTogether> held[kHeld] = {};
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        if (channel(v) < depth) held[v] = hold_vector<kType, kTogether>(p.x, first + channel(v));
      }
      float squares = 0;
      const auto add = [&](const Numbers<kTogether>& x) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) squares += x.x[i] * x.x[i];
      };
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        if (channel(v) < depth) add(unpack<kType>(held[v]));
      }
#pragma unroll 4
      for (int at = channel(kHeld); at < depth; at += kStep) add(read_vector<kType, kTogether>(p.x, first + at));

      const float mean = sum_lanes(squares) / static_cast<float>(depth);
      const float root = inverse_as<kType>(sqrt_as<kType>(mean + p.eps));
      const auto put = [&](int at, Numbers<kTogether> x, const Numbers<kTogether>& weight) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) x.x[i] *= root * weight.x[i];
        write_vector<kType, kTogether>(normed, first + at, x);
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
  }
};

/// What a block keeps of x in shared memory, behind its warps' rings.
__device__ __host__ constexpr bool keeps_x(std::int64_t rows, std::int64_t depth) { return can_norm(rows, depth); }

template <DType kType, typename Stored, int kOutputs, int kRows>
__global__ void __launch_bounds__(kOwnThreads, kRows == 1 ? 3 : 2)
    multiply_few(const __grid_constant__ SmallProducts p, int slots) {
  constexpr int kAhead = kSlots / kOutputs;  // pieces
  let_next_start();
  const Pieces<Stored, kOutputs> pieces(p, shared_memory() + warp() * slots * Stored::kSlotBytes);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) pieces.fetch(i);
  const bool staged = keeps_x(p.rows, p.depth);
  auto* kept = reinterpret_cast<std::uint16_t*>(shared_memory() + kOwnWarps * slots * Stored::kSlotBytes);
  NormedRows<kType> normed;
  if (p.norm != nullptr) normed.prepare(p);
  wait_for_earlier();

  if (p.norm != nullptr) {
    normed.write(p, kept);
  } else if (staged) {
    for (int at = thread() * kTogether; at < p.rows * p.depth; at += kOwnThreads * kTogether) {
      *reinterpret_cast<Words<kTogether>*>(kept + at) = hold_vector<kType, kTogether>(p.x, at);
    }
  }
  sync();
  const void* x = staged ? static_cast<const void*>(kept) : p.x;

  float sums[kOutputs][kRows];
  float before[kRows];
  typename Pieces<Stored, kOutputs>::Place place{};
  int part = 0;
  for (int piece = 0; piece < pieces.total; ++piece) {
    if (part == 0) {
      place = pieces.place_of(piece / pieces.parts);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) sums[o][r] = 0;
        const bool adds = p.onto != nullptr && r < p.rows;
        before[r] = adds ? read_as<float, kType>(p.onto, r * p.of[0].outputs + place.output) : 0;
      }
    }
    wait_for_groups_but<kAhead - 1>();
    sync_warp();
    const char* slots_of[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) slots_of[o] = pieces.slot(piece, o);
    const int count = pieces.numbers_in(part);
    const std::int64_t first = std::int64_t{part} * kPiece;
#pragma unroll 4
    for (int at = lane() * kTogether; at < count; at += kLanes * kTogether) {
      Numbers<kTogether> weight[kOutputs];
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) weight[o] = Stored::read(slots_of[o], at);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= p.rows) break;
        const Numbers<kTogether> row = read_vector<kType, kTogether>(x, r * p.depth + first + at);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) sums[o][r] += weight[o].x[i] * row.x[i];
        }
      }
    }
    sync_warp();
    pieces.fetch(piece + kAhead);
    if (++part < pieces.parts) continue;
    part = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= p.rows) break;
      float y = rounded_one<kType>(sum_lanes(sums[0][r]));
      if constexpr (kOutputs == 2) {
        // Rounded in between, as two products and a fused SwiGLU would.
        y = y * sigmoid_as<kType>(y) * rounded_one<kType>(sum_lanes(sums[kOutputs - 1][r]));
      }
      const SmallProducts::Matrix& matrix = p.of[place.matrix];
      if (lane() == 0) put<kType>(matrix.y, r * matrix.outputs + place.output, before[r] + y);
    }
  }
  wait_for_copies();
}

template <DType kType, typename Stored, int kOutputs, int kRows>
void start(const SmallProducts& p, const Device& device) {
  std::int64_t outputs = 0;
  for (int i = 0; i < (p.gated ? 1 : p.count); ++i) outputs += p.of[i].outputs;
  const std::int64_t grid =
      std::min<std::int64_t>(multiprocessors(device.index), (outputs + kOwnWarps - 1) / kOwnWarps);
  const std::int64_t each = (outputs + grid * kOwnWarps - 1) / (grid * kOwnWarps) * ((p.depth + kPiece - 1) / kPiece);
  const int slots = static_cast<int>(std::min<std::int64_t>(kSlots / kOutputs, each)) * kOutputs;
  const std::int64_t x_bytes = keeps_x(p.rows, p.depth) ? 2 * p.rows * p.depth : 0;
  launch_early<kOwnThreads>(multiply_few<kType, Stored, kOutputs, kRows>, grid,
                            kOwnWarps * slots * Stored::kSlotBytes + static_cast<int>(x_bytes), device.index,
                            device.stream, p, slots);
}

template <DType kType, typename Stored, int kOutputs>
void start_rows(const SmallProducts& p, const Device& device) {
  if (p.rows <= 1) return start<kType, Stored, kOutputs, 1>(p, device);
  if (p.rows <= 4) return start<kType, Stored, kOutputs, 4>(p, device);
  return start<kType, Stored, kOutputs, SmallProducts::kMostRows>(p, device);
}

template <DType kType, typename Stored>
void start_with(const SmallProducts& p, const Device& device) {
  p.gated ? start_rows<kType, Stored, 2>(p, device) : start_rows<kType, Stored, 1>(p, device);
}

template <DType kType>
void start_as(const SmallProducts& p, const Device& device) {
  p.int8 ? start_with<kType, Bytes>(p, device) : start_with<kType, Plain<kType>>(p, device);
}

}  // namespace

void small_products(const SmallProducts& p, const Device& device) {
  if (p.rows > SmallProducts::kMostRows || p.count > SmallProducts::kMostMatrices || p.depth % kTogether != 0 ||
      (p.norm != nullptr && !can_norm(p.rows, p.depth)) || (p.onto != nullptr && (p.gated || p.count != 1))) {
    throw std::logic_error("gka: small_products was called with more than it takes");
  }
  const CurrentDevice current(device.index);
  p.dtype == DType::float16 ? start_as<DType::float16>(p, device) : start_as<DType::bfloat16>(p, device);
}

}  // namespace gka::kernels::cuda
