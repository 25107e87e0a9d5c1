// How `--help` lays out its columns.
#pragma once

#include <memory>

namespace CLI {
class FormatterBase;
}

namespace gka::cli {

/// CLI11's own layout, with descriptions broken between words where a line would be wider than the terminal; 120
/// columns where the output is no terminal.
std::shared_ptr<CLI::FormatterBase> make_help_formatter();

}  // namespace gka::cli
