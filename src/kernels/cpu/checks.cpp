#include "kernels/cpu/checks.h"

#include <stdexcept>
#include <string>

#include "base/limits.h"
#include "kernels/problem.h"

namespace gka::kernels::cpu {
namespace {

void need(bool fine, const char* sentence) {
  if (!fine) throw std::invalid_argument(sentence);
}

void check_size(const char* name, std::int64_t size, std::int64_t least, std::int64_t most) {
  if (size >= least && size <= most) return;
  throw std::invalid_argument(std::string(name) + " takes " + std::to_string(least) + " to " + std::to_string(most) +
                              ", got " + std::to_string(size));
}

void check_iterations(std::int64_t iterations) { check_size("options.iterations", iterations, 0, kMostIterations); }

void check_sequences(const Problem& p) {
  if (p.cu_seqlens == nullptr)
    return need(p.sequences == p.batch, "sequences takes batch where there is no cu_seqlens");
  need(p.batch == 1, "batch takes 1 where there is cu_seqlens");
  need(p.sequences >= 0 && p.cu_seqlens[0] == 0, "cu_seqlens takes sequences + 1 numbers, of which the first is 0");
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    need(p.cu_seqlens[n] <= p.cu_seqlens[n + 1], "cu_seqlens takes numbers that never decrease");
  }
  need(p.cu_seqlens[p.sequences] == p.tokens, "cu_seqlens takes tokens as its last number");
}

/// Queries, keys and, unless left out, values: there, and of one type.
void check_inputs(const View& q, const View& k, const View* v) {
  need(q && k && (v == nullptr || *v), "q, k and v take the address of their first number, and one of them is null");
  need(q.dtype == k.dtype && (v == nullptr || q.dtype == v->dtype), "q, k and v take one type for all of them");
}

}  // namespace

void check(const Problem& p) {
  need(p.batch >= 0 && p.tokens >= 0 && p.heads >= 0, "batch, tokens and heads take numbers of at least 0");
  check_size("key_dim", p.key_dim, 1, kLargestDim);
  if (remembers_values(p)) check_size("value_dim", p.value_dim, 1, kLargestDim);
  check_iterations(p.options.iterations);
  check_sequences(p);
  if (p.batch * p.tokens * p.heads > 0) check_inputs(p.q, p.k, remembers_values(p) ? &p.v : nullptr);
}

void check(const Problem& p, const Saved& saved, const Gradients& gradients) {
  check(p);
  if (p.batch * p.tokens * p.heads == 0) return;
  need(!solves(p) || (saved.x && saved.norm && saved.h), "saved takes what forward left in its x, norm and h");
  need(!remembers_values(p) || saved.u, "saved takes what forward left in its u");
  need(gradients.d_o.data != nullptr, "d_o takes the address of its first number, and is null");
}

void check(const Step& s) {
  need(s.batch >= 0 && s.heads >= 0, "batch and heads take numbers of at least 0");
  check_size("key_dim", s.key_dim, 1, kLargestDim);
  check_size("value_dim", s.value_dim, 1, kLargestDim);
  check_iterations(s.options.iterations);
  if (s.batch * s.heads == 0) return;
  check_inputs(s.q, s.k, &s.v);
  need(s.o && s.h && s.u, "o, h and u take the addresses of their first numbers, and one of them is null");
}

}  // namespace gka::kernels::cpu
