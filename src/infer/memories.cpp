#include "infer/memories.h"

#include <ATen/ops/tensor.h>
#include <sys/file.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <random>
#include <set>
#include <stdexcept>

#include "base/files.h"
#include "base/folders.h"
#include "base/hash.h"
#include "models/activations.h"
#include "models/dtypes.h"
#include "models/safetensors.h"

namespace gka::infer {
namespace {

namespace fs = std::filesystem;

// The second has cuts, of which an older gka knows nothing.
constexpr const char* kFormats[] = {"gka memory 1", "gka memory 2"};
constexpr const char* kCuts = "cuts";
constexpr const char* kEnding = ".safetensors";

std::string hexadecimal(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string state_name(std::size_t block, std::size_t field) {
  return "state." + std::to_string(block) + "." + std::to_string(field);
}

const std::string& entry(const models::Metadata& metadata, const std::string& key, const fs::path& file) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) throw std::runtime_error(file.string() + " is not a memory: it does not say its " + key);
  return found->second;
}

std::int64_t number(const models::Metadata& metadata, const std::string& key, const fs::path& file) {
  const auto& text = entry(metadata, key, file);
  std::int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || value < 0) {
    throw std::runtime_error(file.string() + " is not a memory: its " + key + " is no number");
  }
  return value;
}

std::vector<std::int64_t> numbers(const models::SafetensorsFile& file, const std::string& name) {
  const auto tensor = file.tensor(name).to(at::kLong).contiguous();
  const auto* values = tensor.const_data_ptr<std::int64_t>();
  return {values, values + tensor.numel()};
}

Cuts cuts_of(const std::vector<std::int64_t>& numbers, std::int64_t tokens, const fs::path& file) {
  Cuts cuts;
  Cut before;
  bool sound = numbers.size() % 2 == 0;
  for (std::size_t i = 0; sound && i < numbers.size(); i += 2) {
    const Cut cut{.at = numbers[i], .from = numbers[i + 1]};
    sound = cut.at % kGrid == 0 && cut.from % kGrid == 0 && cut.at >= before.at && cut.from > before.from &&
            cut.from <= cut.at && cut.at <= tokens;
    cuts.push_back(cut);
    before = cut;
  }
  if (!sound) throw std::runtime_error(file.string() + " is not a memory: its cuts are not on its grid of tokens");
  return cuts;
}

