// The chunked memories' own sources on the host, with all their threads, against the recurrence in float64, forward and
// backward, on the same bfloat16 inputs.
#define cuda cuda_with_threads
#include "kernels/cuda/memory/bwd_inputs.cu"
#include "kernels/cuda/memory/bwd_inputs_channels.cu"
#include "kernels/cuda/memory/bwd_states.cu"
#include "kernels/cuda/memory/chunk_states.cu"
#include "kernels/cuda/memory/chunk_wy.cu"
#include "kernels/cuda/memory/chunk_wy_channels.cu"
#include "kernels/cuda/memory/memory.cu"
#undef cuda

#include <gtest/gtest.h>

#include <limits>

#include "kernels/memory_reference.h"

namespace gka::kernels::test {
namespace {

using cuda_with_threads::ChunkedMemory;

const MemoryCase kCases[]{
    {.lengths = {70, 70}, .heads = 2, .key_dim = 24, .value_dim = 40},                         // Gated DeltaNet
    {.lengths = {1, 0, 129, 64}, .heads = 1, .key_dim = 72, .value_dim = 16, .packed = true},  // packed
    {.lengths = {66}, .heads = 1, .key_dim = 64, .value_dim = 72, .decay = false},             // DeltaNet
    {.lengths = {100}, .heads = 2, .key_dim = 128, .value_dim = 8, .delta = false, .shared_keys = true},  // Mamba2
    {.lengths = {130}, .heads = 1, .key_dim = 16, .value_dim = 32, .delta = false, .beta = false},        // RetNet
    {.lengths = {90}, .heads = 1, .key_dim = 32, .value_dim = 16, .strong = true},                        // decays to 0
};

const MemoryCase kChannelCases[]{
    {.lengths = {75}, .heads = 2, .key_dim = 72, .value_dim = 24, .per_channel = true},  // Kimi Delta Attention
    {.lengths = {77}, .heads = 1, .key_dim = 128, .value_dim = 72, .delta = false, .beta = false, .per_channel = true},
    {.lengths = {1, 0, 83, 64}, .heads = 1, .key_dim = 24, .value_dim = 16, .packed = true, .per_channel = true},
    {.lengths = {100}, .heads = 1, .key_dim = 128, .value_dim = 8, .strong = true, .per_channel = true},
    {.lengths = {90}, .heads = 1, .key_dim = 32, .value_dim = 16, .per_channel = true, .weak = true},
    {.lengths = {40}, .heads = 1, .key_dim = 64, .value_dim = 16, .delta = false, .strong = true, .per_channel = true},
};

/// The kernels on the host.
MemoryResult run(const MemoryProblem& p) {
  const auto& c = p.c;
  ChunkedMemory m{.sequences = p.sequences(),
                  .heads = c.heads,
                  .key_dim = c.key_dim,
                  .value_dim = c.value_dim,
                  .length = c.packed ? 0 : c.lengths[0],
                  .tokens = p.tokens(),
                  .bounds = c.packed ? p.bounds.data() : nullptr,
                  .delta = c.delta,
                  .per_channel = c.per_channel,
                  .scale = MemoryProblem::kScale,
                  .log_decay = c.decay ? p.log_decay.data() : nullptr,
                  .beta = c.beta ? p.beta.data() : nullptr,
                  .initial = p.initial.data()};
  const auto key_heads = c.shared_keys ? 1 : c.heads;
  const auto keys = [&](const Halves& x) {
    return cuda_with_threads::MemoryRows{x.data(), key_heads * c.key_dim, c.shared_keys ? 0 : c.key_dim};
  };
  const auto values = [&](const Halves& x) {
    return cuda_with_threads::MemoryRows{x.data(), c.heads * c.value_dim, c.value_dim};
  };
  m.q = keys(p.q);
  m.k = keys(p.k);
  m.v = values(p.v);

  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const auto rows = p.tokens() * c.heads, places = m.slots() * c.heads, state = c.key_dim * c.value_dim;
  struct alignas(16) Sixteen {
    char bytes[16];
  };
  std::vector<Sixteen> tiles(size(places * m.tile_bytes() / 16));
  Halves t(size(places * 64 * 64)), u(size(rows * c.value_dim)), states(size(places * state));
  Halves o(u), d_u(u), d_states(states), d_q(size(rows * c.key_dim)), d_k(d_q), d_v(u);
  MemoryResult result{.final = Floats(p.initial.size()),
                      .d_log_decay = Floats(size(rows * p.decays())),
                      .d_beta = Floats(size(rows)),
                      .d_initial = Floats(p.initial.size())};
  const cuda_with_threads::ChunkedMemorySaved saved{
      .tiles = tiles.data(), .t = t.data(), .u = u.data(), .states = states.data()};
  cuda_with_threads::chunked_memory(m, saved, {.o = o.data(), .final = result.final.data()}, {});
  cuda_with_threads::chunked_memory_backward(m, saved,
                                             {.d_o = values(p.d_o),
                                              .d_final = p.d_final.data(),
                                              .d_u = d_u.data(),
                                              .d_states = d_states.data(),
                                              .d_q = d_q.data(),
                                              .d_k = d_k.data(),
                                              .d_v = d_v.data(),
                                              .d_log_decay = result.d_log_decay.data(),
                                              .d_beta = result.d_beta.data(),
                                              .d_initial = result.d_initial.data()},
                                             {});
  result.o = widened(o);
  result.d_q = widened(d_q);
  result.d_k = widened(d_k);
  result.d_v = widened(d_v);
  return result;
}

template <std::size_t kCount>
void expect_recurrence(const MemoryCase (&cases)[kCount]) {
  unsigned seed = 1;
  for (const auto& which : cases) {
    SCOPED_TRACE(seed - 1);
    const MemoryProblem p(which, seed++);
    expect_close(run(p), reference(p), p, 1e-2);
  }
}

TEST(ChunkedMemory, EqualsTheRecurrenceInFloat64AndItsGradients) { expect_recurrence(kCases); }
TEST(ChunkedMemory, EqualsItWithDecaysPerChannel) { expect_recurrence(kChannelCases); }

}  // namespace
}  // namespace gka::kernels::test
