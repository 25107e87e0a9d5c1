#include "layers/memory.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/limits.h"
#include "gka/gka.h"
#include "layers/functions.h"
#include "ops/recurrence.h"

namespace gka::layers {
namespace {

constexpr std::int64_t kChunk = 64;
constexpr std::int64_t kLeaf = 4;

/// Σ of the log decays up to and including each row of [..., C, K].
at::Tensor sums_to(const at::Tensor& g) { return g.cumsum(-2); }

/// Σ of the log decays after each row, to the end.
at::Tensor sums_after(const at::Tensor& g) {
  const auto later = g.narrow(-2, 1, g.size(-2) - 1).flip({-2}).cumsum(-2).flip({-2});
  return at::cat({later, at::zeros_like(g.narrow(-2, 0, 1))}, -2);
}

/// exp of sums of log decays. On a CPU factors below the root of the smallest normal number are zero: beside what is of
/// order one they are nothing, and denormal numbers, which products of two of them would be, make matrix products there
/// half as fast.
at::Tensor fade(const at::Tensor& sums) {
  if (!sums.is_cpu()) return sums.exp();
  const double smallest =
      sums.scalar_type() == at::kDouble ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  return sums.masked_fill(sums.lt(0.5 * std::log(smallest)), -std::numeric_limits<double>::infinity()).exp();
}

/// Σ_{i<j≤t} g_j for every t (dimension −3) and i (dimension −2) of a short block [..., C, K]; 0 where i ≥ t.
at::Tensor sums_between(const at::Tensor& g) {
  const auto size = g.size(-2);
  const auto after = at::ones({size, size}, g.options()).tril(-1).t().unsqueeze(-1);  // [i,j,1]: j > i
  return (g.unsqueeze(-3) * after).cumsum(-2).transpose(-2, -3);
}

/// P_{ti} = Σ_c rows_{tc} cols_{ic} exp(Σ_{i<j≤t} g_{jc}) for i ≤ t, 0 elsewhere: [R, M, C, K] rows against [M, C, K]
/// columns. Halves of a block meet at its middle, where both of their decays are at most 1; each half is a block.
at::Tensor channel_products(const at::Tensor& rows, const at::Tensor& cols, const at::Tensor& g) {
  const auto size = cols.size(-2);
  if (size <= kLeaf) {
    const auto weighted = cols.unsqueeze(-3) * fade(sums_between(g));    // [M, t, i, K]
    return at::matmul(weighted, rows.unsqueeze(-1)).squeeze(-1).tril();  // [R, M, t, i]
  }
  const auto half = size / 2;
  const auto halves = [&](const at::Tensor& x) { return x.unflatten(-2, {2, half}); };
  const auto r = halves(rows), c = halves(cols), d = halves(g);
  const auto later = r.select(-3, 1) * fade(sums_to(d.select(-3, 1)));
  const auto earlier = c.select(-3, 0) * fade(sums_after(d.select(-3, 0)));
  const auto across = at::matmul(later, earlier.transpose(-1, -2));  // [R, M, half, half]
  const auto within = channel_products(r.flatten(1, 2), c.flatten(0, 1), d.flatten(0, 1))
                          .unflatten(1, {cols.size(0), 2});  // [R, M, 2, half, half]
  const auto top = at::cat({within.select(2, 0), at::zeros_like(across)}, -1);
  const auto bottom = at::cat({across, within.select(2, 1)}, -1);
  return at::cat({top, bottom}, -2);
}

/// The same with one decay per token, [M, C, 1]: the products are weighted afterwards.
at::Tensor head_products(const at::Tensor& rows, const at::Tensor& cols, const at::Tensor& g) {
  const auto products = at::matmul(rows, cols.transpose(-1, -2));
  if (!g.defined()) return products.tril();
  // In float64: a difference of two long sums.
  const auto sums = g.squeeze(-1).to(at::kDouble).cumsum(-1);
  const auto between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril();
  return (products * fade(between.to(products.scalar_type()))).tril();
}

at::Tensor decayed_products(const at::Tensor& rows, const at::Tensor& cols, const at::Tensor& g) {
  return g.defined() && g.size(-1) > 1 ? channel_products(rows, cols, g) : head_products(rows, cols, g);
}

/// Of an even plan: chunks per sequence, and sequences.
std::pair<std::int64_t, std::int64_t> even_sizes(const ChunkPlan& plan) {
  return {static_cast<std::int64_t>(plan.alive.size()), plan.alive.front()};
}

/// Tokens per chunk: fewer where all sequences are shorter.
std::int64_t chunk_size(const Sequences& sequences) {
  const auto longest = static_cast<std::uint64_t>(sequences.longest());
  return std::clamp(static_cast<std::int64_t>(std::bit_ceil(longest)), kLeaf, kChunk);
}

/// [B,T,H,D] as chunks [chunks·H, C, D] in the plan's order; padding is zero.
at::Tensor to_chunks(const at::Tensor& x, const ChunkPlan& plan) {
  if (plan.even) {
    const auto [steps, sequences] = even_sizes(plan);
    const auto chunks = x.reshape({sequences, steps, plan.size, x.size(2), x.size(3)});
    return chunks.permute({1, 0, 3, 2, 4}).flatten(0, 2);
  }
  auto rows = x.flatten(0, 1).index_select(0, plan.gather);
  if (plan.padding.defined()) rows = rows.masked_fill(plan.padding.view({-1, 1, 1}), 0);
  return rows.unflatten(0, {plan.chunks, plan.size}).transpose(1, 2).flatten(0, 1);
}

at::Tensor from_chunks(const at::Tensor& x, const ChunkPlan& plan, at::IntArrayRef shape) {
  const auto heads = shape[2];
  if (plan.even) {
    const auto [steps, sequences] = even_sizes(plan);
    return x.unflatten(0, {steps, sequences, heads}).permute({1, 0, 3, 2, 4}).reshape(shape);
  }
  const auto rows = x.unflatten(0, {plan.chunks, heads}).transpose(1, 2).flatten(0, 1);
  return rows.index_select(0, plan.scatter).view(shape);
}

/// What a chunk does to a state S [K,V] and to its own queries:
///   u = values − erase S      (delta)       o = queries S + products u       S ← decay S + keysᵀ u
struct Chunks {
  at::Tensor values;    // [M,C,V]
  at::Tensor erase;     // [M,C,K]; undefined: u = values
  at::Tensor keys;      // [M,C,K], decayed to the chunk's end
  at::Tensor decay;     // [M,K or 1,1]; undefined: 1
  at::Tensor queries;   // [M,C,K], decayed from the chunk's start
  at::Tensor products;  // [M,C,C]
};

Chunks prepare(const MemoryInputs& in, MemoryRule rule, const ChunkPlan& plan) {
  const auto gate = [&](const at::Tensor& x) { return to_chunks(x.dim() == 3 ? x.unsqueeze(-1) : x, plan); };
  const auto q = to_chunks(accumulate(in.q) * in.scale, plan), k = to_chunks(accumulate(in.k), plan);
  const auto v = to_chunks(accumulate(in.v), plan);
  const auto g = in.log_decay.defined() ? gate(accumulate(in.log_decay)) : at::Tensor();
  const auto beta = in.beta.defined() ? gate(in.beta.to(v.scalar_type())) : at::Tensor();
  const auto weigh = [&](const at::Tensor& x) { return beta.defined() ? x * beta : x; };

  Chunks c{.values = weigh(v), .erase = {}, .keys = k, .decay = {}, .queries = q, .products = {}};
  at::Tensor asked = k;
  if (g.defined()) {
    const auto to_here = sums_to(g);
    const auto from_start = fade(to_here);
    c.queries = q * from_start;
    asked = k * from_start;
    c.keys = k * fade(sums_after(g));
    c.decay = from_start.select(-2, plan.size - 1).unsqueeze(-1);
  }
  if (rule == MemoryRule::add) {
    c.products = decayed_products(q.unsqueeze(0), k, g).squeeze(0);
    return c;
  }
  const auto products = decayed_products(at::stack({q, k}), k, g);
  c.products = products.select(0, 0);
  // (I + β tril(K Kᵀ, −1)) u = β (v − K S), and the inverse of the matrix serves v and K alike.
  const auto identity = at::eye(plan.size, k.options());
  const auto system = weigh(products.select(0, 1).tril(-1)) + identity;
  const auto inverse = at::linalg_solve_triangular(system, identity.expand_as(system), /*upper=*/false, /*left=*/true,
                                                   /*unitriangular=*/true);
  c.values = at::matmul(inverse, c.values);
  c.erase = at::matmul(inverse, weigh(asked));
  return c;
}

/// Per step of the plan, the slice of x that belongs to it.
std::vector<at::Tensor> by_step(const at::Tensor& x, const std::vector<std::int64_t>& sizes) {
  return x.defined() ? x.split_with_sizes(sizes, 0) : std::vector<at::Tensor>(sizes.size());
}

/// Walks the states through the chunks: from the first states [N·H,K,V] to the last, with the answers of all chunks.
std::pair<at::Tensor, at::Tensor> walk(const Chunks& c, const ChunkPlan& plan, std::int64_t heads, at::Tensor state) {
  std::vector<std::int64_t> sizes;
  for (const auto alive : plan.alive) sizes.push_back(alive * heads);
  const auto values = by_step(c.values, sizes), erase = by_step(c.erase, sizes);
  const auto keys = by_step(c.keys, sizes), decay = by_step(c.decay, sizes);

  std::vector<at::Tensor> written, starts, finished;
  for (std::size_t n = 0; n < sizes.size(); ++n) {
    if (sizes[n] < state.size(0)) {
      auto parts = state.split_with_sizes({sizes[n], state.size(0) - sizes[n]}, 0);
      state = parts[0];
      finished.push_back(parts[1]);
    }
    starts.push_back(state);
    written.push_back(erase[n].defined() ? at::baddbmm(values[n], erase[n], state, 1, -1) : values[n]);
    const auto kept = decay[n].defined() ? state * decay[n] : state;
    state = at::baddbmm(kept, keys[n].transpose(-1, -2), written.back());
  }
  finished.push_back(state);
  std::reverse(finished.begin(), finished.end());
  const auto answers = at::baddbmm(at::bmm(c.queries, at::cat(starts)), c.products, at::cat(written));
  return {answers, at::cat(finished)};
}

at::Tensor one_token(const MemoryInputs& in, MemoryRule rule, Call& call) {
  const at::Tensor pool = call.take();
  const ops::RecurrenceStep step{.q = in.q,
                                 .k = in.k,
                                 .v = in.v,
                                 .log_decay = in.log_decay,
                                 .beta = in.beta,
                                 .pool = pool,
                                 .slots = call.slots(),
                                 .delta = rule == MemoryRule::delta,
                                 .scale = in.scale};
  if (ops::has_recurrence_step(step)) return ops::recurrence_step(step);
  const auto type = pool.scalar_type();
  at::Tensor state = call.read(pool, in.q.size(0));
  const auto k = in.k.to(type).unsqueeze(-1);  // [B,H,K,1]
  auto v = in.v.to(type).unsqueeze(-2);        // [B,H,1,V]
  if (in.log_decay.defined()) {
    const auto decay = in.log_decay.to(type).exp();
    state = state * (decay.dim() == 2 ? decay.unsqueeze(-1) : decay).unsqueeze(-1);
  }
  if (rule == MemoryRule::delta) v = v - at::matmul(k.transpose(-1, -2), state);
  if (in.beta.defined()) v = v * in.beta.to(type).unsqueeze(-1).unsqueeze(-1);
  state = state + k * v;
  call.write(pool, state);
  const auto q = (in.q.to(type) * in.scale).unsqueeze(-2);
  return at::matmul(q, state).squeeze(-2).to(in.q.scalar_type());
}

// ---- By kernels

ops::Recurrence recurrence_of(const MemoryInputs& in, MemoryRule rule, const Call& call) {
  return {.q = in.q,
          .k = in.k,
          .v = in.v,
          .log_decay = in.log_decay,
          .beta = in.beta,
          .initial = {},
          .bounds = call.sequences().cu_seqlens(),
          .delta = rule == MemoryRule::delta,
          .scale = in.scale};
}

at::Tensor by_recurrence(ops::Recurrence recurrence, ops::RecurrencePath path, Call& call) {
  recurrence.initial = call.take();
  const auto result = ops::recurrence(recurrence, path, call.wants_state());
  call.give(result.final);
  return result.o;
}

/// Whether the operator with its own kernels computes it.
bool has_operator(const MemoryInputs& in, MemoryRule rule) {
  const bool per_channel = in.log_decay.defined() && in.log_decay.dim() == in.q.dim();
  return rule == MemoryRule::add && !per_channel && in.q.size(-1) <= kLargestDim && in.v.size(-1) <= kLargestDim;
}

at::Tensor by_operator(const MemoryInputs& in, Call& call) {
  const auto result = linear_memory(in.q, in.k, in.v, in.log_decay, in.beta,
                                    {.scale = in.scale,
                                     .initial_state = call.take(),
                                     .output_final_state = call.wants_state(),
                                     .cu_seqlens = call.sequences().cu_seqlens()});
  call.give(result.final_state);
  return result.o;
}

/// On a CPU, which of two sets of kernels has it: heads with more key channels are sooner done in chunks by the
/// operator.
bool is_for_operator(const MemoryInputs& in, MemoryRule rule, ops::RecurrencePath path) {
  constexpr std::int64_t kFewKeys = 32;
  const bool few = path == ops::RecurrencePath::cpu && in.q.size(-1) <= kFewKeys;
  const bool either = path == ops::RecurrencePath::none || path == ops::RecurrencePath::cpu;
  return either && !few && has_operator(in, rule);
}

/// Of no tokens. They hang on all that answers are made of, so that every parameter has a gradient, of zeros: ranks
/// that train together wait for all of them.
at::Tensor no_answers(const MemoryInputs& in) {
  auto nothing = in.q.sum() + in.k.sum();
  for (const auto& gate : {in.log_decay, in.beta}) {
    if (gate.defined()) nothing = nothing + gate.sum();
  }
  return in.v + nothing.to(in.v.scalar_type());
}

}  // namespace

at::Tensor remember_in_chunks(const MemoryInputs& in, MemoryRule rule, Call& call) {
  const auto& plan = call.sequences().chunks(chunk_size(call.sequences()));
  const auto heads = in.q.size(2), key_dim = in.q.size(3), value_dim = in.v.size(3);
  at::Tensor state = call.take();
  if (!state.defined()) {
    const auto options = in.q.options().dtype(accumulation_type(in.q));
    state = at::zeros({call.sequences().count(), heads, key_dim, value_dim}, options);
  }
  if (plan.chunks == 0) {
    call.give(state);
    return no_answers(in);
  }
  if (plan.order.defined()) state = state.index_select(0, plan.order);
  auto [answers, last] = walk(prepare(in, rule, plan), plan, heads, state.flatten(0, 1));
  last = last.unflatten(0, {-1, heads});
  if (plan.inverse.defined()) last = last.index_select(0, plan.inverse);
  call.give(last);
  return from_chunks(answers, plan, in.v.sizes()).to(in.q.scalar_type());
}

at::Tensor remember(const MemoryInputs& in, MemoryRule rule, Call& call) {
  if (call.is_step()) return one_token(in, rule, call);
  const auto recurrence = recurrence_of(in, rule, call);
  const auto path = ops::recurrence_path(recurrence, call.sequences().longest());
  if (is_for_operator(in, rule, path)) return by_operator(in, call);
  return path != ops::RecurrencePath::none ? by_recurrence(recurrence, path, call) : remember_in_chunks(in, rule, call);
}

double memory_flops(std::int64_t heads, std::int64_t key_dim, std::int64_t value_dim, MemoryRule rule) {
  const double products = rule == MemoryRule::delta ? 3 : 2;
  return kWithBackward * products * kMultiplyAdd * static_cast<double>(heads * key_dim * value_dim);
}

double solve_flops(std::int64_t heads, std::int64_t dim, std::int64_t iterations, bool unrolled) {
  const double each = unrolled ? kWithBackward : 2;
  return kMultiplyAdd * static_cast<double>(heads * dim * dim) *
         (2 * kWithBackward + each * static_cast<double>(iterations));
}

StateField memory_field(std::int64_t heads, std::int64_t key_dim, std::int64_t value_dim, at::ScalarType dtype) {
  return {
      .name = "memory", .shape = {heads, key_dim, value_dim}, .dtype = dtype == at::kDouble ? at::kDouble : at::kFloat};
}

}  // namespace gka::layers
