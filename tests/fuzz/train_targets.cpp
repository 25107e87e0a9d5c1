// The training file, and what a run leaves behind.
#include <filesystem>

#include "base/files.h"
#include "base/json.h"
#include "targets.h"
#include "train/config.h"
#include "train/run.h"

namespace gka::fuzz {

/// The file, and then every line of it as a `--set`.
int fuzz_training_file(Bytes bytes) {
  const auto text = text_of(bytes);
  auto settings = Json::object();
  expect_sentence([&] {
    const auto json = parse_json(text, "train.json");
    if (!json.is_object()) return;
    settings = json;
    const auto config = train::parse(json);
    if (config.steps < 1 || config.micro_batch() < 1) std::abort();
    // What a run keeps says the same.
    if (train::first_difference(config.settings, train::parse(config.settings).settings)) std::abort();
  });
  for (std::size_t start = 0, lines = 0; start < text.size() && lines < 8; ++lines) {
    const auto end = std::min(text.find('\n', start), text.size());
    const auto line = text.substr(start, end - start);
    const bool follows_path = line.starts_with("model=") || line.starts_with("from=");
    if (!follows_path && line.find('\0') == std::string_view::npos) {  // a command line has no zero byte
      expect_sentence([&] { train::assign(settings, line); });
    }
    start = end + 1;
  }
  return expect_sentence([&] { train::parse(settings); });
}

namespace {

/// For the time of the process.
struct Folder {
  std::filesystem::path path;
  Folder() {
    auto name = (std::filesystem::temp_directory_path() / "gka-fuzz-XXXXXX").string();
    if (!::mkdtemp(name.data())) std::abort();
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

}  // namespace

/// run.json up to the first zero byte, metrics.jsonl behind it.
int fuzz_run(Bytes bytes) {
  static const Folder scratch;
  const auto& folder = scratch.path;
  const auto text = text_of(bytes);
  const auto cut = std::min(text.find('\0'), text.size());
  const auto put = [&](const char* name, std::string_view content) {
    const Descriptor file(::open((folder / name).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666));
    write_all(file, folder / name, content);
  };
  put("train.json", "{}");
  put("run.json", text.substr(0, cut));
  put("metrics.jsonl", text.substr(std::min(cut + 1, text.size())));
  return expect_sentence([&] {
    const auto run = train::summarise_run(folder);
    if (run.state.empty()) std::abort();
    train::has_begun(folder);
    train::MetricsFile(folder, 5).append({{"step", 6}});
  });
}

}  // namespace gka::fuzz
