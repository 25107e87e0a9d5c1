#include "models/loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "layers/functions.h"
#include "ops/fused.h"

namespace gka::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::int64_t tokens_per_slice(std::int64_t asked, const at::Tensor& weight) {
  if (asked > 0) return asked;
  const std::int64_t values = weight.is_cpu() ? std::int64_t{1} << 22 : std::int64_t{1} << 29;
  const auto tokens = std::max<std::int64_t>(16, values / std::max<std::int64_t>(1, weight.size(0)));
  // Whole tiles of a matrix product, and on a GPU whole rounds of its multiprocessors, or nearly.
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(tokens)));
}

/// Sums run in at least float32.
at::ScalarType wide_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Sums over the tokens of all slices.
struct Sums {
  at::Tensor loss;
  at::Tensor hidden_gradient{};  // undefined where not wanted
  at::Tensor weight_gradient{};
  at::Tensor predicted{};
};

/// hidden [M, C], labels [M] on the same device. `scale` multiplies loss and gradients.
Sums run_slices(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& labels, const at::Tensor& scale,
                std::int64_t slice, bool gradients, bool predict) {
  const auto weight = head.to(hidden.scalar_type());
  const auto wide = wide_type(hidden);
  const auto tokens = hidden.size(0);
  Sums sums{.loss = at::zeros({}, weight.options().dtype(wide))};
  if (gradients) {
    sums.hidden_gradient = at::empty(hidden.sizes(), hidden.options());
    sums.weight_gradient = at::zeros(weight.sizes(), weight.options().dtype(wide));
  }
  if (predict) sums.predicted = at::empty({tokens}, labels.options());
  const auto transposed = weight.t();
  for (std::int64_t start = 0; start < tokens; start += slice) {
    const auto length = std::min(slice, tokens - start);
    const auto part = hidden.narrow(0, start, length);
    const auto label = labels.narrow(0, start, length);
    const auto counted = label.ne(kIgnored);
    const auto index = label.clamp_min(0).unsqueeze(1);
    auto values = at::_log_softmax(at::mm(part, transposed).to(wide), 1, /*half_to_float=*/false);
    if (predict) sums.predicted.narrow(0, start, length).copy_(values.argmax(1));
    sums.loss.sub_(values.gather(1, index).squeeze(1).masked_fill(counted.logical_not(), 0).sum());
    if (!gradients) continue;
    // d loss / d logits = softmax − one-hot, in the place of the log-probabilities.
    values.exp_();
    const auto weights = counted.to(wide).mul_(scale).unsqueeze(1);
    values.mul_(weights).scatter_add_(1, index, weights.neg());
    const auto slope = values.to(weight.scalar_type());
    sums.hidden_gradient.narrow(0, start, length).copy_(at::mm(slope, weight));
    if (weight.scalar_type() == wide) {
      sums.weight_gradient.addmm_(slope.t(), part);
    } else {
      sums.weight_gradient.add_(at::mm(slope.t(), part));
    }
  }
  sums.loss.mul_(scale);
  return sums;
}

/// The head in the type of `hidden`, with rows of zeros until their number is one that a GPU's matrix products like:
/// 50,257 columns that begin at odd places halve their speed.
at::Tensor padded_head(const at::Tensor& head, const at::Tensor& hidden) {
  constexpr std::int64_t kMultiple = 64;
  const auto rows = head.size(0), padded = (rows + kMultiple - 1) / kMultiple * kMultiple;
  at::Tensor weight = at::empty({padded, head.size(1)}, hidden.options());
  weight.narrow(0, 0, rows).copy_(head);
  weight.narrow(0, rows, padded - rows).zero_();
  return weight;
}

