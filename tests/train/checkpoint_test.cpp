// Folders that exist whole or not at all.
#include "train/checkpoint.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "base/files.h"
#include "models/scratch.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;
using models::test::Scratch;

void fill(const fs::path& folder) {
  write_text(folder / "a", "first");
  write_text(folder / "b", std::string(100000, 'x'));
}

std::vector<std::int64_t> steps_in(const fs::path& run) {
  std::vector<std::int64_t> steps;
  for (const auto& saved : list_checkpoints(run)) steps.push_back(saved.step);
  return steps;
}

std::string complaint(const fs::path& folder) {
  return models::test::complaint_of([&] { verify_folder(folder); });
}

TEST(Checkpoint, IsWhatWasWritten) {
  const Scratch scratch;
  const auto folder = scratch / "deep/er/x";
  write_folder(folder, fill);
  EXPECT_EQ(complaint(folder), "");
  EXPECT_EQ(read_text(folder / "a"), "first");
  EXPECT_TRUE(has_checksums(folder));
}

TEST(Checkpoint, DoesNotAppearWhenWritingFails) {
  const Scratch scratch;
  const auto folder = scratch / "checkpoints/x";
  EXPECT_THROW(write_folder(folder,
                            [](const fs::path& unfinished) {
                              fill(unfinished);
                              throw std::runtime_error("no room");
                            }),
               std::runtime_error);
  EXPECT_FALSE(fs::exists(folder));
  EXPECT_TRUE(fs::is_empty(folder.parent_path())) << "nothing is left behind";
}

TEST(Checkpoint, NoticesAChangedByte) {
  const Scratch scratch;
  write_folder(scratch / "x", fill);
  auto text = read_text(scratch / "x/b");
  text[77777] ^= 1;
  write_text(scratch / "x/b", text);
  EXPECT_NE(complaint(scratch / "x").find("b is not what was written"), std::string::npos);
}

TEST(Checkpoint, NoticesAFileCutShort) {
  const Scratch scratch;
  write_folder(scratch / "x", fill);
  fs::resize_file(scratch / "x/b", 99999);
  EXPECT_NE(complaint(scratch / "x").find("b is not what was written"), std::string::npos);
}

TEST(Checkpoint, NoticesAMissingFile) {
  const Scratch scratch;
  write_folder(scratch / "x", fill);
  fs::remove(scratch / "x/a");
  EXPECT_NE(complaint(scratch / "x").find("a is missing"), std::string::npos);
  fs::remove(scratch / "x/CHECKSUMS.xxh64");
  EXPECT_NE(complaint(scratch / "x").find("it has no CHECKSUMS.xxh64"), std::string::npos);
  EXPECT_NE(complaint(scratch / "y").find("there is no checkpoint"), std::string::npos);
}

TEST(Checkpoint, ComesInTheOrderOfSteps) {
  const Scratch scratch;
  for (const int step : {1000, 20, 3}) write_folder(checkpoint_path(scratch.path(), step), fill);
  fs::create_directories(scratch / "checkpoints/step-x");
  EXPECT_EQ(steps_in(scratch.path()), (std::vector<std::int64_t>{3, 20, 1000}));
}

TEST(Checkpoint, GoesWhenItIsOlderThanThoseKept) {
  const Scratch scratch;
  for (const int step : {1, 2, 3, 4}) write_folder(checkpoint_path(scratch.path(), step), fill);
  fs::create_directories(scratch / "checkpoints/.unfinished-step-000000005");
  tidy_checkpoints(scratch.path(), 2);
  EXPECT_EQ(steps_in(scratch.path()), (std::vector<std::int64_t>{3, 4}));
  EXPECT_FALSE(fs::exists(scratch / "checkpoints/.unfinished-step-000000005"));
}

TEST(Checkpoint, IsFoundAsTheLatest) {
  const Scratch scratch;
  for (const int step : {1, 2}) {
    write_folder(checkpoint_path(scratch.path(), step), fill);
    point_to_latest(scratch.path(), checkpoint_path(scratch.path(), step));
  }
  EXPECT_TRUE(fs::equivalent(latest_path(scratch.path()), checkpoint_path(scratch.path(), 2)));
}

}  // namespace
}  // namespace gka::train
