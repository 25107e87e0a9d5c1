// The Chebyshev iteration on spectra in [a, L + a] as a table, the same for every token of a chunk. L is 1, or less
// where tr H/‖H‖_F says that no eigenvalue of H̃ is larger. Iterates are kept as ξ_i/g_i:
//
//   ξ_i = −c_i H̃ξ_{i-1} + (ω_i − c_i a) ξ_{i-1} + (1 − ω_i) ξ_{i-2} + c_i b,   g_i = −(c_i/c) g_{i-1}
//   ξ_i/g_i = c H̃ ξ_{i-1}/g_{i-1} + a_i ξ_{i-1}/g_{i-1} + b_i ξ_{i-2}/g_{i-2} + q_i b
//
// with c (`pace`) the limit of c_i, so that g stays near ±1 and float16 holds the iterates; c goes into H̃'s factors.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "kernels/schedule.h"

namespace gka::kernels::cuda::hopper {

inline constexpr int kMostSteps = 64;

/// A residual b − (H̃ + a) ξ taken on the way. The recurrence goes on for ξ_i less ξ at the residual, with the residual
/// as right-hand side and g = 1; its first step needs no product.
struct Residual {
  float grown = 1, grown_before = 1;  // g of the last step, and of the one before it
  float e_weight = 0, r_weight = 0;   // the step without a product
};

/// Where residuals are taken.
struct Stages {
  int count = 1;                  // one more than there are residuals
  int last[kMostSteps + 1] = {};  // the last step of each stage
  Residual residual[kMostSteps] = {};
};

struct Schedule {
  int last = 0;  // step
  float pace = 1, inverse_pace = 1;
  float ridge = 0;     // times pace
  float faster = 1;    // pace over that of L = 1, a float16
  float headroom = 1;  // what a right-hand side of order 1 is scaled by: iterates reach 1/ridge
  float start = 0;     // ξ_0 = start · b
  float grown_last = 1;
  float a[kMostSteps + 1] = {}, b[kMostSteps + 1] = {}, q[kMostSteps + 1] = {};
};

/// How close to the exact solve a schedule that may stop early comes, at worst: beyond that bf16 results gain nothing.
inline constexpr double kGoal = 6e-3;
/// From this budget on iterations may be spent as the kernel likes: fewer are taken as they are asked for.
inline constexpr std::int64_t kBudget = 20;
/// With less of a ridge the steps that there are do not converge.
inline constexpr double kUsualRidge = 0.02;
/// With less, x is so large where nothing was written that float16 operands show.
inline constexpr double kSmallestRidge = 0.005;
/// No schedule that may stop early has fewer steps.
inline constexpr int kShortest = 8;

/// What c_i comes to on spectra in [ridge, top + ridge].
inline double limit_of_pace(double ridge, double top) {
  const double centre = (top + 2 * ridge) / top;
  return 2 / (1 + std::sqrt(1 - 1 / (centre * centre))) * 2 / (top + 2 * ridge);
}
/// Rounded to the eleven bits of a float16.
inline double as_half(double x) {
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::round(mantissa * 2048) / 2048, exponent);
}
/// By how much a step shrinks what is left to solve.
inline double rate_of(double ridge, double top) {
  const double root = std::sqrt((top + ridge) / ridge);
  return (root - 1) / (root + 1);
}
/// The largest top for which so many steps reach kGoal.
inline double reach_of(double ridge, int steps) {
  const double rate = std::pow(kGoal / 2, 1.0 / steps), root = (1 + rate) / (1 - rate);
  return ridge * (root * root - 1);
}

/// Residuals twice on the way. Steps come in pairs, with an empty one in front where their number is odd. After a
/// residual, one step without products and then an even number. Noise of the steps before a residual updates over those
/// behind it alone, so the first stages are the shorter ones.
inline Stages two_residuals(int steps) {
  Stages s{.count = 3, .last = {0, 0, steps}};
  for (int i = 1; i >= 0; --i) {
    const int about = steps * (i + 1) * 2 / 7;
    s.last[i] = about - (s.last[i + 1] - about + 1) % 2;
  }
  return s;
}
/// Residuals before every step: what is rounded to float16 is never an iterate.
inline Stages residuals_everywhere(int steps) {
  Stages s{.count = steps + 1};
  for (int i = 0; i <= steps; ++i) s.last[i] = i;
  return s;
}

