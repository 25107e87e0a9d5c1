// The folder of a run: one process at a time, and metrics that survive a kill.
#include "train/run.h"

#include <gtest/gtest.h>

#include "models/scratch.h"
#include "train/text.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;
using models::test::Scratch;

TEST(RunLock, KeepsASecondTrainerOut) {
  const Scratch scratch;
  {
    const RunLock lock(scratch.path());
    EXPECT_TRUE(RunLock::is_held(scratch.path()));
    EXPECT_THROW(RunLock(scratch.path()), std::runtime_error);
  }
  EXPECT_FALSE(RunLock::is_held(scratch.path()));
  const RunLock again(scratch.path());
}

TEST(Metrics, ForgetWhatCameAfterTheCheckpoint) {
  const Scratch scratch;
  {
    MetricsFile metrics(scratch.path(), 0);
    for (int step = 1; step <= 5; ++step) metrics.append({{"step", step}, {"loss", 1.0 / step}});
  }
  MetricsFile metrics(scratch.path(), 3);
  metrics.append({{"step", 4}, {"loss", 9.0}});
  const auto lines = read_metrics(scratch.path());
  ASSERT_EQ(lines.size(), 4);
  EXPECT_EQ(lines[2]["loss"], 1.0 / 3) << "numbers keep their bits";
  EXPECT_EQ(lines[3]["loss"], 9.0);
}

TEST(Metrics, LeaveOutHalfALine) {
  const Scratch scratch;
  write_text(scratch / "metrics.jsonl", "{\"step\": 1}\n{\"step\": 2, \"lo");
  EXPECT_EQ(read_metrics(scratch.path()).size(), 1);
}

TEST(Run, ThatNobodyTrainsAndThatDidNotEndWasKilled) {
  const Scratch scratch;
  write_text(scratch / "train.json", "{}");
  write_state(scratch.path(), RunState::running, 10);
  {
    const RunLock lock(scratch.path());
    EXPECT_EQ(summarise_run(scratch.path()).state, "running");
  }
  EXPECT_EQ(summarise_run(scratch.path()).state, "killed");
  write_state(scratch.path(), RunState::failed, 10, "why");
  EXPECT_EQ(summarise_run(scratch.path()).state, "failed");
  EXPECT_EQ(summarise_run(scratch.path()).message, "why");
}

TEST(Runs, AreFoundAtAnyDepth) {
  const Scratch scratch;
  for (const char* name : {"b", "a/deep", "a/er"}) {
    fs::create_directories(scratch / name);
    write_text(scratch / name / "train.json", "{}");
  }
  fs::create_directories(scratch / "other");
  const auto runs = list_runs(scratch.path());
  ASSERT_EQ(runs.size(), 3);
  EXPECT_EQ(runs[0].path, scratch / "a/deep");
  EXPECT_EQ(runs[2].path, scratch / "b");
}

TEST(Text, HasThreeDigitsAndAUnit) {
  EXPECT_EQ(short_count(7), "7");
  EXPECT_EQ(short_count(999), "999");
  EXPECT_EQ(short_count(1000), "1.00k");
  EXPECT_EQ(short_count(12345), "12.3k");
  EXPECT_EQ(short_count(999499), "999k");
  EXPECT_EQ(short_count(999600), "1.00M");
  EXPECT_EQ(short_bytes(5e8), "500 MB");
  EXPECT_EQ(short_bytes(12.34e9), "12.3 GB");
  EXPECT_EQ(short_duration(59.4), "59s");
  EXPECT_EQ(short_duration(61), "1m01s");
  EXPECT_EQ(short_duration(7260), "2h01m");
  EXPECT_EQ(short_duration(90000), "1d01h");
}

}  // namespace
}  // namespace gka::train
