// The block's small operations below autograd, for every device and, without running anything, for the meta device on
// which torch.compile traces.
#include "ops/block.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "gka/block_kernels.h"
#include "kernels/cuda/fused.h"
#include "kernels/cuda/step_block.h"
#include "ops/arguments.h"
#include "ops/backends.h"
#include "ops/checks.h"
#include "ops/on_gpu.h"
#include "ops/run.h"
#include "ops/tensors.h"

namespace gka::ops {
namespace {

using kernels::View;

// ---- Which kernels ----------------------------------------------------------------------------------------------

/// Runs `on_host(executor)` or `on_device(device)`, by where the call's tensors lie.
template <typename OnHost, typename OnDevice>
void run(std::string_view op, c10::Device device, OnHost&& on_host, OnDevice&& on_device) {
  if (device.is_cpu()) return on_host(torch_executor());
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return on_cuda(device, on_device);
  }
  throw c10::NotImplementedError(std::string(op) + ": x takes a device this build has kernels for, cpu" +
                                 (kHasCuda ? " or cuda" : "") + ", got " + device.str());
}

// ---- Tensors as the kernels see them ----------------------------------------------------------------------------

/// The strides of the dimensions before the last, of which a view has up to three, the last ones.
View view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  View result{.data = pointer(tensor), .dtype = kernel_dtype(tensor.scalar_type())};
  std::int64_t* const strides[] = {&result.head_stride, &result.token_stride, &result.batch_stride};
  for (std::int64_t i = 0; i < std::min<std::int64_t>(3, tensor.dim() - 1); ++i) {
    *strides[i] = tensor.stride(tensor.dim() - 2 - i);
  }
  return result;
}

/// [B,T,C] or [B,C].
View conv_view(const at::Tensor& tensor) {
  View result = view(tensor);
  result.batch_stride = tensor.dim() == 3 ? result.token_stride : result.head_stride;
  result.token_stride = tensor.dim() == 3 ? result.head_stride : 0;
  result.head_stride = 0;
  return result;
}

at::Tensor contiguous(const at::Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }

void prepare(ConvCall& a) {
  for (auto* tensor : {&a.x, &a.d_y}) make_channels_contiguous(*tensor);
  for (auto* tensor : {&a.weight, &a.bias, &a.initial_state, &a.d_final_state}) *tensor = contiguous(*tensor);
  a.cu_seqlens = integers(a.cu_seqlens, a.x.device());
  a.state_indices = integers(a.state_indices, a.x.device());
}

void prepare(NormCall& a) {
  for (auto* tensor : {&a.x, &a.gate, &a.d_y}) make_channels_contiguous(*tensor);
  a.weight = contiguous(a.weight);
}

kernels::ShortConv conv_of(const ConvCall& a, const ConvSizes& sizes) {
  return {.batch = sizes.batch.expect_int(),
          .tokens = sizes.tokens.expect_int(),
          .channels = sizes.channels.expect_int(),
          .width = sizes.width.expect_int(),
          .sequences = sizes.sequences.expect_int(),
          .cu_seqlens = static_cast<const std::int64_t*>(pointer(a.cu_seqlens)),
          .x = conv_view(a.x),
          .weight = view(a.weight),
          .bias = view(a.bias),
          .initial_state = view(a.initial_state),
          .activation = a.activation,
          .l2_norm = a.l2_norm,
          .head_dim = a.head_dim,
          .eps = a.eps};
}

kernels::GatedRmsNorm norm_of(const NormCall& a) {
  const auto size = [&](std::int64_t from_the_last) {
    return from_the_last < a.x.dim() ? a.x.size(a.x.dim() - 1 - from_the_last) : 1;
  };
  return {.batch = size(3),
          .tokens = size(2),
          .heads = size(1),
          .dim = size(0),
          .x = view(a.x),
          .gate = view(a.gate),
          .weight = view(a.weight),
          .activation = a.activation,
          .eps = a.eps};
}

// ---- Room for results -------------------------------------------------------------------------------------------

/// Stands for a result that was not asked for.
at::Tensor nothing_like(const at::Tensor& tensor) { return at::empty({0}, tensor.options()); }

at::Tensor room_like(const at::Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); }

/// One gradient for each of a call's inputs that needs one, of its own shape and type.
template <typename Call, typename Inputs>
std::vector<at::Tensor> gradient_room(const Call& a, const Inputs& inputs) {
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < std::size(inputs); ++i) {
    gradients.push_back(a.needs[i] && inputs[i].defined() ? room_like(inputs[i]) : nothing_like(a.x));
  }
  return gradients;
}

