// What the passes of the backward share: their scratch, states and scores between tokens.
#pragma once

#include "kernels/cuda/hopper/bwd_chunk.cuh"
#include "kernels/cuda/hopper/schedule.h"
#include "kernels/cuda/hopper/system.cuh"

namespace gka::kernels::cuda::hopper::bwd {

/// Wide states do not fit shared memory beside a chunk's tokens, nor registers: they come and go in *slices* of 64
/// rows, each a tile by itself. Others are one slice, which is all of them.
template <int D>
inline constexpr bool kInSlices = D == kWideSize;
template <int D>
inline constexpr int kSlices = kInSlices<D> ? D / kChunk : 1;
/// Of wide heads U_c do_c and ŷ_c are passed on in float32 of every chunk.
template <int D>
inline constexpr bool kAlwaysFloat32 = D == kWideSize;
/// Arrays of 64 numbers that warpgroups who share a chunk add their sums over rows up in: two of them to each, so that
/// the order does not matter.
template <int D>
inline constexpr int kSumParts = kTeams<D> > 2 ? kTeams<D> / 2 : 1;
template <int D>
__device__ __forceinline__ float sum_of_parts(const float* sums, int row) {
  float sum = sums[row];
#pragma unroll
  for (int part = 1; part < kSumParts<D>; ++part) sum += sums[part * kChunk + row];
  return sum;
}

/// Gradients of states as tiles of float16, one for each chunk of a head: the number is `down` times what the tile has,
/// NaN if the state is lost; none is larger than `top`. Own parts have both for each slice.
template <int D>
struct States {
  std::uint16_t* tiles;
  float *down, *top;  // [tasks, kSlices<D>]

  __device__ std::uint16_t* tile(std::int64_t task) const { return tiles + task * kStateNumbers<D>; }
};
/// H or U at the start of each chunk as `chunk_h` leaves them: divided by their norm, NaN if lost. With
/// room for all slots there could be (segments_of): norms of those without a chunk are read, and not used.
template <int D>
struct GivenStates {
  const std::uint16_t* tiles;
  const float* norm;
  const float* share = nullptr;  // of wide heads, [tasks, kStateBlocks<D>]: by which 64 columns are to be multiplied

  __device__ const std::uint16_t* tile(std::int64_t task) const { return tiles + task * kStateNumbers<D>; }
};

/// Per-token numbers that `bwd_dq_dh` leaves.
struct alignas(16) Solutions {
  float x_down[kChunk], y_down[kChunk];
  float weight[kChunk];  // w_c
  float reach[kChunk];   // Q_c = Σ_{l ≥ c} M_cl² w_l
  int bad[kChunk];
  int any_bad, padding[3];
};

/// Numbers that a warp of `bwd_carry` leaves one of for every chunk.
template <int D>
inline constexpr int kPartials = kStateNumbers<D> / 8 / kLanes;

/// What `bwd_rhs_du` has to know of the solve.
struct SolveNumbers {
  float pace, headroom;
  float least_spread;       // chunks with a token below this are refined; 0: none
  float least_for_two = 0;  // as Schedules has it
  bool float32;             // U_c do_c as if all were
  int reaches = 0;          // as Schedules has them
  float spread[kReaches] = {};
};

/// Scratch of one backward call. A slot is half a segment: 2 · segment + half; a task a slot of a head.
template <int D>
struct Scratch {
  float *udo, *y;                    // [batch, tokens, heads, D], of refined chunks: U_c do_c, ŷ
  std::uint16_t* q_tiles;            // [tasks]; k is in the system
  KeptGates* gates;                  // [tasks]
  std::uint16_t *x_tiles, *y_tiles;  // [tasks]; ŷ's comes from the solve where the chunk is not refined, with
  float* y_down;                     // [tasks, kChunk]: by which its rows are to be multiplied, NaN: not finite
  std::uint16_t* scores;             // [tasks, kChunk, kChunk]: k_j·x_c of the tiles
  Solutions* solutions;              // [tasks]
  float* zeta;                       // [tasks]: what is left of a state after the slot
  GivenStates<D> h, u;
  const float* trace;  // [tasks]: of H at the start of each chunk
  const int* ample;    // [tasks]: ChunkStates::ample
  char* systems;       // [tasks]: what the solve begins with
  SolveNumbers solve;
  float* of_h;               // [tasks]: times H_0/‖H_0‖: the rest of the slot's own part of the gradient of H_0
  States<D> g, r;            // own parts of the gradients of H_0 and U_0, then what arrives, with
  float *g_down, *r_down;    // this for `down`
  float *g_inner, *r_inner;  // [tasks, kPartials<D>]: parts of ⟨Ḡ', H_0⟩/‖H_0‖ and ⟨R̄', U_0⟩/‖U_0‖

