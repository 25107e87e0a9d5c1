// What a warpgroup does together in the passes of the backward that are not the solve: products on the tensor cores
// (wgmma), tiles of float16 in shared memory, sums over rows and columns. An operand is one float16 (11 bits) whose
// row, or tile, is scaled by a power of two; a block is one warpgroup and has a chunk of 64 tokens.
//
// All that threads do together is here: tests/kernels/cuda_on_host has a stand-in with which the passes run on the
// host.
#pragma once

#include "kernels/cuda/hopper/tile.cuh"
#include "kernels/cuda/hopper/wgmma.cuh"

namespace gka::kernels::cuda::hopper::bwd {

inline constexpr int kTileThreads = 128;
/// Warpgroups that share a chunk where a kernel says so: each has 64 columns of every product of D.
template <int D>
inline constexpr int kTeams = kColumnBlocks<D>;

__device__ __forceinline__ int tile_thread() { return thread(); }
template <int kGroups = 1, typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Parameters...), std::int64_t grid, int shared_bytes, void* stream,
                  Arguments&&... arguments) {
  launch_blocks_of<kGroups * kTileThreads>(kernel, grid, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

/// What a lane of the warp has.
__device__ __forceinline__ float of_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
/// The largest of eight 16-bit numbers without their signs, as bits.
__device__ __forceinline__ std::uint32_t largest_word(const Unit& unit) {
  constexpr unsigned kUnsigned = 0x7fff7fffu;
  const unsigned both = __vmaxu2(__vmaxu2(unit.words[0] & kUnsigned, unit.words[1] & kUnsigned),
                                 __vmaxu2(unit.words[2] & kUnsigned, unit.words[3] & kUnsigned));
  return max(both & 0xffffu, both >> 16);
}
/// Sets bits that several threads may set at once.
__device__ __forceinline__ void mark(int* word, int bits) { atomicOr(word, bits); }

// Of memory that the kernel does not write: such loads may pass the kernel's own stores.
__device__ __forceinline__ Unit read_unit(const std::uint16_t* p) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(p));
  return {words.x, words.y, words.z, words.w};
}
__device__ __forceinline__ Pair read_pair(const float* p) {
  const float2 pair = __ldg(reinterpret_cast<const float2*>(p));
  return {pair.x, pair.y};
}

__device__ __forceinline__ std::uint32_t pack_halves(float x, float y) { return pack_half(x, y); }
__device__ __forceinline__ std::uint32_t pack_bfloats(float x, float y) { return pack(x, y); }

// ---- Copies -----------------------------------------------------------------------------------------------------

/// 64 rows of D 16-bit numbers, `stride` of them apart, on their way into a tile: those behind the first `len` are 0.
template <int D, int kGroups = 1>
__device__ __forceinline__ void copy_rows(const Tile& to, const std::uint16_t* from, int stride, int len) {
  constexpr int kUnits = D / 8, kApart = kGroups * kTileThreads / kUnits;
  constexpr bool kAlike = kApart % 8 == 0;  // rows a multiple of 8 apart lie alike
  const int unit = tile_thread() % kUnits, first = tile_thread() / kUnits;
  std::uint16_t* const at = to.at(first, 8 * unit);
  from += static_cast<std::int64_t>(first) * stride + 8 * unit;
#pragma unroll
  for (int a = 0; a < kChunk / kApart; ++a) {
    std::uint16_t* const here = kAlike ? at + a * kApart * to.columns : to.at(first + a * kApart, 8 * unit);
    copy_async(here, from, first + a * kApart < len);
    from += static_cast<std::int64_t>(kApart) * stride;
  }
}

/// Bytes from global to shared memory, both at multiples of 16.
struct BulkCopy {
  void* to;
  const void* from;
  int bytes;
};

/// Copies that are on their way into shared memory.
struct BulkBarrier {
  std::uint64_t barrier;

  __device__ void init() {
    if (tile_thread() == 0) {
      barrier_init(&barrier);
      barrier_fence();
    }
  }
  /// After a barrier behind the last use of where they go in ordinary loads and products.
  template <typename... Copies>
  __device__ void request(const Copies&... copies) {
    if (tile_thread() != 0) return;
    publish();
    barrier_expect(&barrier, static_cast<std::uint32_t>((copies.bytes + ...)));
    (bulk_copy(copies.to, copies.from, static_cast<std::uint32_t>(copies.bytes), &barrier), ...);
  }
  __device__ void wait(int phase) { barrier_wait(&barrier, phase); }
};

