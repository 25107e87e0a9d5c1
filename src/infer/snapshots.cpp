#include "infer/snapshots.h"

#include <algorithm>
#include <iterator>

#include "base/hash.h"

namespace gka::infer {
namespace {

constexpr std::size_t kRememberedEvictions = 4096;

std::uint64_t extend(std::uint64_t prefix, std::span<const std::int64_t> chunk) {
  Hash64 hash(prefix);
  hash.add(chunk.data(), chunk.size_bytes());
  return hash.value();
}

}  // namespace

std::uint64_t Kind::hash() const {
  Hash64 hash(static_cast<std::uint64_t>(iterations));
  hash.add(cuts.data(), cuts.size() * sizeof(Cut));
  return hash.value();
}

/// One by one: a tree of long prompts is deeper than recursion should go.
Snapshots::~Snapshots() {
  while (!recent_.empty()) drop(recent_.back());
}

Snapshots::Hit Snapshots::find(const Kind& kind, std::span<const std::int64_t> tokens) {
  Hit hit;
  const auto root = roots_.find(kind);
  Node* node = root == roots_.end() ? nullptr : root->second.get();
  Node* best = nullptr;
  Pages pages;
  std::uint64_t prefix = kind.hash();
  for (std::int64_t begin = 0; begin + kGrid <= std::ssize(tokens); begin += kGrid) {
    const auto part = tokens.subspan(static_cast<std::size_t>(begin), kGrid);
    prefix = extend(prefix, part);
    if (gone_.contains(prefix)) hit.evicted = true;
    if (node == nullptr) continue;
    const auto child = node->children.find(Chunk(part.begin(), part.end()));
    node = child == node->children.end() ? nullptr : child->second.get();
    if (node == nullptr) continue;
    hit.shared = begin + kGrid;
    pages.push_back(node->page);
    if (!node->snapshot) continue;
    best = node;
    hit.tokens = hit.shared;
    hit.evicted = false;
  }
  if (best != nullptr) {
    recent_.splice(recent_.begin(), recent_, best->place);
    hit.snapshot = *best->snapshot;
    hit.dropped = dropped_by(kind.cuts);
    if (pool_.pages_needed()) hit.pages = {pages.begin() + hit.dropped / kGrid, pages.begin() + hit.tokens / kGrid};
  }
  return hit;
}

void Snapshots::add(const Kind& kind, std::span<const std::int64_t> tokens, Snapshot snapshot, const Pages& pages,
                    bool pinned) {
  if (tokens.empty() || (!pinned && snapshot.bytes > limit_)) return;
  auto& root = roots_[kind];
  if (!root) {
    root = std::make_unique<Node>();
    root->prefix = kind.hash();
  }
  Node* node = root.get();
  const auto dropped = static_cast<std::size_t>(dropped_by(kind.cuts));
  for (std::size_t begin = 0; begin < tokens.size(); begin += kGrid) {
    const auto part = tokens.subspan(begin, kGrid);
    const auto [child, fresh] = node->children.try_emplace(Chunk(part.begin(), part.end()));
    if (fresh) {
      child->second = std::make_unique<Node>();
      child->second->parent = node;
      child->second->chunk = &child->first;
      child->second->prefix = extend(node->prefix, part);
      if (pool_.pages_needed() && begin >= dropped) {
        child->second->page = pages.at((begin - dropped) / kGrid);
        pool_.share(child->second->page);
      }
    }
    node = child->second.get();
  }
  if (node->snapshot) {
    recent_.splice(recent_.begin(), recent_, node->place);
  } else {
    bytes_ += snapshot.bytes;
    ++count_;
    node->snapshot = std::make_unique<Snapshot>(std::move(snapshot));
    recent_.push_front(node);
    node->place = recent_.begin();
  }
  node->pins += pinned ? 1 : 0;
  while (bytes_ > std::max<std::int64_t>(limit_, 0) && evict_one()) {
  }
}

void Snapshots::unpin(const Kind& kind, std::span<const std::int64_t> tokens) {
  Node* node = walk(kind, tokens);
  if (node == nullptr || node->pins == 0) return;
  --node->pins;
  while (bytes_ > std::max<std::int64_t>(limit_, 0) && evict_one()) {
  }
}

bool Snapshots::free_pages(std::int64_t count) {
  while (pool_.pages_free() < count) {
    if (!evict_one()) return false;
  }
  return true;
}

Snapshots::Node* Snapshots::walk(const Kind& kind, std::span<const std::int64_t> tokens) {
  const auto root = roots_.find(kind);
  Node* node = root == roots_.end() ? nullptr : root->second.get();
  for (std::size_t begin = 0; node != nullptr && begin < tokens.size(); begin += kGrid) {
    const auto part = tokens.subspan(begin, kGrid);
    const auto child = node->children.find(Chunk(part.begin(), part.end()));
    node = child == node->children.end() ? nullptr : child->second.get();
  }
  return node;
}

/// The least recently used snapshot that nobody pinned.
bool Snapshots::evict_one() {
  const auto last = std::find_if(recent_.rbegin(), recent_.rend(), [](const Node* node) { return node->pins == 0; });
  if (last == recent_.rend()) return false;
  Node* node = *last;
  if (gone_.insert(node->prefix).second) gone_order_.push_back(node->prefix);
  if (gone_order_.size() > kRememberedEvictions) {
    gone_.erase(gone_order_.front());
    gone_order_.pop_front();
  }
  drop(node);
  return true;
}

void Snapshots::drop(Node* node) {
  bytes_ -= node->snapshot->bytes;
  --count_;
  recent_.erase(node->place);
  node->snapshot.reset();
  prune(node);
}

/// Nodes that lead to no snapshot.
void Snapshots::prune(Node* node) {
  while (node->parent != nullptr && node->children.empty() && !node->snapshot) {
    if (node->page >= 0) pool_.release(node->page);
    Node* parent = node->parent;
    parent->children.erase(parent->children.find(*node->chunk));
    node = parent;
  }
  if (node->parent == nullptr && node->children.empty()) {  // memories come and go, and each may be a kind of its own
    std::erase_if(roots_, [&](const auto& root) { return root.second.get() == node; });
  }
}

}  // namespace gka::infer