/// As many steps as kGoal needs. A template, for the card has it too, which takes what is constexpr, and clang takes no
/// constexpr function that it could never evaluate, unless it is one.
constexpr int enough_steps(std::floating_point auto rate) {
  const auto enough = static_cast<int>(std::ceil(std::log(kGoal / 2) / std::log(rate) - 1e-9));
  const int some = enough < kShortest ? kShortest : enough;
  return some + some % 2;
}

/// A schedule that is filled step after step.
class ScheduleInProgress {
 public:
  ScheduleInProgress(double ridge, double top)
      : ridge_(ridge), limit_(as_half(limit_of_pace(ridge, top) / limit_of_pace(ridge, 1)) * limit_of_pace(ridge, 1)) {
    of_.pace = static_cast<float>(limit_);
    of_.inverse_pace = static_cast<float>(1 / limit_);
    of_.ridge = static_cast<float>(limit_ * ridge);
    of_.faster = static_cast<float>(as_half(limit_of_pace(ridge, top) / limit_of_pace(ridge, 1)));
    of_.headroom = static_cast<float>(std::exp2(std::floor(std::log2(std::min(1.0, 50 * ridge)))));
  }

  void start(double s) { of_.start = of_.q[0] = static_cast<float>(s); }
  void step(int i, const Coefficients& weights) {
    const double c = weights.s, omega = 1 + weights.m;
    const double next = -c / limit_ * grown_;
    of_.a[i] = static_cast<float>((omega - c * ridge_) * grown_ / next);
    of_.b[i] = static_cast<float>((1 - omega) * before_ / next);
    of_.q[i] = static_cast<float>(c / next);
    before_ = grown_;
    grown_ = next;
  }
  /// A residual, and the step without a product behind it.
  Residual residual(double e_weight, double r_weight) {
    const Residual at{.grown = static_cast<float>(grown_),
                      .grown_before = static_cast<float>(before_),
                      .e_weight = static_cast<float>(e_weight),
                      .r_weight = static_cast<float>(r_weight)};
    before_ = grown_ = 1;
    return at;
  }
  Schedule finish(int last) {
    of_.last = last;
    of_.grown_last = static_cast<float>(grown_);
    return of_;
  }

 private:
  Schedule of_;
  double ridge_, limit_;  // of c_i
  double grown_ = 1, before_ = 1;
};

/// `early`: no more steps than kGoal needs. With `stages`: all of them, with residuals on the way.
inline Schedule make_schedule(double ridge, std::int64_t iterations, bool early, Stages* stages = nullptr,
                              double top = 1) {
  int steps = static_cast<int>(iterations);
  if (early) steps = static_cast<int>(std::min<std::int64_t>(iterations, enough_steps(rate_of(ridge, top))));
  ScheduleInProgress schedule(ridge, top);
  kernels::Schedule chebyshev(Solver::chebyshev, top + ridge, ridge);
  schedule.start(chebyshev.start().s);
  for (int i = 1, stage = 0; i <= steps; ++i) {
    const Coefficients of = chebyshev.step(i);
    if (stages != nullptr && i == stages->last[stage] + 1) {
      stages->residual[stage++] = schedule.residual(1 - (1 + of.m), of.s);
    } else {
      schedule.step(i, of);
    }
  }
  return schedule.finish(steps);
}

/// A symmetric n×n matrix without negative eigenvalues and with Frobenius norm 1 has none above `top` if its trace is
/// at least this: with one of L the others have a trace of √((n − 1)(1 − L²)) at most, and the sum falls as L grows.
/// Below 1/√n no such matrix has all its eigenvalues, and no trace is enough.
inline double spread_for(double top, double n) {
  return top * top * n < 1 ? 2 * std::sqrt(n) : top + std::sqrt((n - 1) * (1 - top * top));
}

/// Schedules for spectra that reach less far than 1 have 8, 10, … 20 steps.
inline constexpr int kReaches = 7, kFirstReach = 3;

/// How a chunk is refined: not; with two residuals; with one before every step.
enum Refined : int { kNot = 0, kTwice = 1, kEverywhere = 2 };

/// By how a chunk is refined. Then those for spectra that reach less far: of[kFirstReach + i], i < reaches, for chunks
/// of which every token has tr H/‖H‖_F ≥ spread[i], which falls.
struct Schedules {
  Schedule of[kFirstReach + kReaches] = {};
  Stages stages[2] = {};  // of[kTwice]'s, of[kEverywhere]'s
  int reaches = 0;
  float spread[kReaches] = {};
  bool may_refine = false;
  float least_spread = 0;   // chunks with a token below this are refined,
  float least_for_two = 0;  // and with one below this everywhere
};

