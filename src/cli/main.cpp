// `gka`: reads the command line, finds the subcommand in the table and runs it.
//
// Subcommand names are looked up before CLI11 sees the line, because it would call a misspelt one an unexpected
// argument and suggest nothing.
#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/lost_pages.h"
#include "base/nearest.h"
#include "cli/commands.h"
#include "gka/info.h"

namespace {

constexpr int kUsageError = 2;

constexpr const char* kDescription =
    "Gated KalmaNet: a memory layer for sequence models that answers each query by solving a ridge regression over "
    "the\n"
    "whole past, with constant memory and linear time.";

constexpr const char* kExamples =
    "Examples:\n"
    "  gka info                                      what this machine runs, and why\n"
    "  gka info --dtype bfloat16 --key-dim 64        the kernel that one call takes\n"
    "  gka info --json                               the same for a program to read\n"
    "\n"
    "`gka COMMAND --help` explains a command's options.";

std::vector<std::string_view> command_names() {
  std::vector<std::string_view> names;
  for (const auto& command : gka::cli::kCommands) names.emplace_back(command.name);
  return names;
}

/// What is wrong with `word` as a subcommand, or nothing.
std::string complaint_about(std::string_view word) {
  const auto names = command_names();
  if (word.starts_with('-') || std::ranges::find(names, word) != names.end()) return {};
  std::string text = "gka: there is no command '" + std::string(word) + "'";
  if (const auto guess = gka::nearest(word, names)) text += "; did you mean '" + std::string(*guess) + "'?";
  text += text.ends_with('?') ? " The commands are:" : "; the commands are:";
  for (const auto name : names) text += " " + std::string(name);
  return text + " (`gka --help` explains them).";
}

/// The first word that looks like an option and is none of the command's. CLI11 would first complain of what is
/// missing, and what is missing may well be what the misspelt option was to give.
std::string complaint_about_options(const CLI::App& app) {
  for (const auto* command : app.get_subcommands()) {
    if (auto deeper = complaint_about_options(*command); !deeper.empty()) return deeper;
  }
  std::vector<std::string> known;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) known.push_back("--" + name);
  }
  const std::vector<std::string_view> names(known.begin(), known.end());
  for (const auto& word : app.remaining()) {
    if (word.size() < 2 || word[0] != '-' || (word[1] >= '0' && word[1] <= '9')) continue;
    const auto option = word.substr(0, word.find('='));
    const auto guess = gka::nearest(option, names);
    const auto command = app.get_parent() ? app.get_name() + " " : std::string();
    return "gka: " + (command.empty() ? "gka " : command) + "has no option '" + option + "'" +
           (guess ? "; did you mean '" + std::string(*guess) + "'?" : "") + " (`gka " + command + "--help` lists them)";
  }
  return {};
}

/// What was printed has to have arrived: a full disk shows when the last of it is written.
int with_output_checked(int status) {
  errno = 0;
  std::cout.flush();
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good();
  const int code = errno;
  if (written) return status;
  std::cerr << "gka: the output could not be written"
            << (code != 0 ? ": " + std::generic_category().message(code) : std::string()) << "\n";
  return status == 0 ? 1 : status;
}

int run(int argc, char** argv) {
  if (argc > 1) {
    if (const auto complaint = complaint_about(argv[1]); !complaint.empty()) {
      std::cerr << complaint << "\n";
      return kUsageError;
    }
  }

  CLI::App app{kDescription, "gka"};
  app.set_version_flag("--version", std::string("gka ") + gka::version());
  app.require_subcommand(0, 1);

  int status = 0;
  for (const auto& command : gka::cli::kCommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.summary);
    sub->final_callback([&status, action = command.declare(*sub)] { status = action(); });
  }

  app.footer(kExamples);  // last, because subcommands would inherit it

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (const auto complaint = complaint_about_options(app); error.get_exit_code() != 0 && !complaint.empty()) {
      std::cerr << complaint << "\n";
      return kUsageError;
    }
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  if (app.get_subcommands().empty()) std::cout << app.help();
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  gka::explain_lost_pages();
  try {
    return with_output_checked(run(argc, argv));
  } catch (const c10::Error& error) {  // torch's: its what() goes on with a stack trace
    std::cerr << "gka: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "gka: " << error.what() << "\n";
    return 1;
  }
}
