// One chunk of tokens of one head, and a state that walks over it. The same cut as on the CPU: the memory of token c is
// H_c = ζ_c H_0 + Σ_{j≤c} M_jc β_j k_j k_jᵀ and is never formed; scalars (decays, norms) are float64, because the solve
// does not see scale and a decay product of 1e-60 still matters.
#pragma once

#include <limits>

#include "kernels/cuda/thread_block.cuh"

namespace gka::kernels::cuda {

struct Sizes {
  int dim = 0;     // D
  int values = 0;  // V, 0 without a memory of values
  int chunk = 0;
  bool solves = false;
  bool remembers = false;

  __host__ __device__ int ldh() const { return padded(dim) + kApart; }  // rows of H
  __host__ __device__ int ldu() const { return padded(values); }        // rows of U
  __host__ __device__ int ldk() const { return padded(dim) + kApart; }
  __host__ __device__ int ldv() const { return padded(values) + kApart; }
  __host__ __device__ int lanes_of_keys() const { return dim * kStride; }
  __host__ __device__ int lanes_of_values() const { return values * kStride; }
  __host__ __device__ int rows_of_tokens() const { return kMaxChunk * max(ldk(), ldv()); }
  __host__ __device__ int h_size() const { return solves ? dim * ldh() : 0; }
  __host__ __device__ int u_size() const { return dim * ldu(); }
};

/// ζ_c = Π_{i≤c} γ_i and M_jc = Π_{j<i≤c} γ_i, by recursion: exactly 0 across a token with γ = 0.
struct Decay {
  double gamma[kMaxChunk];
  double zeta[kMaxChunk];
  double* products;  // M, [kMaxChunk × kMaxChunk]

  __device__ double m(int j, int c) const { return products[j * kMaxChunk + c]; }

  /// From `gamma`.
  __device__ void set(int len) {
    each(len + 1, [&](int j) {
      double* row = j < len ? products + j * kMaxChunk : zeta;
      if (j < len) row[j] = 1;
      double product = 1;
      for (int c = j < len ? j + 1 : 0; c < len; ++c) row[c] = product *= gamma[c];
    });
  }
};

template <typename T>
__device__ __noinline__ void fill(T* values, int n, T value) {
  each(n, [&](int i) { values[i] = value; });
}

/// Contiguous [rows × n] → rows of ld numbers, 0 behind the n.
template <typename T>
__device__ __noinline__ void unpack_matrix(const T* from, int rows, int n, T* to, int ld) {
  move_rows(rows, n, from, n, to, ld, [](int, T value) { return value; });
  const int behind = ld - n;
  each(rows * behind, [&](int at) { to[at / behind * ld + n + at % behind] = T{0}; });
}

template <typename T>
__device__ __noinline__ void pack_matrix(const T* from, int ld, int rows, int n, T* to) {
  move_rows(rows, n, from, ld, to, n, [](int, T value) { return value; });
}

template <typename T>
__device__ __noinline__ void copy(const T* from, int n, T* to) {
  move(n, [&](int at) { return from[at]; }, [&](int at, T value) { to[at] = value; });
}

/// The same for the symmetric part of a square matrix.
template <typename T>
__device__ void pack_symmetric(const T* from, int ld, int n, T* to) {
  each(n * n, [&](int at) {
    const int i = at / n, j = at % n;
    to[at] = (from[max(i, j) * ld + min(i, j)] + from[min(i, j) * ld + max(i, j)]) / 2;
  });
}

/// values[..][c] ← value for the tokens set aside, of which there may be none.
template <typename T>
__device__ __noinline__ void set_lost(T* values, int rows, int len, const int* lost, T value) {
  int any = 0;
  for (int c = 0; c < len; ++c) any |= lost[c];
  if (!any) return;
  each_lane(rows, len, [&](int, int c, int at) {
    if (lost[c]) values[at] = value;
  });
}
template <typename T>
__device__ void mark_lost(T* values, int rows, int len, const int* lost) {
  set_lost(values, rows, len, lost, static_cast<T>(not_a_number()));
}
template <typename T>
__device__ void clear_lost(T* values, int rows, int len, const int* lost) {
  set_lost(values, rows, len, lost, T{0});
}

/// A factor of 0 clears, also what is not finite.
template <typename T>
__device__ __noinline__ void scale_lanes(T* values, int rows, int lanes, const T* factor) {
  each_vector(rows, lanes,
              [&](int, int c, int at) { store(values + at, masked(load(values + at), load(factor + c))); });
}

/// A token's channels from and to lanes.
template <typename T>
__device__ __forceinline__ void put_run(const T (&values)[kRun], int count, T* to) {
#pragma unroll
  for (int r = 0; r < kRun; ++r) {
    if (r < count) to[r * kStride] = values[r];
  }
}
template <typename T>
__device__ __forceinline__ void get_run(const T* from, int count, T (&values)[kRun]) {
#pragma unroll
  for (int r = 0; r < kRun; ++r) values[r] = r < count ? from[r * kStride] : T{0};
}

/// Into a row that is whole runs long.
template <typename T>
__device__ __forceinline__ void store_run(const T (&values)[kRun], T* to) {
#pragma unroll
  for (int r = 0; r < kRun; r += kVector) store(to + r, Vec<T>{values[r], values[r + 1], values[r + 2], values[r + 3]});
}

/// Everything the passes know of one chunk before they touch a state: its tokens and gates.
template <typename T>
struct Chunk {
  Sizes size;
  int len;    // tokens
  int lanes;  // len in whole vectors

