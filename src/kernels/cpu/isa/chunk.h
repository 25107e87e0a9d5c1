// One chunk of tokens of one head, laid out for the matrix products: *tokens are lanes*. An array of D-vectors, one per
// token, is stored as D rows of `lanes` numbers, so that whatever differs from token to token (decay, norm, solver
// coefficients) is a vector, a dot product per token needs no horizontal sums, and D may be anything.
//
// The memory of token c is H_c = ζ_c H_0 + Σ_{j≤c} M_jc β_j k_j k_jᵀ. It is never formed: what a solve needs is
//
//   (σ_c H_c + ρ) x = ρ x + (σ_c ζ_c) H_0 x + Σ_j (M_jc β_j σ_c) k_j (k_jᵀ x)
//
// with σ_c chosen so that the spectrum is known whatever the token. Scalars (decays, norms, σ) are float64 throughout:
// there are few of them, and the solve does not see scale, so a decay product of 1e-60 still matters.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>

#include "kernels/cpu/isa/gemm.h"
#include "kernels/problem.h"

namespace gka::kernels::cpu::GKA_ISA {

inline constexpr int kMaxChunk = 64;
inline constexpr int kDefaultChunk = 32;

/// Aligned, uninitialised, sized once.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t n) { resize(n); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  void resize(std::int64_t n) {
    std::free(data_);
    const std::size_t bytes = (static_cast<std::size_t>(n) * sizeof(T) + 127) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  T* get() const { return data_; }
  operator T*() const { return data_; }  // NOLINT: reads as the array it is

 private:
  T* data_ = nullptr;
};

struct Sizes {
  int dim = 0;     // D
  int values = 0;  // V
  int chunk = 0;
  bool solves = false;
  bool remembers = false;
};

inline Sizes sizes_of(const Problem& p) {
  const auto chunk = p.options.chunk > 0 ? std::min<std::int64_t>(p.options.chunk, kMaxChunk) : kDefaultChunk;
  return {.dim = static_cast<int>(p.key_dim),
          .values = remembers_values(p) ? static_cast<int>(p.value_dim) : 0,
          .chunk = static_cast<int>(chunk),
          .solves = solves(p),
          .remembers = remembers_values(p)};
}

/// Rows of states and of token-major copies are padded to whole vectors, plus one: a power-of-two stride would send
/// every row of a 128 × 128 matrix to the same few cache sets.
template <typename T>
constexpr int row_stride(int n) {
  return padded<T>(n) + (n % 64 == 0 ? kLanes<T> : 0);
}

/// ζ_c = Π_{i≤c} γ_i and M_jc = Π_{j<i≤c} γ_i, 0 for j > c, by recursion: exactly 0 across a token with γ = 0.
struct Decay {
  double zeta[kMaxChunk];
  double m[kMaxChunk][kMaxChunk];
  double into[kMaxChunk][kMaxChunk];  // into[c][j] = M_jc

  /// Lanes beyond len get 0.
  void set(const double* gamma, int len, int lanes) {
    double product = 1;
    for (int c = 0; c < len; ++c) {
      product *= gamma[c];
      zeta[c] = product;
      double* row = into[c];
      for (int j = 0; j < c; ++j) row[j] = into[c - 1][j] * gamma[c];
      row[c] = 1;
      std::fill(row + c + 1, row + lanes, 0.0);
      std::fill(m[c], m[c] + lanes, 0.0);
      for (int j = 0; j <= c; ++j) m[j][c] = row[j];
    }
    std::fill(zeta + len, zeta + lanes, 0.0);
  }
  double end(int j, int len) const { return into[len - 1][j]; }
};

template <typename T>
void read_row(const View& view, std::int64_t at, int n, T* to) {
  with_type(view.dtype, [&](auto type) {
    using Stored = decltype(type);
    const auto* from = static_cast<const Stored*>(view.data) + at;
    for (int i = 0; i < n; ++i) to[i] = convert<T>(from[i]);
  });
}

template <typename T>
void write_row(const View& view, std::int64_t at, int n, const T* from) {
  with_type(view.dtype, [&](auto type) {
    using Stored = decltype(type);
    auto* to = static_cast<Stored*>(view.data) + at;
    for (int i = 0; i < n; ++i) to[i] = convert<Stored>(from[i]);
  });
}

