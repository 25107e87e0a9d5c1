#include "models/loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "base/labels.h"
#include "layers/functions.h"
#include "ops/cross_entropy.h"

namespace gka::models {
namespace {

std::int64_t tokens_per_slice(std::int64_t asked, const at::Tensor& weight) {
  if (asked > 0) return asked;
  const auto values = weight.is_cpu() ? kSliceOnCpu : kSliceElsewhere;
  const auto tokens = std::max<std::int64_t>(16, values / std::max<std::int64_t>(1, weight.size(0)));
  // Whole tiles of a matrix product, and on a GPU whole rounds of its multiprocessors, or nearly.
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(tokens)));
}

/// Sums run in at least float32.
at::ScalarType wide_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels) {
  if (hidden.dim() < 1 || weight.dim() != 2 || hidden.size(-1) != weight.size(1) ||
      labels.sizes() != hidden.sizes().slice(0, static_cast<std::size_t>(hidden.dim() - 1))) {
    throw std::invalid_argument(c10::str("the loss takes hidden [..., C], a head [V, C] and labels [...]; it got ",
                                         hidden.sizes(), ", ", weight.sizes(), " and ", labels.sizes(),
                                         ", which do not fit each other"));
  }
  if (!labels.is_cpu()) return;
  const auto wrong = labels.ge(weight.size(0)).logical_or_(labels.lt(0).logical_and_(labels.ne(kIgnoredLabel)));
  if (wrong.any().item<bool>()) {
    throw std::invalid_argument("the label " + std::to_string(labels.masked_select(wrong)[0].item<std::int64_t>()) +
                                " is outside the vocabulary of " + std::to_string(weight.size(0)) + " tokens");
  }
}

/// states [M, C] with a label each, of which they are rows `rows`.
Loss loss_of_rows(const at::Tensor& states, const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& labels,
                  const LossOptions& options) {
  const auto number = states.options().dtype(wide_type(states)).requires_grad(false);
  const auto scale = options.divisor > 0
                         ? at::full({}, 1 / options.divisor, number)
                         : labels.ne(kIgnoredLabel).sum().clamp_min(1).to(wide_type(states)).reciprocal();
  const auto result = ops::sliced_cross_entropy(states, weight, labels, scale, tokens_per_slice(options.slice, weight),
                                                options.predict);
  return {.mean = result.loss, .rows = rows, .predicted = result.predicted};
}

}  // namespace

at::Tensor pick_targets(const at::Tensor& labels) {
  const auto flat = labels.flatten().to(at::kLong);
  const auto rows = flat.ne(kIgnoredLabel).nonzero().squeeze(1);
  return at::stack({rows, flat.index_select(0, rows)});
}

Loss sliced_cross_entropy_at(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                             const LossOptions& options) {
  const auto rows = targets[0];
  const bool all = rows.numel() == hidden.size(0);
  return loss_of_rows(all ? hidden : hidden.index_select(0, rows), weight, rows, targets[1], options);
}

Loss sliced_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                          const LossOptions& options) {
  check(hidden, weight, labels);
  const auto states = hidden.reshape({-1, hidden.size(-1)});
  if (labels.is_cpu()) {
    const auto targets = layers::upload(pick_targets(labels), hidden.device());
    return sliced_cross_entropy_at(states, weight, targets, options);
  }
  const auto flat = labels.flatten();
  return loss_of_rows(states, weight, at::arange(flat.numel(), flat.options()), flat, options);
}

at::Tensor sliced_log_probabilities(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                    std::int64_t slice) {
  check(hidden, weight, labels);
  const at::NoGradGuard no_gradient;
  const auto states = hidden.reshape({-1, hidden.size(-1)});
  const auto flat = labels.flatten().to(hidden.device());
  const auto transposed = weight.to(hidden.scalar_type()).t();
  const auto length = tokens_per_slice(slice, weight);
  auto result = at::empty({flat.numel()}, hidden.options().dtype(wide_type(hidden)));
  for (std::int64_t start = 0; start < flat.numel(); start += length) {
    const auto count = std::min(length, flat.numel() - start);
    const auto label = flat.narrow(0, start, count);
    const auto logits = at::mm(states.narrow(0, start, count), transposed).to(wide_type(hidden));
    const auto values = at::_log_softmax(logits, 1, /*half_to_float=*/false);
    const auto chosen = values.gather(1, label.clamp_min(0).unsqueeze(1)).squeeze(1);
    result.narrow(0, start, count).copy_(chosen.masked_fill(label.eq(kIgnoredLabel), 0));
  }
  return result.reshape(labels.sizes());
}

}  // namespace gka::models
