// Token files, and the windows training takes from them.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include "data/token_set.h"
#include "support.h"

namespace gka::data {
namespace {

using TokenFiles = InFolder;
using TokenSets = InFolder;
using Numbers = std::vector<std::int64_t>;

Numbers all_of(const TokenFile& file) {
  Numbers tokens(static_cast<std::size_t>(file.tokens()));
  file.read(0, tokens);
  return tokens;
}

struct Window {
  Numbers inputs, targets, starts;
};

Window window(const TokenSet& set, std::int64_t index, std::size_t tokens) {
  Window made{Numbers(tokens), Numbers(tokens), {}};
  made.starts = set.fill(index, made.inputs, made.targets);
  return made;
}

TEST_F(TokenFiles, give_back_what_was_written) {
  const TokenFile file(write("a.tokens", {{1, 2, 3}, {}, {255}}));
  EXPECT_EQ(all_of(file), (Numbers{1, 2, 3, 256, 256, 255, 256}));
  const auto offsets = file.offsets();
  EXPECT_EQ(std::vector<std::uint64_t>(offsets.begin(), offsets.end()), (std::vector<std::uint64_t>{0, 4, 5, 7}));
  EXPECT_EQ(file.header().token_bytes, 2U);
  EXPECT_EQ(file.header().vocab_size, 257U);
  EXPECT_EQ(file[5], 255);
  file.verify();
}

TEST_F(TokenFiles, may_be_empty) {
  const TokenFile file(write("a.tokens", {}));
  EXPECT_EQ(file.tokens(), 0);
  EXPECT_EQ(file.documents(), 0);
  file.verify();
}

TEST_F(TokenFiles, appear_only_when_they_are_whole) {
  {
    TokenFileWriter writer(path("a.tokens"), Tokenizer::load("bytes"), 256);
    writer.add(std::vector<Token>{1, 2, 3});
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

/// A file of three documents, with other offsets and checksums that fit them.
std::string with_offsets(const std::string& file, const std::string& other, std::vector<std::uint64_t> offsets) {
  auto bytes = read_text(file);
  std::memcpy(bytes.data() + bytes.size() - 8 * offsets.size(), offsets.data(), 8 * offsets.size());
  const auto body = hash64(std::string_view(bytes).substr(sizeof(TokenFileHeader)));
  std::memcpy(bytes.data() + offsetof(TokenFileHeader, body_hash), &body, 8);
  const auto header = hash64(std::string_view(bytes).substr(0, offsetof(TokenFileHeader, header_hash)));
  std::memcpy(bytes.data() + offsetof(TokenFileHeader, header_hash), &header, 8);
  write_text(other, bytes);
  return other;
}

TEST_F(TokenFiles, with_documents_that_do_not_follow_each_other_are_refused) {
  const auto file = write("a.tokens", {{1, 2}, {3}, {4, 5, 6}});  // offsets 0, 3, 5, 9
  const auto open = [&](std::vector<std::uint64_t> offsets) {
    return complaint([&] { TokenFile(with_offsets(file, path("b.tokens"), std::move(offsets))).verify(); });
  };
  EXPECT_EQ(open({0, 3, 5, 9}), "nothing was thrown");
  EXPECT_EQ(open({0, 3, 3, 9}), "nothing was thrown") << "a document may be empty";
  for (const auto& wrong : {std::vector<std::uint64_t>{0, 5, 3, 9},
                            {0, 3, 10, 9},
                            {1, 3, 5, 9},
                            {0, 3, 5, 8},
                            {0, 3, ~std::uint64_t{0}, 9},
                            {0, 3, std::uint64_t{1} << 63, 9}}) {
    EXPECT_TRUE(has(open(wrong), "its documents do not follow each other"));
  }
}

TEST_F(TokenFiles, with_a_token_beyond_their_vocabulary_are_refused) {
  auto bytes = read_text(write("a.tokens", {{1, 2}}));
  bytes[sizeof(TokenFileHeader) + 1] = 1;  // 1 becomes 257
  write_text(path("b.tokens"), bytes);
  EXPECT_TRUE(has(complaint([&] { TokenFile(path("b.tokens")).verify(); }), "do not match its checksum"));
  const auto same = with_offsets(path("b.tokens"), path("c.tokens"), {0, 3});
  EXPECT_TRUE(has(complaint([&] { TokenFile(same).verify(); }), "it has the token 257, and its vocabulary has 257"));
}

TEST_F(TokenSets, read_a_damaged_file_only_when_told_not_to_verify) {
  auto bytes = read_text(write_counting("a.tokens", 1000));
  bytes[500] ^= 1;
  write_text(path("b.tokens"), bytes);
  EXPECT_TRUE(has(complaint([&] { TokenSet({.files = {{path("b.tokens")}}}); }), "do not match its checksum"));
  EXPECT_EQ(TokenSet({.files = {{path("b.tokens")}}, .verify = false}).tokens(), 1000);
}

TEST_F(TokenSets, remember_which_files_are_whole_until_they_change) {
  ::setenv("XDG_CACHE_HOME", path("cache").c_str(), 1);
  const auto remembered = [&] { return read_text(path("cache/gka/verified")); };
  const TokenSetOptions options{.files = {{write_counting("a.tokens", 1000)}}};
  TokenSet{options};
  const auto once = remembered();
  EXPECT_EQ(std::ranges::count(once, '\n'), 1);
  TokenSet{options};
  EXPECT_EQ(remembered(), once);
  write_counting("a.tokens", 999);
  TokenSet{options};
  EXPECT_EQ(std::ranges::count(remembered(), '\n'), 2);
  ::unsetenv("XDG_CACHE_HOME");
}

TEST_F(TokenFiles, that_are_damaged_say_how) {
  const auto whole = read_text(write_counting("a.tokens", 1000));
  const auto open = [&](std::string bytes) {
    write_text(path("b.tokens"), bytes);
    return complaint([&] { TokenFile(path("b.tokens")).verify(); });
  };
  EXPECT_TRUE(has(open("some text"), "b.tokens is not a token file"));
  EXPECT_TRUE(has(open(""), "is not a token file"));
  EXPECT_TRUE(has(open(whole.substr(0, 40)), "truncated: its header is not whole"));
  EXPECT_TRUE(has(open(whole.substr(0, whole.size() - 1)), "is truncated: 2111 of 2112 bytes"));
  EXPECT_TRUE(has(open(whole + "x"), "has bytes too many"));
  auto changed = whole;
  changed[16] ^= 1;
  EXPECT_TRUE(has(open(changed), "header does not match its checksum"));
  changed = whole;
  changed[500] ^= 1;
  EXPECT_TRUE(has(open(changed), "contents do not match its checksum"));
  changed = whole;
  changed[8] = 9;
  EXPECT_TRUE(has(open(changed), "has format version 9"));
  EXPECT_TRUE(has(complaint([&] { TokenFile(path("none")); }), "none: No such file"));
}

TEST_F(TokenSets, hand_out_every_window_once_an_epoch) {
  const TokenSet set({.files = {{write_counting("a.tokens", 101)}, {write_counting("b.tokens", 58)}}, .seed = 3});
  ASSERT_EQ(set.windows(10), 15);
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::multiset<std::int64_t> firsts;
    for (int i = 0; i < 15; ++i) firsts.insert(window(set, epoch * 15 + i, 10).inputs.front());
    std::multiset<std::int64_t> all;
    const auto shift = *firsts.rbegin() - 90;  // a has no slack; b starts somewhere in its seven spare tokens
    EXPECT_EQ(shift, 0);
    for (int i = 0; i < 10; ++i) all.insert(10 * i);
    std::multiset<std::int64_t> rest;
    std::ranges::set_difference(firsts, all, std::inserter(rest, rest.end()));
    EXPECT_EQ(rest.size(), 5U) << "of b";
    for (auto at = rest.begin(), next = std::next(at); next != rest.end(); ++at, ++next) EXPECT_EQ(*next - *at, 10);
  }
}

TEST_F(TokenSets, shuffle_differently_in_every_epoch_and_for_every_seed) {
  const auto file = write_counting("a.tokens", 251);
  const auto order = [&](std::uint64_t seed, std::int64_t first) {
    const TokenSet set({.files = {{file}}, .seed = seed});
    Numbers firsts;
    for (int i = 0; i < 25; ++i) firsts.push_back(window(set, first + i, 10).inputs.front());
    return firsts;
  };
  EXPECT_NE(order(1, 0), order(1, 25));
  EXPECT_NE(order(1, 0), order(2, 0));
  EXPECT_EQ(order(1, 25), order(1, 25));
  EXPECT_FALSE(std::ranges::is_sorted(order(1, 0)));
}

TEST_F(TokenSets, targets_are_the_tokens_that_follow) {
  const TokenSet set({.files = {{write_counting("a.tokens", 251)}}});
  for (int i = 0; i < 25; ++i) {
    const auto [inputs, targets, starts] = window(set, i, 10);
    for (std::size_t t = 0; t < 10; ++t) {
      EXPECT_EQ(inputs[t], inputs[0] + static_cast<std::int64_t>(t));
      EXPECT_EQ(targets[t], inputs[t] + 1);
    }
  }
}

TEST_F(TokenSets, know_where_documents_start) {
  const TokenSet set({.files = {{write("a.tokens", {{1, 2}, {3}, {}, {4, 5, 6}})}}, .shuffle = false});
  // 1 2 E | 3 E | E | 4 5 6 E
  EXPECT_EQ(window(set, 0, 4).starts, (Numbers{3}));
  EXPECT_EQ(window(set, 1, 4).starts, (Numbers{1, 2}));
  EXPECT_EQ(window(set, 0, 3).starts, (Numbers{3})) << "the start of the next document is the last target";
  EXPECT_EQ(window(set, 2, 3).starts, (Numbers{}));
}

TEST_F(TokenSets, draw_from_files_by_weight) {
  const auto a = write_counting("a.tokens", 1001), b = write("b.tokens", {std::vector<Token>(101, 256)}, std::nullopt);
  const TokenSet set({.files = {{a, 3}, {b, 1}}});
  std::map<bool, int> drawn;
  for (int i = 0; i < 4096; ++i) ++drawn[window(set, i, 10).inputs.front() == 256];
  EXPECT_EQ(drawn[false], 3072);
  EXPECT_EQ(drawn[true], 1024);
  std::set<std::int64_t> places;
  int seen = 0;
  for (int i = 0; seen < 100; ++i) {
    const auto first = window(set, i, 10).inputs.front();
    if (first != 256 && ++seen) places.insert(first);
  }
  EXPECT_EQ(places.size(), 100U)
      << "a file's windows come once before any comes twice (ten apart modulo 256: all differ)";
}

TEST_F(TokenSets, keep_the_end_of_every_file_for_evaluation) {
  std::vector<std::vector<Token>> documents;
  for (int i = 0; i < 100; ++i) documents.emplace_back(9, i);
  const auto file = write("a.tokens", documents);
  const auto tokens_of = [&](Part part) {
    const TokenSet set({.files = {{file}}, .eval_fraction = 0.105, .part = part, .shuffle = false});
    std::set<std::int64_t> seen;
    for (int i = 0; i < set.windows(3); ++i) {
      for (const auto token : window(set, i, 3).targets) seen.insert(token);
    }
    seen.erase(256);
    return seen;
  };
  const auto train = tokens_of(Part::train), eval = tokens_of(Part::eval);
  EXPECT_EQ(train.size() + eval.size(), 100U);
  EXPECT_EQ(eval.size(), 10U) << "the cut is at a document";
  EXPECT_LT(*train.rbegin(), *eval.begin());
}

TEST_F(TokenSets, complain_in_one_sentence) {
  const auto file = write_counting("a.tokens", 8);
  const auto open = [&](TokenSetOptions options) { return complaint([&] { window(TokenSet(options), 0, 10); }); };
  EXPECT_TRUE(has(open({}), "files is empty"));
  EXPECT_TRUE(has(open({.files = {{file}}}), "have 8 tokens here, too few for a window of 11"));
  EXPECT_TRUE(has(open({.files = {{file, 1}}}), "has 8 tokens here, too few for a window of 11"));
  EXPECT_TRUE(has(open({.files = {{file}}, .part = Part::eval}), "eval_fraction is 0"));
  EXPECT_TRUE(has(open({.files = {{file}}, .eval_fraction = 0.5, .part = Part::eval}), "a larger eval_fraction"));
  const auto long_file = write_counting("b.tokens", 800);
  const TokenSet one_too_short({.files = {{long_file, 1000}, {file, 1}}});
  EXPECT_TRUE(has(complaint([&] { one_too_short.check_length(10); }), "a.tokens has 8 tokens here"));
  EXPECT_EQ(complaint([&] { one_too_short.check_length(7); }), "nothing was thrown");
  EXPECT_TRUE(has(open({.files = {{file}}, .eval_fraction = 1.5}), "eval_fraction must be at least 0 and below 1"));
  EXPECT_TRUE(has(open({.files = {{file, 1}, {file, 0}}}), "weights must be positive"));
}

}  // namespace
}  // namespace gka::data