/// Asks for rows that will be read soon: tokens of one head lie too far apart for the hardware to see them coming.
inline void prefetch_rows(const View& view, std::int64_t b, std::int64_t t, std::int64_t head, int count,
                          std::int64_t n) {
  if (!view) return;
  const std::int64_t size = with_type(view.dtype, [](auto type) { return static_cast<std::int64_t>(sizeof type); });
  for (int c = 0; c < count; ++c) {
    const char* row = static_cast<const char*>(view.data) + offset(view, b, t + c, head) * size;
    for (std::int64_t at = 0; at < n * size; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

inline double read_gate(const View& view, std::int64_t at, double otherwise) {
  double value = otherwise;
  if (view) read_row(view, at, 1, &value);
  return value;
}

/// rows[len × ld] → lanes[n × stride], whole squares of vectors at a time; ld and stride are whole vectors. Lanes
/// beyond len become 0.
template <typename T>
void to_lanes(const T* rows, int ld, int len, int n, T* lanes, int stride) {
  constexpr int kSide = kLanes<T>;
  for (int c = 0; c < stride; c += kSide) {
    for (int i = 0; i < n; i += kSide) {
      Vec<T> square[kSide];
      for (int r = 0; r < kSide; ++r) square[r] = c + r < len ? load(rows + (c + r) * ld + i) : Vec<T>{};
      transpose<T>(square);
      for (int r = 0; r < kSide && i + r < n; ++r) store(lanes + (i + r) * stride + c, square[r]);
    }
  }
}

/// The way back; rows are filled up with 0 to ld.
template <typename T>
void to_rows(const T* lanes, int stride, int len, int n, T* rows, int ld) {
  constexpr int kSide = kLanes<T>;
  for (int i = 0; i < ld; i += kSide) {
    for (int c = 0; c < len; c += kSide) {
      Vec<T> square[kSide];
      for (int r = 0; r < kSide; ++r) square[r] = i + r < n ? load(lanes + (i + r) * stride + c) : Vec<T>{};
      transpose<T>(square);
      for (int r = 0; r < kSide && c + r < len; ++r) store(rows + (c + r) * ld + i, square[r]);
    }
  }
}

/// For n whole vectors. x·0 is 0 unless x is not finite.
template <typename T>
bool all_finite(const T* row, int n) {
  Vec<T> sums[4] = {};
  int i = 0;
  for (; i + 4 * kLanes<T> <= n; i += 4 * kLanes<T>) {
    for (int j = 0; j < 4; ++j) sums[j] += load(row + i + j * kLanes<T>) * T{0};
  }
  for (; i < n; i += kLanes<T>) sums[0] += load(row + i) * T{0};
  const Vec<T> sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  bool finite = true;
  for (int l = 0; l < kLanes<T>; ++l) finite &= sum[l] == 0;
  return finite;
}

/// mask[j][c] = M_jc β_j σ_c, which is 0 for j > c and beyond len, and scale[c] = σ_c ζ_c; sigma has a value per lane.
template <typename T>
void set_weights(const Decay& decay, const double* beta, const double* sigma, int len, int lanes, T* mask, T* scale) {
  for (int c = 0; c < lanes; ++c) scale[c] = static_cast<T>(sigma[c] * decay.zeta[c]);
  for (int j = 0; j < len; ++j) {
    const double* m = decay.m[j];
    for (int c = 0; c < lanes; ++c) mask[j * lanes + c] = static_cast<T>(m[c] * beta[j] * sigma[c]);
  }
}

/// out[c] = Σ_i a[i][c] b[i][c], one dot product per token.
template <typename T>
void lane_dot(const T* a, const T* b, int n, int lanes, T* out) {
  for (int c = 0; c < lanes; c += kLanes<T>) {
    Vec<T> sums[4] = {};  // a sum has to wait for the one before
    int i = 0;
    for (; i + 4 <= n; i += 4) {
      for (int j = 0; j < 4; ++j) sums[j] += load(a + (i + j) * lanes + c) * load(b + (i + j) * lanes + c);
    }
    for (; i < n; ++i) sums[0] += load(a + i * lanes + c) * load(b + i * lanes + c);
    store(out + c, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

/// A state as the kernels walk with it: rows padded with 0, h symmetric.
template <typename T>
struct StatePair {
  Buffer<T> h, u;
  int ldh = 0, ldu = 0;

  StatePair() = default;
  explicit StatePair(const Sizes& s) { allocate(s); }
  static void clear(Buffer<T>& m, std::int64_t n) {
    m.resize(n);
    std::fill_n(m.get(), n, T{0});
  }
  void allocate(const Sizes& s) {
    ldh = row_stride<T>(s.dim);
    ldu = row_stride<T>(s.values);
    if (s.solves) clear(h, static_cast<std::int64_t>(s.dim) * ldh);
    if (s.remembers) clear(u, static_cast<std::int64_t>(s.dim) * ldu);
  }
};

/// Contiguous [rows × n] → padded rows, zero where there is no source.
template <typename T>
void unpack_matrix(const T* from, int rows, int n, T* to, int ld) {
  for (int i = 0; i < rows; ++i) {
    T* row = to + static_cast<std::int64_t>(i) * ld;
    for (int j = 0; j < n; ++j) row[j] = from == nullptr ? T{0} : from[static_cast<std::int64_t>(i) * n + j];
    for (int j = n; j < ld; ++j) row[j] = T{0};
  }
}

template <typename T>
void pack_matrix(const T* from, int ld, int rows, int n, T* to) {
  for (int i = 0; i < rows; ++i) std::memcpy(to + static_cast<std::int64_t>(i) * n, from + i * ld, sizeof(T) * n);
}

template <typename T>
void symmetrise(T* m, int n, int ld) {
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < i; ++j) m[i * ld + j] = m[j * ld + i] = (m[i * ld + j] + m[j * ld + i]) / 2;
  }
}

/// Rows of n numbers become NaN; what pads them stays 0.
template <typename T>
void fill_nan(T* m, int rows, int n, int ld) {
  for (int i = 0; i < rows; ++i)
    std::fill_n(m + static_cast<std::int64_t>(i) * ld, n, std::numeric_limits<T>::quiet_NaN());
}

/// Token c of an array of lanes becomes NaN.
template <typename T>
void mark_lost(T* values, int rows, int lanes, int c) {
  for (int i = 0; i < rows; ++i) values[i * lanes + c] = std::numeric_limits<T>::quiet_NaN();
}

/// ‖m‖_F in float64 whatever the scale of m.
template <typename T>
double frobenius(const T* m, int rows, int ld) {
  const auto norm = [&](double scale) {
    const int n = rows * ld;
    double sums[8] = {};
    int i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int j = 0; j < 8; ++j) sums[j] += (m[i + j] * scale) * (m[i + j] * scale);
    }
    double total = 0;
    for (; i < n; ++i) total += (m[i] * scale) * (m[i] * scale);
    for (const double s : sums) total += s;
    return std::sqrt(total);
  };
  const double plain = norm(1.0);
  if constexpr (sizeof(T) == 8) {
    // Squares of float64 leave the range of float64; rescale by a power of two and try again.
    if (plain < 1e-140) return norm(0x1p+500) * 0x1p-500;
    if (plain > 1e+140) return norm(0x1p-500) * 0x1p+500;
  }
  return plain;
}

/// Everything the passes know of one chunk before they touch a state: its tokens and gates.
template <typename T>
struct Chunk {
  Sizes size;
  int ldk, ldv;
  int len = 0;    // tokens
  int lanes = 0;  // len in whole vectors

  Buffer<T> k, v;       // [len × ldk], [len × ldv]: token-major
  Buffer<T> q, kt, vt;  // [D × lanes], [D × lanes], [V × lanes] (vt only where asked for)
  Buffer<T> row;        // one row for conversions
  double gamma[kMaxChunk], beta[kMaxChunk], alpha[kMaxChunk];
  Decay key_decay_storage, value_decay;
  const Decay* key_decay = nullptr;

  // Tokens that write something not finite: they and the tokens after them are lost, until γ = 0 forgets it all; no
  // earlier token is touched. A sum over tokens with zero weights would spread a NaN, so in products such a token's key
  // and value count as 0, and whoever is lost is marked afterwards.
  bool bad_key[kMaxChunk], bad_value[kMaxChunk];

  explicit Chunk(const Sizes& s) : size(s), ldk(row_stride<T>(s.dim)), ldv(row_stride<T>(s.values)) {
    k.resize(static_cast<std::int64_t>(s.chunk) * ldk);
    kt.resize(static_cast<std::int64_t>(s.dim) * kMaxChunk);
    q.resize(static_cast<std::int64_t>(s.dim) * kMaxChunk);
    row.resize(static_cast<std::int64_t>(s.chunk) * std::max(ldk, ldv));
    if (s.remembers) {
      v.resize(static_cast<std::int64_t>(s.chunk) * ldv);
      vt.resize(static_cast<std::int64_t>(s.values) * kMaxChunk);
    }
  }

  struct Needs {
    bool queries = true;
    bool key_lanes = true;
    bool values = true;
    bool value_lanes = false;
  };

  void load(const Problem& p, std::int64_t b, std::int64_t t, std::int64_t head, int length, Needs needs) {
    len = length;
    lanes = padded<T>(len);
    load_gates(p, b, t, head);
    load_rows(p.k, b, t, key_head(p, head), size.dim, k, ldk, bad_key);
    for (int c = 0; c < len; ++c) {
      bad_key[c] = (bad_key[c] && beta[c] != 0) || !std::isfinite(beta[c]) || std::isnan(gamma[c]);
      if (!std::isfinite(beta[c])) beta[c] = 0;
      if (std::isnan(gamma[c])) gamma[c] = 0;
    }
    if (size.remembers && needs.values) {
      load_rows(p.v, b, t, value_head(p, head), size.values, v, ldv, bad_value);
      for (int c = 0; c < len; ++c) bad_value[c] = bad_key[c] || (bad_value[c] && beta[c] != 0);
      if (needs.value_lanes) to_lanes<T>(v, ldv, len, size.values, vt, lanes);
    }
    key_decay_storage.set(gamma, len, lanes);
    key_decay = &key_decay_storage;
    if (!p.options.decay_keys) set_undecayed_keys(p);
    if (needs.key_lanes) to_lanes<T>(k, ldk, len, size.dim, kt, lanes);
    if (needs.queries) load_lanes(p.q, b, t, head, size.dim, q);
  }

  /// Which tokens a bad write, or a state that was lost before, has reached: everything from there to the next γ = 0.
  void find_lost(const bool* bad, const Decay& decay, bool state_lost, bool* lost) const {
    for (int c = 0; c < len; ++c) {
      const double gamma_c = c == 0 ? decay.zeta[0] : decay.m[c - 1][c];
      state_lost = (state_lost && gamma_c != 0) || bad[c];
      lost[c] = state_lost;
    }
  }
  bool ends_lost(const bool* bad, const Decay& decay) const {
    bool lost[kMaxChunk] = {};
    find_lost(bad, decay, false, lost);
    return lost[len - 1];
  }

  /// Asks for the keys and values of `count` tokens that will be loaded soon.
  void prefetch(const Problem& p, std::int64_t b, std::int64_t t, std::int64_t head, std::int64_t count) const {
    prefetch_rows(p.k, b, t, key_head(p, head), static_cast<int>(count), size.dim);
    prefetch_rows(p.v, b, t, value_head(p, head), static_cast<int>(count), size.values);
  }

  const Decay& values_decay() const { return key_decay == &key_decay_storage ? key_decay_storage : value_decay; }

  /// Any [.., n]-vector per token, as lanes.
  void load_lanes(const View& view, std::int64_t b, std::int64_t t, std::int64_t head, int n, T* to) {
    const int ld = padded<T>(n);
    for (int c = 0; c < len; ++c) read_row(view, offset(view, b, t + c, head), n, row + c * ld);
    to_lanes<T>(row, ld, len, n, to, lanes);
  }

  void store_lanes(const View& view, std::int64_t b, std::int64_t t, std::int64_t head, int n, const T* from) {
    const int ld = padded<T>(n);
    to_rows<T>(from, lanes, len, n, row, ld);
    for (int c = 0; c < len; ++c) write_row<T>(view, offset(view, b, t + c, head), n, row + c * ld);
  }

 private:
  void load_gates(const Problem& p, std::int64_t b, std::int64_t t, std::int64_t head) {
    for (int c = 0; c < len; ++c) {
      gamma[c] = p.log_decay ? std::exp(read_gate(p.log_decay, offset(p.log_decay, b, t + c, head), 0)) : 1.0;
      beta[c] = read_gate(p.beta, offset(p.beta, b, t + c, head), 1);
      alpha[c] = read_gate(p.alpha, offset(p.alpha, b, t + c, head), 1);
    }
  }

  /// Rows that are not finite are marked and read as 0.
  void load_rows(const View& view, std::int64_t b, std::int64_t t, std::int64_t head, int n, T* to, int ld, bool* bad) {
    for (int c = 0; c < len; ++c) {
      T* at = to + static_cast<std::int64_t>(c) * ld;
      read_row(view, offset(view, b, t + c, head), n, at);
      std::fill(at + n, at + ld, T{0});
      bad[c] = !all_finite(at, ld);
      if (bad[c]) std::fill(at, at + n, T{0});
    }
  }

  void set_undecayed_keys(const Problem& p) {
    if (!p.log_decay) return;
    value_decay = key_decay_storage;
    double ones[kMaxChunk];
    std::fill(ones, ones + kMaxChunk, 1.0);
    key_decay_undecayed.set(ones, len, lanes);
    key_decay = &key_decay_undecayed;
  }

  Decay key_decay_undecayed;
};

/// state · zeta as the start of a product, in two steps where zeta itself would lose bits to underflow before the
/// product does. With zeta = 0 it is forgotten, whatever it was.
template <typename T>
Start<T> faded(const T* state, std::int64_t ld, double zeta) {
  if (zeta == 0) return {};
  const bool tiny = zeta < std::sqrt(static_cast<double>(std::numeric_limits<T>::min()));
  const T factor = static_cast<T>(tiny ? std::sqrt(zeta) : zeta);
  return {.from = state, .ld = ld, .by = factor, .again = tiny ? factor : T{1}};
}

/// Rows [from, to) of next = ζ_C state + Σ_j M_jC β_j k_j (k_j or v_j)ᵀ; next may be state. h gets √weight on both
/// sides, so that it stays symmetric to the last bit.
template <typename T>
void advance_keys(const Chunk<T>& c, const T* h, T* next, int ld, int from, int to, T* scratch) {
  const std::int64_t begin = static_cast<std::int64_t>(from) * ld;
  if (c.ends_lost(c.bad_key, *c.key_decay)) return fill_nan(next + begin, to - from, c.size.dim, ld);
  for (int j = 0; j < c.len; ++j) {
    const T weight = static_cast<T>(std::sqrt(c.key_decay->end(j, c.len) * c.beta[j]));
    for (int i = 0; i < c.ldk; ++i) scratch[j * c.ldk + i] = weight * c.k[j * c.ldk + i];
  }
  const Start<T> start = faded(h + begin, ld, c.key_decay->zeta[c.len - 1]);
  const Left<T> keys{scratch + from, 1, c.ldk};
  if (to - from == c.size.dim) {
    symmetric_gemm<T>(to, c.len, keys, scratch, c.ldk, next, ld, start);
  } else {
    gemm<T>(to - from, padded<T>(c.size.dim), c.len, keys, scratch, c.ldk, next + begin, ld, start);
  }
}

template <typename T>
void advance_values(const Chunk<T>& c, const T* u, T* next, int ld, int from, int to, T* scratch) {
  const std::int64_t begin = static_cast<std::int64_t>(from) * ld;
  const Decay& decay = c.values_decay();
  if (c.ends_lost(c.bad_value, decay)) return fill_nan(next + begin, to - from, c.size.values, ld);
  for (int j = 0; j < c.len; ++j) {
    const T weight = static_cast<T>(decay.end(j, c.len) * c.beta[j]);
    for (int i = 0; i < c.ldv; ++i) scratch[j * c.ldv + i] = weight * c.v[j * c.ldv + i];
  }
  gemm<T>(to - from, padded<T>(c.size.values), c.len, {c.k + from, 1, c.ldk}, scratch, c.ldv, next + begin, ld,
          faded(u + begin, ld, decay.zeta[c.len - 1]));
}

}  // namespace gka::kernels::cpu::GKA_ISA
