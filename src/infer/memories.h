// Texts that were read once and stand before later prompts. A memory is its tokens and the states at its last grid
// point: to the engine a snapshot that is never evicted; on the disk a safetensors file that names the model it belongs
// to. Of attention's caches it may keep the last part only (`cuts`): then whatever goes on from it is of another kind
// than a sequence that read the same tokens, and shares nothing with it beyond the first cut.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "infer/engine.h"
#include "infer/snapshots.h"

namespace gka::infer {

/// What a sequence knew at the last grid point of a memory.
struct Remembered {
  Snapshot snapshot{};
  std::vector<at::Tensor> pages{};  // what the pages held that are kept, as Pool::read_pages gives it
};

struct Memory {
  MemoryInfo info{};
  std::vector<std::int64_t> tokens{};
  Cuts cuts{};                   // its own, and before it those of the memories it was forked from
  std::string model{};           // the hash of the model it was read by
  std::filesystem::path file{};  // empty: it lives in memory only
  bool resident = false;         // its snapshot is in the tree, pinned
};

/// A hash of all that makes a model's states what they are: its configuration, its type, every weight.
std::string hash_of(const models::Decoder& decoder);

/// The file appears whole or not at all.
void write_memory(const Memory& memory, const Remembered& remembered);
/// What a file says about itself, and the states in it, for a model with these fields of state.
Memory read_memory(const std::filesystem::path& file);
/// Nothing is remembered where the file has pages of bytes and the engine of numbers, or the other way round.
Remembered read_remembered(const std::filesystem::path& file, const models::Decoder& decoder, bool int8_pages);

/// The engine's table of memories; any thread may ask.
class Memories {
 public:
  /// Takes in the files of a folder (empty: none), which is made where there is none.
  explicit Memories(std::filesystem::path folder);

  /// Looks into the folder where there is none of that id: another server may have put it there.
  std::optional<Memory> find(const std::string& id);
  /// Those of a model, the oldest first.
  std::vector<MemoryInfo> list(const std::string& model) const;
  bool empty() const;
  /// Takes in what other servers have put into the folder, and lets go of what they have removed from it: those come
  /// back.
  std::vector<Memory> look_again();
  static bool was_removed(const Memory& memory);  // by another server
  /// A memory with an id and a date of its own, not yet in the table.
  Memory make(std::string name, std::vector<std::int64_t> tokens, Cuts cuts, std::string model) const;
  void add(Memory memory);
  /// The memory that was there; its file is gone.
  std::optional<Memory> remove(const std::string& id);
  bool set_resident(const std::string& id);  // false: it is gone

 private:
  void take_in(const std::filesystem::path& file);  // with the lock held

  std::filesystem::path folder_;
  mutable std::mutex mutex_;
  std::map<std::string, Memory> memories_;
  std::set<std::string> unreadable_;  // files that are no memories, of which that was said
};

}  // namespace gka::infer
