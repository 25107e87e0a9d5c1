// `gka`: reads the command line, finds the subcommand in the table and runs it, or hands over to `gka-torch`, the same
// program with the commands that need torch: loading torch takes half a second, which `gka --version` should not.
//
// Subcommand names are looked up before CLI11 sees the line, because it would call a misspelt one an unexpected
// argument and suggest nothing.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/files.h"
#include "base/lost_pages.h"
#include "base/nearest.h"
#include "cli/commands.h"
#include "cli/help.h"
#include "gka/info.h"

namespace {

constexpr int kUsageError = 2;

constexpr const char* kDescription =
    "Gated KalmaNet: a memory layer for sequence models that answers each query by solving a ridge regression over "
    "the\n"
    "whole past, with constant memory and linear time.";

constexpr const char* kExamples =
    "Examples:\n"
    "  gka info                                         what this machine runs, and why\n"
    "  gka tokenize book.txt --out book                 turn text into book.tokens\n"
    "  gka train configs/tiny/gka.train.json --set 'data.files=[\"book.tokens\"]'\n"
    "  gka runs                                         list runs; gka plot runs/tiny-gka draws one\n"
    "  gka generate runs/tiny-gka --prompt 'It was'     continue a text; see also gka score, eval, serve\n"
    "\n"
    "`gka COMMAND --help` explains a command's options.";

std::vector<std::string_view> command_names() {
  std::vector<std::string_view> names;
  for (const auto& command : gka::cli::kCommands) names.emplace_back(command.name);
  return names;
}

/// Whether this program can do what is asked, be it to complain.
bool is_here(std::span<char* const> words) {
  using gka::cli::kCommands;
  const auto here = [](const auto& command) { return command.declare != nullptr; };
  if (std::ranges::all_of(kCommands, here)) return true;
  const std::string_view first = words[0];
  if (first.starts_with('-')) return words.size() == 1 && (first == "--version" || first == "--help" || first == "-h");
  const auto* command = std::ranges::find(kCommands, first, &gka::cli::Command::name);
  return command == kCommands.end() || here(*command);
}

/// Threads that wait for each other go to sleep after microseconds. libgomp's own habit, to spin for milliseconds,
/// holds the core that the other thread needs as soon as the machine has other work. It reads this when it is loaded.
void let_threads_sleep() {
  if (std::getenv("OMP_WAIT_POLICY") == nullptr) ::setenv("GOMP_SPINCOUNT", "1000", /*overwrite=*/0);
}

/// Replaces this process by the program that has all commands.
[[noreturn]] void hand_over(char** argv) {
  let_threads_sleep();
  const auto program = std::filesystem::canonical("/proc/self/exe").parent_path() / "gka-torch";
  ::execv(program.c_str(), argv);
  throw gka::file_error("run", program);
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

/// The first word that looks like an option and is none of the command's, else the first that has no place. CLI11 would
/// first complain of what is missing, and what is missing may well be what that word was to give.
std::string complaint_about_options(const CLI::App& app) {
  for (const auto* command : app.get_subcommands()) {
    if (auto deeper = complaint_about_options(*command); !deeper.empty()) return deeper;
  }
  std::vector<std::string> known;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) known.push_back("--" + name);
  }
  const std::vector<std::string_view> names(known.begin(), known.end());
  const auto words = app.remaining();
  const auto command = app.get_parent() ? app.get_name() + " " : std::string();
  for (const auto& word : words) {
    if (word.size() < 2 || word[0] != '-' || (word[1] >= '0' && word[1] <= '9')) continue;
    const auto option = word.substr(0, word.find('='));
    const auto guess = gka::nearest(option, names);
    return "gka: " + (command.empty() ? "gka " : command) + "has no option '" + option + "'" +
           (guess ? "; did you mean '" + std::string(*guess) + "'?" : "") + " (`gka " + command + "--help` lists them)";
  }
  if (words.empty()) return {};
  return "gka: '" + words.front() + "' is no option of `gka " + command + "…` and has no place there (`gka " + command +
         "--help` shows what it takes)";
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
  app.formatter(gka::cli::make_help_formatter());  // first, because subcommands inherit it
  app.set_version_flag("--version", std::string("gka ") + gka::version());
  app.require_subcommand(0, 1);

  int status = 0;
  for (const auto& command : gka::cli::kCommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.summary);
    if (!command.declare) continue;
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

// For programs without torch; torch_errors.cpp has the other.
[[gnu::weak]] std::string gka::cli::sentence_of(const std::exception& error) { return error.what(); }

int main(int argc, char** argv) {
  gka::explain_lost_pages();
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond `ulimit -f` is then an error of write(), which has a sentence
  try {
    if (argc > 1 && !is_here(std::span(argv + 1, argv + argc))) hand_over(argv);
    return with_output_checked(run(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "gka: " << gka::cli::sentence_of(error) << "\n";
    return 1;
  }
}