/// A tile to global memory, after `publish` and a barrier.
__device__ inline void send_tile(void* to, const void* from, int bytes) {
  if (tile_thread() == 0) bulk_store(to, from, static_cast<std::uint32_t>(bytes));
}
/// Until it is there.
__device__ inline void finish_sending() {
  if (tile_thread() == 0) bulk_store_finish();
}
/// Until what was sent has been read. A barrier must follow before it is overwritten.
__device__ inline void wait_until_sent() {
  if (tile_thread() == 0) bulk_store_wait();
}

// ---- Tiles ------------------------------------------------------------------------------------------------------

/// Four 8×8 matrices in accumulator order; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ Unit load_matrices(std::uint32_t at) {
  Unit unit;
  hopper::load_matrices(unit.words, at);
  return unit;
}

/// tile_thread(), of which the compiler knows only that it is not negative.
__device__ __forceinline__ unsigned hidden_thread() { return static_cast<unsigned>(opaque(tile_thread())); }
/// A descriptor of which 32 bits change from step to step; found anew for every product, not kept in registers from the
/// first one on.
struct Operand {
  int columns;  // of a block
  std::uint32_t low;

  __device__ __forceinline__ explicit Operand(const std::uint16_t* data, int rows, int columns = 64)
      : columns(columns),
        low(static_cast<std::uint32_t>(
            opaque(static_cast<int>(columns == 64 ? descriptor(data, rows) : descriptor<32>(data, rows))))) {}
  /// Step s with its columns, or its rows, as what is summed over.
  __device__ __forceinline__ std::uint64_t k_major(int s, int rows) const {
    return at(s / (columns / 16) * rows * columns * 2 + s % (columns / 16) * 32);
  }
  __device__ __forceinline__ std::uint64_t mn_major(int s) const { return at(s * 16 * columns * 2); }

 private:
  __device__ __forceinline__ std::uint64_t at(int bytes) const {
    // What `descriptor` has there for every operand.
    const std::uint64_t high = columns == 64 ? 0x4000004000000000u : 0x8000002000000000u;
    return (high | low) + static_cast<std::uint32_t>(bytes >> 4);
  }
};

/// finish(row, unit, load(row, unit)) for every unit of eight columns of 64 rows; up to four loads are under way.
template <int D, int kGroups = 1, typename Load, typename Finish>
__device__ __forceinline__ void sweep_units(Load&& load, Finish&& finish) {
  constexpr int kUnits = D / 8, kApart = kGroups * kTileThreads / kUnits;
  constexpr int kAtOnce = min(4, kChunk / kApart);
  const int unit = tile_thread() % kUnits;
#pragma unroll 1
  for (int first = tile_thread() / kUnits; first < kChunk; first += kApart * kAtOnce) {
    decltype(load(0, 0)) values[kAtOnce];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) values[a] = load(first + kApart * a, unit);
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) finish(first + kApart * a, unit, values[a]);
  }
}

/// For both halves of 64 rows of D numbers: finish(row, first unit, load(row, first unit), top), where top is the
/// most that measure(loaded) gave for the row.
template <int D, typename Load, typename Measure, typename Finish>
__device__ __forceinline__ void sweep_half_rows(Load&& load, Measure&& measure, Finish&& finish) {
  const int lane = tile_thread() % 32, row = tile_thread() / 32 * 16 + lane % 16, first = lane / 16 * (D / 16);
  const auto loaded = load(row, first);
  const std::uint32_t top = measure(loaded);
  finish(row, first, loaded, max(top, __shfl_xor_sync(0xffffffffu, top, 16)));
}

/// The largest of 64 numbers' sizes, as bits, for every thread.
__device__ __forceinline__ std::uint32_t largest_of_tokens(const float* values) {
  const int lane = tile_thread() % 32;
  std::uint32_t top = max(size_bits(values[lane]), size_bits(values[lane + 32]));
#pragma unroll
  for (int reach = 16; reach > 0; reach /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, reach));
  return top;
}

/// The largest of all threads' words, for every thread; `parts` is room for 4 of each group. A barrier inside.
template <int kGroups = 1>
__device__ __forceinline__ std::uint32_t most_of_threads(std::uint32_t own, std::uint32_t* parts) {
#pragma unroll
  for (int reach = 16; reach > 0; reach /= 2) own = max(own, __shfl_xor_sync(0xffffffffu, own, reach));
  if (tile_thread() % 32 == 0) parts[tile_thread() / 32] = own;
  sync();
  std::uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) top = max(top, parts[i]);
  return top;
}
/// Every unit of a state: body(row, unit).
template <int D, typename Body>
__device__ __forceinline__ void each_unit_of_state(Body&& body) {
  constexpr int kUnits = D / 8;
#pragma unroll 4
  for (int i = tile_thread(); i < D * kUnits; i += kTileThreads) body(i / kUnits, i % kUnits);
}

