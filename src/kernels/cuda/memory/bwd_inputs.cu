// The gradients of a chunk's inputs, from its state S, the gradient D of the state behind it, u, du and do. With z = Tᵀ
// du (du without the delta rule):
//
//   E = scale · tril(M ∘ do uᵀ),   F = −tril(β M ∘ z uᵀ, −1)
//   dq = scale · e^G ∘ (do Sᵀ) + E k                                        dv = β z
//   dk = e^{G_C − G} ∘ (u Dᵀ) − β e^G ∘ (z Sᵀ) + Eᵀ q + (F + Fᵀ) k
//   dβ = z·v − e^G k·(z Sᵀ) − Σ_i (M ∘ k kᵀ ∘ z uᵀ)_ti over i < t
//
// A token's decay stands in every product of a later token with an earlier one, so with W = E ∘ q kᵀ + F ∘ k kᵀ
//
//   dg_l = Σ_{t≥l, i<l} W_ti + Σ_{t≥l} [what t found in S] + Σ_{i<l} [what i left in D] + e^{G_C} ⟨D, S⟩
//
// a sum of what is there, not a difference of running sums, which cancels where decays are strong. The sum over t ≥ l
// is a product with a triangle of ones.
//
// inputs.cuh has the sums over values.
#include "kernels/cuda/memory/inputs.cuh"

namespace gka::kernels::cuda::memory {
namespace inputs {  // named, so that a test can have all passes in one file

/// [t][i], once the values are through.
struct Pairs {
  alignas(16) Bits e[kChunk][kSquare], f[kChunk][kSquare], w[kChunk][kSquare];
};

/// What sums over channels, a part of it from each quarter of the columns.
struct Rows {
  float found[kParts][kChunk], left[kParts][kChunk], beta[kParts][kChunk], pairs[kParts][kChunk];
  float states[kBlock / kLanes];
};

template <int kKeys>
struct Shared {
  alignas(16) Bits q[kChunk][kKeys + kPad], k[kChunk][kKeys + kPad], t[kChunk][kSquare], z[kChunk][kSquare];
  union {
    Block<kKeys> blocks[2];
    Pairs pairs;
  };
  Rows rows;
  alignas(16) TwoFloats sums[kChunk];
  float beta[kChunk];
};

/// E, F and W of this warp's tokens against a quarter of them, and what of dβ stands there.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void weigh_pairs(Shared<kKeys>& s, Products<kKeys, Decay::per_head>& p, float scale,
                                            float (&d_beta)[2]) {
  const int rows = part_row(), columns = part() * 16;
  Sums<2> q_k, k_k;
  q_k.clear();
  k_k.clear();
  q_k.template multiply<kKeys, Lies::straight, Lies::turned>(s.q[rows], kKeys + kPad, s.k[columns], kKeys + kPad);
  if constexpr (kDelta) {
    k_k.template multiply<kKeys, Lies::straight, Lies::turned>(s.k[rows], kKeys + kPad, s.k[columns], kKeys + kPad);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = rows + q_k.row(i), c = columns + q_k.column(n);
      float e[2], f[2], w[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = 2 * i + j;
        const float decay = decay_between(s.sums[t], s.sums[c + j]);
        const float both = decay * p.z_u.x[n][at];
        e[j] = c + j <= t ? scale * decay * p.out_u.x[n][at] : 0;
        f[j] = c + j < t ? -s.beta[t] * both : 0;
        w[j] = c + j < t ? e[j] * q_k.x[n][at] + f[j] * k_k.x[n][at] : 0;
        if (kDelta) d_beta[i] -= c + j < t ? both * k_k.x[n][at] : 0;
      }
      put_two(&s.pairs.e[t][c], e[0], e[1]);
      if (kDelta) put_two(&s.pairs.f[t][c], f[0], f[1]);
      put_two(&s.pairs.w[t][c], w[0], w[1]);
    }
  }
}

