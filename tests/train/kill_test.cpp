// A process killed at every step of saving, the last one included, leaves a run that goes on.
//
// The functions through which a save reaches the disk are defined here once more, in front of the system's: a child
// process counts its calls and dies, as under `kill -9`, right before the one that was chosen. So nothing in the
// program itself has to know about tests.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>

#include "base/files.h"
#include "models/scratch.h"
#include "train/checkpoint.h"

namespace {

int g_dies_before = 0;  // which call; 0: none
int g_calls = 0;

template <typename Function, typename... Arguments>
auto counted(const char* name, Arguments... arguments) {
  if (g_dies_before != 0 && ++g_calls == g_dies_before) ::kill(::getpid(), SIGKILL);
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name))(arguments...);
}

}  // namespace

extern "C" {
int fsync(int file) { return counted<int (*)(int)>("fsync", file); }
int rename(const char* from, const char* to) noexcept {
  return counted<int (*)(const char*, const char*)>("rename", from, to);
}
int symlink(const char* to, const char* at) noexcept {
  return counted<int (*)(const char*, const char*)>("symlink", to, at);
}
int unlinkat(int folder, const char* name, int flags) noexcept {
  return counted<int (*)(int, const char*, int)>("unlinkat", folder, name, flags);
}
int mkdir(const char* name, mode_t mode) noexcept { return counted<int (*)(const char*, mode_t)>("mkdir", name, mode); }
}

namespace gka::train {
namespace {

namespace fs = std::filesystem;
using models::test::Scratch;

constexpr std::size_t kKept = 2;

/// What the trainer does: files into a folder beside, its name, `latest`, and the oldest goes.
void save(const fs::path& run, std::int64_t step) {
  write_folder(checkpoint_path(run, step), [&](const fs::path& folder) {
    for (const char* name : {"config.json", "model.safetensors", "trainer.json"}) {
      write_text(folder / name, name + std::to_string(step));
    }
  });
  tidy_checkpoints(run, kKept);
}

/// Whether the process was killed, and did not come to its end.
bool is_killed(const std::function<void()>& work, int before_call) {
  const auto child = ::fork();
  if (child == 0) {
    g_calls = 0;
    g_dies_before = before_call;
    work();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
  return WIFSIGNALED(status);
}

std::set<std::string> everything_in(const fs::path& run) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(run))
    names.insert(fs::relative(entry.path(), run).string());
  return names;
}

TEST(ARunKilledWhileItSaves, HasWholeCheckpointsAndEndsAsIfNothingHadBeen) {
  const Scratch undisturbed;
  for (const int step : {1, 2, 3}) save(undisturbed.path(), step);
  const auto expected = everything_in(undisturbed.path());

  int kills = 0;
  for (bool killed = true; killed;) {
    const Scratch scratch;
    const auto& run = scratch.path();
    for (const int step : {1, 2}) save(run, step);
    killed = is_killed([&] { save(run, 3); }, kills + 1);
    if (killed) ++kills;

    const auto saved = list_checkpoints(run);
    ASSERT_GE(saved.size(), kKept - 1) << "killed before call " << kills;
    for (const auto& checkpoint : saved) EXPECT_NO_THROW(verify_folder(checkpoint.path)) << kills;
    EXPECT_NO_THROW(verify_folder(latest_path(run))) << "what `latest` names is whole; call " << kills;

    // Going on: the newest is loaded, what the save left to do is done, and the step is taken again unless it is there.
    tidy_checkpoints(run, kKept);
    if (saved.back().step < 3) save(run, 3);
    EXPECT_EQ(everything_in(run), expected) << "killed before call " << kills;
    EXPECT_TRUE(fs::equivalent(latest_path(run), checkpoint_path(run, 3))) << kills;
  }
  EXPECT_GT(kills, 15) << "a save is that many steps at least";
}

}  // namespace
}  // namespace gka::train
