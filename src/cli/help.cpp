#include "cli/help.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace gka::cli {
namespace {

constexpr std::size_t kNarrowest = 60, kWidest = 120;
constexpr std::size_t kGroupIndent = 2;  // how far CLI11 moves the options of a group

std::size_t terminal_columns() {
  winsize size{};
  const bool known = ::isatty(STDOUT_FILENO) == 1 && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? std::clamp<std::size_t>(size.ws_col, kNarrowest, kWidest) : kWidest;
}

/// How many columns a text takes: one for each character, of however many bytes.
std::size_t columns_of(std::string_view text) {
  return static_cast<std::size_t>(std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
}

/// `text` in lines of at most so many columns, unless a single word is longer, and what stands between the lines.
std::string broken(std::string_view text, std::size_t columns, const std::string& between = "\n") {
  std::string lines;
  std::size_t used = 0;
  while (!text.empty()) {
    const auto end = std::min(text.find_first_of(" \n"), text.size());
    const auto word = text.substr(0, end);
    const bool full = used > 0 && used + 1 + columns_of(word) > columns;
    if (used > 0) lines += full ? between : " ";
    lines += word;
    used = columns_of(word) + (used == 0 || full ? 0 : used + 1);
    if (end < text.size() && text[end] == '\n') {
      lines += between;
      used = 0;
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_desc(const CLI::Option* option) const override {
    return broken(option->get_description(), room() - kGroupIndent);
  }

  std::string make_subcommand(const CLI::App* command) const override {
    auto name = "  " + command->get_name();
    name.resize(std::max(name.size() + 1, get_column_width()), ' ');
    return name + broken(command->get_description(), room(), "\n" + std::string(get_column_width(), ' ')) + "\n";
  }

 private:
  std::size_t room() const { return terminal_columns() - get_column_width(); }
};

}  // namespace

std::shared_ptr<CLI::FormatterBase> make_help_formatter() { return std::make_shared<HelpFormatter>(); }

}  // namespace gka::cli
