// Where sequences keep what they remember: a slot each for states of fixed size, and pages of 64 tokens for caches that
// grow. Pages are counted: a snapshot and any number of sequences may share one, and whoever shares a page only reads
// it.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include "models/decoder.h"

namespace gka::infer {

/// Prompts are read, remembered and paged on this grid of tokens, counted from the start of the sequence.
inline constexpr std::int64_t kGrid = layers::kPageTokens;

constexpr std::int64_t grid_floor(std::int64_t tokens) { return tokens / kGrid * kGrid; }
constexpr std::int64_t pages_for(std::int64_t tokens) { return (tokens + kGrid - 1) / kGrid; }

using Pages = std::vector<std::int64_t>;

/// Once a sequence has read `at` tokens (on the grid), attention forgets those before `from` (likewise): their pages go
/// back to the pool, and what is read from then on does not see them.
struct Cut {
  std::int64_t at = 0, from = 0;
  auto operator<=>(const Cut&) const = default;
};
/// In the order they come: `from` grows, `at` does not shrink.
using Cuts = std::vector<Cut>;

/// What attention has forgotten once all of them are made.
inline std::int64_t dropped_by(const Cuts& cuts) { return cuts.empty() ? 0 : cuts.back().from; }

class Pool {
 public:
  struct Limits {
    std::int64_t slots = 0;
    std::int64_t pages = 0;
    std::int64_t context = 0;  // tokens of the longest sequence
    bool grows = true;         // begins small; else everything is there from the start, and stays where it is
    bool int8_pages = false;   // pages hold bytes (kernels/int8_pages.h)
  };
  Pool(const models::Decoder& decoder, const Limits& limits);

  /// A free slot, or none; what it held before is gone once a state is put there.
  std::optional<std::int64_t> take_slot();
  void give_slot(std::int64_t slot) { free_slots_.push_back(slot); }
  /// So many pages, each held once, or none of them.
  std::optional<Pages> take_pages(std::int64_t count);
  void share(std::int64_t page) { ++holders_[static_cast<std::size_t>(page)]; }
  void release(std::int64_t page);

  /// Whether sequences need pages at all.
  bool pages_needed() const { return page_bytes_ > 0; }
  std::int64_t pages_free() const { return limits_.pages - pages_in_use_; }
  const Limits& limits() const { return limits_; }
  std::int64_t slots_in_use() const { return made_slots_ - static_cast<std::int64_t>(free_slots_.size()); }
  std::int64_t pages_in_use() const { return pages_in_use_; }
  std::int64_t page_bytes() const { return page_bytes_; }    // of all layers together
  std::int64_t state_bytes() const { return state_bytes_; }  // of one sequence, pages apart

  const models::DecoderState& state() const { return state_; }
  /// A slot and a page beyond all others, for rows of a recorded step that belong to nobody. Only where nothing grows.
  std::int64_t spare_slot() const { return limits_.slots; }
  std::int64_t spare_page() const { return limits_.pages; }

  /// What `forward` takes for one sequence: its state (nullptr: it begins) with the pools of pages in their places.
  /// Undefined where that would be all empty.
  std::optional<models::DecoderState> with_pages(const models::DecoderState* sequence) const;
  /// What pages hold, [tokens, …] for every paged tensor in order of blocks and fields; and back into pages.
  std::vector<at::Tensor> read_pages(const Pages& pages) const;
  void write_pages(const Pages& pages, const std::vector<at::Tensor>& contents) const;

 private:
  void grow(std::int64_t slots, std::int64_t pages);
  template <typename Visit>
  void each_paged(const Visit& visit) const;

  const models::Decoder& decoder_;
  Limits limits_;
  std::vector<std::vector<layers::StateField>> fields_;
  models::DecoderState state_;
  std::int64_t made_slots_ = 0, made_pages_ = 0, pages_in_use_ = 0;
  std::int64_t page_bytes_ = 0, state_bytes_ = 0;
  std::vector<std::int64_t> free_slots_, free_pages_;
  std::vector<std::int32_t> holders_;  // of each page
};

/// Bytes of a page of all layers together, and of one sequence's state without them.
struct SequenceBytes {
  std::int64_t page = 0, state = 0;
};
SequenceBytes sequence_bytes(const models::Decoder& decoder, std::int64_t context, bool int8_pages = false);

std::int64_t bytes_of(const models::DecoderState& state);

}  // namespace gka::infer