  __device__ Unit* packed(std::int64_t task, int bytes) const {
    return reinterpret_cast<Unit*>(systems + task * SystemLayout<D>::kBytes + bytes);
  }
  __device__ SystemRows& rows(std::int64_t task) const {
    return *reinterpret_cast<SystemRows*>(packed(task, SystemLayout<D>::kRows));
  }
};

using Scores = Product<1, kChunk>;
template <int D>
using Wide = Product<1, D>;
template <int D>
using Square = Product<kColumnBlocks<D>, D>;
/// A block of columns of a tile.
template <int D>
using BlockOf = Product<1, kBlockColumns<D>>;
/// The same of the warpgroups that share a chunk.
template <int D>
using SharedScores = Product<1, kChunk, kTeams<D>>;
template <int D>
using SharedWide = Product<1, D, kTeams<D>>;
template <int D>
using SharedSquare = Product<kColumnBlocks<D>, D, kTeams<D>>;

/// What a kernel is compiled for. kWhole: key_dim = value_dim = kSize, and all views are of that type and lie aligned.
/// kConstant: the ridge is. kValues: there are values; else it is the keys' part alone, whose o is x.
template <int kSize_, DType kType_, bool kWhole_, bool kConstant_ = false, bool kValues_ = true>
struct Shape {
  static constexpr int kSize = kSize_;
  static constexpr DType kType = kType_;
  static constexpr bool kWhole = kWhole_, kConstant = kConstant_, kValues = kValues_;
  using WithoutRidge = Shape<kSize_, kType_, kWhole_, false, kValues_>;  // for what does not ask how it is
};

/// Sizes, known to the compiler where they are whole.
template <typename Shape>
struct Sides {
  int dim, values;

  __device__ explicit Sides(const Problem& p)
      : dim(Shape::kWhole ? Shape::kSize : static_cast<int>(p.key_dim)),
        values(Shape::kWhole ? Shape::kSize : static_cast<int>(p.value_dim)) {}
};

/// Where a task's chunk is; `len` is 0 where there is none. Nothing has to be read for that unless sequences are
/// packed.
__device__ __forceinline__ Place place_of_task(const Problem& p, const Plan& plan, unsigned task) {
  const auto heads = static_cast<unsigned>(p.heads);
  const unsigned slot = task / heads, head = task % heads;
  if (p.cu_seqlens == nullptr) return place_of(tokens_of_row(p, static_cast<int>(slot)), head);
  if (slot / 2 >= plan.count(p)) return {};
  return place_of(tokens_of(plan.segments[slot / 2], static_cast<int>(slot % 2)), head);
}

/// Rows of an array [batch, tokens, heads, D] as threads have those of a product.
template <typename Shape, typename Product>
__device__ __forceinline__ void read_tokens(Product& to, const Problem& p, const Place& place, const float* array) {
  const Sides<Shape> sides(p);
  const auto from = place.field(p, array, sides.dim);
  if constexpr (Shape::kWhole) {
    to.read(Product::per_row([&](int row) { return row < place.len ? from.at(row, 0) : nullptr; }));
  } else {
    to.each([&](const At& at, float& a, float& b) {
      const bool inside = at.row < place.len && at.column < sides.dim;
      const Pair pair = inside ? read_pair(from.at(at.row, at.column)) : Pair{0, 0};
      a = pair.x;
      b = pair.y;
    });
  }
}

/// put(by), where by(r) makes float16 numbers of those of a row; of rows that are not finite after they became 0.
template <typename Product, typename Tops, typename Put>
__device__ __forceinline__ void scale_rows(Product& numbers, const Tops& top, Put&& put) {
  bool fine = true;
  for (const std::uint32_t of_row : top.x) fine &= usable(of_row);
  if (!fine) {
    numbers.each([&](const At& at, float& a, float& b) {
      if (!usable(top.x[at.r])) a = b = 0;
    });
  }
  put([&](int r) { return scale_of(top.x[r]).up; });
}

/// M_jc at a place of a product where the row is the later token; 0 else.
struct Fading {
  Scores::OfRows row;
  Scores::OfColumns column;