/// The same by a kernel that turns a slice's logits into their gradient in place.
Sums run_slices_fused(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& labels,
                      const at::Tensor& scale, std::int64_t slice, bool gradients, bool predict) {
  const auto weight = padded_head(head, hidden);
  const auto tokens = hidden.size(0), classes = head.size(0);
  Sums sums{.loss = at::zeros({}, hidden.options().dtype(at::kFloat))};
  if (gradients) {
    sums.hidden_gradient = at::empty(hidden.sizes(), hidden.options());
    sums.weight_gradient = at::empty(weight.sizes(), weight.options().dtype(at::kFloat));
    if (tokens == 0) sums.weight_gradient.zero_();
  }
  if (predict) sums.predicted = at::empty({tokens}, labels.options());
  const at::Tensor room = at::empty({std::min(slice, tokens), weight.size(0)}, weight.options());
  for (std::int64_t start = 0; start < tokens; start += slice) {
    const auto length = std::min(slice, tokens - start);
    const auto part = hidden.narrow(0, start, length);
    at::Tensor logits = room.narrow(0, 0, length);
    at::mm_out(logits, part, weight.t());
    const auto rows = ops::cross_entropy_(logits, labels.narrow(0, start, length), classes,
                                          gradients ? scale : at::Tensor(), predict);
    sums.loss.add_(rows.losses.sum());
    if (predict) sums.predicted.narrow(0, start, length).copy_(rows.predicted);
    if (!gradients) continue;
    at::Tensor to_hidden = sums.hidden_gradient.narrow(0, start, length);
    at::mm_out(to_hidden, logits, weight);
    // Slices are added up inside the products, in float32. What is there at first counts nothing.
    auto& total = sums.weight_gradient;
    at::addmm_out(total, total, logits.t(), part, at::kFloat, /*beta=*/start > 0 ? 1 : 0);
  }
  if (gradients) sums.weight_gradient = sums.weight_gradient.narrow(0, 0, classes);
  sums.loss.mul_(scale);
  return sums;
}

struct SlicedCrossEntropy : torch::autograd::Function<SlicedCrossEntropy> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
                               const at::Tensor& labels, const at::Tensor& scale, std::int64_t slice, bool gradients,
                               bool predict) {
    const auto run = ops::has_fused(hidden) ? run_slices_fused : run_slices;
    auto sums = run(hidden, weight, labels, scale, slice, gradients, predict);
    if (gradients) context->save_for_backward({sums.hidden_gradient, sums.weight_gradient.to(weight.scalar_type())});
    variable_list results{sums.loss};
    if (predict) {
      context->mark_non_differentiable({sums.predicted});
      results.push_back(sums.predicted);
    }
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto slope = [&](const at::Tensor& gradient) {
      return gradient.mul(gradients[0].to(gradient.scalar_type()));
    };
    return {slope(saved[0]), slope(saved[1]), {}, {}, {}, {}, {}};
  }
};

void check(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels) {
  if (hidden.dim() < 1 || weight.dim() != 2 || hidden.size(-1) != weight.size(1) ||
      labels.sizes() != hidden.sizes().slice(0, static_cast<std::size_t>(hidden.dim() - 1))) {
    throw std::invalid_argument("the loss takes hidden [..., C], a head [V, C] and labels [...]; it got shapes " +
                                std::to_string(hidden.numel()) + ", " + std::to_string(weight.numel()) + " and " +
                                std::to_string(labels.numel()) + " values that do not fit each other");
  }
  if (!labels.is_cpu()) return;
  const auto wrong = labels.ge(weight.size(0)).logical_or_(labels.lt(0).logical_and_(labels.ne(kIgnored)));
  if (wrong.any().item<bool>()) {
    throw std::invalid_argument("the label " + std::to_string(labels.masked_select(wrong)[0].item<std::int64_t>()) +
                                " is outside the vocabulary of " + std::to_string(weight.size(0)) + " tokens");
  }
}

/// states [M, C] with a label each, of which they are rows `rows`.
Loss loss_of_rows(const at::Tensor& states, const at::Tensor& weight, const at::Tensor& rows, const at::Tensor& labels,
                  const LossOptions& options) {
  const auto number = states.options().dtype(wide_type(states)).requires_grad(false);
  const auto scale = options.divisor > 0 ? at::full({}, 1 / options.divisor, number)
                                         : labels.ne(kIgnored).sum().clamp_min(1).to(wide_type(states)).reciprocal();
  const bool gradients = at::GradMode::is_enabled() && (states.requires_grad() || weight.requires_grad());
  const auto results = SlicedCrossEntropy::apply(states, weight, labels, scale, tokens_per_slice(options.slice, weight),
                                                 gradients, options.predict);
  return {.mean = results[0], .rows = rows, .predicted = options.predict ? results[1] : at::Tensor()};
}

}  // namespace

at::Tensor pick_targets(const at::Tensor& labels) {
  const auto flat = labels.flatten().to(at::kLong);
  const auto rows = flat.ne(kIgnored).nonzero().squeeze(1);
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
    result.narrow(0, start, count).copy_(chosen.masked_fill(label.eq(kIgnored), 0));
  }
  return result.reshape(labels.sizes());
}

}  // namespace gka::models
