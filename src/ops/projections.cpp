#include "ops/projections.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "ops/block.h"
#include "ops/linear.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

GradientRoom& room_of(AutogradContext* context) {
  return static_cast<GradientRoom&>(*context->saved_data["room"].toCapsule());
}

/// Every projection of x in one product, and its gradient in one tensor, whose parts are made where they arise.
///
/// Inputs: x [B,T,C], the heads' weights, their convolutions' in the same order, the other weights. Outputs: the heads,
/// convolved, and the other products, columns of the one.
struct ProjectConvolved : torch::autograd::Function<ProjectConvolved> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs,
                               const std::vector<ConvolvedHeads>& heads, const c10::intrusive_ptr<GradientRoom>& room,
                               std::vector<Remade>* remade) {
    const auto &x = inputs[0], flat = x.reshape({-1, x.size(-1)});
    const auto count = heads.size();
    const auto convs = inputs.slice(1 + count, count);
    auto weights = inputs.slice(1, count).vec();
    for (const auto& other : inputs.slice(1 + 2 * count)) weights.push_back(other);
    const auto weight = stacked(weights, x.scalar_type());
    const auto product = room->make(x.options());
    at::Tensor rows = product.flatten(0, 1);
    at::mm_out(rows, flat, weight.t());

    variable_list outputs, kept{flat, product, weight};
    std::vector<std::int64_t> widths, norms, sizes;
    std::int64_t first = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      widths.push_back(weights[i].size(0));
      const auto part = product.narrow(-1, first, widths.back());
      first += widths.back();
      if (i >= count) {
        outputs.push_back(part);
        continue;
      }
      const auto convolve = [part, conv = convs[i].detach(), norm = heads[i].norm, head_dim = heads[i].head_dim] {
        return short_conv(part, conv, {.l2_norm = norm, .head_dim = head_dim}).y;
      };
      outputs.push_back(convolve());
      remade->push_back({.tensor = outputs.back(), .make = convolve});
      kept.push_back(convs[i]);
      norms.push_back(static_cast<std::int64_t>(heads[i].norm));
      sizes.push_back(heads[i].head_dim);
    }
    context->save_for_backward(std::move(kept));
    context->saved_data["widths"] = widths;
    context->saved_data["norms"] = norms;
    context->saved_data["sizes"] = sizes;
    context->saved_data["type"] = inputs[1].scalar_type();
    context->saved_data["room"] = c10::IValue::make_capsule(room);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const auto &flat = kept[0], &product = kept[1], &weight = kept[2];
    const auto widths = context->saved_data["widths"].toIntVector(), norms = context->saved_data["norms"].toIntVector(),
               sizes = context->saved_data["sizes"].toIntVector();
    const auto type = context->saved_data["type"].toScalarType();
    const auto d_product = room_of(context).take(product.options());

    variable_list to_convs;
    std::int64_t first = 0;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const auto place = d_product.narrow(-1, first, widths[i]);
      if (i < norms.size()) {
        ConvCall conv;
        conv.x = product.narrow(-1, first, widths[i]);
        conv.weight = kept[3 + i];
        conv.l2_norm = static_cast<L2Norm>(norms[i]);
        conv.head_dim = sizes[i];
        conv.d_y = slopes[i];
        to_convs.push_back(short_conv_backward_to(std::move(conv), place));
      } else if (slopes[i].const_data_ptr() != place.const_data_ptr()) {
        place.copy_(slopes[i]);
      }
      first += widths[i];
    }
    const auto rows = d_product.flatten(0, 1);
    const auto to_weights = product_as(type, rows.t(), flat).split_with_sizes(widths);
    const auto heads = to_weights.begin() + static_cast<std::ptrdiff_t>(norms.size());
    variable_list gradients{at::mm(rows, weight).view({product.size(0), product.size(1), -1})};
    gradients.insert(gradients.end(), to_weights.begin(), heads);
    gradients.insert(gradients.end(), to_convs.begin(), to_convs.end());
    gradients.insert(gradients.end(), heads, to_weights.end());
    gradients.resize(gradients.size() + 3);  // for the heads' options, the room and what is made again
    return gradients;
  }
};

