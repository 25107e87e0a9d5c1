#include "kernels/checks.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/limits.h"
#include "kernels/problem.h"

namespace gka::kernels {
namespace {

constexpr auto kNone = std::numeric_limits<std::int64_t>::max();

void need(bool fine, const char* sentence) {
  if (!fine) throw std::invalid_argument(sentence);
}

void check_size(const char* name, std::int64_t size, std::int64_t least, std::int64_t most) {
  if (size >= least && size <= most) return;
  const auto range =
      most == kNone ? "at least " + std::to_string(least) : std::to_string(least) + " to " + std::to_string(most);
  throw std::invalid_argument(std::string(name) + " takes " + range + ", got " + std::to_string(size));
}

/// Whether there is anything to do. Sizes whose product no memory has are a mistake, and would be less than nothing.
bool any(std::initializer_list<std::int64_t> sizes) {
  std::int64_t numbers = 1;
  bool beyond = false;
  for (const auto size : sizes) {
    if (size == 0) return false;
    beyond |= numbers > (kNone >> 12) / size;  // of 256 channels of 8 bytes, and a little more
    if (!beyond) numbers *= size;
  }
  need(!beyond, "the sizes are those of more numbers than memory can hold");
  return true;
}

/// A choice that was made from a number may be none of those that have a name. `of`: a part of what `name` is.
template <typename Enum>
void check_choice(const char* name, Enum choice, const char* of = "") {
  const auto& names = names_of(choice);
  if (std::ranges::any_of(names, [&](const auto& entry) { return entry.second == choice; })) return;
  throw std::invalid_argument(std::string(name) + of + " takes one of " + list_names<Enum>() + ", got number " +
                              std::to_string(static_cast<int>(choice)));
}

using NamedView = std::pair<const char*, const View&>;

/// Of those that are not left out.
void check_types(std::initializer_list<NamedView> views) {
  for (const auto& [name, view] : views) {
    if (view) check_choice(name, view.dtype, ".dtype");
  }
}

void check_options(const Options& options) {
  check_size("options.iterations", options.iterations, 0, kMostIterations);
  check_size("options.chunk", options.chunk, 0, kNone);
  check_choice("options.part", options.part);
  check_choice("options.solver", options.solver);
  check_choice("options.gradient", options.gradient);
  check_choice("options.ridge_mode", options.ridge_mode);
  need(options.ridge >= 0 && std::isfinite(options.ridge), "options.ridge takes a finite number of at least 0");
  if (options.ridge_diagonal == nullptr) return;
  need(options.ridge_mode == RidgeMode::constant &&
           (options.solver == Solver::conjugate_gradient || options.solver == Solver::exact),
       "options.ridge_diagonal takes RidgeMode::constant and the solver conjugate_gradient or exact");
}

/// Of a Problem or a ShortConv.
template <typename Call>
void check_sequences(const Call& p) {
  if (p.cu_seqlens == nullptr)
    return need(p.sequences == p.batch, "sequences takes batch where there is no cu_seqlens");
  need(p.batch == 1, "batch takes 1 where there is cu_seqlens");
  need(p.sequences >= 0 && p.cu_seqlens[0] == 0, "cu_seqlens takes sequences + 1 numbers, of which the first is 0");
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    need(p.cu_seqlens[n] <= p.cu_seqlens[n + 1], "cu_seqlens takes numbers that never decrease");
  }
  need(p.cu_seqlens[p.sequences] == p.tokens, "cu_seqlens takes tokens as its last number");
}

/// What a Problem and a Step have in common.
template <typename Call>
void check_heads(const Call& call, bool values) {
  check_size("heads", call.heads, 0, std::numeric_limits<std::int32_t>::max());
  check_size("key_dim", call.key_dim, 1, kLargestDim);
  if (values) check_size("value_dim", call.value_dim, 1, kLargestDim);
  need(call.key_group >= 1 && call.heads % call.key_group == 0, "key_group takes a divisor of heads");
  need(call.value_group >= 1 && call.heads % call.value_group == 0, "value_group takes a divisor of heads");
  check_options(call.options);
  check_types({{"q", call.q}, {"k", call.k}, {"v", call.v}});
  check_types({{"log_decay", call.log_decay}, {"beta", call.beta}, {"alpha", call.alpha}});
}

/// Queries, keys and, unless left out, values: there, and of one type.
void check_inputs(const View& q, const View& k, const View* v) {
  need(q && k && (v == nullptr || *v), "q, k and v take the address of their first number, and one of them is null");
  need(q.dtype == k.dtype && (v == nullptr || q.dtype == v->dtype), "q, k and v take one type for all of them");
}

/// Whether there is anything to do.
bool check(const Problem& p) {
  check_size("batch", p.batch, 0, kNone);
  check_size("tokens", p.tokens, 0, kNone);
  check_heads(p, remembers_values(p));
  check_sequences(p);
  if (!any({p.batch, p.tokens, p.heads})) return false;
  check_inputs(p.q, p.k, remembers_values(p) ? &p.v : nullptr);
  return true;
}

void check_indices(const std::int64_t* indices, std::int64_t batch) {
  for (std::int64_t b = 0; indices != nullptr && b < batch; ++b) check_size("state_indices", indices[b], 0, kNone);
}

void check_conv(const ShortConv& c) {
  check_size("batch", c.batch, 0, kNone);
  check_size("channels", c.channels, 0, kNone);
  check_size("width", c.width, 1, kMaxConvWidth);
  need(c.activation == Activation::none || c.activation == Activation::silu, "activation takes none or silu");
  check_choice("l2_norm", c.l2_norm);
  check_types({{"x", c.x}, {"weight", c.weight}, {"bias", c.bias}, {"initial_state", c.initial_state}});
  if (c.l2_norm == L2Norm::none) return;
  check_size("head_dim", c.head_dim, 1, kMaxConvHead);
  need(c.channels % c.head_dim == 0, "head_dim takes a divisor of channels");
}

void check_conv_inputs(const ShortConv& c) {
  need(c.x && c.weight, "x and weight take the address of their first number, and one of them is null");
}

/// Whether there is anything to do.
bool check(const ShortConv& c) {
  check_conv(c);
  check_size("tokens", c.tokens, 0, kNone);
  check_sequences(c);
  if (!any({c.batch, c.tokens, c.channels})) return false;
  check_conv_inputs(c);
  return true;
}

/// Whether there is anything to do.
bool check(const GatedRmsNorm& n) {
  check_size("batch", n.batch, 0, kNone);
  check_size("tokens", n.tokens, 0, kNone);
  check_size("heads", n.heads, 0, kNone);
  check_size("dim", n.dim, 1, kMaxNormDim);
  check_choice("activation", n.activation);
  check_types({{"x", n.x}, {"gate", n.gate}, {"weight", n.weight}});
  if (!any({n.batch, n.tokens, n.heads, n.dim})) return false;
  need(n.x.data != nullptr, "x takes the address of its first number, and is null");
  return true;
}

constexpr const char* kNoY = "y takes the address of its first number, and is null";
constexpr const char* kNoGradientOfY = "d_y takes the address of its first number, and is null";

}  // namespace