/// Where tr H / ‖H‖_F (the root of how many keys H is made of, about) is below kAmple/a, the directions that are read
/// are so small in x beside the null space that rounding, and in the gradients stopping early, would show. Where the
/// steps converge, the second half of them makes up for it; where they are too few, or the ridge is too small, nothing
/// does, and no iterate may be rounded.
inline constexpr double kAmple = 0.07;

inline Schedules make_schedules(double ridge, std::int64_t iterations, bool refine, std::int64_t dim) {
  const bool may_refine = refine && iterations > 0, early = refine && iterations >= kBudget;
  const bool converges = early && ridge >= kUsualRidge;
  Schedules all{.may_refine = may_refine,
                .least_spread = static_cast<float>(kAmple / ridge),
                .least_for_two = static_cast<float>(converges ? 0 : kAmple / std::max(ridge, kUsualRidge))};
  const auto steps = static_cast<int>(iterations);
  all.of[kNot] = make_schedule(ridge, iterations, early);
  // Where two residuals are too many steps between them, the chunks that ask for some get them everywhere.
  all.stages[0] = early ? two_residuals(steps) : residuals_everywhere(steps);
  all.stages[1] = residuals_everywhere(steps);
  for (int i = 0; i < 2; ++i) {
    all.of[kTwice + i] = make_schedule(ridge, iterations, false, may_refine ? &all.stages[i] : nullptr);
  }
  constexpr double kMargin = 1.005;  // for rounding, where traces and norms are found
  const auto n = static_cast<double>(dim);
  for (int i = 0; i < kReaches && early; ++i) {
    const int fewer = kShortest + 2 * i;
    const double reach = reach_of(ridge, fewer);
    if (fewer >= all.of[kNot].last || reach >= 1) break;
    all.of[kFirstReach + i] = make_schedule(ridge, fewer, true, nullptr, reach);
    all.spread[i] = static_cast<float>(kMargin * spread_for(reach, n));
    all.reaches = i + 1;
  }
  return all;
}

// ---- Increments (on trial: `increments`, solve_increments.cuh) ------------------------------------------------------

/// Steps for chunks in which few keys are left, on spectra in [a, 1 + a]. What n steps leave of a direction with
/// eigenvalue λ is a polynomial in λ that is 1 at 0. Chebyshev's leave the same of all directions at worst; but what is
/// read lies along the keys, where λ is large, and in the gradients 1/a multiplies what is left there. So these leave
/// nothing at λ = a, across the keys, and of others about 1/λ: (1 − λ/a) π_i(λ)/π_i(0), with π_i orthogonal under
/// (λ − a)² λ²/√((λ − a)(1 + a − λ)).
class StepsAlongKeys {
 public:
  explicit StepsAlongKeys(double ridge) : ridge_(ridge) {
    // Monic, π_{i+1} = (λ − α_i) π_i − β_i π_{i-1}. From Chebyshev's a factor λ − z of the weight makes, with
    // q_i = π_{i+1}(z)/π_i(z) (Christoffel), α_{i+1} + q_{i+1} − q_i of α_i and β_i q_i/q_{i-1} of β_i.
    alpha_.fill(ridge + 0.5);
    beta_.fill(1.0 / 16);
    beta_[0] = 0;
    beta_[1] = 1.0 / 8;
    std::size_t last = alpha_.size() - 1;
    for (const double z : {ridge, ridge, 0.0, 0.0}) {
      double q = z - alpha_[0], q_before = 1;
      for (std::size_t i = 0; i < last; ++i) {
        const double q_next = z - alpha_[i + 1] - beta_[i + 1] / q;
        alpha_[i] = alpha_[i + 1] + q_next - q;
        beta_[i] *= q / q_before;
        q_before = q, q = q_next;
      }
      --last;
    }
  }

  /// ξ_0 over b.
  double start() const { return 1 / ridge_; }
  /// s = c_i and m = ω_i − 1 of the next one; the first takes nothing of what was before ξ_0.
  Coefficients step() {
    const double alpha = alpha_[next_], beta = beta_[next_];
    root_ = next_ == 0 ? -alpha : -alpha - beta / root_;
    return {.s = -1 / root_, .m = next_++ == 0 ? 0 : -alpha / root_ - 1};
  }

