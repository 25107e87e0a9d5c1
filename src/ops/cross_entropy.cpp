#include "ops/cross_entropy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "base/labels.h"
#include "kernels/cuda/fused.h"
#include "ops/checks.h"
#include "ops/fused.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct CrossEntropyRows {
  at::Tensor losses;     // float32 [M]; 0 where the label is negative
  at::Tensor predicted;  // int64 [M]; undefined unless asked for
};
/// logits [M, N] contiguous, of which the first `classes` columns count; labels int64 [M]. Where `scale` (float32, a
/// scalar on the device) is defined, logits become scale · (softmax − one-hot), and 0 in the other columns.
CrossEntropyRows rows_on_gpu(at::Tensor logits, const at::Tensor& labels, std::int64_t classes, const at::Tensor& scale,
                             bool predict) {
  CrossEntropyRows rows{.losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat)), .predicted = {}};
  if (predict) rows.predicted = at::empty({logits.size(0)}, labels.options());
  on_gpu(logits, [&](const auto& device) {
    kernels::cuda::cross_entropy({.rows = logits.size(0),
                                  .classes = classes,
                                  .stride = logits.size(1),
                                  .dtype = kernel_dtype(logits.scalar_type()),
                                  .logits = logits.data_ptr(),
                                  .labels = labels.const_data_ptr<std::int64_t>(),
                                  .scale = scale.defined() ? scale.const_data_ptr<float>() : nullptr,
                                  .losses = rows.losses.data_ptr<float>(),
                                  .predicted = predict ? rows.predicted.data_ptr<std::int64_t>() : nullptr},
                                 device);
  });
  return rows;
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
  const auto wide = accumulation_type(hidden);
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
    const auto counted = label.ne(kIgnoredLabel);
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
    const auto rows =
        rows_on_gpu(logits, labels.narrow(0, start, length), classes, gradients ? scale : at::Tensor(), predict);
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
    const auto run = has_fused(hidden) ? run_slices_fused : run_slices;
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

}  // namespace

CrossEntropy sliced_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                  const at::Tensor& scale, std::int64_t slice, bool predict) {
  const bool gradients = at::GradMode::is_enabled() && (hidden.requires_grad() || weight.requires_grad());
  const auto results = SlicedCrossEntropy::apply(hidden, weight, labels, scale, slice, gradients, predict);
  return {.loss = results[0], .predicted = predict ? results[1] : at::Tensor()};
}

}  // namespace gka::ops
