// Which tokens of a [B,T,C] batch belong to which sequence. Built once for a call of the model and shared by all its
// layers, so that what it takes to lay out a ragged batch (and to know it on the host) is paid once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace gka::layers {

/// The tokens of all sequences cut into chunks of `size`, ordered in steps: step n holds chunk n of every sequence that
/// is so long, longest sequence first. A recurrence over chunks then works on one contiguous slice per step, and the
/// sequences still alive are always the first ones.
struct ChunkPlan {
  std::int64_t size = 0;
  std::int64_t chunks = 0;
  std::vector<std::int64_t> alive;  // per step: how many sequences have a chunk in it; never increasing
  bool even = false;                // all sequences have the same number of chunks, and nothing is padded
  at::Tensor gather;                // int64 [chunks·size]: the token (of B·T) in each place; 0 where padded
  at::Tensor scatter;               // int64 [B·T]: the place of each token
  at::Tensor padding;               // bool [chunks·size], true where padded; undefined where nothing is
  at::Tensor order;                 // int64 [N]: the sequences, longest first; undefined where that is their order
  at::Tensor inverse;               // int64 [N]: where each sequence went; undefined likewise
};

class Sequences {
 public:
  /// B sequences of T tokens. `past` says how many tokens each has had before (its state comes with the call).
  static Sequences rows(std::int64_t batch, std::int64_t tokens, at::Device device,
                        std::vector<std::int64_t> past = {});
  /// One row; sequence n is the tokens bounds[n] … bounds[n+1] − 1 of it. Empty sequences are allowed.
  static Sequences packed(std::vector<std::int64_t> bounds, at::Device device, std::vector<std::int64_t> past = {});
  /// The same from cu_seqlens, int32 or int64 [N+1] on any device (a device other than the CPU is waited for).
  static Sequences packed(const at::Tensor& cu_seqlens, at::Device device, std::vector<std::int64_t> past = {});
  /// B rows of which the first lengths[b] tokens count; outputs of the others are zero.
  static Sequences padded(const std::vector<std::int64_t>& lengths, std::int64_t tokens, at::Device device,
                          std::vector<std::int64_t> past = {});

  std::int64_t batch() const { return batch_; }
  std::int64_t tokens() const { return tokens_; }
  std::int64_t count() const { return static_cast<std::int64_t>(bounds_.size()) - 1; }
  bool is_packed() const { return cu_seqlens_.defined(); }
  bool is_padded() const { return dense_ != nullptr; }

  /// Host: sequence n is the tokens bounds()[n] … bounds()[n+1] − 1 of the B·T laid end to end.
  const std::vector<std::int64_t>& bounds() const { return bounds_; }
  /// Host: tokens before this call, [N].
  const std::vector<std::int64_t>& past() const { return past_; }
  std::int64_t longest() const;

  /// Device: int64 [N+1]; undefined unless packed.
  const at::Tensor& cu_seqlens() const { return cu_seqlens_; }
  /// Device: int64 [B,T], each token's place in its own sequence, counted from the sequence's first token ever.
  const at::Tensor& positions() const { return positions_; }

  const ChunkPlan& chunks(std::int64_t size) const;

  /// Of a padded batch: the same sequences packed, and the places of their tokens in the B·T, int64.
  const Sequences& dense() const { return *dense_; }
  const at::Tensor& kept() const { return kept_; }

 private:
  std::int64_t batch_ = 0;
  std::int64_t tokens_ = 0;
  std::vector<std::int64_t> bounds_;
  std::vector<std::int64_t> past_;
  at::Tensor cu_seqlens_;
  at::Tensor positions_;
  at::Tensor kept_;
  std::shared_ptr<const Sequences> dense_;
  std::shared_ptr<std::vector<std::unique_ptr<const ChunkPlan>>> plans_ =
      std::make_shared<std::vector<std::unique_ptr<const ChunkPlan>>>();  // made when asked for, shared by copies
};

}  // namespace gka::layers