  __device__ explicit Fading(const TokenGates& gates)
      : row(Scores::of_rows(gates.reach)), column(Scores::of_columns(gates.reach)) {}
  __device__ __forceinline__ float to_row(const At& at, int e) const {
    return at.column + e > at.row ? 0 : power_of_two(row.x[at.r] - column.x[at.c + e]);
  }
};

/// sum += part, row by row times factor.
template <typename Product, typename Factor>
__device__ __forceinline__ void add_rows(Product& sum, const Product& part, const Factor& factor) {
  sum.each_with(part, [&](const At& at, float& x, float& y, float a, float b) {
    x += factor[at.r] * a;
    y += factor[at.r] * b;
  });
}

/// A symmetric state's tile of 128 rows is kept without the quarter of the last 64 rows and the first 64 columns: its
/// first quarter, and what lies from here on.
template <int D>
inline constexpr int kSecondHalf = kStateNumbers<D> / 2;

/// A product times a power of two, `unit`, as a state's tile in shared memory, `room`, and on to global memory; `lost`:
/// as a lost one. Barriers inside: before the tile is written, and after it was sent.
template <int D, bool kSymmetric, typename Product>
__device__ __forceinline__ void send_state(Product& product, float unit, const Tile& room, const States<D>& to,
                                           std::int64_t task, bool lost, TokenGates& gates) {
  const float largest = bits_to_float(product.largest(reinterpret_cast<std::uint32_t*>(gates.parts))) * unit;
  const std::uint32_t top = float_to_bits(largest);
  const Scale scale = scale_of(top);
  const bool fine = usable(top) && !lost;
  if (fine) {
    product.store(room, scale.up * unit);
  } else {
    each_unit_of_state<D>([&](int row, int u) { room.put(row, u, Unit{}); });
  }
  publish();
  sync();
  if constexpr (kSymmetric && D == 128) {
    send_tile(to.tile(task), room.data, kStateBytes<D> / 4);
    send_tile(to.tile(task) + kSecondHalf<D>, room.data + kSecondHalf<D>, kStateBytes<D> / 2);
  } else {
    send_tile(to.tile(task), room.data, kStateBytes<D>);
  }
  if (tile_thread() == 0) {
    to.down[task] = fine ? scale.down : bits_to_float(0x7fc00000u);
    to.top[task] = fine ? largest : bits_to_float(0x7fc00000u);
  }
}

/// Slice `which` of a wide state to global memory: it lies in `slice`, a tile, times an unknown power of two `unit`;
/// `put(up)` stores it there, times `up`. `own_largest`: of this thread's numbers. What lay in `slice` has been sent,
/// as thread 0 knows. Barriers inside, the last one before it is sent.
template <int D, int kGroups, typename Put>
__device__ __forceinline__ void send_slice(std::uint32_t own_largest, float unit, Put&& put, const Tile& slice,
                                           int which, const States<D>& to, std::int64_t task, bool lost,
                                           TokenGates& gates) {
  constexpr int kPiece = kChunk * 64;
  const std::uint32_t bits = most_of_threads<kGroups>(own_largest, reinterpret_cast<std::uint32_t*>(gates.parts));
  const float largest = bits_to_float(bits) * unit;
  const std::uint32_t top = float_to_bits(largest);
  const Scale scale = scale_of(top);
  const bool fine = usable(top) && !lost;
  if (fine) {
    put(scale.up * unit);
  } else {
    sweep_units<D, kGroups>([](int, int) { return Unit{}; },
                            [&](int row, int u, const Unit& nothing) { slice.put(row, u, nothing); });
  }
  publish();
  sync();
  for (int block = 0; block < kColumnBlocks<D>; ++block) {
    send_tile(to.tile(task) + (block * kSlices<D> + which) * kPiece, slice.data + block * kPiece, kPiece * 2);
  }
  if (tile_thread() == 0) {
    to.down[task * kSlices<D> + which] = fine ? scale.down : bits_to_float(0x7fc00000u);
    to.top[task * kSlices<D> + which] = fine ? largest : bits_to_float(0x7fc00000u);
  }
}

/// Slices of wide states on their way into two tiles, in turn.
template <int D>
struct SliceRing {
  BulkBarrier arrived[2];

