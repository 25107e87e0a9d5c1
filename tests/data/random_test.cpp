// Hashes, random numbers and shuffles: what everything else here takes for granted.
#include "data/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/hash.h"

namespace gka::data {
namespace {

TEST(Hash64, is_xxh64) {
  EXPECT_EQ(hash64(""), 0xEF46DB3751D8E999U);
  EXPECT_EQ(hash64("a"), 0xD24EC4F1A98C6E5BU);
  EXPECT_EQ(hash64("abc"), 0x44BC2CF5AD770999U);
  EXPECT_EQ(hash64("Nobody inspects the spammish repetition"), 0xFBCEA83C8A378BF1U);
}

TEST(Hash64, does_not_depend_on_how_the_input_is_cut) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  const auto whole = hash64(text);
  for (const std::size_t piece : {1U, 3U, 31U, 32U, 33U, 100U}) {
    Hash64 hash;
    for (std::size_t at = 0; at < text.size(); at += piece) hash.add(std::string_view(text).substr(at, piece));
    EXPECT_EQ(hash.value(), whole) << "in pieces of " << piece;
  }
}

TEST(Random, draws_every_number_below_n_about_equally_often) {
  Random random({1, 2, 3});
  std::vector<int> counts(7, 0);
  for (int i = 0; i < 70000; ++i) ++counts[static_cast<std::size_t>(random.below(7))];
  for (const int count : counts) EXPECT_NEAR(count, 10000, 500);  // five standard deviations
}

TEST(Random, names_that_differ_in_one_number_give_different_sequences) {
  EXPECT_NE(Random({1, 2}).next(), Random({1, 3}).next());
  EXPECT_NE(Random({1, 2}).next(), Random({2, 1}).next());
  EXPECT_NE(Random({0}).next(), Random({0, 0}).next());
}

class EverySize : public testing::TestWithParam<std::int64_t> {};

TEST_P(EverySize, a_permutation_has_every_number_once) {
  const auto size = GetParam();
  const Permutation permutation(size, 42);
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < size; ++i) numbers.push_back(permutation(i));
  std::ranges::sort(numbers);
  std::vector<std::int64_t> all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(numbers, all);
}
INSTANTIATE_TEST_SUITE_P(Sizes, EverySize, testing::Values(1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4096, 4097));

TEST(Permutation, another_key_gives_another_order) {
  const Permutation one(1000, 1), two(1000, 2);
  int same = 0, fixed = 0;
  for (int i = 0; i < 1000; ++i) {
    same += one(i) == two(i);
    fixed += one(i) == i;
  }
  EXPECT_LT(same, 15);
  EXPECT_LT(fixed, 15);
}

TEST(Permutation, sends_every_number_everywhere) {
  std::vector<int> counts(10, 0);
  for (std::uint64_t key = 0; key < 10000; ++key) ++counts[static_cast<std::size_t>(Permutation(10, mix({key}))(3))];
  for (const int count : counts) EXPECT_NEAR(count, 1000, 160);
}

}  // namespace
}  // namespace gka::data
