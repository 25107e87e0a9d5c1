#include "models/checksums.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/hash.h"

namespace gka::models {
namespace {

namespace fs = std::filesystem;

constexpr const char* kChecksums = "CHECKSUMS.xxh64";
constexpr std::size_t kDigits = 16;

std::string checksum_of(const fs::path& file) {
  char text[kDigits + 1];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash64(MappedFile(file).text())));
  return text;
}

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().filename() != kChecksums) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

/// Whether loading a model or a run would read it.
bool is_read(const fs::path& name) {
  return name.extension() == ".json" || name.extension() == ".safetensors" || name.filename() == "merges.txt";
}

/// Not what goes on from a step: the optimiser's state, or the parts of many processes (gka.train in Python).
bool is_of_model(const fs::path& name) {
  return name.filename() != kOptimiserFile && name.filename() != kProgressFile && *name.begin() != "distributed";
}

std::runtime_error damaged(const fs::path& folder, const std::string& why) {
  return std::runtime_error("the checkpoint '" + folder.string() + "' is damaged: " + why);
}

/// "0123456789abcdef  name" a line; the names are inside the folder.
std::map<std::string, std::string> read_list(const fs::path& folder) {
  const auto text = read_text(folder / kChecksums);
  const auto unreadable = damaged(folder, "its " + std::string(kChecksums) + " is empty or not whole");
  if (text.empty() || text.back() != '\n') throw unreadable;
  std::map<std::string, std::string> list;
  for (std::size_t start = 0; start < text.size();) {
    const auto end = text.find('\n', start);
    const auto line = text.substr(start, end - start);
    const auto digits = line.substr(0, kDigits);
    const bool well_formed = line.size() > kDigits + 2 && line.substr(kDigits, 2) == "  " &&
                             digits.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (!well_formed) throw unreadable;
    const fs::path name(line.substr(kDigits + 2));
    if (name.is_absolute() || std::ranges::find(name, fs::path("..")) != name.end()) throw unreadable;
    list[name.string()] = digits;
    start = end + 1;
  }
  return list;
}

}  // namespace

void write_checksums(const fs::path& folder) {
  std::string text;
  for (const auto& path : files_in(folder)) {
    const auto file = open_regular(path);
    if (::fsync(file.descriptor.get()) != 0) throw file_error("write", path);
    text += checksum_of(path) + "  " + fs::relative(path, folder).string() + "\n";
  }
  write_text(folder / kChecksums, text);
}

bool has_checksums(const fs::path& folder) { return fs::exists(folder / kChecksums); }

void verify_folder(const fs::path& folder, Checked checked) {
  if (!fs::is_directory(folder)) throw std::runtime_error("there is no checkpoint '" + folder.string() + "'");
  if (!has_checksums(folder)) throw damaged(folder, "it has no " + std::string(kChecksums));
  const auto list = read_list(folder);
  for (const auto& [name, checksum] : list) {
    if (checked == Checked::model && !is_of_model(name)) continue;
    if (!fs::exists(folder / name)) throw damaged(folder, name + " is missing");
    if (checksum_of(folder / name) != checksum) {
      throw damaged(folder, name + " is not what was written (its checksum differs)");
    }
  }
  for (const auto& path : files_in(folder)) {
    const auto name = fs::relative(path, folder);
    if (is_read(name) && !list.contains(name.string())) {
      throw damaged(folder, name.string() + " is not in its " + kChecksums);
    }
  }
}

void verify_if_listed(const fs::path& folder, Checked checked) {
  if (has_checksums(folder)) verify_folder(folder, checked);
}

}  // namespace gka::models