  T *k, *v;        // [len × ldk], [len × ldv]: token-major
  T *q, *kt, *vt;  // [D × lanes], [D × lanes], [V × lanes]
  double gamma[kMaxChunk], beta[kMaxChunk], alpha[kMaxChunk];
  T weight[kMaxChunk];  // of `advance`
  Decay decays[2];
  int any_bad;
  int key_decays;  // which of the two the keys have: the values' own, or (decay_keys = false) one without decay
  int state_lost;

  // Tokens that write something not finite: they and the tokens after them are lost, until γ = 0 forgets it all; no
  // earlier token is touched. A sum over tokens with zero weights would spread a NaN, so in products such a token's key
  // and value count as 0, and whoever is lost is marked afterwards.
  int bad_key[kMaxChunk], bad_value[kMaxChunk];

  struct Needs {
    bool queries = true;
    bool key_lanes = true;
    bool value_lanes = false;
  };

  __host__ __device__ void allocate_hot(Arena& arena, const Sizes& s) {
    size = s;
    kt = arena.take<T>(s.lanes_of_keys());
  }
  __host__ __device__ void allocate(Arena& arena) {
    k = arena.take<T>(kMaxChunk * size.ldk());
    q = arena.take<T>(size.lanes_of_keys());
    v = arena.take<T>(size.remembers ? kMaxChunk * size.ldv() : 0);
    vt = arena.take<T>(size.lanes_of_values());
    for (Decay& decay : decays) decay.products = arena.take<double>(kMaxChunk * kMaxChunk);
  }

  __device__ const Decay& key_decay() const { return decays[key_decays]; }
  __device__ const Decay& values_decay() const { return decays[0]; }

  __device__ void set_length(int length) {
    sync();  // whoever still reads the last one
    alone([&] {
      len = length;
      lanes = padded(length);
      any_bad = 0;
    });
  }

  __device__ __noinline__ void load(const Problem& p, std::int64_t b, std::int64_t t, std::int64_t head, int length,
                                    Needs needs) {
    set_length(length);
    load_gates(p, b, t, head);
    load_rows(p.k, b, t, key_head(p, head), size.dim, k, size.ldk(), needs.key_lanes ? kt : nullptr, bad_key);
    if (size.remembers) {
      load_rows(p.v, b, t, value_head(p, head), size.values, v, size.ldv(), needs.value_lanes ? vt : nullptr,
                bad_value);
    }
    each(len, [&](int c) {
      const bool bad_gate = !finite(beta[c]) || gamma[c] != gamma[c];
      if (bad_gate) raise(&any_bad);
      bad_key[c] = (bad_key[c] && beta[c] != 0) || bad_gate;
      if (size.remembers) bad_value[c] = bad_key[c] || (bad_value[c] && beta[c] != 0);
      if (!finite(beta[c])) beta[c] = 0;
      if (gamma[c] != gamma[c]) gamma[c] = 0;
      decays[0].gamma[c] = gamma[c];
      decays[1].gamma[c] = 1;
    });
    decays[0].set(len);
    if (key_decays == 1) decays[1].set(len);
    if (needs.queries) load_lanes(p.q, b, t, head, size.dim, q);
  }

  /// Which tokens a bad write, or a state that was lost before, has reached: everything from there to the next γ = 0.
  /// `lost`, if given, gets them; returned is whether the chunk's end is among them.
  __device__ __noinline__ bool find_lost(const int* bad, const Decay& decay, bool before, int* lost) {
    if (!before && !any_bad) {
      each(lost != nullptr ? len : 0, [&](int c) { lost[c] = 0; });
      return false;
    }
    alone([&] {
      int reached = before;
      for (int c = 0; c < len; ++c) {
        reached = (reached && decay.gamma[c] != 0) || bad[c];
        if (lost != nullptr) lost[c] = reached;
      }
      state_lost = reached;
    });
    const bool at_end = state_lost != 0;
    sync();
    return at_end;
  }