/// A bit for each of 64 tokens, whether its mark is set; the same for every thread.
__device__ __forceinline__ std::uint64_t marked_tokens(const int* marks) {
  const int lane = tile_thread() % 32;
  const std::uint64_t low = __ballot_sync(0xffffffffu, marks[lane] != 0);
  return low | static_cast<std::uint64_t>(__ballot_sync(0xffffffffu, marks[lane + 32] != 0)) << 32;
}
/// The last one that is marked up to token c, or −1.
__device__ __forceinline__ float last_marked(std::uint64_t marked, int c) {
  return static_cast<float>(63 - __clzll(static_cast<long long>(marked << (63 - c) >> (63 - c))));
}

/// put(i, c, the largest of value(i, …) up to token c, or with down(i) from it on) for i < kCount, one for each warp of
/// kGroups in turn.
template <int kCount, int kGroups, typename Down, typename Value, typename Put>
__device__ __forceinline__ void running_largest(Down&& down, Value&& value, Put&& put) {
  const int lane = tile_thread() % 32;
#pragma unroll 1
  for (int i = tile_thread() / 32; i < kCount; i += kGroups * kTileThreads / 32) {
    __syncwarp();
    const int near = down(i) ? 63 - 2 * lane : 2 * lane, far = down(i) ? near - 1 : near + 1;
    const float first = value(i, near), second = fmaxf(first, value(i, far));
    float before = second;
#pragma unroll
    for (int reach = 1; reach < 32; reach *= 2) before = fmaxf(before, __shfl_up_sync(0xffffffffu, before, reach));
    before = __shfl_up_sync(0xffffffffu, before, 1);
    put(i, near, lane == 0 ? first : fmaxf(before, first));
    put(i, far, lane == 0 ? second : fmaxf(before, second));
  }
}
/// finish(c, Σ 2^(kPower |reach_c − reach_i|) value(i)) over the tokens i ≥ c (kDown) or i ≤ c, by the first warp.
template <bool kDown, int kPower, typename Value, typename Finish>
__device__ __forceinline__ void decayed_sums(const float* reach, Value&& value, Finish&& finish) {
  if (tile_thread() >= 32) return;
  __syncwarp();
  const int lane = tile_thread(), near = kDown ? 63 - 2 * lane : 2 * lane, far = kDown ? near - 1 : near + 1;
  const auto fade = [](float from, float to) { return power_of_two(-kPower * fabsf(to - from)); };
  const float near_reach = reach[near], far_reach = reach[far], own = value(near);
  float sum = value(far) + fade(near_reach, far_reach) * own;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, sum, apart), from = __shfl_up_sync(0xffffffffu, far_reach, apart);
    if (lane >= apart) sum += fade(from, far_reach) * other;
  }
  const float before = __shfl_up_sync(0xffffffffu, sum, 1), from = __shfl_up_sync(0xffffffffu, far_reach, 1);
  finish(near, lane == 0 ? own : own + fade(from, near_reach) * before);
  finish(far, sum);
}
/// finish(t, Σ_c term(t, c)) for tokens t < count of the chunk and all its tokens c, by the threads of kGroups.
template <typename Sum, int kGroups, typename Term, typename Finish>
__device__ __forceinline__ void sum_over_tokens(int count, Term&& term, Finish&& finish) {
  constexpr int kShare = kGroups * kTileThreads / kChunk;
  const int t = tile_thread() / kShare, own = tile_thread() % kShare;
  Sum sum = 0;
#pragma unroll 4
  for (int c = own; c < kChunk; c += kShare) sum += term(t, c);
#pragma unroll
  for (int reach = 1; reach < kShare; reach *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, reach);
  if (own == 0 && t < count) finish(t, sum);
}

/// The sum of values[0 … c] in thread c < 64, of which each such thread gives its own; `carry` is room for one.
/// Barriers inside.
__device__ inline double add_up(double value, double* carry) {
  const int c = tile_thread();
#pragma unroll
  for (int reach = 1; reach < 32; reach *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, value, reach);
    if (c % 32 >= reach) value += other;
  }
  sync();
  if (c == 31) *carry = value;
  sync();
  return c >= 32 && c < 64 ? value + *carry : value;
}
/// body(c, value of thread c) for the 64 threads of a scan.
template <typename Value, typename Body>
__device__ __forceinline__ void scan_tokens(double* carry, Value&& value, Body&& body) {
  const int c = tile_thread();
  const double sum = add_up(c < kChunk ? value(c) : 0, carry);
  if (c < kChunk) body(c, sum);
  sync();
}