constexpr std::string_view kConvStep = "short_conv_step", kConvBackward = "short_conv_backward",
                           kNormBackward = "gated_rms_norm_backward";

kernels::ShortConvStep step_of(const ConvCall& a, const ConvSizes& sizes, const at::Tensor& y) {
  return {.conv = conv_of(a, sizes),
          .y = conv_view(y),
          .state = view(a.state),
          .state_indices = static_cast<const std::int64_t*>(pointer(a.state_indices))};
}

/// Into `results`: x's, the weight's, the bias's and the state's; empty ones were not asked for.
void differentiate_conv(ConvCall& a, const ConvSizes& sizes, const std::vector<at::Tensor>& results) {
  prepare(a);
  const auto conv = conv_of(a, sizes);
  const kernels::ShortConvGradients gradients{.d_y = conv_view(a.d_y),
                                              .d_final_state = view(a.d_final_state),
                                              .d_x = results[0].numel() > 0 ? conv_view(results[0]) : View{},
                                              .d_weight = view(results[1]),
                                              .d_bias = view(results[2]),
                                              .d_initial_state = view(results[3])};
  run(
      kConvBackward, a.x.device(),
      [&](const auto& executor) { kernels::cpu::short_conv_backward(conv, gradients, executor); },
      [&](const auto& device) { kernels::cuda::short_conv_backward(conv, gradients, device); });
}

/// Into `results`: x's, the gate's and the weight's; empty ones were not asked for. With `y`: that once more.
void differentiate_norm(NormCall& a, const std::vector<at::Tensor>& results, const at::Tensor& y = {}) {
  prepare(a);
  const auto norm = norm_of(a);
  const kernels::GatedRmsNormGradients gradients{
      .d_y = view(a.d_y), .d_x = view(results[0]), .d_gate = view(results[1]), .d_weight = view(results[2])};
  run(
      kNormBackward, a.x.device(),
      [&](const auto& executor) {
        if (y.defined()) kernels::cpu::gated_rms_norm(norm, view(y), executor);
        kernels::cpu::gated_rms_norm_backward(norm, gradients, executor);
      },
      [&](const auto& device) { kernels::cuda::gated_rms_norm_backward(norm, gradients, view(y), device); });
}

}  // namespace

at::Tensor short_conv_backward_to(ConvCall call, const at::Tensor& d_x) {
  call.needs = {true, true, false, false};
  const auto sizes = check_short_conv_backward(kConvBackward, call);
  const auto d_weight = room_like(call.weight), none = nothing_like(call.x);
  differentiate_conv(call, sizes, {d_x, d_weight, none, none});
  return d_weight;
}

GatedNormGradients gated_rms_norm_backward_to(NormCall call, const at::Tensor& d_gate) {
  call.needs = {true, true, true};
  check_gated_rms_norm_backward(kNormBackward, call);
  const GatedNormGradients results{
      .d_x = room_like(call.x), .d_weight = room_like(call.weight), .y = room_like(call.x)};
  differentiate_norm(call, {results.d_x, d_gate, results.d_weight}, results.y);
  return results;
}

std::vector<at::Tensor> short_conv_steps(std::vector<ConvCall> calls) {
  std::vector<at::Tensor> results;
  std::vector<kernels::ShortConvStep> steps;
  for (ConvCall& a : calls) {
    const auto sizes = check_short_conv_step(kConvStep, a);
    prepare(a);
    results.push_back(room_like(a.x));
    steps.push_back(step_of(a, sizes, results.back()));
  }
  on_gpu(calls.front().x, [&](const auto& device) { kernels::cuda::short_conv_steps(steps, device); });
  return results;
}