  /// Any [.., n]-vector per token, as lanes; lanes beyond the last token become 0.
  __device__ __noinline__ void load_lanes(const View& view, std::int64_t b, std::int64_t t, std::int64_t head, int n,
                                          T* to) {
    with_storage(view.dtype, [&](auto storage) {
      constexpr DType kType = decltype(storage)::type;
      const std::int64_t first = offset(view, b, t, head);
      const bool aligned = runs_aligned<kType>(view.data, first, view.token_stride);
      each_run(lanes, n, [&](int c, int i, int count) {
        T values[kRun] = {};
        if (c < len) read_run<T, kType>(view.data, first + c * view.token_stride + i, count, aligned, values);
        put_run(values, count, to + i * kStride + c);
      });
    });
  }

  __device__ __noinline__ void store_lanes(const View& view, std::int64_t b, std::int64_t t, std::int64_t head, int n,
                                           const T* from) {
    with_storage(view.dtype, [&](auto storage) {
      constexpr DType kType = decltype(storage)::type;
      const std::int64_t first = offset(view, b, t, head);
      const bool aligned = runs_aligned<kType>(view.data, first, view.token_stride);
      each_run(len, n, [&](int c, int i, int count) {
        T values[kRun];
        get_run(from + i * kStride + c, count, values);
        write_run<kType>(view.data, first + c * view.token_stride + i, count, aligned, values);
      });
    });
  }

 private:
  __device__ void load_gates(const Problem& p, std::int64_t b, std::int64_t t, std::int64_t head) {
    const auto gate = [&](const View& view, int c, double otherwise) {
      return view.data != nullptr ? read<double>(view, offset(view, b, t + c, head)) : otherwise;
    };
    if (thread() == 0) key_decays = p.log_decay.data != nullptr && !p.options.decay_keys ? 1 : 0;
    each(len, [&](int c) {
      gamma[c] = exp(gate(p.log_decay, c, 0));
      beta[c] = gate(p.beta, c, 1);
      alpha[c] = gate(p.alpha, c, 1);
      bad_key[c] = bad_value[c] = 0;
    });
  }

  /// As rows and, if given room, as lanes. What is not finite is marked and read as 0.
  __device__ __noinline__ void load_rows(const View& view, std::int64_t b, std::int64_t t, std::int64_t head, int n,
                                         T* to, int ld, T* as_lanes, int* bad) {
    with_storage(view.dtype, [&](auto storage) {
      constexpr DType kType = decltype(storage)::type;
      const std::int64_t first = offset(view, b, t, head);
      const bool aligned = runs_aligned<kType>(view.data, first, view.token_stride);
      each_run(lanes, n, [&](int c, int i, int count) {
        T values[kRun] = {};
        if (c < len) read_run<T, kType>(view.data, first + c * view.token_stride + i, count, aligned, values);
        if (as_lanes != nullptr) put_run(values, count, as_lanes + i * kStride + c);
        if (c >= len) return;
        T sum = 0;
        for (int r = 0; r < kRun; ++r) sum += values[r] - values[r];
        store_run(values, to + c * ld + i);
        if (sum == 0) return;
        raise(bad + c);
        raise(&any_bad);
      });
    });
    const bool all_good = any_bad == 0;
    sync();  // before anybody raises it for other rows
    if (all_good) return;
    each_run(len, n, [&](int c, int i, int count) {
      const T nothing[kRun] = {};
      if (!bad[c]) return;
      for (int r = 0; r < count; ++r) to[c * ld + i + r] = T{0};
      if (as_lanes != nullptr) put_run(nothing, count, as_lanes + i * kStride + c);
    });
  }
};

/// state ← ζ_C state + Σ_j M_jC β_j k_j (k_j or v_j)ᵀ. h gets √weight on both sides, so that it stays symmetric but for
/// the order of sums. `rows` is room for the weighted tokens.
template <typename T>
__device__ __noinline__ void advance(Chunk<T>& c, bool keys, T* state, T* rows) {
  const Sizes& s = c.size;
  const int ld = keys ? s.ldk() : s.ldv(), lds = keys ? s.ldh() : s.ldu(), last = c.len - 1;
  const Decay& decay = keys ? c.key_decay() : c.values_decay();
  if (c.find_lost(keys ? c.bad_key : c.bad_value, decay, false, nullptr)) {
    return fill(state, s.dim * lds, static_cast<T>(not_a_number()));
  }
  each(c.len, [&](int j) {
    const double weight = decay.m(j, last) * c.beta[j];
    c.weight[j] = static_cast<T>(keys ? sqrt(weight) : weight);
  });
  const T* tokens = keys ? c.k : c.v;
  move_rows(c.len, padded(keys ? s.dim : s.values), tokens, ld, rows, ld,
            [&](int j, T value) { return c.weight[j] * value; });
  gemm<T>(s.dim, padded(keys ? s.dim : s.values), c.len, {keys ? rows : c.k, 1, s.ldk()}, rows, ld, state, lds,
          decay.zeta[last]);
}

}  // namespace gka::kernels::cuda
