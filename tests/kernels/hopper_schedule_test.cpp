// The Hopper solve's table of Chebyshev steps: walked as the kernel walks it, on one eigenvalue at a time, it gives the
// iterate of the plain recurrence, whether or not there are residuals on the way.
#include "kernels/cuda/hopper/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "kernels/cuda/hopper/blocks.h"
#include "kernels/cuda/hopper/gates.h"
#include "kernels/cuda/hopper/sizes.h"

namespace gka::kernels::test {
namespace {

using cuda::hopper::Schedule;
using cuda::hopper::Stages;

/// ξ_n of the recurrence of docs/mathematics.md for (μ + a) ξ = 1 and spectra in [a, top + a].
double chebyshev(double mu, double ridge, int steps, double top = 1) {
  const double centre = top + 2 * ridge, rho = top / centre;
  double omega = 2, before = 0, now = 2 / centre;
  for (int i = 1; i <= steps; ++i) {
    omega = 4 / (4 - rho * rho * omega);
    const double c = 2 * omega / centre, next = omega * now + (1 - omega) * before + c * (1 - (mu + ridge) * now);
    before = now, now = next;
  }
  return now;
}

/// The same by the table, with the kernel's two iterates over g and its restarts on residuals, in float64.
double by_table(const Schedule& s, const Stages& stages, double mu) {
  const double h = s.pace * mu;
  double now = stages.last[0] % 2 == 0 ? s.start : 0, before = 0, b = 1, sum = 0;
  int i = stages.last[0] % 2 == 0 ? 1 : 0;
  for (int stage = 0;; ++stage) {
    EXPECT_EQ((stages.last[stage] - i + 1) % 2, 0) << "steps are taken two by two";
    for (; i <= stages.last[stage]; ++i) {
      const double next = h * now + s.a[i] * now + s.b[i] * before + s.q[i] * b;
      before = now, now = next;
    }
    if (stage == stages.count - 1) return sum + s.grown_last * now;
    const auto& at = stages.residual[stage];
    const double error_before = at.grown_before * before - at.grown * now;
    sum += at.grown * now;
    b = -s.inverse_pace * (h * sum + s.ridge * sum - s.pace);
    now = at.e_weight * error_before + at.r_weight * b, before = 0;
    i = stages.last[stage] + 2;
  }
}
/// Without residuals.
double by_table(const Schedule& s, double mu) { return by_table(s, Stages{.last = {s.last}}, mu); }

class HopperSchedule : public testing::TestWithParam<double> {};

TEST_P(HopperSchedule, IsChebyshev) {
  const double ridge = GetParam();
  for (const int iterations : {0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 19, 20, 21, 30, 31, 64}) {
    for (const bool refine : {false, true}) {
      const auto schedules = cuda::hopper::make_schedules(ridge, iterations, refine, 128);
      EXPECT_EQ(schedules.may_refine, refine && iterations > 0);
      EXPECT_TRUE(iterations >= cuda::hopper::kBudget || schedules.of[0].last == iterations);
      const auto compare = [&](const Schedule& s, auto&& table) {
        EXPECT_LE(s.last, iterations);
        for (double mu = 0; mu <= 1; mu += 0.0625) {
          const double want = chebyshev(mu, ridge, s.last);
          EXPECT_NEAR(table(mu), want, 2e-5 * std::abs(want)) << "mu " << mu << ", iterations " << iterations;
        }
      };
      compare(schedules.of[0], [&](double mu) { return by_table(schedules.of[0], mu); });
      for (int i = 0; i < 2 && schedules.may_refine; ++i) {
        const Schedule& s = schedules.of[cuda::hopper::kTwice + i];
        const Stages& stages = schedules.stages[i];
        EXPECT_EQ(stages.last[stages.count - 1], iterations) << "what is refined gets the whole budget";
        EXPECT_EQ(s.last, iterations);
        EXPECT_EQ(stages.count, i == 0 && iterations >= cuda::hopper::kBudget ? 3 : iterations + 1);
        compare(s, [&](double mu) { return by_table(s, stages, mu); });
      }
    }
  }
}

TEST_P(HopperSchedule, StopsOnlyWhereItIsCloseEnough) {
  const double ridge = GetParam();
  const Schedule s = cuda::hopper::make_schedules(ridge, 64, true, 128).of[0];
  for (double mu = 0; mu <= 1; mu += 0.03125) {
    EXPECT_LE(std::abs(by_table(s, mu) * (mu + ridge) - 1), 1.01 * cuda::hopper::kGoal) << "mu " << mu;
  }
}

TEST_P(HopperSchedule, TakesFewerStepsWhereSpectraReachLessFar) {
  const double ridge = GetParam();
  const auto schedules = cuda::hopper::make_schedules(ridge, 30, true, 128);
  const Schedule& usual = schedules.of[0];
  for (int i = 0; i < schedules.reaches; ++i) {
    const Schedule& s = schedules.of[cuda::hopper::kFirstReach + i];
    EXPECT_EQ(s.last, cuda::hopper::kShortest + 2 * i);
    EXPECT_LT(s.last, usual.last);
    EXPECT_TRUE(i == 0 || schedules.spread[i] <= schedules.spread[i - 1]) << "more steps ask for less";
    EXPECT_FLOAT_EQ(s.pace, s.faster * usual.pace);
    EXPECT_EQ(s.faster * 2048, std::round(s.faster * 2048)) << "a float16";
    const double reach = cuda::hopper::reach_of(ridge, s.last);
    for (double mu = 0; mu <= reach; mu += reach / 64) {
      const double got = by_table(s, mu);
      EXPECT_NEAR(got, chebyshev(mu, ridge, s.last, reach), 1e-4 * std::abs(got)) << "mu " << mu;
      EXPECT_LE(std::abs(got * (mu + ridge) - 1), 1.01 * cuda::hopper::kGoal) << "mu " << mu << ", reach " << reach;
    }
  }
  EXPECT_EQ(cuda::hopper::make_schedules(ridge, 12, true, 128).reaches, 0) << "a small budget is spent as asked";
}

TEST_P(HopperSchedule, IsCloseEnoughOnEverySpectrumThatAllowsIt) {
  const double ridge = GetParam();
  std::mt19937 source(3);
  std::uniform_real_distribution<double> uniform;
  int allowed = 0;
  for (const int dim : {8, 64, 128}) {
    const auto schedules = cuda::hopper::make_schedules(ridge, 64, true, dim);
    for (int draw = 0; draw < 400; ++draw) {
      // Eigenvalues as H̃ may have them: some decay, one larger than the others, Frobenius norm 1.
      std::vector<double> eigenvalues(static_cast<std::size_t>(dim));
      const double decay = 4 * uniform(source) / dim, outlier = std::exp(6 * uniform(source) - 3);
      double square = 0, trace = 0, largest = 0;
      for (std::size_t i = 0; i < eigenvalues.size(); ++i) {
        eigenvalues[i] = i == 0 ? outlier : uniform(source) * std::exp(-decay * static_cast<double>(i));
        square += eigenvalues[i] * eigenvalues[i];
      }
      for (double& eigenvalue : eigenvalues) {
        eigenvalue /= std::sqrt(square);
        trace += eigenvalue;
        largest = std::max(largest, eigenvalue);
      }
      for (int i = 0; i < schedules.reaches; ++i) {
        if (trace < schedules.spread[i]) continue;
        ++allowed;
        const Schedule& s = schedules.of[cuda::hopper::kFirstReach + i];
        EXPECT_LE(largest, cuda::hopper::reach_of(ridge, s.last));
        for (const double mu : eigenvalues) {
          EXPECT_LE(std::abs(by_table(s, mu) * (mu + ridge) - 1), 1.01 * cuda::hopper::kGoal) << "mu " << mu;
        }
      }
    }
  }
  EXPECT_TRUE(allowed > 0 || ridge != 0.02) << "some of them do";
}

/// ξ by increments, as solve_increments.cuh makes it, in float64; m_of(i) and s_of(i) as Increments has them.
template <typename M, typename S>
double by_increments(double mu, double ridge, double pace, double start, int last, M&& m_of, S&& s_of) {
  double xi = 0, g = pace, delta = start;
  for (int i = 1; i <= last; ++i) {
    xi += delta;
    g -= pace * mu * delta;
    delta = m_of(i) * delta + s_of(i) * (g - pace * ridge * xi);
  }
  return xi + delta;
}
double by_increments(const cuda::hopper::IncrementSchedules& all, int which, double mu) {
  const cuda::hopper::Increments& of = all.of[which];
  const double pace = all.pace;
  return by_increments(
      mu, all.ridge / pace, pace, of.start, of.last, [&](int i) { return of.m[i]; }, [&](int i) { return of.s[i]; });
}

TEST_P(HopperSchedule, AsIncrementsIsTheSame) {
  const double ridge = GetParam();
  for (const bool refine : {true, false}) {
    for (const int iterations : {7, 30}) {
      const auto like = cuda::hopper::make_schedules(ridge, iterations, refine, 128);
      const auto all = cuda::hopper::make_increment_schedules(like, ridge, iterations, refine);
      EXPECT_EQ(all.pace, like.of[0].pace) << "chunk_system has it in its numbers";
      for (double mu = 0; mu <= 1; mu += 1.0 / 64) {
        const double want = chebyshev(mu, ridge, like.of[0].last);
        EXPECT_NEAR(by_increments(all, 0, mu), want, 1e-5 * (1 + 1 / ridge)) << "mu " << mu;
        for (int i = 0; i < like.reaches; ++i) {
          const int last = like.of[cuda::hopper::kFirstReach + i].last;
          const double reach = cuda::hopper::reach_of(ridge, last), nearer = mu * reach;
          EXPECT_NEAR(by_increments(all, cuda::hopper::kFirstReach + i, nearer), chebyshev(nearer, ridge, last, reach),
                      1e-5 * (1 + 1 / ridge));
        }
      }
    }
  }
}

TEST_P(HopperSchedule, ChunksOfFewKeysTakeStepsAlongThemWhereStepsConverge) {
  const double ridge = GetParam();
  const auto schedules_for = [&](int iterations, bool refine) {
    const auto like = cuda::hopper::make_schedules(ridge, iterations, refine, 128);
    return cuda::hopper::make_increment_schedules(like, ridge, iterations, refine);
  };
  const auto left = [&](const auto& all, double mu) {
    return std::abs(by_increments(all, cuda::hopper::kTwice, mu) * (mu + ridge) - 1);
  };
  const auto all = schedules_for(30, true);
  EXPECT_EQ(all.of[cuda::hopper::kEverywhere].last, all.of[cuda::hopper::kTwice].last);
  if (ridge < cuda::hopper::kUsualRidge) {
    EXPECT_EQ(all.of[cuda::hopper::kTwice].last, 30) << "steps that do not converge are all taken";
    return;
  }
  EXPECT_LE(all.of[cuda::hopper::kTwice].last, 24);
  EXPECT_LE(left(all, 0), 1e-5);
  for (double mu = 0; mu <= 1; mu += 1.0 / 256) {
    EXPECT_LE(left(all, mu), cuda::hopper::kGoal) << "mu " << mu;
    // Times (μ + a)/a, as gradients see it: half of what all thirty of Chebyshev's steps leave with a ridge of 0.02.
    EXPECT_LE(left(all, mu) * (mu + ridge) / ridge, 9e-3) << "mu " << mu;
  }
  const int enough = cuda::hopper::enough_along_keys(ridge);
  for (const int iterations : {12, enough - 1, enough}) {
    const int last = schedules_for(iterations, true).of[cuda::hopper::kTwice].last;
    EXPECT_EQ(last, iterations < cuda::hopper::kBudget ? iterations : std::min(iterations, enough));
  }
  EXPECT_EQ(schedules_for(30, false).of[cuda::hopper::kTwice].last, 30);
}

TEST_P(HopperSchedule, ConjugateGradientsTakeNoMoreStepsThanChebyshevs) {
  const double ridge = GetParam();
  for (const bool backward : {false, true}) {
    const auto limits = cuda::hopper::conjugate_limits(ridge, 30, true, backward);
    EXPECT_EQ(limits.most > 0, ridge >= cuda::hopper::kUsualRidge);
    EXPECT_LE(limits.most, cuda::hopper::make_schedule(ridge, 30, true).last);
    EXPECT_LE(limits.least, limits.most);
    EXPECT_EQ(cuda::hopper::conjugate_limits(ridge, 30, false, backward).most, 0) << "all thirty are asked for";
    EXPECT_EQ(cuda::hopper::conjugate_limits(ridge, 12, true, backward).most, 0);
  }
}

TEST_P(HopperSchedule, StepsAlongKeysLeaveWhatIsOrthogonalUnderTheirWeight) {
  constexpr int kSteps = 6, kNodes = 64;
  const double ridge = GetParam();
  double products[kSteps + 1][kSteps + 1] = {};
  for (int node = 0; node < kNodes; ++node) {
    const double at = ridge + 0.5 + 0.5 * std::cos((node + 0.5) * 3.14159265358979324 / kNodes);  // λ
    cuda::hopper::StepsAlongKeys steps(ridge);
    double now = steps.start(), before = 0, left[kSteps + 1] = {1 - at * now};
    for (int i = 1; i <= kSteps; ++i) {
      const Coefficients of = steps.step();
      const double next = now + of.m * (now - before) + of.s * (1 - at * now);
      before = now, now = next;
      left[i] = 1 - at * now;  // with a factor 1 − λ/a, of which the weight has the square
    }
    for (int i = 0; i <= kSteps; ++i) {
      for (int j = 0; j <= kSteps; ++j) products[i][j] += at * at * left[i] * left[j];
    }
  }
  for (int i = 0; i <= kSteps; ++i) {
    for (int j = 0; j < i; ++j) {
      EXPECT_NEAR(products[i][j] / std::sqrt(products[i][i] * products[j][j]), 0, 1e-8) << i << " and " << j;
    }
  }
}

TEST(HopperGates, BothPassesAskTheSameTokensWhetherToRefine) {
  for (int length = 1; length <= cuda::hopper::kChunk; ++length) {
    std::set<int> asked, marked;
    for (int i = 0; i < cuda::hopper::kAsked; ++i) asked.insert(cuda::hopper::asked_token(i, length));
    for (int c = 0; c < length; ++c) {
      if (cuda::hopper::is_asked(c, length)) marked.insert(c);
    }
    EXPECT_EQ(asked, marked) << length << " tokens";
  }
}

INSTANTIATE_TEST_SUITE_P(Ridges, HopperSchedule, testing::Values(0.005, 0.02, 0.1, 1.0));

TEST(HopperBlocks, EveryBlockHasChunksOfEveryHeadWhereThatCostsNobodyATaskMore) {
  using cuda::hopper::blocks_for_heads;
  for (const std::int64_t heads : {1, 2, 6, 8, 12, 32}) {
    for (const std::int64_t chunks : {1, 33, 100, 256, 1024, 4000}) {
      for (const std::int64_t there : {1, 132, 264, 396, 528}) {
        const std::int64_t tasks = chunks * heads, blocks = std::min(there, tasks);
        const std::int64_t used = blocks_for_heads(blocks, tasks, heads);
        const auto rounds = [&](std::int64_t n) { return (tasks + n - 1) / n; };
        EXPECT_LE(used, blocks);
        EXPECT_LE(16 * rounds(used), 17 * rounds(blocks));
        if (rounds(blocks) < 64) continue;
        std::set<std::int64_t> met;
        for (std::int64_t task = 0; task < tasks; task += used) met.insert(task % heads);
        EXPECT_EQ(static_cast<std::int64_t>(met.size()), heads) << there << " blocks, " << chunks << " chunks";
      }
    }
  }
  EXPECT_EQ(blocks_for_heads(264, 8192, 8), 263);  // 65,536 tokens of 8 heads on 132 multiprocessors
}

/// Step by step, as the kernel takes them where tokens have schedules of their own, for (μ + ρ) ξ = 1 with μ ≤ 1 − ρ.
double by_token_schedule(const Stages& stages, double mu, double rho) {
  const auto own = static_cast<float>(rho);
  cuda::hopper::TokenSchedule s(own);
  const double pace = cuda::hopper::TokenSchedule::pace_of(own), h = pace * mu, ridge = pace * rho;
  double now = cuda::hopper::TokenSchedule::start_of(own), before = 0, b = 1, sum = 0;
  int i = 1;
  for (int stage = 0;; ++stage) {
    for (; i <= stages.last[stage]; ++i) {
      const double q = s.next_weight(), next = h * now + s.a * now + s.b * before + q * b;
      before = now, now = next;
    }
    if (stage == stages.count - 1) return sum + s.grown(own) * now;
    const cuda::hopper::Residual at = s.restart(own);
    const double error_before = at.grown_before * before - at.grown * now;
    sum += at.grown * now;
    b = 1 - (h * sum + ridge * sum) / pace;
    now = at.e_weight * error_before + at.r_weight * b, before = 0;
    i = stages.last[stage] + 2;
  }
}

/// ξ for (μ + ρ) ξ = 1 by the weights of kernels/schedule.h, for spectra in [ρ, 1].
double by_kernels_schedule(double mu, double rho, int steps) {
  ::gka::kernels::Schedule chebyshev(Solver::chebyshev, 1, rho);
  double now = chebyshev.start().s, before = 0;
  for (int i = 1; i <= steps; ++i) {
    const Coefficients of = chebyshev.step(i);
    const double next = now + of.m * (now - before) - of.s * ((mu + rho) * now - 1);
    before = now, now = next;
  }
  return now;
}

TEST(HopperTokenSchedule, IsThatOfKernelsScheduleWithAndWithoutResiduals) {
  for (const double rho : {1e-4, 0.003, 0.02, 0.3, 0.9, 1.0}) {
    for (const int steps : {7, 8, 30}) {
      for (const double share : {0.0, 0.3, 1.0}) {  // of [0, 1 − ρ]
        const double mu = share * (1 - rho);
        const double now = by_kernels_schedule(mu, rho, steps);
        for (const Stages& stages :
             {Stages{.last = {steps}}, cuda::hopper::two_residuals(steps), cuda::hopper::residuals_everywhere(steps)}) {
          EXPECT_NEAR(by_token_schedule(stages, mu, rho), now, 3e-5 * (1 + now))
              << rho << ", " << steps << " steps, " << stages.count << " stages";
        }
      }
    }
  }
}

TEST(HopperTokenSchedule, AsIncrementsIsTheSame) {
  for (const double rho : {1e-4, 0.003, 0.02, 0.3, 0.9, 1.0}) {
    for (const int steps : {1, 7, 30}) {
      for (const double share : {0.0, 0.3, 1.0}) {  // of [0, 1 − ρ]
        const double mu = share * (1 - rho);
        const auto rounded = static_cast<float>(rho);
        cuda::hopper::TokenSchedule schedule(rounded);
        cuda::hopper::TokenWeights weights{};
        const auto m_of = [&](int) {
          weights = schedule.next_increment();
          return weights.m;
        };
        const auto s_of = [&](int) { return weights.s; };
        const double pace = cuda::hopper::TokenSchedule::pace_of(rounded);
        const double now = by_kernels_schedule(mu, rho, steps);
        const double start = cuda::hopper::TokenSchedule::start_of(rounded);
        EXPECT_NEAR(by_increments(mu, rho, pace, start, steps, m_of, s_of), now, 3e-5 * (1 + now)) << rho;
      }
    }
  }
}

TEST(HopperTokenSchedule, ChunksAreRefinedByTheirOwnRidge) {
  using cuda::hopper::refined_for;
  EXPECT_EQ(refined_for(0.02f, 3.6f, 30), cuda::hopper::kNot);
  EXPECT_EQ(refined_for(0.02f, 3.4f, 30), cuda::hopper::kTwice);
  EXPECT_EQ(refined_for(0.02f, 3.4f, 12), cuda::hopper::kEverywhere);
  EXPECT_EQ(refined_for(0.01f, 6.0f, 30), cuda::hopper::kTwice);
  EXPECT_EQ(refined_for(0.01f, 3.0f, 30), cuda::hopper::kEverywhere);
  EXPECT_EQ(refined_for(0.001f, 11.0f, 30), cuda::hopper::kEverywhere);
  EXPECT_EQ(refined_for(10, 1, 30), cuda::hopper::kNot);
  EXPECT_EQ(refined_for(0.02f, std::nanf(""), 30), cuda::hopper::kTwice);
}

TEST(HopperTokenSchedule, TakesAsManyStepsAsTheSmallestRidgeNeeds) {
  using cuda::hopper::token_steps;
  EXPECT_EQ(token_steps(1, 30, true), 8);
  EXPECT_EQ(token_steps(0.25f, 30, true), 8);
  const auto as_adaptive = static_cast<float>(0.02 / 1.02);  // the same spectrum, over its upper end
  EXPECT_EQ(token_steps(as_adaptive, 30, true), cuda::hopper::make_schedule(0.02, 30, true).last);
  EXPECT_EQ(token_steps(0.001f, 30, true), 30);
  EXPECT_EQ(token_steps(1e-20f, 30, true), 30);
  EXPECT_EQ(token_steps(0.25f, 30, false), 30);
  EXPECT_EQ(token_steps(0.25f, 12, true), 12);
}

}  // namespace
}  // namespace gka::kernels::test
