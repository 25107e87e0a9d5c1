// What each argument must be, checked before anything runs. Every complaint is one sentence that names the argument,
// what it takes and what it got, thrown as c10::ValueError or c10::TypeError (ValueError and TypeError in Python).
#pragma once

#include <c10/core/SymInt.h>

#include <string>
#include <string_view>

#include "gka/kernels.h"
#include "ops/arguments.h"

namespace gka::ops {

/// Symbolic, because the same checks run while torch.compile traces.
struct Sizes {
  c10::SymInt batch, tokens, heads, key_dim, value_dim, sequences, segments;
};

struct ConvSizes {
  c10::SymInt batch, tokens, channels, width, sequences;
};
struct ConvOptions {
  Activation activation = Activation::silu;
  L2Norm l2_norm = L2Norm::none;
};

[[noreturn]] void fail_value(const std::string& sentence);
[[noreturn]] void fail_type(const std::string& sentence);

/// The name under which a user called: "gated_kalmanet", "ridge_solve" or "linear_memory".
std::string_view public_name(const Arguments& arguments);

/// The options by value, with every name and number checked. ridge_diagonal is left to the caller.
kernels::Options parse_options(std::string_view op, const Arguments& arguments);

// Shapes, types and devices, for each kind of call.
Sizes check_call(std::string_view op, const Arguments& arguments);
Sizes check_backward(const Arguments& arguments);
Sizes check_step(const Arguments& arguments);

// The block's small operations.
ConvSizes check_short_conv(const Arguments& arguments);
ConvSizes check_short_conv_backward(const Arguments& arguments);
ConvSizes check_short_conv_step(const Arguments& arguments);
void check_gated_rms_norm(const Arguments& arguments);
void check_gated_rms_norm_backward(const Arguments& arguments);
ConvOptions parse_conv_options(std::string_view op, const Arguments& arguments);
Activation parse_gate_options(std::string_view op, const Arguments& arguments);
/// cu_seqlens and state_indices.
void check_conv_values(std::string_view op, const Arguments& arguments);

/// What only a look at the numbers tells: beta, log_decay, cu_seqlens, a ridge per channel, state_indices, iterations.
void check_values(std::string_view op, const Arguments& arguments);

kernels::DType kernel_dtype(at::ScalarType type);

/// The type of states and of what is kept for the backward pass.
at::ScalarType accumulation_type(const at::Tensor& q);

}  // namespace gka::ops
