// Turns: over several rounds everyone's numbers go up by one, and shares are those of the weights.
#include "data/turns.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace gka::data {
namespace {

TEST(Turns, CountEveryonesPlacesOnOverTheRounds) {
  const std::array<double, 3> weights{5, 2, 1};
  const Turns turns(weights, 7);
  constexpr std::int64_t kRound = 4096;
  std::array<std::int64_t, 3> drawn{};
  for (std::int64_t place = 0; place < 3 * kRound; ++place) {
    const auto [who, number] = turns(place);
    ASSERT_LT(who, weights.size());
    ASSERT_EQ(number, drawn[who]++) << "place " << place;
  }
  EXPECT_EQ(drawn, (std::array<std::int64_t, 3>{3 * kRound * 5 / 8, 3 * kRound * 2 / 8, 3 * kRound / 8}));
}

TEST(Turns, OfNobodyAreEmptyAndAnotherKeyIsAnotherOrder) {
  EXPECT_TRUE(Turns().empty());
  const std::array<double, 2> weights{1, 1};
  const Turns one(weights, 1), other(weights, 2);
  int apart = 0;
  for (std::int64_t place = 0; place < 100; ++place) apart += one(place).who != other(place).who;
  EXPECT_GT(apart, 20);
}

}  // namespace
}  // namespace gka::data
