// `gka runs`: the training runs in a folder and how each stands.
#include <CLI/CLI.hpp>
#include <array>
#include <filesystem>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/table.h"
#include "train/run.h"
#include "train/text.h"

namespace gka::cli {
namespace {

using train::print;
using train::RunSummary;

struct RunsOptions {
  std::string folder = "runs";
  bool json = false;
};

struct Column {
  const char* name;
  bool right;  // numbers stand at the right
  std::string (*cell)(const RunSummary& run);
};

std::string shown(const std::optional<double>& value) { return value ? print("%.4f", *value) : "–"; }

constexpr std::array kColumns{
    Column{"run", false, [](const RunSummary& run) { return run.path.lexically_normal().string(); }},
    Column{"state", false, [](const RunSummary& run) { return run.state; }},
    Column{"step", true,
           [](const RunSummary& run) { return std::to_string(run.step) + "/" + std::to_string(run.steps); }},
    Column{"loss", true, [](const RunSummary& run) { return shown(run.loss); }},
    Column{"eval loss", true, [](const RunSummary& run) { return shown(run.eval_loss); }},
    Column{"accuracy", true, [](const RunSummary& run) { return shown(run.accuracy); }},
    Column{"time", true, [](const RunSummary& run) { return train::short_duration(run.seconds); }},
};

/// A text from a file, for a terminal: what would move its cursor or change its colours is shown, not done.
std::string printable(const std::string& text) {
  std::string safe;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool second_set = byte == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (byte >= 0x20 && byte != 0x7F && !second_set) {
      safe += text[i];
      continue;
    }
    safe += "\uFFFD";
    if (second_set) ++i;
  }
  return safe;
}

void print_table(const std::vector<RunSummary>& runs) {
  std::vector<Row> rows(1);
  std::vector<bool> right;
  for (const auto& column : kColumns) {
    rows[0].emplace_back(column.name);
    right.push_back(column.right);
  }
  for (const auto& run : runs) {
    auto& row = rows.emplace_back();
    for (const auto& column : kColumns) row.push_back(printable(column.cell(run)));
  }
  std::cout << layout(rows, right);
  for (const auto& run : runs) {
    if (run.message.empty()) continue;
    std::cout << printable(run.path.lexically_normal().string() + ": " + run.message) << "\n";
  }
}

Json as_json(const RunSummary& run) {
  return {{"run", run.path.string()},
          {"state", run.state},
          {"step", run.step},
          {"steps", run.steps},
          {"loss", json::write(run.loss)},
          {"eval_loss", json::write(run.eval_loss)},
          {"eval_accuracy", json::write(run.accuracy)},
          {"seconds", run.seconds},
          {"message", run.message}};
}

int list(const RunsOptions& options) {
  if (!std::filesystem::is_directory(options.folder)) {
    throw std::runtime_error("there is no folder '" + options.folder + "'; `gka runs FOLDER` looks in another one.");
  }
  const auto runs = train::list_runs(options.folder);
  if (options.json) {
    auto all = Json::array();
    for (const auto& run : runs) all.push_back(as_json(run));
    std::cout << all.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
  } else if (runs.empty()) {
    std::cout << "There are no runs in '" << options.folder << "'; `gka train CONFIG` starts one.\n";
  } else {
    print_table(runs);
  }
  return 0;
}

}  // namespace

Action declare_runs(CLI::App& app) {
  const auto options = std::make_shared<RunsOptions>();
  app.add_option("folder", options->folder, "The folder to search, with all folders below it")->capture_default_str();
  app.add_flag("--json", options->json, "Print JSON");
  return [options] { return list(*options); };
}

}  // namespace gka::cli