void check(const Problem& p, const Outputs& out) {
  if (!check(p)) return;
  check_types({{"o", out.o}});
  const Saved& s = out.saved;
  if (s.x == nullptr && s.norm == nullptr && s.h == nullptr && s.u == nullptr) return;
  need(!solves(p) || (s.x && s.norm && s.h), "saved takes room for x, norm and h, or for nothing");
  need(!remembers_values(p) || s.u, "saved takes room for u, or for nothing");
}

void check(const Problem& p, const Gradients& gradients) {
  need(!check(p) || gradients.d_o.data != nullptr, "d_o takes the address of its first number, and is null");
  const auto& g = gradients;
  check_types({{"d_o", g.d_o}, {"d_q", g.d_q}, {"d_k", g.d_k}, {"d_v", g.d_v}});
  check_types({{"d_log_decay", g.d_log_decay}, {"d_beta", g.d_beta}, {"d_alpha", g.d_alpha}});
}

void check(const Problem& p, const Saved& saved, const Gradients& gradients) {
  check(p, gradients);
  if (!any({p.batch, p.tokens, p.heads})) return;
  need(!solves(p) || (saved.x && saved.norm && saved.h), "saved takes what forward left in its x, norm and h");
  need(!remembers_values(p) || saved.u, "saved takes what forward left in its u");
}

void check(const Step& s) {
  check_size("batch", s.batch, 0, kNone);
  check_heads(s, /*values=*/true);
  if (!any({s.batch, s.heads})) return;
  check_inputs(s.q, s.k, &s.v);
  check_types({{"o", s.o}});
  need(s.o && s.h && s.u, "o, h and u take the addresses of their first numbers, and one of them is null");
  check_indices(s.state_indices, s.batch);
  for (std::int64_t b = 0; s.iterations != nullptr && b < s.batch; ++b) {
    check_size("iterations", s.iterations[b], 0, kMostIterations);
  }
}

void check(const ShortConv& c, const ShortConvOutputs& out) {
  need(!check(c) || out.y, kNoY);
  check_types({{"y", out.y}, {"final_state", out.final_state}});
}

void check(const ShortConv& c, const ShortConvGradients& gradients) {
  need(!check(c) || gradients.d_y, kNoGradientOfY);
  const auto& g = gradients;
  check_types({{"d_y", g.d_y}, {"d_final_state", g.d_final_state}, {"d_x", g.d_x}});
  check_types({{"d_weight", g.d_weight}, {"d_bias", g.d_bias}, {"d_initial_state", g.d_initial_state}});
}

void check(const ShortConvStep& s) {
  check_conv(s.conv);
  if (!any({s.conv.batch, s.conv.channels})) return;
  check_conv_inputs(s.conv);
  need(s.y.data != nullptr, kNoY);
  need(s.conv.width == 1 || s.state, "state takes the address of its first number, and is null");
  check_types({{"y", s.y}, {"state", s.state}});
  check_indices(s.state_indices, s.conv.batch);
}

void check(const GatedRmsNorm& n, const View& y) {
  need(!check(n) || y, kNoY);
  check_types({{"y", y}});
}

void check(const GatedRmsNorm& n, const GatedRmsNormGradients& gradients) {
  need(!check(n) || gradients.d_y, kNoGradientOfY);
  const auto& g = gradients;
  check_types({{"d_y", g.d_y}, {"d_x", g.d_x}, {"d_gate", g.d_gate}, {"d_weight", g.d_weight}});
}

void check(const Executor& executor) {
  need(executor.threads <= 1 || executor.run, "an executor of several threads takes a function `run`");
}

}  // namespace gka::kernels