 private:
  double ridge_;
  std::array<double, kMostSteps + 5> alpha_{}, beta_{};
  std::size_t next_ = 0;
  double root_ = 1;  // π_{i+1}(0)/π_i(0)
};

/// δ_i = m_i δ_{i-1} + s_i g with g in the scale of the pace, i = 1 … last, behind δ_0 = start · b.
struct Increments {
  int last = 0;
  float start = 0;
  float m[kMostSteps + 1] = {}, s[kMostSteps + 1] = {};
};

/// Steps of conjugate gradients: at least, at most, and between them until |r|² ≤ enough |b|²; fewer where |r|² ≤
/// nothing |b|². None: not for this call.
struct ConjugateLimits {
  int least = 0, most = 0;
  float enough = 0, nothing = 0;
  float ridge = 0, inverse_pace = 1;
  float largest_beta = 0;
};
/// How many there are for certain where Chebyshev's would be `enough_steps`: as many as leave no more than those leave,
/// for random keys, such that share a direction, and a trained model's (docs/kernel-log.md). The backward pass solves
/// for vectors along the keys, which takes fewer. β is at most (κ − 1)²/4κ < 1/4a by itself; twice that, noise
/// included, leaves p within float16's range.
inline ConjugateLimits conjugate_limits(double ridge, std::int64_t iterations, bool refine, bool backward) {
  const double rate = rate_of(ridge, 1);
  const bool all_but_exact = 2 * std::pow(rate, static_cast<double>(iterations)) <= 1e-3;
  if (!refine || iterations < kBudget || ridge < kUsualRidge || !all_but_exact) return {};
  const int most = enough_steps(rate);
  const int least = static_cast<int>(std::ceil((backward ? 0.59 : 0.68) * most));
  return {.least = std::max(least, 4),
          .most = most,
          .enough = 2.5e-5f,
          .nothing = 4e-8f,
          .ridge = static_cast<float>(ridge),
          .inverse_pace = static_cast<float>(1 / limit_of_pace(ridge, 1)),
          .largest_beta = static_cast<float>(1 / (2 * ridge))};
}

/// Indexed as Schedules are. Chunks that solve.cuh refines have no residuals here; where steps converge they take those
/// along the keys, else all that there are.
struct IncrementSchedules {
  float pace = 1, ridge = 0;  // `ridge` times pace
  Increments of[kFirstReach + kReaches] = {};
  ConjugateLimits conjugate = {};
};

/// `steps`: Chebyshev's or StepsAlongKeys.
template <typename Next>
Increments make_increments(double start, int last, double pace, Next&& next) {
  Increments of{.last = last, .start = static_cast<float>(start)};
  for (int i = 1; i <= last; ++i) {
    const Coefficients weights = next(i);
    of.m[i] = static_cast<float>(weights.m);
    of.s[i] = static_cast<float>(weights.s / pace);
  }
  return of;
}
inline Increments chebyshev_increments(double ridge, double top, int last, double pace) {
  kernels::Schedule steps(Solver::chebyshev, top + ridge, ridge);
  const double start = steps.start().s;
  return make_increments(start, last, pace, [&](int i) { return steps.step(i); });
}

/// How many of those along the keys leave as little in the gradients as thirty of Chebyshev's.
inline int enough_along_keys(double ridge) { return enough_steps(rate_of(ridge, 1)) + 2; }

/// The steps of `like` and of refined chunks in this form. All have the pace that chunk_system's numbers have in them.
inline IncrementSchedules make_increment_schedules(const Schedules& like, double ridge, std::int64_t iterations,
                                                   bool refine) {
  const double pace = static_cast<double>(like.of[kNot].pace);
  IncrementSchedules all{.pace = like.of[kNot].pace, .ridge = like.of[kNot].ridge};
  all.of[kNot] = chebyshev_increments(ridge, 1, like.of[kNot].last, pace);
  for (int i = 0; i < like.reaches; ++i) {
    const int last = like.of[kFirstReach + i].last;
    all.of[kFirstReach + i] = chebyshev_increments(ridge, reach_of(ridge, last), last, pace);
  }
  const int along = enough_along_keys(ridge), steps = static_cast<int>(iterations);
  if (refine && iterations >= kBudget && ridge >= kUsualRidge && along <= steps) {
    StepsAlongKeys keys(ridge);
    all.of[kTwice] = make_increments(keys.start(), along, pace, [&](int) { return keys.step(); });
  } else {
    all.of[kTwice] = chebyshev_increments(ridge, 1, steps, pace);
  }
  all.of[kEverywhere] = all.of[kTwice];
  return all;
}

