// The Chebyshev iteration on spectra in [a, 1 + a] as a table, the same for every token. Iterates are kept as ξ_i/g_i:
//
//   ξ_i = −c_i H̃ξ_{i-1} + (ω_i − c_i a) ξ_{i-1} + (1 − ω_i) ξ_{i-2} + c_i b,   g_i = −(c_i/c) g_{i-1}
//   ξ_i/g_i = c H̃ ξ_{i-1}/g_{i-1} + a_i ξ_{i-1}/g_{i-1} + b_i ξ_{i-2}/g_{i-2} + q_i b
//
// with c (`pace`) the limit of c_i, so that g stays near ±1 and float16 holds the iterates; c goes into H̃'s factors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace gka::kernels::cuda::hopper {

inline constexpr int kMostSteps = 64;

struct Schedule {
  int first = 0;  // steps before the residual, or all of them
  int last = 0;   // steps in all
  bool refined = false;
  float pace = 1;
  float ridge = 0;     // times pace
  float headroom = 1;  // what a right-hand side of order 1 is scaled by: iterates reach 1/ridge
  float residual = 1;  // −g_first / pace
  float start = 0;     // ξ_0 = start · b
  float grown_before = 0, grown_first = 1, inverse_grown_first = 1;  // g at first − 1 and first, and pace over that
  float grown_last = 1;
  float e_weight = 0, r_weight = 0;  // step first + 1, which needs no product
  float a[kMostSteps + 1] = {}, b[kMostSteps + 1] = {}, q[kMostSteps + 1] = {};
};

/// How close to the exact solve a schedule that may stop early comes, at worst: beyond that bf16 results gain nothing.
inline constexpr double kGoal = 6e-3;
/// From this budget on iterations may be spent as the kernel likes.
inline constexpr std::int64_t kBudget = 20;

/// `early`: no more steps than kGoal needs. `refined`: all of them, with a residual in the middle.
inline Schedule make_schedule(double ridge, std::int64_t iterations, bool early, bool refined) {
  const double limit = 2 / (1 + std::sqrt(1 - 1 / ((1 + 2 * ridge) * (1 + 2 * ridge)))) * 2 / (1 + 2 * ridge);
  Schedule s{.pace = static_cast<float>(limit), .ridge = static_cast<float>(limit * ridge)};
  s.headroom = static_cast<float>(std::exp2(std::floor(std::log2(std::min(1.0, 50 * ridge)))));
  const double kappa = (1 + ridge) / ridge, rate = (std::sqrt(kappa) - 1) / (std::sqrt(kappa) + 1);
  s.refined = refined;
  s.last = static_cast<int>(iterations);
  if (early) {
    const int enough = std::max(8, static_cast<int>(std::ceil(std::log(kGoal / 2) / std::log(rate))));
    s.last = static_cast<int>(std::min<std::int64_t>(iterations, enough + enough % 2));
  }
  // Steps come in pairs, with an empty one in front where their number is odd. After the residual, one step without
  // products and then last − first − 1, which has to be even.
  s.first = refined ? s.last / 2 - (s.last / 2 + s.last + 1) % 2 : s.last;

  const double centre = 1 + 2 * ridge, rho = 1 / centre;
  double omega = 2, grown = 1, before = 1;
  s.start = s.q[0] = static_cast<float>(2 / centre);
  for (int i = 1; i <= s.last; ++i) {
    omega = 4 / (4 - rho * rho * omega);
    const double c = 2 * omega / centre;
    if (s.refined && i == s.first + 1) {
      s.e_weight = static_cast<float>(1 - omega);
      s.r_weight = static_cast<float>(c);
      before = grown = 1;
      continue;
    }
    const double next = -c / limit * grown;
    s.a[i] = static_cast<float>((omega - c * ridge) * grown / next);
    s.b[i] = static_cast<float>((1 - omega) * before / next);
    s.q[i] = static_cast<float>(c / next);
    before = grown;
    grown = next;
    if (i == s.first) {
      s.grown_before = static_cast<float>(before);
      s.grown_first = static_cast<float>(grown);
      s.inverse_grown_first = static_cast<float>(limit / grown);
      s.residual = static_cast<float>(-grown / limit);
    }
  }
  s.grown_last = static_cast<float>(grown);
  return s;
}

/// One for chunks that need no residual and one for those that do, by that: where refining is not allowed, the same.
struct Schedules {
  Schedule of[2];
  bool may_refine = false;
  float least_spread = 0;  // chunks with a token below this are refined
};

/// Where tr H / ‖H‖_F (the root of how many keys H is made of, about) is below kAmple/a, the directions that are read
/// are so small in x beside the null space that rounding, and in the gradients stopping early, would show.
inline constexpr double kAmple = 0.07;

inline Schedules make_schedules(double ridge, std::int64_t iterations, bool refine) {
  const bool may_refine = refine && iterations >= kBudget;
  return {
      .of = {make_schedule(ridge, iterations, may_refine, false), make_schedule(ridge, iterations, false, may_refine)},
      .may_refine = may_refine,
      .least_spread = static_cast<float>(kAmple / ridge)};
}

}  // namespace gka::kernels::cuda::hopper
