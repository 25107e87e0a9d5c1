// The byte tokenizer, decoding as a stream, and Unicode; the BPE tokenizers are compared with others' in test_*.py.
#include "data/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "data/regex.h"
#include "data/unicode.h"
#include "support.h"

namespace gka::data {
namespace {

std::string all_bytes() {
  std::string text(256, '\0');
  std::iota(text.begin(), text.end(), '\0');
  return text;
}

TEST(Bytes, every_byte_is_its_own_token_and_comes_back) {
  const auto tokenizer = Tokenizer::load("bytes");
  const auto ids = tokenizer.encode(all_bytes());
  for (int i = 0; i < 256; ++i) EXPECT_EQ(ids[static_cast<std::size_t>(i)], i);
  EXPECT_EQ(tokenizer.decode(ids), all_bytes());
  EXPECT_EQ(tokenizer.vocab_size(), 257);
  EXPECT_EQ(tokenizer.end_of_document(), 256);
}

TEST(Bytes, the_end_of_a_document_shows_when_asked_for) {
  const auto tokenizer = Tokenizer::load("bytes");
  EXPECT_EQ(tokenizer.decode(std::vector<Token>{'a', 256, 'b'}), "a<|endoftext|>b");
  EXPECT_EQ(tokenizer.decode(std::vector<Token>{'a', 256, 'b'}, Specials::no), "ab");
  EXPECT_EQ(tokenizer.decode(std::vector<Token>{'a', 99999, -1}), "a") << "numbers that are no token";
}

TEST(StreamDecoder, holds_a_character_back_until_it_is_whole) {
  StreamDecoder stream(Tokenizer::load("bytes"));
  const std::string text = "aé好😀";
  std::vector<std::string> shown;
  for (const char byte : text) shown.push_back(stream.push(static_cast<unsigned char>(byte)));
  EXPECT_EQ(shown, (std::vector<std::string>{"a", "", "é", "", "", "好", "", "", "", "😀"}));
  EXPECT_EQ(stream.finish(), "");
}

TEST(StreamDecoder, shows_what_can_no_longer_become_a_character) {
  StreamDecoder stream(Tokenizer::load("bytes"));
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.push(0x9F), "");
  EXPECT_EQ(stream.push('x'), "\uFFFDx");
  EXPECT_EQ(stream.push(0xFF), "\uFFFD");
  EXPECT_EQ(stream.push(0xE5), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(StreamDecoder, says_what_decode_says) {
  std::string bytes;
  for (int i = 0; i < 2000; ++i) bytes += static_cast<char>(i * i * 31 + i / 3);
  const auto tokenizer = Tokenizer::load("bytes");
  StreamDecoder stream(tokenizer);
  std::string shown;
  for (const auto id : tokenizer.encode(bytes)) shown += stream.push(id);
  EXPECT_EQ(shown + stream.finish(), replace_malformed(bytes));
}

TEST(Unicode, malformed_bytes_become_one_replacement_for_each_start_of_a_character) {
  EXPECT_EQ(replace_malformed("a\xC3z"), "a\uFFFDz");
  EXPECT_EQ(replace_malformed("\xF0\x9F\x98z"), "\uFFFDz");
  EXPECT_EQ(replace_malformed("\xE0\x80\x80"), "\uFFFD\uFFFD\uFFFD") << "an overlong form is no start";
  EXPECT_EQ(replace_malformed("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD") << "nor is a surrogate";
  EXPECT_EQ(replace_malformed("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD") << "nor anything beyond U+10FFFF";
}

TEST(Unicode, composes_letters_and_marks) {
  EXPECT_EQ(compose("e\u0301"), "é");
  EXPECT_EQ(compose("o\u0302\u0323"), "ộ") << "marks are put in order first";
  EXPECT_EQ(compose("\u1100\u1161\u11A8"), "각");
  EXPECT_EQ(compose("\u212B"), "Å") << "a character that always decomposes";
  EXPECT_EQ(compose("a\u0305\u0301"), "a\u0305\u0301") << "a mark of the same class is in the way";
}

TEST(Tokenizer, that_is_missing_or_damaged_says_so) {
  EXPECT_TRUE(has(complaint([] { Tokenizer::load("/nowhere"); }), "there is no tokenizer '/nowhere'"));
}

TEST(Regex, reads_spaces_as_oniguruma_does) {
  if (!have_regex()) GTEST_SKIP() << "built without PCRE2";
  Regex::Matcher matcher{Regex(R"(\s)")};
  Regex::Matcher::Match match{};
  EXPECT_TRUE(matcher.find("\u3000", 0, match));
  EXPECT_FALSE(matcher.find("\u180E", 0, match)) << "no longer a space";
}

TEST(Regex, refuses_what_pcre2_reads_differently) {
  if (!have_regex()) GTEST_SKIP() << "built without PCRE2";
  EXPECT_TRUE(has(complaint([] { Regex(R"(\h+)"); }), "not supported: \\h"));
  EXPECT_TRUE(has(complaint([] { Regex(R"([a-z&&[^b]])"); }), "not supported: a class within a class"));
  EXPECT_TRUE(has(complaint([] { Regex("(a"); }), "not supported: the tokenizer's pattern (a"));
}

TEST(Regex, names_what_it_refuses) {
  if (!have_regex()) GTEST_SKIP() << "built without PCRE2";
  const std::vector<std::pair<std::string, std::string>> cases{
      {R"(\p{Latin})", R"(\p{Latin})"},  // it got letters that PCRE2 does not know yet
      {R"(\p{Alphabetic})", R"(\p{Alphabetic})"},
      {R"(\p{Emoji})", R"(\p{Emoji})"},
      {R"(\pL)", R"(\p without {...})"},
      {"a{1,2}+", "{n,m}+"},
      {"a{2}?", "{n}?"},
      {"(?i:\u017Fs)", "a letter beyond ASCII where case is ignored"},
      {"(?i:ss)", "'ss' where case is ignored"},
      {R"(\R)", R"(\R)"},
      {R"((a)\1)", R"(\1)"},
      {"a(?i)b", "a group that begins with (?i)"},
      {"(*ACCEPT)", "(*"},
      {R"([\b])", R"(\b inside [...])"},
      {R"(\xE3)", R"(\x80 and above, which is a byte)"},
  };
  for (const auto& [pattern, name] : cases) {
    EXPECT_TRUE(has(complaint([&] { Regex{pattern}; }), "not supported: " + name + " in the tokenizer's pattern"));
  }
}

TEST(Regex, refuses_a_pattern_that_is_no_text_or_nested_without_end) {
  if (!have_regex()) GTEST_SKIP() << "built without PCRE2";
  EXPECT_TRUE(has(complaint([] { Regex("a\xff"); }), "not valid UTF-8"));
  EXPECT_TRUE(has(complaint([] { Regex(std::string(100000, '(') + std::string(100000, ')')); }), "not supported"));
}

/// A tokenizer.json of the 256 bytes and what `change` makes of it.
template <typename Change>
std::string tokenizer_file(const std::string& path, Change&& change) {
  nlohmann::json vocabulary = nlohmann::json::object();
  for (int i = 0; i < 94; ++i) vocabulary[std::string(1, static_cast<char>('!' + i))] = i;
  nlohmann::json file{{"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", nlohmann::json::array()}}},
                      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                      {"added_tokens", {{{"id", 94}, {"content", "<|end|>"}, {"special", true}}}}};
  change(file);
  write_text(path, file.dump());
  return path;
}

using TokenizerFiles = InFolder;

TEST_F(TokenizerFiles, take_whole_numbers_of_a_vocabularys_size_for_tokens) {
  if (!have_regex()) GTEST_SKIP() << "built without PCRE2";
  for (const auto& [number, said] :
       std::vector<std::pair<nlohmann::json, std::string>>{{4294967301, "the number 4294967301"},
                                                           {5.9, "has the number 5.9"},
                                                           {true, "has the number true"},
                                                           {-1, "has the number -1"},
                                                           {"5", "has the number \"5\""}}) {
    const auto in_vocabulary = [&](auto& file) { file["model"]["vocab"]["a"] = number; };
    EXPECT_TRUE(has(complaint([&] { Tokenizer::load(tokenizer_file(path("a.json"), in_vocabulary)); }), said));
    const auto added = [&](auto& file) { file["added_tokens"][0]["id"] = number; };
    EXPECT_TRUE(has(complaint([&] { Tokenizer::load(tokenizer_file(path("b.json"), added)); }), said));
  }
}

TEST_F(TokenizerFiles, put_no_token_around_a_text_that_they_do_not_have) {
  if (!have_regex()) GTEST_SKIP() << "built without PCRE2";
  const auto beyond = [](auto& file) {
    const auto token = nlohmann::json{{"id", "x"}, {"ids", {95}}};
    file["post_processor"] = {{"type", "TemplateProcessing"},
                              {"single", {{{"SpecialToken", {{"id", "x"}}}}}},
                              {"special_tokens", {{"x", token}}}};
  };
  EXPECT_TRUE(
      has(complaint([&] { Tokenizer::load(tokenizer_file(path("a.json"), beyond)); }), "template has the token 95"));
}

TEST_F(TokenizerFiles, may_not_be_nested_without_end) {
  write_text(path("a.json"), std::string(100000, '['));
  EXPECT_TRUE(has(complaint([&] { Tokenizer::load(path("a.json")); }), "nested more than 100 levels deep"));
}

TEST_F(TokenizerFiles, of_one_token_with_a_huge_number_take_no_memory) {
  if (!have_regex()) GTEST_SKIP() << "built without PCRE2";
  const auto far = [](auto& file) { file["model"]["vocab"]["a"] = 4000000; };
  EXPECT_TRUE(has(complaint([&] { Tokenizer::load(tokenizer_file(path("a.json"), far)); }), "far beyond"));
}

TEST_F(TokenizerFiles, read_text_that_spells_a_special_token_as_text_when_asked_to) {
  if (!have_regex()) GTEST_SKIP() << "built without PCRE2";
  const auto tokenizer = Tokenizer::load(tokenizer_file(path("a.json"), [](auto&) {}));
  EXPECT_EQ(tokenizer.encode("a<|end|>"), (std::vector<Token>{'a' - '!', 94}));
  const auto as_text = tokenizer.encode("a<|end|>", Specials::no, Spelled::text);
  EXPECT_EQ(as_text.size(), 8);
  EXPECT_EQ(tokenizer.decode(as_text), "a<|end|>");
  EXPECT_EQ(std::ranges::count(as_text, 94), 0);
}

}  // namespace
}  // namespace gka::data