// ---- Products ---------------------------------------------------------------------------------------------------

/// A 64×64 left operand in registers: float16, rows scaled by powers of two; kLo: and what that lost.
template <bool kLo>
struct Left {
  std::uint32_t hi[16], lo[kLo ? 16 : 1];
  float factor[2];  // what a row of a product is to be multiplied by
};

/// 64 · kBlocks rows and kN columns in the registers of the warpgroup, or of kGroups of them, which have kN / kGroups
/// columns each and all take part in whatever is done.
template <int kBlocks, int kN, int kGroups = 1>
class Product {
  static constexpr int kOwn = kN / kGroups;

 public:
  /// Which of the groups this is, as a number of which the compiler knows that a warp's threads have the same.
  static __device__ __forceinline__ int own_group() {
    return __shfl_sync(0xffffffffu, tile_thread() / kTileThreads, 0);
  }
  /// A number for each row, or column, that this thread has to do with.
  struct OfRows {
    float x[2 * kBlocks];
  };
  struct OfColumns {
    float x[kOwn / 4];
  };
  static __device__ __forceinline__ OfRows of_rows(const float* values) {
    OfRows own;
#pragma unroll
    for (int r = 0; r < 2 * kBlocks; ++r) own.x[r] = values[first_row() + 64 * (r / 2) + 8 * (r % 2)];
    return own;
  }
  static __device__ __forceinline__ OfColumns of_columns(const float* values) {
    OfColumns own;
#pragma unroll
    for (int i = 0; i < kOwn / 8; ++i) {
      const Pair pair = *reinterpret_cast<const Pair*>(values + 8 * i + first_column());
      own.x[2 * i] = pair.x;
      own.x[2 * i + 1] = pair.y;
    }
    return own;
  }

  /// of(row) for each row that this thread has to do with.
  template <typename Of>
  static __device__ __forceinline__ auto per_row(Of&& of) {
    struct {
      decltype(of(0)) x[2 * kBlocks];
    } own;
    const Own place;
#pragma unroll
    for (int r = 0; r < 2 * kBlocks; ++r) own.x[r] = of(place.row + 64 * (r / 2) + 8 * (r % 2));
    return own;
  }
  /// body(at, x, y), which may change the numbers.
  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
    const Own own;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kOwn / 2; i += 2) body(own.at(m, i), c_[m][i], c_[m][i + 1]);
    }
  }
  /// Number i of those that this thread has.
  __device__ __forceinline__ float& operator[](int i) { return c_[0][i]; }
  /// The same with the numbers of another one at the same place.
  template <typename Body>
  __device__ __forceinline__ void each_with(const Product& other, Body&& body) {
    const Own own;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kOwn / 2; i += 2) {
        body(own.at(m, i), c_[m][i], c_[m][i + 1], other.c_[m][i], other.c_[m][i + 1]);
      }
    }
  }

  /// body(at, x, y, what a tile of 64 rows has there).
  template <typename Body>
  __device__ __forceinline__ void each_beside(const Tile& tile, Body&& body) {
    static_assert(kBlocks == 1);
    const Own own;
    const Matrices matrices(tile);
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 8) {
      const Unit words = load_matrices(matrices.at(0, i));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        body(own.at(0, i + j), c_[0][i + j], c_[0][i + j + 1], unpack_halves(words.words[j / 2]));
      }
    }
  }

  /// = A B, with A of 64 rows and kDepth columns; kAdd: += A B.
  template <Major kMajor, int kDepth, bool kAdd = false>
  __device__ __forceinline__ void multiply(const Tile& a, const Tile& b) {
    queue<kMajor, kDepth, kAdd>(a, b);
    finish(*this);
  }
  /// The same, known after `finish`, which may take several: nothing may be done with them in between.
  template <Major kMajor, int kDepth, bool kAdd = false>
  __device__ __forceinline__ void queue(const Tile& a, const Tile& b) {
    static_assert(kBlocks == 1);
    const Operand left(a.data, a.rows, a.columns), right = own_part<kMajor>(b);
    begin<kAdd>();
#pragma unroll
    for (int s = 0; s < kDepth / 16; ++s) {
      mma<false, kMajor == Major::mn, true>(c_[0], left.k_major(s, a.rows),
                                            kMajor == Major::mn ? right.mn_major(s) : right.k_major(s, b.rows),
                                            kAdd || s > 0);
    }
  }
  template <typename... Products>
  static __device__ __forceinline__ void finish(Products&... products) {
    wgmma_commit();
    wgmma_wait<0>();
    (products.release(), ...);
  }
  /// = A B for a group by itself, with B's 64 rows as the group's columns.
  template <int kDepth>
  __device__ __forceinline__ void multiply_own(const Tile& a, const Tile& b) {
    static_assert(kBlocks == 1 && kOwn == 64);
    const Operand left(a.data, a.rows, a.columns), right(b.data, b.rows, b.columns);
    begin<false>();
#pragma unroll
    for (int s = 0; s < kDepth / 16; ++s) {
      mma<false, false, true>(c_[0], left.k_major(s, a.rows), right.k_major(s, b.rows), s > 0);
    }
    end();
  }
  /// = A B with a symmetric B of kN rows; of 128 the quarter with the last 64 rows and the first 64 columns is not
  /// there.
  __device__ __forceinline__ void multiply_symmetric(const Tile& a, const Tile& b) {
    static_assert(kBlocks == 1 && (kN <= 64 || (kN == 128 && kOwn == 64)));
    if constexpr (kN <= 64) return multiply<Major::k, kN>(a, b);
    const bool first = __shfl_sync(0xffffffffu, own_columns(), 0) == 0;
    const Operand left(a.data, a.rows), right = own_part<Major::k>(b);
    if (first) {
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        mma<false, false, true>(c_[0], left.k_major(s, a.rows), right.k_major(s, b.rows), s > 0);
      }
    } else {
      const Operand turned(b.data + b.rows * 64, b.rows);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        mma<false, true, true>(c_[0], left.k_major(s, a.rows), turned.mn_major(s), s > 0);
      }
    }
    wgmma_fence();
