// A stand-in for src/kernels/cuda/hopper/warpgroup.cuh: the same products of the same float16 numbers, one number
// after another.
#pragma once

#include <cstdlib>
#include <limits>
#include <vector>

#include "kernels/cuda/hopper/tile.cuh"

namespace gka::kernels::cuda::hopper::bwd {

inline constexpr int kTileThreads = 1;
template <int>
inline constexpr int kTeams = 1;
inline constexpr int kTileMemory = 116 * 1024;  // two blocks to a multiprocessor

inline int tile_thread() { return 0; }

inline char* tile_memory() {
  alignas(1024) static char bytes[kTileMemory];
  return bytes;
}

template <int = 1, typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Parameters...), std::int64_t grid, std::size_t shared_bytes, void* stream,
                  Arguments&&... arguments) {
  if (shared_bytes > kTileMemory) std::abort();
  std::memset(tile_memory(), 0xff, kTileMemory);
  launch(kernel, grid, 0, stream, std::forward<Arguments>(arguments)...);
}

inline float logarithm(float x) { return std::log2(std::fabs(x)); }
inline void mark(int* word, int bits) { *word |= bits; }
inline void publish() {}
inline float of_lane(float value, int) { return value; }
inline std::uint32_t largest_word(const Unit& unit) {
  std::uint32_t top = 0;
  for (const std::uint32_t word : unit.words) top = max(top, max(word & 0x7fffu, word >> 16 & 0x7fffu));
  return top;
}

template <typename To, typename From>
To read_whole(const From* p) {
  To to;
  std::memcpy(&to, p, sizeof(To));
  return to;
}
inline Unit read_unit(const std::uint16_t* p) { return read_whole<Unit>(p); }
inline Pair read_pair(const float* p) { return read_whole<Pair>(p); }

