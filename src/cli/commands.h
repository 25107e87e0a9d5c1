// The subcommands of `gka`. A new one is a file that defines its declare function, and a line in the table.
#pragma once

#include <array>
#include <functional>

namespace CLI {
class App;
}

namespace gka::cli {

/// What runs once the command line is read; its result is the exit status.
using Action = std::function<int()>;

struct Command {
  const char* name;
  const char* summary;
  /// Adds the options to `app` and returns the action that reads them.
  Action (*declare)(CLI::App& app);
};

Action declare_info(CLI::App& app);

inline constexpr std::array kCommands{
    Command{"info", "What this build holds, what this machine can run, and which kernel a call takes", declare_info},
};

}  // namespace gka::cli
