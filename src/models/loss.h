// Cross entropy of a language model's head without its logits: tokens go through the head in slices, and a slice's
// gradient is taken while its logits are there, so that [tokens, vocabulary] never exists at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/labels.h"

namespace gka::models {

/// How many logits a slice has at most.
inline constexpr std::int64_t kSliceOnCpu = std::int64_t{1} << 22, kSliceElsewhere = std::int64_t{1} << 29;

struct LossOptions {
  /// Tokens per slice; 0: as many as keep a slice's logits within the limits above.
  std::int64_t slice = 0;
  /// What the sum is divided by; 0 is the number of labels that are not ignored.
  double divisor = 0;
  /// Fill `predicted` as well.
  bool predict = false;
};

struct Loss {
  at::Tensor mean;       // scalar, float32 (float64 for float64), differentiable; 0 where every label is ignored
  at::Tensor rows;       // int64 [M]: the tokens that went through the head, as places in labels.flatten()
  at::Tensor predicted;  // int64 [M]: the likeliest token at each
};

/// The tokens that have a label: int64 [2, M], their places in labels.flatten() above their labels. `labels` is on the
/// CPU, where finding them makes no device wait.
at::Tensor pick_targets(const at::Tensor& labels);

/// hidden [N, C], weight [V, C]; targets as `pick_targets` gives them, on the device of `hidden`.
Loss sliced_cross_entropy_at(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                             const LossOptions& options = {});

/// hidden [..., C], weight [V, C], labels [...] of integers below V or kIgnoredLabel. Products run in the type of
/// `hidden`, sums in float32 or better, and each gradient has the type of what it belongs to. Where the labels are on
/// the CPU, ignored tokens never reach the head; elsewhere finding them would make the device wait, so they do and are
/// masked.
Loss sliced_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                          const LossOptions& options = {});

/// log p(label) at each token, [...] in float32 or better, in slices likewise; 0 where a label is ignored. No gradient.
at::Tensor sliced_log_probabilities(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                    std::int64_t slice = 0);

}  // namespace gka::models
