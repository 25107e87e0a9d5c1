// A stand-in for src/kernels/cuda/hopper/backward_tiles.cuh: the same products of the same bfloat16 numbers, one number
// after another.
#pragma once

#include <vector>

#include "kernels/cuda/block.cuh"

namespace gka::kernels::cuda::hopper::passes {

inline constexpr int kTileThreads = 1;
inline constexpr int kTileWarps = 8;
inline constexpr int kTileBytes = 227 * 1024;

inline int tile_thread() { return 0; }

inline char* tile_memory() {
  alignas(16) static char bytes[kTileBytes];
  return bytes;
}

template <typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Parameters...), std::int64_t grid, int shared_bytes, void* stream,
                  Arguments&&... arguments) {
  std::memset(tile_memory(), 0xff, kTileBytes);
  launch(kernel, grid, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

inline float power_of_two(float x) { return x < -126 ? 0 : std::exp2(x); }
inline void announce_line(const void*) {}
inline void announce(const void*, int) {}
inline void copy_sixteen(void* to, const void* from, bool zero) {
  zero ? std::memset(to, 0, 16) : std::memcpy(to, from, 16);
}
inline void wait_for_copies() {}

struct Pair {
  float x, y;
};
struct Quad {
  float x[4];
};
struct Packed {
  std::uint32_t words[2];
};

template <typename To, typename From>
To read_whole(const From* p) {
  To to;
  std::memcpy(&to, p, sizeof(To));
  return to;
}
inline std::uint32_t read_word(const std::uint16_t* p) { return read_whole<std::uint32_t>(p); }
inline Packed read_words(const std::uint16_t* p) { return read_whole<Packed>(p); }
inline Pair read_pair(const float* p) { return read_whole<Pair>(p); }
inline Quad read_quad(const float* p) { return read_whole<Quad>(p); }

struct Rows {
  std::uint16_t* hi;
  std::uint16_t* lo;
  int ld;

  Rows top() const { return {hi, nullptr, ld}; }
  Rows from_column(int i) const { return {hi + i, lo == nullptr ? nullptr : lo + i, ld}; }
};

inline std::uint32_t to_bfloat16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
inline std::uint32_t pack_pair(float x, float y) { return to_bfloat16(x) | to_bfloat16(y) << 16; }
inline Pair unpack_pair(std::uint32_t packed) {
  return {bits_to_float(packed << 16), bits_to_float(packed & 0xffff0000u)};
}
inline float one(const std::uint16_t* p, int at) { return bits_to_float(static_cast<std::uint32_t>(p[at]) << 16); }

struct SplitPair {
  std::uint32_t hi, lo;
};
inline SplitPair split_pair(Pair p) {
  const std::uint32_t hi = pack_pair(p.x, p.y);
  const Pair kept = unpack_pair(hi);
  return {hi, pack_pair(p.x - kept.x, p.y - kept.y)};
}

inline void store_pair(const Rows& to, int row, int column, float x, float y) {
  const int at = row * to.ld + column;
  const SplitPair split = split_pair({x, y});
  std::memcpy(to.hi + at, &split.hi, 4);
  if (to.lo != nullptr) std::memcpy(to.lo + at, &split.lo, 4);
}
inline void store_quad(const Rows& to, int row, int column, const Quad& q) {
  store_pair(to, row, column, q.x[0], q.x[1]);
  store_pair(to, row, column + 2, q.x[2], q.x[3]);
}
inline Pair load_pair(const Rows& from, int row, int column) {
  const int at = row * from.ld + column;
  const auto value = [&](int i) { return one(from.hi, i) + (from.lo != nullptr ? one(from.lo, i) : 0); };
  return {value(at), value(at + 1)};
}

inline float sum_of_threads(float own, float*) { return own; }

inline void add_up(double* values) {
  for (int c = 1; c < 64; ++c) values[c] += values[c - 1];
}

template <int kSums, typename Load, typename Use, typename Finish>
void sum_rows(int rows, int columns, Load&& load, Use&& use, Finish&& finish) {
  for (int row = 0; row < rows; ++row) {
    float sums[kSums] = {};
    for (int column = 0; column < columns; column += 4) use(row, column, load(row, column), sums);
    finish(row, sums);
  }
}

enum class Lies : std::uint8_t { as_is, transposed };
enum class Zero : std::uint8_t { nowhere, above, below };

struct At {
  int row, column, r, c;
};

template <int kM, int kN, int kWarpsM>
class Product {
 public:
  struct OfRows {
    float x[kM];
  };
  struct OfColumns {
    float x[kN];
  };
  static OfRows of_rows(const float* values) {
    OfRows own;
    std::memcpy(own.x, values, sizeof(own.x));
    return own;
  }
  static OfColumns of_columns(const float* values) {
    OfColumns own;
    std::memcpy(own.x, values, sizeof(own.x));
    return own;
  }

  void clear() { std::memset(c_, 0, sizeof(c_)); }

  template <typename Body>
  void each(Body&& body) {
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < kN; n += 2) body(At{m, n, m, n}, c_[m][n], c_[m][n + 1]);
    }
  }
  template <typename Body>
  void each_with(const Product& other, Body&& body) {
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < kN; n += 2) {
        body(At{m, n, m, n}, c_[m][n], c_[m][n + 1], other.c_[m][n], other.c_[m][n + 1]);
      }
    }
  }

  template <Lies kA, Lies kB, int kDepth, Zero kZero = Zero::nowhere>
  void add(const Rows& a, const Rows& b) {
    add_planes<kA, kB, kZero>(a.hi, a.ld, b.hi, b.ld, kDepth);
    if (a.lo != nullptr) add_planes<kA, kB, kZero>(a.lo, a.ld, b.hi, b.ld, kDepth);
    if (b.lo != nullptr) add_planes<kA, kB, kZero>(a.hi, a.ld, b.lo, b.ld, kDepth);
  }
  template <Lies kA, Lies kB, int kDepth>
  void add_lower(const Rows& a, const Rows& b) {
    add<kA, kB, kDepth>(a, b);
    each([](const At& at, float& x, float& y) {  // nobody may rely on these
      if (at.column > at.row + 31) x = y = 1e30f;
    });
  }

  template <int kDepth, int, bool kLo, typename Load, typename Split>
  void add_from(const Rows& a, Load&& load, Split&& split) {
    std::vector<std::uint16_t> hi(kDepth * kN), lo(kDepth * kN);
    for (int n = 0; n < kN; ++n) {
      for (int l = 0; l < kDepth; l += 2) {
        const SplitPair both = split(load(n, l));
        for (int i = 0; i < 2; ++i) {
          hi[(l + i) * kN + n] = static_cast<std::uint16_t>(both.hi >> 16 * i);
          lo[(l + i) * kN + n] = static_cast<std::uint16_t>(both.lo >> 16 * i);
        }
      }
    }
    add<Lies::as_is, Lies::as_is, kDepth>(a, {hi.data(), kLo ? lo.data() : nullptr, kN});
  }

  template <typename Term>
  void row_sums(float*, float* out, Term&& term) {
    for (int m = 0; m < kM; ++m) {
      out[m] = 0;
      for (int n = 0; n < kN; n += 2) out[m] += term(At{m, n, m, n}, c_[m][n], c_[m][n + 1]);
    }
  }
  void lower_column_sums(float*, float* out) {
    for (int n = 0; n < kN; ++n) {
      out[n] = 0;
      for (int m = n; m < kM; ++m) out[n] += c_[m][n];
    }
  }

 private:
  float c_[kM][kN];

  template <Lies kA, Lies kB, Zero kZero>
  void add_planes(const std::uint16_t* a, int lda, const std::uint16_t* b, int ldb, int k) {
    for (int m = 0; m < kM; ++m) {
      for (int l = 0; l < k; ++l) {
        if (kZero == Zero::above && l / 16 > m / 16) continue;
        if (kZero == Zero::below && l / 16 < m / 16) continue;
        const float left = one(a, kA == Lies::as_is ? m * lda + l : l * lda + m);
        for (int n = 0; n < kN; ++n) c_[m][n] += left * one(b, kB == Lies::as_is ? l * ldb + n : n * ldb + l);
      }
    }
  }
};

}  // namespace gka::kernels::cuda::hopper::passes
