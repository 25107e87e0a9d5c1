// Safetensors files: what is written is read back to the bit, and a damaged file is refused in one sentence.
#include "models/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#include "models/scratch.h"

namespace gka::models::test {
namespace {

constexpr at::ScalarType kAllTypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong,
                                        at::kInt,    at::kShort, at::kByte,     at::kBool};

TEST(Safetensors, EveryTypeComesBackToTheBit) {
  const Scratch folder;
  Tensors tensors;
  for (const auto type : kAllTypes) tensors[at::toString(type)] = at::arange(7, at::kLong).to(type).reshape({7, 1});
  tensors["scalar"] = at::arange(1, at::kFloat).squeeze();
  tensors["empty"] = at::empty({3, 0, 2}, at::kFloat);
  tensors["strided"] = at::randn({4, 6}, at::kDouble).t();
  write_safetensors(folder / "all.safetensors", tensors, {{"format", "pt"}, {"note", "a \"quoted\" ü"}});

  const SafetensorsFile file(folder / "all.safetensors");
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"note", "a \"quoted\" ü"}}));
  const auto stored = file.tensors();
  ASSERT_EQ(stored.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(stored.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(stored.at(name).sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(at::equal(stored.at(name), tensor)) << name;
  }
}

TEST(Safetensors, ATensorOutlivesItsFileAndWritingToItLeavesTheFileAlone) {
  const Scratch folder;
  const auto path = folder / "x.safetensors";
  write_safetensors(path, {{"x", at::arange(4, at::kFloat)}});
  auto x = SafetensorsFile(path).tensor("x");
  x.add_(1);
  EXPECT_TRUE(at::equal(x, at::arange(1, 5, at::kFloat)));
  EXPECT_TRUE(at::equal(SafetensorsFile(path).tensor("x"), at::arange(4, at::kFloat)));
}

TEST(Safetensors, WritingReplacesAFileWholeAndLeavesNothingBeside) {
  const Scratch folder;
  const auto path = folder / "x.safetensors";
  for (const int value : {1, 2}) write_safetensors(path, {{"x", at::full({3}, value)}});
  EXPECT_EQ(SafetensorsFile(path).tensor("x")[0].item<int>(), 2);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"x.safetensors"});
}

TEST(Safetensors, AFolderThatIsNotThereIsNamed) {
  const Scratch folder;
  const auto path = folder / "nowhere" / "x.safetensors";
  EXPECT_ERROR(write_safetensors(path, {}), "cannot write " + path.string() + ": No such file or directory");
  EXPECT_ERROR(SafetensorsFile{path}, "cannot open " + path.string());
}

/// A file with that header and so many bytes of data.
std::string file_with(const std::string& header, std::size_t data) {
  std::uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + std::string(data, '\0');
}

struct Damage {
  std::string name;
  std::string bytes;
  std::string complaint;
};

class DamagedSafetensors : public testing::TestWithParam<Damage> {};

TEST_P(DamagedSafetensors, IsRefusedInASentenceThatSaysWhy) {
  const Scratch folder;
  write_text(folder / "bad.safetensors", GetParam().bytes);
  EXPECT_ERROR(SafetensorsFile{folder / "bad.safetensors"}, GetParam().complaint);
}

INSTANTIATE_TEST_SUITE_P(
    Safetensors, DamagedSafetensors,
    testing::Values(
        Damage{"empty", "", "fewer than its first field"}, Damage{"short", "1234", "fewer than its first field"},
        Damage{"a_header_longer_than_the_file", file_with("{}", 0).substr(0, 9), "states a header of 2 bytes"},
        Damage{"another_format", "PK\3\4 this is a zip file", "of another format"},
        Damage{"no_json", file_with("{nonsense", 0), "not a JSON object"},
        Damage{"a_list", file_with("[]", 0), "not a JSON object"},
        Damage{"an_entry_without_shape", file_with(R"({"x":{"dtype":"F32","data_offsets":[0,4]}})", 4), "'x'"},
        Damage{"a_negative_size", file_with(R"({"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4), "'x'"},
        Damage{"a_size_that_overflows",
               file_with(R"({"x":{"dtype":"F32","shape":[4611686018427387905,4],"data_offsets":[0,16]}})", 16),
               "do not fit its type and shape"},
        Damage{"an_unknown_type", file_with(R"({"x":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}})", 4),
               "type F8_E4M3"},
        Damage{"offsets_that_do_not_fit", file_with(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
               "do not fit its type and shape"},
        Damage{"offsets_backwards", file_with(R"({"x":{"dtype":"F32","shape":[0],"data_offsets":[4,0]}})", 4),
               "do not fit its type and shape"},
        Damage{"truncated_data", file_with(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7),
               "it may be truncated"},
        Damage{"overlapping_tensors",
               file_with(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                         R"("y":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                         6),
               "'y' overlaps"},
        Damage{"a_gap", file_with(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", 6), "a gap before 'x'"},
        Damage{"more_data_than_tensors", file_with(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 6),
               "2 bytes follow"},
        Damage{"metadata_that_are_no_texts", file_with(R"({"__metadata__":{"a":1}})", 0), "metadata"}),
    [](const auto& damage) { return damage.param.name; });

TEST(Safetensors, AFileWhoseDataAreNotAlignedIsReadAllTheSame) {
  const Scratch folder;
  auto bytes = file_with(R"({"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}} )", 8);
  if ((bytes.size() - 8) % 8 == 0) bytes = file_with(R"({"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}  )", 8);
  ASSERT_NE((bytes.size() - 8) % 8, 0U);
  const double value = 2.5;
  std::memcpy(bytes.data() + bytes.size() - sizeof(value), &value, sizeof(value));
  write_text(folder / "x.safetensors", bytes);
  EXPECT_EQ(SafetensorsFile(folder / "x.safetensors").tensor("x").item<double>(), value);
}

}  // namespace
}  // namespace gka::models::test
