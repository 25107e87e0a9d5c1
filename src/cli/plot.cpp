// `gka plot`: hands over to _plot.py, the part of the Python package that
// draws, with the Python it is installed in.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/files.h"
#include "cli/commands.h"

namespace gka::cli {
namespace {

namespace fs = std::filesystem;

/// The first of `names` that exists in a folder above the executable: package,
/// virtual environment and checkout all lie there.
fs::path find_above(const std::vector<const char*>& names) {
  for (auto folder = fs::canonical("/proc/self/exe").parent_path(); folder.has_relative_path();) {
    folder = folder.parent_path();
    for (const auto* name : names) {
      if (fs::exists(folder / name)) return folder / name;
    }
  }
  return {};
}

struct PlotOptions {
  std::vector<std::string> runs;
  std::string output = "plot.png", x = "step", y;
};

int draw(const PlotOptions& options) {
  const auto script = find_above({"_plot.py", "python/gka/_plot.py"});
  if (script.empty())
    throw std::runtime_error(
        "plots are drawn by the Python package; install "
        "it with `pip install gka`");
  const auto found = find_above({"bin/python3", ".venv/bin/python3"});
  const auto python = found.empty() ? std::string("python3") : found.string();

  std::vector<std::string> words{python, script.string(), "--output", options.output, "--x", options.x};
  if (!options.y.empty()) words.insert(words.end(), {"--y", options.y});
  words.emplace_back("--");
  words.insert(words.end(), options.runs.begin(), options.runs.end());
  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  throw file_error("run", python);
}

}  // namespace

Action declare_plot(CLI::App& app) {
  const auto options = std::make_shared<PlotOptions>();
  app.add_option("runs", options->runs, "Folders of runs")->required()->type_name("RUN");
  app.add_option("-o,--output", options->output,
                 "The picture to write; its ending chooses the kind: .png (added if there is none), .svg, .pdf")
      ->capture_default_str();
  app.add_option("--x", options->x, "The horizontal axis: step, tokens, time; for models of images also images, epoch")
      ->capture_default_str();
  app.add_option("--y", options->y,
                 "Panels, separated by commas: loss, accuracy, learning_rate, "
                 "gradient_norm, tokens_per_second, images_per_second, memory; "
                 "loss, and accuracy where it was measured, if left out");
  app.footer(
      "Example:\n  gka plot runs/gka runs/gdn -o loss.png --x tokens "
      "--y loss,accuracy");
  return [options] { return draw(*options); };
}

}  // namespace gka::cli