at::Tensor block_step(BlockStepCall call) {
  constexpr std::string_view kName = "gated_kalmanet_step";
  const auto& x = call.convs.front().x;
  if (!kHasCuda || !x.is_cuda() || !has_gates(call.projected, call.kinds) || values_are_checked(x.device())) return {};
  const auto heads = call.memory.h.size(1);
  MemoryCall& a = call.memory;
  // They are checked and not read: of heads that are shared the first stands for all.
  const auto by_head = [&](const at::Tensor& t, std::int64_t dim) {
    const auto own = t.unflatten(-1, {t.size(-1) / dim, dim});
    return own.size(1) == heads ? own : own.narrow(1, 0, 1).expand({-1, heads, -1});
  };
  a.q = by_head(call.convs[0].x, a.h.size(-1));
  a.k = by_head(call.convs[1].x, a.h.size(-1));
  a.v = by_head(call.convs[2].x, a.u.size(-1));
  const auto options = check_options(kName, a);
  const auto sizes = check_step(kName, a);
  const auto y = at::empty({a.q.size(0), heads, a.v.size(-1)}, a.q.options());
  kernels::cuda::StepBlock block{.step = step_of(a, sizes, options, y)};
  for (std::size_t i = 0; i < call.convs.size(); ++i) {
    ConvCall& conv = call.convs[i];
    const auto conv_sizes = check_short_conv_step(kConvStep, conv);
    prepare(conv);
    block.convs[i] = step_of(conv, conv_sizes, conv.x);
    if (!conv.state.is_contiguous()) return {};
  }
  const auto by_token = [](const at::Tensor& t) {
    return t.defined() ? View{.data = pointer(t),
                              .dtype = kernel_dtype(t.scalar_type()),
                              .batch_stride = t.stride(0),
                              .head_stride = t.stride(1)}
                       : View{};
  };
  call.norm.x = y;
  check_gated_rms_norm("gated_rms_norm", call.norm);
  prepare(call.norm);
  block.gates = gates_of(call.projected, call.kinds);
  block.log_decay = call.log_decay;
  block.beta = call.beta;
  block.alpha = call.alpha;
  block.norm = norm_of(call.norm);
  block.norm.gate = by_token(call.norm.gate);
  block.y = by_token(y);
  bool taken = false;
  on_gpu(x, [&](const auto& device) {
    taken = kernels::cuda::takes_step_block(block);
    if (taken) kernels::cuda::step_block(block, device);
  });
  return taken ? y : at::Tensor();
}

void run_short_conv(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<ConvCall> self(op);
  ConvCall a = self.pop(*stack);
  const auto sizes = check_short_conv(self.name(), a);
  const auto y = room_like(a.x);
  const auto state = a.output_final_state
                         ? at::empty_symint({sizes.sequences, sizes.channels, sizes.width - 1}, a.x.options())
                         : nothing_like(a.x);
  if (!a.x.device().is_meta()) {
    if (values_are_checked(a.x.device())) check_values(self.name(), a);
    prepare(a);
    const auto conv = conv_of(a, sizes);
    const kernels::ShortConvOutputs outputs{.y = conv_view(y), .final_state = view(state)};
    run(
        self.name(), a.x.device(), [&](const auto& executor) { kernels::cpu::short_conv(conv, outputs, executor); },
        [&](const auto& device) { kernels::cuda::short_conv(conv, outputs, device); });
  }
  push_results(*stack, {y, state});
}

void run_short_conv_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<ConvCall> self(op);
  ConvCall a = self.pop(*stack);
  const auto sizes = check_short_conv_backward(self.name(), a);
  const auto results = gradient_room(a, std::array{a.x, a.weight, a.bias, a.initial_state});
  if (!a.x.device().is_meta()) differentiate_conv(a, sizes, results);
  push_results(*stack, results);
}

void run_short_conv_step(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<ConvCall> self(op);
  ConvCall a = self.pop(*stack);
  const auto sizes = check_short_conv_step(self.name(), a);
  const auto y = room_like(a.x);
  if (!a.x.device().is_meta()) {
    if (values_are_checked(a.x.device())) check_values(self.name(), a);
    prepare(a);
    const auto step = step_of(a, sizes, y);
    run(
        self.name(), a.x.device(), [&](const auto& executor) { kernels::cpu::short_conv_step(step, executor); },
        [&](const auto& device) { kernels::cuda::short_conv_step(step, device); });
  }
  push_results(*stack, {y});
}

void run_gated_rms_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<NormCall> self(op);
  NormCall a = self.pop(*stack);
  check_gated_rms_norm(self.name(), a);
  const auto y = room_like(a.x);
  if (!a.x.device().is_meta()) {
    prepare(a);
    const auto norm = norm_of(a);
    run(
        self.name(), a.x.device(), [&](const auto& executor) { kernels::cpu::gated_rms_norm(norm, view(y), executor); },
        [&](const auto& device) { kernels::cuda::gated_rms_norm(norm, view(y), device); });
  }
  push_results(*stack, {y});
}

void run_gated_rms_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<NormCall> self(op);
  NormCall a = self.pop(*stack);
  check_gated_rms_norm_backward(self.name(), a);
  const auto results = gradient_room(a, std::array{a.x, a.gate, a.weight});
  if (!a.x.device().is_meta()) differentiate_norm(a, results);
  push_results(*stack, results);
}

}  // namespace gka::ops
