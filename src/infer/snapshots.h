// What prompts leave behind: states at grid points, in a tree over their tokens. An edge of the tree is 64 tokens, so a
// node stands for a prefix on the grid; some nodes hold a snapshot (the states there and the last token's output), and
// every node on the way to one holds its page of each cache. Each kind of sequence has a tree of its own.
//
// A snapshot's tensors are what the forward pass put out: nobody changes them, so keeping and giving them costs
// nothing.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <unordered_set>
#include <vector>

#include "infer/pool.h"

namespace gka::infer {

struct Snapshot {
  models::DecoderState state;  // undefined tensors where pages are
  at::Tensor hidden;           // [C], of the last token
  std::int64_t bytes = 0;      // of both; pages are the pool's
};

/// What states depend on besides the tokens: sequences of another kind share nothing.
struct Kind {
  std::int64_t iterations = 0;  // of GKA's solver
  Cuts cuts{};                  // all of them made at or before the states' token
  auto operator<=>(const Kind&) const = default;

  std::uint64_t hash() const;
};

class Snapshots {
 public:
  /// `bytes` < 0: none are kept but pinned ones.
  Snapshots(Pool& pool, std::int64_t bytes) : pool_(pool), limit_(bytes) {}
  ~Snapshots();
  Snapshots(const Snapshots&) = delete;
  Snapshots& operator=(const Snapshots&) = delete;

  struct Hit {
    std::int64_t tokens = 0;  // 0: nothing found
    Snapshot snapshot{};
    Pages pages{};  // of those tokens, but for the first `dropped`; not yet shared
    std::int64_t dropped = 0;
    std::int64_t shared = 0;  // so many tokens (on the grid) stand at the start of an earlier prompt as well
    bool evicted = false;     // further along there was a snapshot that had to go
  };
  /// The longest remembered prefix of `tokens`.
  Hit find(const Kind& kind, std::span<const std::int64_t> tokens);

  /// Remembers the state after all of `tokens` (a multiple of the grid), which lie in `pages`, but for those that the
  /// kind's cuts dropped.
  void add(const Kind& kind, std::span<const std::int64_t> tokens, Snapshot snapshot, const Pages& pages,
           bool pinned = false);
  /// A pinned snapshot stays whatever the limit; pins are counted.
  void unpin(const Kind& kind, std::span<const std::int64_t> tokens);

  /// Lets snapshots go, least recently used first, until so many pages are free; false where that is not enough.
  bool free_pages(std::int64_t count);

  bool enabled() const { return limit_ >= 0; }
  std::int64_t limit() const { return limit_; }
  std::int64_t count() const { return count_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  using Chunk = std::vector<std::int64_t>;
  struct Node {
    Node* parent = nullptr;
    std::map<Chunk, std::unique_ptr<Node>> children;
    const Chunk* chunk = nullptr;  // its key in the parent
    std::int64_t page = -1;        // none where attention has forgotten it
    std::unique_ptr<Snapshot> snapshot;
    std::int64_t pins = 0;
    std::uint64_t prefix = 0;            // a hash of all tokens up to here
    std::list<Node*>::iterator place{};  // in recent_, while it holds a snapshot
  };

  Node* walk(const Kind& kind, std::span<const std::int64_t> tokens);
  bool evict_one();
  void drop(Node* node);
  void prune(Node* node);

  Pool& pool_;
  std::int64_t limit_, count_ = 0, bytes_ = 0;
  std::map<Kind, std::unique_ptr<Node>> roots_;
  std::list<Node*> recent_;                 // with a snapshot, the last used first
  std::unordered_set<std::uint64_t> gone_;  // prefixes of evicted snapshots, the last few thousand
  std::deque<std::uint64_t> gone_order_;
};

}  // namespace gka::infer
