// One token for many sequences, states in place: each by itself (token.h), except that an exact solve is a chunk of one
// token.
#include <memory>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/isa/token.h"
#include "kernels/cpu/plan.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

template <typename T>
struct Workspace {
  Token<T> token;
  Buffer<T> h;  // a padded copy, where the pool's rows are not whole vectors
};

std::int64_t slot_of(const Step& s, std::int64_t b) { return s.state_indices != nullptr ? s.state_indices[b] : b; }
std::int64_t iterations_of(const Step& s, std::int64_t b) {
  return s.iterations != nullptr ? s.iterations[b] : s.options.iterations;
}

template <typename T>
void step_directly(const Step& s, const Executor& executor) {
  const int dim = static_cast<int>(s.key_dim), values = static_cast<int>(s.value_dim);
  const auto workspace = [&] {
    auto w = std::make_unique<Workspace<T>>();
    if (padded<T>(dim) != dim) w->h.resize(static_cast<std::int64_t>(dim) * padded<T>(dim));
    return w;
  };
  parallel_tasks(executor, s.batch * s.heads, workspace, [&](std::int64_t task, Workspace<T>& w) {
    const std::int64_t b = task / s.heads, head = task % s.heads, at = slot_of(s, b) * s.heads + head;
    read_token(s, b, 0, head, w.token);
    T* h = static_cast<T*>(s.h) + at * s.key_dim * s.key_dim;
    write_key(s.options, w.token, dim, h, dim);
    const int ld = padded<T>(dim);
    if (ld != dim) unpack_matrix<T>(h, dim, dim, w.h, ld);
    const double sigma = solve_token<T>(s.options, ld != dim ? w.h : h, ld, dim, head, iterations_of(s, b), w.token,
                                        nullptr, s.certainty != nullptr ? s.certainty + task : nullptr);
    T* u = static_cast<T*>(s.u) + at * s.key_dim * s.value_dim;
    write_and_read_values(s.options.scale, dim, values, sigma, u, values, w.token);
    write_row<T>(s.o, offset(s.o, b, 0, head), values, w.token.y);
  });
}

/// A batch of sequences of one token each, from and to the pool.
void step_as_chunks(const Step& s, const Executor& executor) {
  const bool wide = s.q.dtype == DType::float64;
  const std::int64_t bytes = wide ? 8 : 4;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    Problem p{.batch = 1,
              .tokens = 1,
              .heads = s.heads,
              .key_dim = s.key_dim,
              .value_dim = s.value_dim,
              .sequences = 1,
              .key_group = s.key_group,
              .value_group = s.value_group};
    const auto row = [&](View view) {
      if (view)
        view.data = static_cast<char*>(view.data) +
                    b * view.batch_stride * with_type(view.dtype, [](auto t) { return sizeof t; });
      return view;
    };
    p.q = row(s.q);
    p.k = row(s.k);
    p.v = row(s.v);
    p.log_decay = row(s.log_decay);
    p.beta = row(s.beta);
    p.alpha = row(s.alpha);
    char* h = static_cast<char*>(s.h) + slot_of(s, b) * s.heads * s.key_dim * s.key_dim * bytes;
    char* u = static_cast<char*>(s.u) + slot_of(s, b) * s.heads * s.key_dim * s.value_dim * bytes;
    p.h0 = h;
    p.u0 = u;
    p.options = s.options;
    p.options.iterations = iterations_of(s, b);
    Outputs out;
    out.o = row(s.o);
    out.h = h;
    out.u = u;
    if (s.certainty != nullptr) out.report.certainty = s.certainty + b * s.heads;
    forward(p, out, executor);
  }
}

}  // namespace

void step(const Step& s, const Executor& executor) {
  if (s.options.solver == Solver::exact) {
    step_as_chunks(s, executor);
  } else if (s.q.dtype == DType::float64) {
    step_directly<double>(s, executor);
  } else {
    step_directly<float>(s, executor);
  }
}

#define GKA_TEXT_OF(x) #x
#define GKA_TEXT(x) GKA_TEXT_OF(x)
const InstructionSet kInstructionSet{.name = GKA_TEXT(GKA_ISA),
                                     .forward = forward,
                                     .backward = backward,
                                     .step = step,
                                     .short_conv = short_conv,
                                     .short_conv_backward = short_conv_backward,
                                     .short_conv_step = short_conv_step,
                                     .gated_rms_norm = gated_rms_norm,
                                     .gated_rms_norm_backward = gated_rms_norm_backward,
                                     .products = products,
                                     .recurrence = {recurrence, recurrence_backward, recurrence_step},
                                     .recurrence_in_float64 = {recurrence, recurrence_backward, recurrence_step}};
#undef GKA_TEXT
#undef GKA_TEXT_OF

}  // namespace gka::kernels::cpu::GKA_ISA