  __device__ void init() {
    arrived[0].init();
    arrived[1].init();
  }
  /// Slice `which` of a state as number n; after a barrier behind the last use of the tile.
  __device__ __forceinline__ void request(int n, const Tile& to, const std::uint16_t* state, int which) {
    constexpr int kPiece = kChunk * 64;
    static_assert(kColumnBlocks<D> == 4);
    const auto piece = [&](int block) {
      return BulkCopy{to.data + block * kPiece, state + (block * kSlices<D> + which) * kPiece, kPiece * 2};
    };
    arrived[n % 2].request(piece(0), piece(1), piece(2), piece(3));
  }
  __device__ __forceinline__ void wait(int n) { arrived[n % 2].wait(n / 2 % 2); }
};

/// What a kernel has in shared memory for the slices of a wide state, before its tiles, which begin at multiples of
/// 1,024 bytes.
template <int D, bool = kInSlices<D>>
struct alignas(1024) SliceRoom {
  std::uint16_t slices[2][kTileNumbers<D>];
  SliceRing<D> ring;
};
template <int D>
struct SliceRoom<D, false> {};

/// A block of 64 columns of a tile of tokens.
__device__ __forceinline__ Tile column_block(const Tile& tile, int which) {
  return {tile.data + which * tile.rows * 64, tile.rows};
}

/// Gradients of the chunk's tokens to where they belong, `columns` of them.
template <typename Shape, typename Rows>
__device__ __forceinline__ void write_rows(Rows& numbers, const View& view, const Place& place, int columns) {
  const Out<Shape> to(view, place);
  if (to.data == nullptr) return;
  if constexpr (Shape::kWhole) {
    const auto rows = Rows::per_row([&](int row) { return to.row(row, place.len); });
    Rows::write(rows, [&](const At&, int i) { return pack_as<Shape::kType>(numbers[i], numbers[i + 1]); });
  } else {
    numbers.each([&](const At& at, float a, float b) {
      if (at.row < place.len && at.column < columns) to.put(at.row, at.column, a, b);
    });
  }
}

/// To global memory, from shared memory.
template <typename T>
__device__ __forceinline__ void keep(T& to, const T& from) {
  static_assert(sizeof(T) % sizeof(Unit) == 0);
  for (int i = tile_thread(); i < static_cast<int>(sizeof(T) / sizeof(Unit)); i += kTileThreads) {
    reinterpret_cast<Unit*>(&to)[i] = reinterpret_cast<const Unit*>(&from)[i];
  }
}

}  // namespace gka::kernels::cuda::hopper::bwd