/// What a killed server was writing. No other memory will have its name, so nobody else would remove it; a server that
/// still writes holds a lock on it (NewFile).
void remove_abandoned(const fs::path& folder) {
  std::error_code none;
  for (const auto& found : fs::directory_iterator(folder, none)) {
    if (found.path().filename().string().find(std::string(kEnding) + ".writing-") == std::string::npos) continue;
    const Descriptor file(::open(found.path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file.open() && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(found.path().c_str());
  }
}

/// Not there, which is more than that it cannot be seen just now.
bool is_gone(const fs::path& file) {
  std::error_code none;
  return fs::status(file, none).type() == fs::file_type::not_found;
}

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string hash_of(const models::Decoder& decoder) {
  Hash64 hash;
  hash.add(to_json(decoder.config()).dump());
  hash.add(models::name_of_dtype(models::activations_of(decoder.parameters().options())));
  for (const auto& parameter : decoder.parameters().all()) {
    const auto value = parameter.value.detach().cpu().contiguous();
    hash.add(parameter.name);
    hash.add(value.const_data_ptr(), value.nbytes());
  }
  return hexadecimal(hash.value());
}

void write_memory(const Memory& memory, const Remembered& remembered) {
  models::Tensors tensors{{"tokens", at::tensor(memory.tokens, at::kLong)}};
  const auto& snapshot = remembered.snapshot;
  if (snapshot.hidden.defined()) tensors.emplace("hidden", snapshot.hidden.cpu());
  for (std::size_t b = 0; b < snapshot.state.blocks.size(); ++b) {
    const auto& block = snapshot.state.blocks[b].tensors;
    for (std::size_t f = 0; f < block.size(); ++f) {
      if (block[f].defined()) tensors.emplace(state_name(b, f), block[f].cpu());
    }
  }
  for (std::size_t i = 0; i < remembered.pages.size(); ++i) {
    tensors.emplace("pages." + std::to_string(i), remembered.pages[i].cpu());
  }
  if (!memory.cuts.empty()) {
    std::vector<std::int64_t> numbers;
    for (const auto& cut : memory.cuts) numbers.insert(numbers.end(), {cut.at, cut.from});
    tensors.emplace(kCuts, at::tensor(numbers, at::kLong).view({-1, 2}));
  }
  const auto& info = memory.info;
  models::write_safetensors(memory.file, tensors,
                            {{"format", kFormats[memory.cuts.empty() ? 0 : 1]},
                             {"id", info.id},
                             {"name", info.name},
                             {"created", std::to_string(info.created)},
                             {"state_bytes", std::to_string(info.state_bytes)},
                             {"cache_bytes", std::to_string(info.cache_bytes)},
                             {"model", memory.model}});
}

Memory read_memory(const fs::path& file) {
  const models::SafetensorsFile stored(file);
  const auto& metadata = stored.metadata();
  if (std::ranges::count(kFormats, entry(metadata, "format", file)) == 0) {
    throw std::runtime_error(file.string() + " is not a memory of a form this gka knows");
  }
  Memory memory;
  memory.info = {.id = entry(metadata, "id", file),
                 .name = entry(metadata, "name", file),
                 .state_bytes = number(metadata, "state_bytes", file),
                 .cache_bytes = number(metadata, "cache_bytes", file),
                 .created = number(metadata, "created", file)};
  memory.model = entry(metadata, "model", file);
  memory.tokens = numbers(stored, "tokens");
  memory.info.tokens = std::ssize(memory.tokens);
  if (stored.has(kCuts)) memory.cuts = cuts_of(numbers(stored, kCuts), memory.info.tokens, file);
  memory.info.kept_tokens = memory.info.tokens - dropped_by(memory.cuts);
  memory.file = file;
  return memory;
}

Remembered read_remembered(const fs::path& file, const models::Decoder& decoder, bool int8_pages) {
  const models::SafetensorsFile stored(file);
  Remembered remembered;
  if (!stored.has("hidden")) return remembered;
  const auto take = [&](const std::string& name) { return stored.tensor(name).to(decoder.device()).clone(); };
  auto& snapshot = remembered.snapshot;
  snapshot.hidden = take("hidden");
  const auto fields = decoder.state_fields(models::activations_of(decoder.parameters().options()), int8_pages);
  snapshot.state.blocks.resize(fields.size());
  for (std::size_t b = 0; b < fields.size(); ++b) {
    for (std::size_t f = 0; f < fields[b].size(); ++f) {
      const bool paged = fields[b][f].max_tokens == layers::kUnbounded;
      if (paged) {
        const auto name = "pages." + std::to_string(remembered.pages.size());
        if ((stored.tensor(name).scalar_type() == at::kChar) != int8_pages) return {};
        remembered.pages.push_back(take(name));
      }
      snapshot.state.blocks[b].tensors.push_back(paged ? at::Tensor() : take(state_name(b, f)));
    }
  }
  snapshot.bytes = bytes_of(snapshot.state) + static_cast<std::int64_t>(snapshot.hidden.nbytes());
  return remembered;
}

Memories::Memories(fs::path folder) : folder_(std::move(folder)) {
  if (folder_.empty()) return;
  make_folder(folder_);
  remove_abandoned(folder_);
  look_again();
}

void Memories::take_in(const fs::path& file) {
  try {
    auto memory = read_memory(file);
    memories_.emplace(memory.info.id, std::move(memory));
  } catch (const std::exception& error) {
    if (unreadable_.insert(file.string()).second)  // said once
      std::cerr << "gka: warning: a memory was left out: " << error.what() << "\n";
  }
}

bool Memories::was_removed(const Memory& memory) { return !memory.file.empty() && is_gone(memory.file); }

std::vector<Memory> Memories::look_again() {
  std::vector<Memory> gone;
  if (folder_.empty()) return gone;
  const std::lock_guard lock(mutex_);
  std::set<std::string> known;
  for (auto memory = memories_.begin(); memory != memories_.end();) {
    if (!is_gone(memory->second.file)) {
      known.insert((memory++)->second.file.string());
    } else {
      gone.push_back(std::move(memory->second));
      memory = memories_.erase(memory);
    }
  }
  std::error_code none;
  for (const auto& found : fs::directory_iterator(folder_, none)) {
    if (found.path().extension() == kEnding && !known.contains(found.path().string())) take_in(found.path());
  }
  return gone;
}

std::optional<Memory> Memories::find(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const bool named = id.starts_with("mem-") && std::ranges::all_of(id.substr(4), [](unsigned char c) {
                       return std::isxdigit(c) != 0;
                     });  // as ours are: never a path
  auto found = memories_.find(id);
  if (found == memories_.end() && named && !folder_.empty()) {
    if (const auto file = folder_ / (id + kEnding); !is_gone(file)) take_in(file);
    found = memories_.find(id);
  }
  return found == memories_.end() ? std::nullopt : std::optional(found->second);
}

std::vector<MemoryInfo> Memories::list(const std::string& model) const {
  const std::lock_guard lock(mutex_);
  std::vector<MemoryInfo> all;
  for (const auto& [id, memory] : memories_) {
    if (memory.model == model) all.push_back(memory.info);
  }
  std::ranges::stable_sort(all, {}, &MemoryInfo::created);
  return all;
}

bool Memories::empty() const {
  const std::lock_guard lock(mutex_);
  return memories_.empty();
}

Memory Memories::make(std::string name, std::vector<std::int64_t> tokens, Cuts cuts, std::string model) const {
  std::random_device random;
  const auto number = (static_cast<std::uint64_t>(random()) << 32) | random();
  Memory memory;
  memory.info = {.id = "mem-" + hexadecimal(number),
                 .name = std::move(name),
                 .tokens = std::ssize(tokens),
                 .state_bytes = 0,
                 .cache_bytes = 0,
                 .created = now(),
                 .kept_tokens = std::ssize(tokens) - dropped_by(cuts)};
  memory.tokens = std::move(tokens);
  memory.cuts = std::move(cuts);
  memory.model = std::move(model);
  if (!folder_.empty()) memory.file = folder_ / (memory.info.id + kEnding);
  return memory;
}

void Memories::add(Memory memory) {
  const std::lock_guard lock(mutex_);
  const auto id = memory.info.id;
  memories_.insert_or_assign(id, std::move(memory));
}

std::optional<Memory> Memories::remove(const std::string& id) {
  const std::lock_guard lock(mutex_);
  auto found = memories_.extract(id);
  if (found.empty()) return std::nullopt;
  if (!found.mapped().file.empty()) {
    std::error_code ignored;  // gone already is gone
    fs::remove(found.mapped().file, ignored);
  }
  return std::move(found.mapped());
}

bool Memories::set_resident(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = memories_.find(id);
  if (found == memories_.end()) return false;
  found->second.resident = true;
  return true;
}

}  // namespace gka::infer
