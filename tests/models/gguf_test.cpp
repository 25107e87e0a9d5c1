// GGUF files that are not sound: each is one sentence, whatever byte is missing or wrong. What sound ones mean is
// checked against numpy in test_import.py.
#include "models/gguf.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "models/scratch.h"

namespace gka::models::test {
namespace {

template <typename T>
std::string bytes(T value) {
  std::string text(sizeof(T), '\0');
  std::memcpy(text.data(), &value, sizeof(T));
  return text;
}

std::string text(const std::string& words) { return bytes(std::uint64_t{words.size()}) + words; }

std::string tensor(const std::string& name, const std::vector<std::uint64_t>& sizes, std::uint32_t type,
                   std::uint64_t place) {
  auto entry = text(name) + bytes(static_cast<std::uint32_t>(sizes.size()));
  for (const auto size : sizes) entry += bytes(size);
  return entry + bytes(type) + bytes(place);
}

std::string head(std::uint64_t tensors, std::uint64_t keys) {
  return "GGUF" + bytes(std::uint32_t{3}) + bytes(tensors) + bytes(keys);
}

std::string padded(std::string file) { return file + std::string((32 - file.size() % 32) % 32, '\0'); }

/// A number, a list of texts, and one tensor of two rows of 32 numbers in Q8_0.
std::string small_file() {
  auto file = head(1, 2);
  file += text("count") + bytes(std::uint32_t{4}) + bytes(std::uint32_t{7});
  file += text("words") + bytes(std::uint32_t{9}) + bytes(std::uint32_t{8}) + bytes(std::uint64_t{2}) + text("a") +
          text("bc");
  file = padded(file + tensor("x", {32, 2}, 8, 0));
  for (int row = 0; row < 2; ++row) {
    file += bytes(std::uint16_t{0x3800});  // a half
    for (int i = 0; i < 32; ++i) file += static_cast<char>(i - 16);
  }
  return file;
}

Gguf parse(const std::string& file) { return parse_gguf(file, "model.gguf"); }

TEST(Gguf, ASmallFileIsRead) {
  const auto file = small_file();
  const auto content = parse(file);
  EXPECT_EQ(content.get<std::int64_t>("count", "it"), 7);
  EXPECT_EQ(content.get<std::vector<std::string>>("words", "it"), (std::vector<std::string>{"a", "bc"}));
  EXPECT_ERROR(content.get<double>("words", "it"), "'words' of it takes a number");
  EXPECT_ERROR(content.get<bool>("none", "it"), "it has no 'none'");
  const auto& x = content.tensors.at("x");
  EXPECT_EQ(x.shape, (std::vector<std::int64_t>{2, 32}));
  std::vector<float> numbers(64);
  dequantise(x, numbers);
  EXPECT_EQ(numbers[0], -8.0F);
  EXPECT_EQ(numbers[63], 7.5F);
}

TEST(Gguf, AFileThatIsCutOffAnywhereIsOneSentence) {
  const auto file = small_file();
  for (std::size_t size = 0; size < file.size(); ++size) {
    const auto complaint = complaint_of([&] { parse(file.substr(0, size)); });
    EXPECT_NE(complaint.find("model.gguf is not a sound GGUF file: "), std::string::npos) << size << ": " << complaint;
  }
}

TEST(Gguf, AWrongByteAnywhereBreaksNothing) {
  const auto file = small_file();
  for (std::size_t place = 0; place < file.size(); ++place) {
    for (const char wrong : {'\x00', '\x7f', '\xff'}) {
      auto damaged = file;
      damaged[place] = wrong;
      const auto complaint = complaint_of([&] {
        const auto content = parse(damaged);
        for (const auto& [name, tensor] : content.tensors) {
          std::vector<float> numbers(static_cast<std::size_t>(tensor.count()));
          dequantise(tensor, numbers);
        }
      });
      EXPECT_EQ(complaint.find('\n'), std::string::npos) << place << ": " << complaint;  // none, or one sentence
    }
  }
}

TEST(Gguf, WhatMakesNoSenseIsNamed) {
  EXPECT_ERROR(parse("GGML"), "does not begin with GGUF");
  EXPECT_ERROR(parse("GGUF" + bytes(std::uint32_t{1}) + std::string(16, '\0')), "its version is 1");
  EXPECT_ERROR(parse(head(~std::uint64_t{0}, 0)), "the number of its tensors is");
  EXPECT_ERROR(parse(head(1, 0) + tensor("x", {33}, 8, 0)), "no blocks of 32");
  EXPECT_ERROR(parse(head(1, 0) + tensor("x", {32}, 10, 0)), "'x' of model.gguf has the type number 10");
  EXPECT_ERROR(parse(head(1, 0) + tensor("x", {}, 0, 0)), "'x' has 0 dimensions");
  EXPECT_ERROR(parse(head(1, 0) + tensor("x", {~std::uint64_t{0}, 9}, 0, 0)), "more than any tensor has");
  EXPECT_ERROR(parse(padded(head(1, 0) + tensor("x", {8}, 0, ~std::uint64_t{0}))), "ends behind the end of the file");
  EXPECT_ERROR(parse(padded(head(2, 0) + tensor("x", {1}, 0, 0) + tensor("x", {1}, 0, 0))), "the tensor 'x' twice");
  auto deep = head(0, 1) + text("k") + bytes(std::uint32_t{9});
  for (int i = 0; i < 9; ++i) deep += bytes(std::uint32_t{9}) + bytes(std::uint64_t{1});
  EXPECT_ERROR(parse(deep), "a list in a list");
}

}  // namespace
}  // namespace gka::models::test
