// Ctrl-C, SIGTERM and a closed terminal while a command makes a file or a folder.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace gka::cli {

/// While one lives, such a signal ends the program at once, with a sentence, the status 130 and nothing left of what
/// was being written. For the main thread, one at a time.
class Interruptible {
 public:
  /// What the command makes, in the user's words; empty where it makes nothing.
  explicit Interruptible(const std::string& out);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  /// Said before NewFile (base/files.h) begins to write `path`; and how it is then given its name, which no signal cuts
  /// in two.
  void writes_file(const std::filesystem::path& path);
  void finish_file(const std::function<void()>& commit);

  /// Said before `unfinished` is made, which will become `folder`; it holds files alone.
  void fills_folder(const std::filesystem::path& folder, const std::filesystem::path& unfinished);
};

}  // namespace gka::cli