/// What each token found in S and left in D, in sums over its channels; then out_s and u_d become what dq and dk have
/// from the states.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void weigh_states(Shared<kKeys>& s, Products<kKeys, Decay::per_head>& p, float scale,
                                             float (&d_beta)[2]) {
  const int rows = part_row(), columns = part() * (kKeys / 4);
  float found[2] = {}, left[2] = {}, from_start[2], to_end[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = rows + p.out_s.row(i);
    from_start[i] = decay_from_start(s.sums[t]);
    to_end[i] = decay_between(s.sums[kChunk - 1], s.sums[t]);
    beta[i] = s.beta[t];
  }
#pragma unroll
  for (int n = 0; n < kKeys / 32; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = rows + p.out_s.row(i), c = columns + p.out_s.column(n);
      const std::uint32_t q = two_at(&s.q[t][c]), k = two_at(&s.k[t][c]);
      float *x = &p.out_s.x[n][2 * i], *y = &p.z_s.x[n][2 * i], *z = &p.u_d.x[n][2 * i];
      const float key_z = low_half(k) * y[0] + high_half(k) * y[1];
      found[i] += scale * (low_half(q) * x[0] + high_half(q) * x[1]) - beta[i] * key_z;
      left[i] += low_half(k) * z[0] + high_half(k) * z[1];
      d_beta[i] -= from_start[i] * key_z;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        x[j] *= scale * from_start[i];
        z[j] = to_end[i] * z[j] - beta[i] * from_start[i] * y[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    found[i] *= from_start[i];
    left[i] *= to_end[i];
  }
  put_row_sums(s.rows.found, found);
  put_row_sums(s.rows.left, left);
}

/// Σ_{t≥l, i<l} W_ti over a quarter of the i.
template <int kKeys>
__device__ __forceinline__ void sum_pairs(Shared<kKeys>& s) {
  const int rows = part_row(), columns = part() * 16;
  const int eight = lane() % 8, second = lane() / 8 % 2 * 8, third = lane() / 16 * 8;
  const auto ones = [&](int row, int t) {  // two of them: t ≥ row
    return (t >= row ? 0x3f80u : 0u) | (t + 1 >= row ? 0x3f800000u : 0u);
  };
  Sums<2> later;
  later.clear();
#pragma unroll
  for (int k = 0; k < kChunk; k += 16) {
    const int l = rows + lane() / 4, t = k + lane() % 4 * 2;
    const std::uint32_t left[4]{ones(l, t), ones(l + 8, t), ones(l, t + 8), ones(l + 8, t + 8)};
    std::uint32_t right[4];
    load_blocks<true>(right, &s.pairs.w[k + eight + second][columns + third]);
    multiply_add(later.x[0], left, right[0], right[1]);
    multiply_add(later.x[1], left, right[2], right[3]);
  }
  float sums[2] = {};
  later.each([&](int i, int n, float first, float second_one) {
    const int l = rows + later.row(i), c = columns + later.column(n);
    sums[i] += (c < l ? first : 0) + (c + 1 < l ? second_one : 0);
  });
  put_row_sums(s.rows.pairs, sums);
}

template <int kAcross>
__device__ __forceinline__ void write_keys(Sums<kAcross>& sums, void* to, const ChunkedMemory& m, const Chunk& chunk,
                                           std::int64_t head) {
  const int rows = part_row(), columns = part() * (8 * kAcross);
  sums.each([&](int i, int n, float first, float second) {
    const int t = rows + sums.row(i), c = columns + sums.column(n);
    if (t >= chunk.tokens || c >= m.key_dim) return;
    put_two(static_cast<Bits*>(to) + ((chunk.first + t) * m.heads + head) * m.key_dim + c, first, second);
  });
}

/// dq and dk: what the states gave, and what pairs of the chunk's tokens add.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void write_d_keys(const Shared<kKeys>& s, Products<kKeys, Decay::per_head>& p,
                                             const ChunkedMemory& m, const ChunkedMemoryGradients& to,
                                             const Chunk& chunk, std::int64_t head) {
  constexpr int kWide = kKeys + kPad;
  const int rows = part_row(), columns = part() * (kKeys / 4);
  p.out_s.template multiply<kChunk, Lies::straight, Lies::straight>(s.pairs.e[rows], kSquare, &s.k[0][columns], kWide);
  write_keys(p.out_s, to.d_q, m, chunk, head);
  p.u_d.template multiply<kChunk, Lies::turned, Lies::straight>(&s.pairs.e[0][rows], kSquare, &s.q[0][columns], kWide);
  if constexpr (kDelta) {
    p.u_d.template multiply<kChunk, Lies::straight, Lies::straight>(s.pairs.f[rows], kSquare, &s.k[0][columns], kWide);
    p.u_d.template multiply<kChunk, Lies::turned, Lies::straight>(&s.pairs.f[0][rows], kSquare, &s.k[0][columns],
                                                                  kWide);
  }
  write_keys(p.u_d, to.d_k, m, chunk, head);
}

