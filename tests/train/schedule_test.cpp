#include "train/schedule.h"

#include <gtest/gtest.h>

namespace gka::train {
namespace {

constexpr Schedule kSchedule{.peak = 2, .warmup = 0.1, .final = 0.25, .steps = 100};

TEST(Schedule, RisesInAStraightLineToThePeak) {
  for (int step = 1; step <= 10; ++step) EXPECT_DOUBLE_EQ(kSchedule(step), 0.2 * step);
}

TEST(Schedule, FallsAlongACosineToItsEnd) {
  EXPECT_DOUBLE_EQ(kSchedule(55), 2 * (0.25 + 0.75 / 2)) << "half way, half of what there is to fall";
  EXPECT_DOUBLE_EQ(kSchedule(100), 0.5);
  for (int step = 11; step <= 100; ++step) EXPECT_LT(kSchedule(step), kSchedule(step - 1));
}

TEST(Schedule, WithoutWarmupFallsFromTheFirstStep) {
  const Schedule schedule{.peak = 1, .warmup = 0, .final = 0, .steps = 4};
  EXPECT_LT(schedule(1), 1);
  EXPECT_NEAR(schedule(4), 0, 1e-15);
}

TEST(Schedule, IsConstantWhenItEndsWhereItBegan) {
  const Schedule schedule{.peak = 3, .warmup = 0, .final = 1, .steps = 50};
  for (int step = 1; step <= 50; ++step) EXPECT_DOUBLE_EQ(schedule(step), 3);
}

TEST(Schedule, OfWarmupAloneEndsAtThePeak) {
  const Schedule schedule{.peak = 1, .warmup = 1, .final = 0, .steps = 5};
  EXPECT_DOUBLE_EQ(schedule(5), 1);
}

}  // namespace
}  // namespace gka::train