/// The gated norm whose gate is a part of a product, and the projection behind it: it writes the gate's gradient where
/// the product's will be, and keeps o and the gate alone.
struct GatedOutput : torch::autograd::Function<GatedOutput> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& o, const at::Tensor& gate,
                            const at::Tensor& norm, const at::Tensor& weight, const GatedRmsNormOptions& options,
                            const c10::intrusive_ptr<GradientRoom>& room) {
    const auto outward = weight.to(o.scalar_type());
    context->save_for_backward({o, gate, norm, outward});
    context->saved_data["activation"] = static_cast<std::int64_t>(options.activation);
    context->saved_data["eps"] = options.eps;
    context->saved_data["type"] = weight.scalar_type();
    context->saved_data["room"] = c10::IValue::make_capsule(room);
    const auto normed = gated_rms_norm(o, gate, norm, options);
    return at::mm(rows_of(normed), outward.t()).view({o.size(0), o.size(1), -1});
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const auto &o = kept[0], &gate = kept[1], &outward = kept[3];
    const auto slope = slopes[0].contiguous().flatten(0, -2);
    NormCall norm;
    norm.x = o;
    norm.gate = gate;
    norm.weight = kept[2];
    norm.activation = static_cast<Activation>(context->saved_data["activation"].toInt());
    norm.eps = context->saved_data["eps"].toDouble();
    norm.d_y = at::mm(slope, outward).view(o.sizes());
    const auto d_gate = room_of(context).open(gate);
    const auto found = gated_rms_norm_backward_to(std::move(norm), d_gate);
    const auto d_weight = product_as(context->saved_data["type"].toScalarType(), slope.t(), rows_of(found.y));
    return {found.d_x, d_gate, found.d_weight, d_weight, {}, {}};
  }

 private:
  /// [B,T,heads,channels] as rows of all heads.
  static at::Tensor rows_of(const at::Tensor& by_head) { return by_head.flatten(-2).flatten(0, -2); }
};

}  // namespace

at::Tensor GradientRoom::make(const at::TensorOptions& options) const {
  // Rows begin at whole lines of the cache.
  constexpr std::int64_t kLine = 64;
  const auto pitch = (shape_[2] + kLine - 1) / kLine * kLine;
  return at::empty({shape_[0], shape_[1], pitch}, options.requires_grad(false)).narrow(-1, 0, shape_[2]);
}

at::Tensor GradientRoom::open(const at::Tensor& of) {
  all_ = make(of.options());
  pass_ = torch::autograd::get_current_graph_task_id();
  return all_.as_strided(of.sizes(), of.strides(), of.storage_offset());
}

at::Tensor GradientRoom::take(const at::TensorOptions& options) {
  const at::Tensor written = std::exchange(all_, at::Tensor());
  return written.defined() && pass_ == torch::autograd::get_current_graph_task_id() ? written : make(options);
}

ConvolvedProjections project_convolved(const at::Tensor& x, const std::vector<ConvolvedHeads>& heads,
                                       const std::vector<at::Tensor>& others) {
  std::vector<at::Tensor> inputs{x};
  std::int64_t columns = 0;
  for (const auto& head : heads) {
    inputs.push_back(head.weight);
    columns += head.weight.size(0);
  }
  for (const auto& head : heads) inputs.push_back(head.conv);
  for (const auto& other : others) {
    inputs.push_back(other);
    columns += other.size(0);
  }
  ConvolvedProjections result{.heads = {}, .others = {}, .remade = {}, .room = {}};
  result.room = c10::make_intrusive<GradientRoom>(std::array{x.size(0), x.size(1), columns});
  const auto parts = ProjectConvolved::apply(at::TensorList(inputs), heads, result.room, &result.remade);
  const auto first = parts.begin() + static_cast<std::ptrdiff_t>(heads.size());
  result.heads.assign(parts.begin(), first);
  result.others.assign(first, parts.end());
  return result;
}

at::Tensor gated_output(const at::Tensor& o, const at::Tensor& gate, const at::Tensor& norm, const at::Tensor& weight,
                        const GatedRmsNormOptions& options, const c10::intrusive_ptr<GradientRoom>& room) {
  return GatedOutput::apply(o, gate, norm, weight, options, room);
}

}  // namespace gka::ops