#pragma unroll
    for (int s = 4; s < 8; ++s) {
      mma<false, false, true>(c_[0], left.k_major(s, a.rows), right.k_major(s, b.rows));
    }
    end();
  }
  /// = A B with A in registers; B has 64 rows, which are summed over.
  template <bool kLo>
  __device__ __forceinline__ void multiply(const Left<kLo>& a, const Tile& b) {
    static_assert(kBlocks == 1 && kGroups == 1);
    const Operand right(b.data, b.rows, b.columns);
    begin<false>();
#pragma unroll
    for (int s = 0; s < kChunk / 16; ++s) mma<true, true>(c_[0], a.hi + 4 * s, right.mn_major(s), s > 0);
    if constexpr (kLo) {
#pragma unroll
      for (int s = 0; s < kChunk / 16; ++s) mma<true, true>(c_[0], a.lo + 4 * s, right.mn_major(s));
    }
    end();
  }
  /// = AᵀB over the 64 rows of both; kAdd: += AᵀB. Rows for which A has no column are 0.
  template <bool kAdd>
  __device__ __forceinline__ void outer(const Tile& a, const Tile& b) {
    const Operand right = own_part<Major::mn>(b);
    begin<kAdd>();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      const Operand left(a.data + m * a.rows * 64, a.rows, a.columns);
#pragma unroll
      for (int s = 0; s < kChunk / 16; ++s) {
        mma<true, true, true>(c_[m], left.mn_major(s), right.mn_major(s), kAdd || s > 0);
      }
    }
    end();
    if (a.columns < 64) {  // the rest of 64 rows comes from what lies behind A
      each([&](const At& at, float& x, float& y) {
        if (at.row >= a.columns) x = y = 0;
      });
    }
  }

  /// The numbers value(at, x, y) as a left operand.
  template <bool kLo, typename Value>
  __device__ __forceinline__ Left<kLo> as_left(Value&& value) {
    static_assert(kBlocks == 1 && kN == kChunk && kGroups == 1);
    const Own own;
    float v[kN / 2];
    float top[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      const Pair pair = value(own.at(0, i), c_[0][i], c_[0][i + 1]);
      v[i] = pair.x;
      v[i + 1] = pair.y;
      top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    Left<kLo> left;
    float up[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
      const Scale scale = scale_of(float_to_bits(top[r]));
      left.factor[r] = scale.down;
      up[r] = scale.up;
    }
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      const float x = v[i] * up[i / 2 % 2], y = v[i + 1] * up[i / 2 % 2];
      left.hi[i / 2] = pack_half(x, y);
      if constexpr (kLo) left.lo[i / 2] = pack_half_rest(x, y, left.hi[i / 2]);
    }
    return left;
  }

  /// Left operands: tiles of numbers that value(at, i, pairs) gives, one pair for each tile,
  /// for the numbers i and i + 1 of any product of this kind.
  template <int kTiles, typename Value>
  static __device__ __forceinline__ void put(const Tile (&to)[kTiles], Value&& value) {
    static_assert(kBlocks == 1);
    const Own own;
    const Matrices matrices(to[0]);
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 8) {
      std::uint32_t w[kTiles][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Pair pairs[kTiles];
        value(own.at(0, i + 2 * j), i + 2 * j, pairs);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) w[t][j] = pack_half(pairs[t].x, pairs[t].y);
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        store_matrices(matrices.at(0, i) + (shared_address(to[t].data) - shared_address(to[0].data)), w[t][0], w[t][1],
                       w[t][2], w[t][3]);
      }
    }
  }
  /// Rows of 16-bit numbers to global memory: row r to rows.x[r] unless that is null, word(at, i) for the numbers i and
  /// i + 1 of any product of this kind. Lanes in pairs exchange words, so that four write 32 bytes at once.
  template <typename Rows, typename Word>
  static __device__ __forceinline__ void write(const Rows& rows, Word&& word) {
    static_assert(kBlocks == 1);
    const Own own;
    const unsigned lane = hidden_thread() % 32;
    const bool odd = lane % 2 != 0;
    const unsigned place = own_columns() * 2 + lane % 2 * 16 + lane / 2 % 2 * 8;
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t first = word(own.at(0, i + 2 * r), i + 2 * r);
        const std::uint32_t second = word(own.at(0, i + 4 + 2 * r), i + 4 + 2 * r);
        const std::uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
        const Packed both{odd ? other : first, odd ? second : other};
        if (rows.x[r] != nullptr) *reinterpret_cast<Packed*>(rows.x[r] + place + 4 * i) = both;
      }
    }
  }

  /// To global memory and back as float16, 64 · kN numbers in an order of their own, the same for any kGroups.
  __device__ __forceinline__ void save(std::uint16_t* to) const {
    static_assert(kBlocks == 1);
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 8) {
      Unit unit;
#pragma unroll
      for (int w = 0; w < 4; ++w) unit.words[w] = pack_half(c_[0][i + 2 * w], c_[0][i + 2 * w + 1]);
      reinterpret_cast<Unit*>(to)[own_unit() + i / 8 * kTileThreads] = unit;
    }
  }
  struct Saved {
    Unit units[kOwn / 16];

    /// The numbers i and i + 1.
    __device__ __forceinline__ Pair pair(int i) const { return unpack_halves(units[i / 8].words[i % 8 / 2]); }
  };
  static __device__ __forceinline__ Saved saved(const std::uint16_t* from) {
    static_assert(kBlocks == 1);
    Saved own;
#pragma unroll
    for (int i = 0; i < kOwn / 16; ++i) own.units[i] = read_unit(from + (own_unit() + i * kTileThreads) * 8);
    return own;
  }
  /// Rows from global memory: row r from rows.x[r], 0 where that is null.
  template <typename Rows>
  __device__ __forceinline__ void read(const Rows& rows) {
    static_assert(kBlocks == 1);
    const int column = first_column();
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 2) {
      const float* const row = rows.x[i / 2 % 2];
      const Pair pair = row != nullptr ? read_pair(row + column + i / 4 * 8) : Pair{0, 0};
      c_[0][i] = pair.x;
      c_[0][i + 1] = pair.y;
    }
  }
  /// What `keep` left, of rows of kN columns.
  __device__ __forceinline__ void take(const Unit* from) {
    static_assert(kBlocks == 1);
    from += own_unit();
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 8) {
      const Unit unit = read_unit(reinterpret_cast<const std::uint16_t*>(from + i / 8 * kTileThreads));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const Pair pair = unpack_halves(unit.words[w]);
        c_[0][i + 2 * w] = pair.x;
        c_[0][i + 2 * w + 1] = pair.y;
      }
    }
  }

  /// out[row] = Σ over columns of term(at, x, y). A barrier must follow. Several groups: += instead, two to each of
  /// kSumParts arrays (two numbers to 0, so that their order does not matter).
  template <typename Term>
  __device__ __forceinline__ void row_sums(float* out, Term&& term) {
    float total[2] = {0, 0};
    each([&](const At& at, float x, float y) { total[at.r] += term(at, x, y); });
    sum_up(out, total);
  }
  /// The same of this times another one, or times what a tile of 64 rows has there.
  __device__ __forceinline__ void row_sums_with(const Product& other, float* out) {
    float total[2] = {0, 0};
    each_with(other, [&](const At& at, float x, float y, float a, float b) {
      total[at.r] += x * a;
      total[at.r] += y * b;
    });
    sum_up(out, total);
  }
  __device__ __forceinline__ void row_sums_with(const Tile& tile, float* out) {
    float total[2] = {0, 0};
    each_beside(tile, [&](const At& at, float x, float y, const Pair& other) {
      total[at.r] += x * other.x;
      total[at.r] += y * other.y;
    });
    sum_up(out, total);
  }
  /// The largest bits of a number's size in each row, in the columns of the group.
  struct Tops {
    std::uint32_t x[2];
  };
  __device__ __forceinline__ Tops largest_bits() {
    static_assert(kBlocks == 1);
    Tops top{};
    each([&](const At& at, float x, float y) { top.x[at.r] = max(top.x[at.r], max(size_bits(x), size_bits(y))); });
#pragma unroll
    for (std::uint32_t& x : top.x) {
      x = max(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = max(x, __shfl_xor_sync(0xffffffffu, x, 2));
    }
    return top;
  }
  /// out[row] = the same, or what is there already if that is more. A barrier must follow.
  __device__ __forceinline__ void row_tops(std::uint32_t* out) {
    const Tops top = largest_bits();
    if (tile_thread() % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) atomicMax(out + first_row() + 8 * r, top.x[r]);
  }
  /// out[column] = Σ over rows; `parts` is room for 4 · kN numbers. Barriers inside; one must follow.
  __device__ __forceinline__ void column_sums(float* parts, float* out) {
    static_assert(kBlocks == 1);
    const int warp = tile_thread() % kTileThreads / 32;
#pragma unroll
    for (int i = 0; i < kOwn / 8; ++i) {
      float x = c_[0][4 * i] + c_[0][4 * i + 2], y = c_[0][4 * i + 1] + c_[0][4 * i + 3];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, step);
        y += __shfl_xor_sync(0xffffffffu, y, step);
      }
      if (tile_thread() % 32 < 4) {
        parts[warp * kN + 8 * i + first_column()] = x;
        parts[warp * kN + 8 * i + first_column() + 1] = y;
      }
    }
    sync();
    const int c = tile_thread();
    if (c < kN) out[c] = parts[c] + parts[kN + c] + (parts[2 * kN + c] + parts[3 * kN + c]);
  }
  /// The largest bits of a number's size, for every thread; `parts` is room for 4 words of each group. A barrier
  /// inside.
  __device__ __forceinline__ std::uint32_t largest(std::uint32_t* parts) {
    return most_of_threads<kGroups>(own_largest(), parts);
  }
  /// The same of this thread's numbers.
  __device__ __forceinline__ std::uint32_t own_largest() {
    std::uint32_t top = 0;
    each([&](const At&, float x, float y) { top = max(top, max(size_bits(x), size_bits(y))); });
    return top;
  }
  /// The largest |x| of each row this thread has to do with.
  __device__ __forceinline__ OfRows tops() {
    OfRows top{};
    each([&](const At& at, float x, float y) { top.x[at.r] = fmaxf(top.x[at.r], fmaxf(fabsf(x), fabsf(y))); });
#pragma unroll
    for (float& x : top.x) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    }
    return top;
  }
  /// body(row, r), by one thread for every row.
  template <typename Body>
  __device__ __forceinline__ void each_row(Body&& body) {
    if (tile_thread() % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2 * kBlocks; ++r) body(first_row() + 64 * (r / 2) + 8 * (r % 2), r);
  }
  /// As float16 in the order in which threads hold them, times by(at): of rows of several products, this is number
  /// `turn`.
  template <typename By>
  __device__ __forceinline__ void keep(Unit* to, int turn, By&& by) {
    static_assert(kBlocks == 1 && kGroups == 1);
    const Own own;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 8) {
      Unit unit;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float factor = by(own.at(0, i + 2 * w));
        unit.words[w] = pack_half(c_[0][i + 2 * w] * factor, c_[0][i + 2 * w + 1] * factor);
      }
      to[(turn * (kN / 16) + i / 8) * kTileThreads + tile_thread()] = unit;
    }
  }
  /// As a tile, times `by`, or times by(r) for each row.
  __device__ __forceinline__ void store(const Tile& to, float by) {
    store_rows(to, [&](int) { return by; });
  }
  template <typename By>
  __device__ __forceinline__ void store_rows(const Tile& to, By&& by) {
    store_parts<false>(to, to, by);
  }
  /// The same, and in a second tile what that lost.
  template <bool kRest, typename By>
  __device__ __forceinline__ void store_parts(const Tile& to, const Tile& rest, By&& by) {
    const Matrices matrices(to), rests(rest);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kOwn / 2; i += 8) {
        std::uint32_t w[4], lost[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float factor = by(2 * m + j % 2), x = c_[m][i + 2 * j] * factor, y = c_[m][i + 2 * j + 1] * factor;
          w[j] = pack_half(x, y);
          if constexpr (kRest) lost[j] = pack_half_rest(x, y, w[j]);
        }
        store_matrices(matrices.at(m, i), w[0], w[1], w[2], w[3]);
        if constexpr (kRest) store_matrices(rests.at(m, i), lost[0], lost[1], lost[2], lost[3]);
      }
    }
  }

 private:
  float c_[kBlocks][kOwn / 2];

  /// Where `keep` and `save` put the first of this thread's units.
  static __device__ __forceinline__ int own_unit() {
    return own_columns() / 16 * kTileThreads + tile_thread() % kTileThreads;
  }
  static __device__ __forceinline__ int own_columns() { return kGroups == 1 ? 0 : tile_thread() / kTileThreads * kOwn; }
  static __device__ __forceinline__ int first_row() {
    return tile_thread() % kTileThreads / 32 * 16 + tile_thread() % 32 / 4;
  }
  static __device__ __forceinline__ int first_column() { return own_columns() + tile_thread() % 4 * 2; }
  /// Where this thread's numbers are: found anew wherever they are gone through, because dozens of places in registers
  /// are dear.
  struct Own {
    int row, column;

    __device__ __forceinline__ Own() {
      const unsigned thread = hidden_thread();
      row = static_cast<int>(thread % kTileThreads / 32 * 16 + thread % 32 / 4);
      column = static_cast<int>((kGroups == 1 ? 0 : thread / kTileThreads * kOwn) + thread % 4 * 2);
    }
    __device__ __forceinline__ At at(int m, int i) const {
      return {row + 64 * m + 8 * (i / 2 % 2), i / 4 * 8 + column, 2 * m + i / 2 % 2, i / 4 * 2};
    }
  };
  /// Where this lane's row begins in the four 8×8 matrices of which stmatrix and ldmatrix make numbers i … i + 7.
  struct Matrices {
    std::uint32_t first;
    int block;  // bytes

    __device__ __forceinline__ explicit Matrices(const Tile& tile) : block(tile.rows * tile.columns * 2) {
      const unsigned thread = hidden_thread(), matrix = thread % 32 / 8;
      const unsigned row = thread % kTileThreads / 32 * 16 + matrix % 2 * 8 + thread % 8;
      const unsigned column = kGroups == 1 ? 0 : thread / kTileThreads * kOwn;
      const unsigned swizzle = tile.columns == 64 ? row % 8 : row / 2 % 4;
      first = shared_address(tile.data) + column / 64 * block + row * static_cast<unsigned>(tile.columns * 2) +
              ((column % 64 / 8 + matrix / 2) ^ swizzle) * 16;
    }
    /// i: a multiple of 8.
    __device__ __forceinline__ std::uint32_t at(int m, int i) const {
      return (first ^ (i / 4 % 8 * 16)) + i / 32 * block + m * 64 * 128;
    }
  };
  __device__ __forceinline__ void sum_up(float* out, float (&total)[2]) const {
    static_assert(kBlocks == 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
      total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
      if (tile_thread() % 4 != 0) continue;
      if constexpr (kGroups == 1) {
        out[first_row() + 8 * r] = total[r];
      } else {
        const int part = kGroups > 2 ? tile_thread() / (2 * kTileThreads) * kChunk : 0;
        atomicAdd(out + part + first_row() + 8 * r, total[r]);
      }
    }
  }
  /// The group's columns of a right operand.
  template <Major kMajor>
  static __device__ __forceinline__ Operand own_part(const Tile& b) {
    // From a lane to all: only so does the compiler know that the descriptor is the same for all lanes.
    const int column = kGroups == 1 ? 0 : __shfl_sync(0xffffffffu, own_columns(), 0);
    const int skipped = kMajor == Major::k ? column * 64 : column / 64 * 64 * b.rows + column % 64;
    return Operand(b.data + skipped, b.rows, b.columns);
  }
  template <bool kAdd>
  __device__ __forceinline__ void begin() {
    if constexpr (kAdd) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) hold(c_[m]);
    }
    wgmma_fence();
  }
  __device__ __forceinline__ void end() { finish(*this); }
  __device__ __forceinline__ void release() {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) hold(c_[m]);
  }
  template <int, int, int>
  friend class Product;
};

}  // namespace gka::kernels::cuda::hopper::bwd