inline std::uint32_t pack_halves(float x, float y) {
  return float_to_half(x) | static_cast<std::uint32_t>(float_to_half(y)) << 16;
}
inline std::uint32_t pack_bfloats(float x, float y) {
  const auto rounded = [](float value) {
    const std::uint32_t bits = float_to_bits(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  };
  return rounded(x) | rounded(y) << 16;
}

template <int D, int = 1>
void copy_rows(const Tile& to, const std::uint16_t* from, int stride, int len) {
  for (int c = 0; c < kChunk; ++c) {
    for (int u = 0; u < D / 8; ++u) copy_async(to.at(c, 8 * u), from + c * stride + 8 * u, c < len);
  }
}

struct BulkCopy {
  void* to;
  const void* from;
  int bytes;
};
struct BulkBarrier {
  void init() { requested = 0; }
  template <typename... Copies>
  void request(const Copies&... copies) {
    (std::memcpy(copies.to, copies.from, static_cast<std::size_t>(copies.bytes)), ...);
    ++requested;
  }
  void wait(int phase) const {
    if (phase == requested % 2) std::abort();  // on the card: forever
  }
  int requested;
};
inline void send_tile(void* to, const void* from, int bytes) { std::memcpy(to, from, static_cast<std::size_t>(bytes)); }
inline void finish_sending() {}
inline void wait_until_sent() {}

template <int D, int = 1, typename Load, typename Finish>
void sweep_units(Load&& load, Finish&& finish) {
  for (int row = 0; row < kChunk; ++row) {
    for (int u = 0; u < D / 8; ++u) finish(row, u, load(row, u));
  }
}
template <int = 1>
std::uint32_t most_of_threads(std::uint32_t own, std::uint32_t*) {
  return own;
}

inline std::uint64_t marked_tokens(const int* marks) {
  std::uint64_t marked = 0;
  for (int c = 0; c < kChunk; ++c) marked |= static_cast<std::uint64_t>(marks[c] != 0) << c;
  return marked;
}
inline float last_marked(std::uint64_t marked, int c) {
  while (c >= 0 && (marked >> c & 1) == 0) --c;
  return static_cast<float>(c);
}
template <int kCount, int, typename Down, typename Value, typename Put>
void running_largest(Down&& down, Value&& value, Put&& put) {
  for (int i = 0; i < kCount; ++i) {
    float top = -std::numeric_limits<float>::infinity();
    for (int n = 0; n < kChunk; ++n) {
      const int c = down(i) ? kChunk - 1 - n : n;
      top = std::fmax(top, value(i, c));
      put(i, c, top);
    }
  }
}
template <bool kDown, int kPower, typename Value, typename Finish>
void decayed_sums(const float* reach, Value&& value, Finish&& finish) {
  float sum = 0;
  for (int i = 0; i < kChunk; ++i) {
    const int c = kDown ? kChunk - 1 - i : i;
    if (i > 0) sum *= power_of_two(-kPower * std::fabs(reach[c] - reach[kDown ? c + 1 : c - 1]));
    sum += value(c);
    finish(c, sum);
  }
}
template <typename Sum, int, typename Term, typename Finish>
void sum_over_tokens(int count, Term&& term, Finish&& finish) {
  for (int t = 0; t < count; ++t) {
    Sum sum = 0;
    for (int c = 0; c < kChunk; ++c) sum += term(t, c);
    finish(t, sum);
  }
}

template <int D, typename Load, typename Measure, typename Finish>
void sweep_half_rows(Load&& load, Measure&& measure, Finish&& finish) {
  for (int row = 0; row < kChunk; ++row) {
    const auto low = load(row, 0), high = load(row, D / 16);
    const std::uint32_t top = max(measure(low), measure(high));
    finish(row, 0, low, top);
    finish(row, D / 16, high, top);
  }
}
inline std::uint32_t largest_of_tokens(const float* values) {
  std::uint32_t top = 0;
  for (int c = 0; c < kChunk; ++c) top = max(top, size_bits(values[c]));
  return top;
}

template <int D, typename Body>
void each_unit_of_state(Body&& body) {
  for (int row = 0; row < D; ++row) {
    for (int u = 0; u < D / 8; ++u) body(row, u);
  }
}
template <typename Value, typename Body>
void scan_tokens(double*, Value&& value, Body&& body) {
  double sum = 0;
  for (int c = 0; c < kChunk; ++c) {
    sum += value(c);
    body(c, sum);
  }
}

template <bool kLo>
struct Left {
  float hi[kChunk][kChunk], lo[kChunk][kChunk];
  float factor[kChunk];
};

template <int kBlocks, int kN, int = 1>
class Product {
  static constexpr int kM = 64 * kBlocks;

 public:
  struct OfRows {
    float x[kM];
  };
  struct OfColumns {
    float x[kN];
  };
  static OfRows of_rows(const float* values) { return read_whole<OfRows>(values); }
  static OfColumns of_columns(const float* values) { return read_whole<OfColumns>(values); }

  template <typename Of>
  static auto per_row(Of&& of) {
    struct {
      decltype(of(0)) x[kM];
    } own;
    for (int m = 0; m < kM; ++m) own.x[m] = of(m);
    return own;
  }
  template <typename Body>
  void each(Body&& body) {
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < kN; n += 2) body(At{m, n, m, n}, c_[m][n], c_[m][n + 1]);
    }
  }
  float& operator[](int i) { return c_[i / kN][i % kN]; }
  template <typename Body>
  void each_with(const Product& other, Body&& body) {
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < kN; n += 2) {
        body(At{m, n, m, n}, c_[m][n], c_[m][n + 1], other.c_[m][n], other.c_[m][n + 1]);
      }
    }
  }

  template <typename Body>
  void each_beside(const Tile& tile, Body&& body) {
    each([&](const At& at, float& x, float& y) { body(at, x, y, tile.pair(at.row, at.column)); });
  }

  template <Major kMajor, int kDepth, bool kAdd = false>
  void multiply(const Tile& a, const Tile& b) {
    add_product(
        kAdd, kDepth, [&](int m, int l) { return one(a, m, l); },
        [&](int l, int n) { return kMajor == Major::mn ? one(b, l, n) : one(b, n, l); });
  }
  template <Major kMajor, int kDepth, bool kAdd = false>
  void queue(const Tile& a, const Tile& b) {
    multiply<kMajor, kDepth, kAdd>(a, b);
  }
  static void finish(const auto&...) {}
  void multiply_symmetric(const Tile& a, const Tile& b) {
    add_product(
        false, kN, [&](int m, int l) { return one(a, m, l); },
        [&](int l, int n) { return l < 64 ? one(b, l, n) : one(b, n, l); });
  }
  template <bool kLo>
  void multiply(const Left<kLo>& a, const Tile& b) {
    const auto right = [&](int l, int n) { return one(b, l, n); };
    add_product(false, kChunk, [&](int m, int l) { return a.hi[m][l]; }, right);
    if (kLo) add_product(true, kChunk, [&](int m, int l) { return a.lo[m][l]; }, right);
  }
  template <bool kAdd>
  void outer(const Tile& a, const Tile& b) {
    add_product(kAdd, kChunk, [&](int m, int l) { return one(a, l, m); }, [&](int l, int n) { return one(b, l, n); });
  }

  template <bool kLo, typename Value>
  Left<kLo> as_left(Value&& value) {
    Left<kLo> left;
    for (int m = 0; m < kM; ++m) {
      std::uint32_t top = 0;
      float row[kN];
      for (int n = 0; n < kN; n += 2) {
        const Pair pair = value(At{m, n, m, n}, c_[m][n], c_[m][n + 1]);
        row[n] = pair.x;
        row[n + 1] = pair.y;
        top = max(top, max(size_bits(pair.x), size_bits(pair.y)));
      }
      const Scale scale = scale_of(top);
      left.factor[m] = scale.down;
      for (int n = 0; n < kN; ++n) {
        left.hi[m][n] = half_to_float(float_to_half(row[n] * scale.up));
        left.lo[m][n] = half_to_float(float_to_half(row[n] * scale.up - left.hi[m][n]));
      }
    }
    return left;
  }

  template <int kTiles, typename Value>
  static void put(const Tile (&to)[kTiles], Value&& value) {
    for (int i = 0; i < kM * kN; i += 2) {
      Pair pairs[kTiles];
      value(At{i / kN, i % kN, i / kN, i % kN}, i, pairs);
      for (int t = 0; t < kTiles; ++t) {
        *to[t].at(i / kN, i % kN) = float_to_half(pairs[t].x);
        *to[t].at(i / kN, i % kN + 1) = float_to_half(pairs[t].y);
      }
    }
  }

  template <typename Rows, typename Word>
  static void write(const Rows& rows, Word&& word) {
    for (int i = 0; i < kM * kN; i += 2) {
      const At at{i / kN, i % kN, i / kN, i % kN};
      const std::uint32_t both = word(at, i);
      if (rows.x[at.r] != nullptr) std::memcpy(rows.x[at.r] + 2 * at.column, &both, sizeof(both));
    }
  }

  void save(std::uint16_t* to) const {
    for (int i = 0; i < kM * kN; ++i) to[i] = float_to_half(c_[i / kN][i % kN]);
  }
  struct Saved {
    const std::uint16_t* numbers;

    Pair pair(int i) const { return {half_to_float(numbers[i]), half_to_float(numbers[i + 1])}; }
  };
  static Saved saved(const std::uint16_t* from) { return {from}; }
  template <typename Rows>
  void read(const Rows& rows) {
    each([&](const At& at, float& x, float& y) {
      const Pair pair = rows.x[at.r] != nullptr ? read_pair(rows.x[at.r] + at.column) : Pair{0, 0};
      x = pair.x;
      y = pair.y;
    });
  }
  /// What `keep` left.
  void take(const Unit* from) {
    each([&](const At& at, float& x, float& y) {
      const auto [unit, word] = kept(at);
      const Pair pair = unpack_halves(from[unit].words[word]);
      x = pair.x;
      y = pair.y;
    });
  }

  template <typename Term>
  void row_sums(float* out, Term&& term) {
    for (int m = 0; m < kM; ++m) {
      out[m] = 0;
      for (int n = 0; n < kN; n += 2) out[m] += term(At{m, n, m, n}, c_[m][n], c_[m][n + 1]);
    }
  }
  void row_sums_with(const Product& other, float* out) {
    for (int m = 0; m < kM; ++m) {
      out[m] = 0;
      for (int n = 0; n < kN; ++n) out[m] += c_[m][n] * other.c_[m][n];
    }
  }
  void row_sums_with(const Tile& tile, float* out) {
    for (int m = 0; m < kM; ++m) {
      out[m] = 0;
      for (int n = 0; n < kN; ++n) out[m] += c_[m][n] * one(tile, m, n);
    }
  }
  struct Tops {
    std::uint32_t x[kM];
  };
  Tops largest_bits() {
    Tops top{};
    row_tops(top.x);
    return top;
  }
  void row_tops(std::uint32_t* out) {
    each([&](const At& at, float x, float y) { out[at.row] = max(out[at.row], max(size_bits(x), size_bits(y))); });
  }
  void column_sums(float*, float* out) {
    for (int n = 0; n < kN; ++n) {
      out[n] = 0;
      for (int m = 0; m < kM; ++m) out[n] += c_[m][n];
    }
  }
  std::uint32_t largest(std::uint32_t*) {
    std::uint32_t top = 0;
    each([&](const At&, float x, float y) { top = max(top, max(size_bits(x), size_bits(y))); });
    return top;
  }
  OfRows tops() {
    OfRows top{};
    each([&](const At& at, float x, float y) {
      top.x[at.row] = std::fmax(top.x[at.row], std::fmax(std::fabs(x), std::fabs(y)));
    });
    return top;
  }
  template <typename Body>
  void each_row(Body&& body) {
    for (int m = 0; m < kM; ++m) body(m, m);
  }
  template <typename By>
  void keep(Unit* to, int turn, By&& by) {
    each([&](const At& at, float x, float y) {
      const auto [unit, word] = kept(at);
      to[turn * (kN / 16) * 128 + unit].words[word] = pack_halves(x * by(at), y * by(at));
    });
  }
  void store(const Tile& to, float by) {
    store_rows(to, [&](int) { return by; });
  }
  template <typename By>
  void store_rows(const Tile& to, By&& by) {
    each([&](const At& at, float x, float y) {
      *to.at(at.row, at.column) = float_to_half(x * by(at.r));
      *to.at(at.row, at.column + 1) = float_to_half(y * by(at.r));
    });
  }
  template <bool kRest, typename By>
  void store_parts(const Tile& to, const Tile& rest, By&& by) {
    store_rows(to, by);
    each([&](const At& at, float x, float y) {
      *rest.at(at.row, at.column) = float_to_half(x * by(at.r) - one(to, at.row, at.column));
      *rest.at(at.row, at.column + 1) = float_to_half(y * by(at.r) - one(to, at.row, at.column + 1));
    });
  }

 private:
  struct Kept {
    int unit, word;
  };
  /// Thread l of warp w has rows 16w + l/4 and 8 below, columns 8i + 2(l % 4) and the next.
  static Kept kept(const At& at) {
    const int thread = at.row / 16 * 32 + at.row % 8 * 4 + at.column % 8 / 2;
    const int word = at.column / 8 * 2 + at.row % 16 / 8;
    return {word / 4 * 128 + thread, word % 4};
  }

  float c_[kM][kN];

  static float one(const Tile& tile, int row, int column) { return half_to_float(*tile.at(row, column)); }

  template <typename A, typename B>
  void add_product(bool add, int depth, A&& a, B&& b) {
    if (!add) std::memset(c_, 0, sizeof(c_));
    std::vector<float> right(static_cast<std::size_t>(depth * kN));
    for (int l = 0; l < depth; ++l) {
      for (int n = 0; n < kN; ++n) right[static_cast<std::size_t>(l * kN + n)] = b(l, n);
    }
    for (int m = 0; m < kM; ++m) {
      for (int l = 0; l < depth; ++l) {
        const float left = a(m, l);
        const float* row = right.data() + l * kN;
        for (int n = 0; n < kN; ++n) c_[m][n] += left * row[n];
      }
    }
  }
};

}  // namespace gka::kernels::cuda::hopper::bwd