/// dβ and dg from the sums over channels and pairs, a thread a token.
__device__ __forceinline__ void write_d_gates(const Rows& rows, float last, const ChunkedMemory& m,
                                              const ChunkedMemoryGradients& to, const Chunk& chunk, std::int64_t head) {
  const int l = thread();
  if (l >= chunk.tokens) return;
  const auto sum = [](const float (&parts)[kParts][kChunk], int t) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) total += parts[i][t];
    return total;
  };
  const std::int64_t at = (chunk.first + l) * m.heads + head;
  if (to.d_beta != nullptr) to.d_beta[at] = sum(rows.beta, l);
  if (to.d_log_decay == nullptr) return;
  float states = 0;
  for (int i = 0; i < kBlock / kLanes; ++i) states += rows.states[i];
  float total = last * states + sum(rows.pairs, l);
  for (int t = 0; t < kChunk; ++t) total += sum(t < l ? rows.left : rows.found, t);
  to.d_log_decay[at] = total;
}

template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kBlock, 1)
    bwd_inputs(const __grid_constant__ ChunkedMemory m, const __grid_constant__ ChunkedMemorySaved saved,
               const __grid_constant__ ChunkedMemoryGradients to) {
  auto& s = *reinterpret_cast<Shared<kKeys>*>(shared_memory());
  const Task task = own_task(m);
  const auto [slot, head, place, chunk] = task;
  if (chunk.tokens == 0) return;
  fetch_keys<kKeys, kDelta>(s, m, saved, task);
  fetch_block(s.blocks[0], m, saved, to, chunk, head, 0);
  if (thread() < kChunk) {
    s.sums[thread()] = tiles_at<kKeys, kDelta, Decay::per_head>(m, saved, slot, head)->sums[thread()];
  }
  load_beta(s.beta, m, chunk, head);

  Products<kKeys, Decay::per_head> products;
  products.clear();
  const auto values = static_cast<int>(m.value_dim);
  for (int from = 0, n = 0; from < values; from += kValues, ++n) {
    const auto& b = s.blocks[n % 2];
    if (from + kValues < values) {
      fetch_block(s.blocks[(n + 1) % 2], m, saved, to, chunk, head, from + kValues);
      wait_for_groups_but<1>();
    } else {
      wait_for_groups_but<0>();
    }
    sync();
    slopes_of_values<kDelta>(s, b, products, m, chunk, head, from, static_cast<Bits*>(to.d_v));
    sync();
    add_block<kDelta>(s, b, products);
    sync();
  }
  float d_beta[2]{products.z_v[0], products.z_v[1]};
  weigh_pairs<kKeys, kDelta>(s, products, m.scale, d_beta);
  weigh_states<kKeys, kDelta>(s, products, m.scale, d_beta);
  put_row_sums(s.rows.beta, d_beta);
  const float states = sum_lanes(products.states[0]);
  if (lane() == 0) s.rows.states[warp()] = states;
  sync();
  write_d_keys<kKeys, kDelta>(s, products, m, to, chunk, head);
  sum_pairs(s);
  sync();
  write_d_gates(s.rows, decay_from_start(s.sums[kChunk - 1]), m, to, chunk, head);
}

}  // namespace inputs

void run_bwd_inputs(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const ChunkedMemoryGradients& gradients,
                    const Device& device) {
  with_shape(m, [&]<int kKeys, bool kDelta>() {
    launch_blocks_of<inputs::kBlock>(inputs::bwd_inputs<kKeys, kDelta>, m.slots() * m.heads,
                                     shared_bytes<inputs::Shared<kKeys>>(), device.stream, m, saved, gradients);
  });
}

}  // namespace gka::kernels::cuda::memory