// ---- A ridge of each token's own --------------------------------------------------------------------------------

/// Of a step, as Increments has them.
struct TokenWeights {
  float m, s;
};

/// With a constant ridge λ a token's system is σH + ρ with a spectrum in [ρ, 1] (kernels/system_scale.h), and ρ is its
/// own. Its weights are found step by step: with Ω the limit of ω_i and v_i = Ω/ω_i
///
///   c = 4/(1 + √ρ)²,   Ω = c (1 + ρ)/2,   v_i = Ω − (Ω − 1)/v_{i-1},   v_0 = Ω/2
///   a_i = −c (1 − ρ)/2,   b_i = 1 − Ω,   q_i = −c/g_{i-1},   g_i = −g_{i-1}/v_i
///
/// (ω_i = 4/(4 − r²ω_{i-1}) with r = (1 − ρ)/(1 + ρ) makes 1 − ω_i = −r²ω_iω_{i-1}/4, and r²Ω²/4 is Ω − 1.) Only what
/// every step needs is kept, in the registers of threads that have few: ρ is asked for where it is needed again.
struct TokenSchedule {
  float a, b, v, q;

  constexpr explicit TokenSchedule(float rho)
      : a(-0.5f * pace_of(rho) * (1 - rho)), b(1 - limit_of(rho)), v(0.5f * limit_of(rho)), q(-pace_of(rho)) {}

  static constexpr float pace_of(float rho) {
    const float root = 1 + std::sqrt(rho);
    return 4 / (root * root);
  }
  static constexpr float limit_of(float rho) { return 0.5f * pace_of(rho) * (1 + rho); }
  static constexpr float start_of(float rho) { return 2 / (1 + rho); }

  /// Before a step with weights a, b and q: what comes after it.
  constexpr float next_weight() {
    const float now = q;
    advance();
    q *= -v;
    return now;
  }
  /// m and s of the next step as Increments has them.
  constexpr TokenWeights next_increment() {
    advance();
    return {.m = (1 - b) / v - 1, .s = 1 / v};
  }
  /// g of the last step.
  constexpr float grown(float rho) const { return -pace_of(rho) / q; }
  /// The step without a product behind a residual.
  constexpr Residual restart(float rho) {
    Residual at{.grown = grown(rho), .grown_before = -grown(rho) * v};
    advance();
    at.e_weight = 1 - (1 - b) / v;
    at.r_weight = pace_of(rho) / v;
    q = -pace_of(rho);
    return at;
  }

 private:
  constexpr void advance() { v = 1 - b + b / v; }
};

/// What a right-hand side of order 1 is scaled by: iterates reach 1/ρ, and within kMostSteps a few thousand at most.
constexpr float token_headroom(float rho) {
  float headroom = 1;
  for (; headroom > 50 * rho && headroom > 1.0f / 32; headroom /= 2) continue;
  return headroom;
}

/// With less, millions of steps would be enough, and soon more than an int holds.
inline constexpr float kLeastRho = 1e-12f;

/// How many steps a chunk takes that is not refined, of the smallest ρ of its tokens.
constexpr int token_steps(float rho, std::int64_t iterations, bool refine) {
  const auto all = static_cast<int>(iterations);
  if (!refine || iterations < kBudget || !(rho > kLeastRho)) return all;
  const double root = std::sqrt(static_cast<double>(rho)), rate = (1 - root) / (1 + root);
  const int enough = enough_steps(rate > 0.01 ? rate : 0.01);
  return enough < all ? enough : all;
}

/// How a token with ‖H‖_F = λ/ridge and tr H/‖H‖_F = spread wants its chunk refined. Where the ridge is less than what
/// float16 operands are known to do, in every step.
constexpr Refined refined_for(float ridge, float spread, std::int64_t iterations) {
  constexpr float kUsual = static_cast<float>(kUsualRidge), kNeeded = static_cast<float>(kAmple);
  if (ridge < static_cast<float>(kSmallestRidge)) return kEverywhere;
  if (spread * ridge >= kNeeded) return kNot;
  const bool converges = iterations >= kBudget && ridge >= kUsual;
  return !converges && !(spread * (ridge < kUsual ? kUsual : ridge) >= kNeeded) ? kEverywhere : kTwice;
}

}  // namespace gka::kernels::cuda::hopper
