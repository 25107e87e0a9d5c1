// Pattern strings: one token per block, with a shorthand for repeats.
#include "models/pattern.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "models/scratch.h"

namespace gka::models::test {
namespace {

TEST(Pattern, AShorthandIsWrittenOut) {
  const std::pair<const char*, const char*> cases[] = {
      {"*", "*"},
      {"*-GKA-*-GKA", "*-GKA-*-GKA"},
      {"3xGKA", "GKA-GKA-GKA"},
      {"2x*", "*-*"},
      {"2x(2xGKA-*)", "GKA-GKA-*-GKA-GKA-*"},
      {"M2-2xM2", "M2-M2-M2"},
      {"2x(GKA-2x(*-GDN))-SWA", "GKA-*-GDN-*-GDN-GKA-*-GDN-*-GDN-SWA"},
      {"GKA*-BMF", "GKA*-BMF"},
  };
  for (const auto& [pattern, full] : cases) EXPECT_EQ(join_pattern(expand_pattern(pattern)), full) << pattern;
}

TEST(Pattern, TheHybridOfThePaperHasAttentionWhereItSays) {
  const auto tokens = expand_pattern("6xGKA-*-7xGKA-*-7xGKA-*-6xGKA-*");
  ASSERT_EQ(tokens.size(), 30U);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool attention = i == 6 || i == 14 || i == 22 || i == 29;
    EXPECT_EQ(tokens[i], attention ? "*" : "GKA") << i;
  }
}

TEST(Pattern, WhatCannotBeReadIsShownWithItsPlace) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "position 1, which takes a block's name"},
      {"GKA-", "position 5, which takes a block's name"},
      {"GKA--*", "position 5, which takes a block's name"},
      {"GKA *", "position 4, which takes '-' or the end"},
      {"3GKA", "position 2, which takes 'x' after the number of repeats"},
      {"0xGKA", "1 or more"},
      {"2x(GKA-*", "')' that closes the group"},
      {"GKA)", "position 4, which takes '-' or the end"},
      {"99999xGKA", "at most 10000 blocks"},
      {"9999x(9999xGKA)", "at most 10000 blocks"},
  };
  for (const auto& [pattern, complaint] : cases) EXPECT_ERROR(expand_pattern(pattern), complaint) << pattern;
}

}  // namespace
}  // namespace gka::models::test
