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
[[noreturn]] void fail_value(const std::string& sentence);
[[noreturn]] void fail_type(const std::string& sentence);

/// The choice with that name; complains with a list of them where there is none.
template <typename Enum>
Enum parse_choice(std::string_view op, std::string_view argument, std::string_view name) {
  if (const auto value = parse_name<Enum>(name)) return *value;
  fail_value(std::string(op) + ": " + std::string(argument) + " takes one of " + list_names<Enum>() + ", got \"" +
             std::string(name) + "\"");
}

/// The name under which a user calls a part: "gated_kalmanet", "ridge_solve" or "linear_memory".
std::string_view public_name(kernels::Part part);

/// Whether a part solves for x, with a state H, and whether it remembers values, in a state U.
constexpr bool solves(kernels::Part part) { return part != kernels::Part::memory; }
constexpr bool remembers(kernels::Part part) { return part != kernels::Part::solve; }

/// The options, with every number checked. ridge_diagonal is left to the caller.
kernels::Options check_options(std::string_view op, const MemoryCall& call);

// Shapes, types and devices, for each kind of call.
Sizes check_call(std::string_view op, const MemoryCall& call);
Sizes check_backward(std::string_view op, const MemoryCall& call);
Sizes check_step(std::string_view op, const MemoryCall& call);

/// What only a look at the numbers tells: beta, log_decay, cu_seqlens, a ridge per channel, state_indices, iterations.
void check_values(std::string_view op, const MemoryCall& call);

// The block's small operations, numbers among their options included.
ConvSizes check_short_conv(std::string_view op, const ConvCall& call);
ConvSizes check_short_conv_backward(std::string_view op, const ConvCall& call);
ConvSizes check_short_conv_step(std::string_view op, const ConvCall& call);
/// cu_seqlens and state_indices.
void check_values(std::string_view op, const ConvCall& call);
void check_gated_rms_norm(std::string_view op, const NormCall& call);
void check_gated_rms_norm_backward(std::string_view op, const NormCall& call);

kernels::DType kernel_dtype(at::ScalarType type);

/// The type of states and of what is kept for the backward pass.
at::ScalarType accumulation_type(const at::Tensor& q);

}  // namespace gka::ops
