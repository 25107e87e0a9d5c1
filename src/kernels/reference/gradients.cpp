#include "kernels/reference/gradients.h"

#include <utility>

#include "kernels/reference/unrolled.h"

namespace gka::kernels::reference {
namespace {

constexpr std::size_t kStretch = 64;  // tokens between the states that are kept; the others are recomputed

SolveGradient no_gradient(std::size_t n) {
  const auto size = static_cast<std::int64_t>(n);
  return {.d_q = Vector(n, 0.0), .d_h = Matrix(size, size), .d_ridge = Vector(n, 0.0)};
}

/// dH from df: f = ‖H‖_F, so df reaches H along H/f; nothing where H is 0.
void add_norm_gradient(Matrix& d_h, double d_norm, const Regression& regression) {
  if (regression.norm == 0.0) return;
  const double in_matrix = regression.unit / regression.norm;  // the system's matrix is H/unit
  add(d_h, d_norm * in_matrix, regression.system.matrix);
}

bool adaptive(const Options& options) { return options.ridge_mode == RidgeMode::adaptive; }

SolveGradient solve_gradient(const Regression& regression, const Vector& q, const Vector& x, const Vector& d_x,
                             const Options& options) {
  if (regression.empty) return no_gradient(q.size());
  return options.gradient == Gradient::implicit ? implicit_gradient(regression, x, d_x, options)
                                                : unrolled_gradient(regression, q, x, d_x, options);
}

/// What one token adds to the gradient of its own H_t and U_t, and its dq and dα.
struct Contribution {
  Vector d_q{};
  double d_alpha = 0.0;
  SolveGradient solve{};
};

Contribution through_output(const Token& token, const Memory& memory, const Settings& settings, const Vector& d_o,
                            Matrix& d_u) {
  const Options& options = settings.options;
  if (options.part == Part::memory) {
    add_outer(d_u, options.scale, token.q, d_o);
    return {.d_q = scaled(multiply(memory.u, d_o), options.scale)};
  }

  const Regression ridge_regression = regression(memory.h, settings);
  const Vector x = answer(ridge_regression, token.q, options);
  if (options.part == Part::solve) {
    SolveGradient solve = solve_gradient(ridge_regression, token.q, x, d_o, options);
    return {.d_q = solve.d_q, .solve = std::move(solve)};
  }

  const Vector d_mixed = scaled(multiply(memory.u, d_o), options.scale);  // s U_t do_t
  add_outer(d_u, options.scale, mixed_query(token, x, options), d_o);
  SolveGradient solve = solve_gradient(ridge_regression, token.q, x, scaled(d_mixed, token.alpha), options);
  Contribution result{.d_q = solve.d_q, .d_alpha = dot(x, d_mixed) - dot(token.q, d_mixed)};
  add(result.d_q, 1.0 - token.alpha, d_mixed);
  result.solve = std::move(solve);
  return result;
}

/// dk, dv, dβ and dlogγ of one token from all that reaches its H_t and U_t (either may be empty).
void through_recurrence(const Token& token, const Memory& before, const Memory& reaching, const Options& options,
                        TokenGradient& result) {
  result.d_k.assign(token.k.size(), 0.0);
  if (options.part != Part::memory) {
    const Vector along_k = multiply(reaching.h, token.k);
    add(result.d_k, 2.0 * token.beta, along_k);
    result.d_beta += dot(token.k, along_k);
    if (options.decay_keys && token.decay != 0.0) result.d_log_decay += token.decay * inner(reaching.h, before.h);
  }
  if (options.part != Part::solve) {
    const Vector along_v = multiply(reaching.u, token.v);
    add(result.d_k, token.beta, along_v);
    result.d_v = scaled(multiply_transposed(reaching.u, token.k), token.beta);
    result.d_beta += dot(token.k, along_v);
    if (token.decay != 0.0) result.d_log_decay += token.decay * inner(reaching.u, before.u);
  }
}

}  // namespace

SolveGradient implicit_gradient(const Regression& regression, const Vector& x, const Vector& d_x,
                                const Options& options) {
  SolveGradient result = no_gradient(x.size());
  result.d_q = answer(regression, d_x, options);
  const Vector& y = result.d_q;
  add_outer(result.d_h, -0.5, y, x);
  add_outer(result.d_h, -0.5, x, y);
  for (std::size_t i = 0; i < x.size(); ++i) result.d_ridge[i] = -y[i] * x[i];
  if (adaptive(options) && options.ridge_gradient) {
    add_norm_gradient(result.d_h, -options.ridge * dot(x, y), regression);
  }
  return result;
}

SolveGradient unrolled_gradient(const Regression& regression, const Vector& q, const Vector& x, const Vector& d_x,
                                const Options& options) {
  Vector d_scaled = d_x;  // of x̃ = unit · x
  for (double& value : d_scaled) value /= regression.unit;
  SystemGradient through = unrolled(options.solver, regression.system, q, options.iterations, d_scaled);

  SolveGradient result{
      .d_q = std::move(through.d_q), .d_h = symmetric_part(through.d_matrix), .d_ridge = std::move(through.d_ridge)};
  for (double& value : result.d_h.data) value /= regression.unit;
  if (!options.ridge_gradient) return result;
  const double d_norm = adaptive(options) ? -dot(x, d_x) / regression.norm -
                                                inner(through.d_matrix, regression.system.matrix) / regression.norm
                                          : through.d_upper;  // L = f + λ
  add_norm_gradient(result.d_h, d_norm, regression);
  return result;
}

SequenceGradient sequence_gradient(const std::vector<Token>& tokens, const Memory& initial, const Settings& settings,
                                   const std::vector<Vector>& d_o, const Memory& d_final) {
  const Options& options = settings.options;
  const std::size_t length = tokens.size();

  std::vector<Memory> kept;  // the state before tokens 0, kStretch, 2 kStretch, …
  Memory memory = initial;
  for (std::size_t t = 0; t < length; ++t) {
    if (t % kStretch == 0) kept.push_back(memory);
    remember(memory, tokens[t], options);
  }

  SequenceGradient result;
  result.tokens.resize(length);
  result.d_initial = d_final;  // becomes Ḡ and R̄ on the way back
  Memory& reaching = result.d_initial;
  if (options.part != Part::memory) {
    reaching.h = symmetric_part(reaching.h);
    result.d_ridge.assign(static_cast<std::size_t>(reaching.h.rows), 0.0);
  }

  for (std::size_t stretch = kept.size(); stretch-- > 0;) {
    const std::size_t begin = stretch * kStretch;
    const std::size_t end = std::min(begin + kStretch, length);
    std::vector<Memory> states{kept[stretch]};  // before token begin + i
    for (std::size_t t = begin; t < end; ++t) {
      states.push_back(states.back());
      remember(states.back(), tokens[t], options);
    }
    for (std::size_t t = end; t-- > begin;) {
      const Token& token = tokens[t];
      TokenGradient& d_token = result.tokens[t];
      Contribution own = through_output(token, states[t - begin + 1], settings, d_o[t], reaching.u);
      d_token.d_q = std::move(own.d_q);
      d_token.d_alpha = own.d_alpha;
      if (options.part != Part::memory) {
        add(reaching.h, 1.0, own.solve.d_h);
        add(result.d_ridge, 1.0, own.solve.d_ridge);
      }
      through_recurrence(token, states[t - begin], reaching, options, d_token);
      if (options.part != Part::memory) scale(reaching.h, key_decay(token, options));
      if (options.part != Part::solve) scale(reaching.u, token.decay);
    }
  }
  return result;
}

}  // namespace gka::kernels::reference
