#include "ops/checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <type_traits>
#include <vector>

#include "base/limits.h"
#include "gka/block_kernels.h"
#include "gka/errors.h"
#include "kernels/problem.h"
#include "ops/dtypes.h"

namespace gka::ops {
namespace {

template <typename... Parts>
std::string sentence(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

constexpr char kSharedHeads = 'h';

// What types an argument takes.
enum class Type { data, like_anchor, gate, state, floating, index, int32, float64 };

/// One tensor argument. Each letter of `shape` is a size, and means the same in every rule of a call: the first tensor
/// that has it sets it. h is H or a divisor of it: heads that several of q's share.
template <typename Call>
struct Rule {
  std::string_view name;  // as the user knows it
  at::Tensor Call::* tensor;
  std::string_view shape;
  Type type;
  bool required = false;
  bool host = false;  // may stay on the CPU whatever the device
};

constexpr Rule<MemoryCall> kCallRules[] = {
    {"q", &MemoryCall::q, "BTHD", Type::data, true},
    {"k", &MemoryCall::k, "BThD", Type::like_anchor, true},
    {"v", &MemoryCall::v, "BThV", Type::like_anchor},
    {"log_decay", &MemoryCall::log_decay, "BTH", Type::gate},
    {"beta", &MemoryCall::beta, "BTH", Type::gate},
    {"alpha", &MemoryCall::alpha, "BTH", Type::gate},
    {"ridge", &MemoryCall::ridge_diagonal, "HD", Type::floating},
    {"initial_state h", &MemoryCall::h0, "NHDD", Type::state},
    {"initial_state u", &MemoryCall::u0, "NHDV", Type::state},
};

// What the backward pass takes besides, by what the forward pass did: solved, remembered values, or either.
constexpr Rule<MemoryCall> kSolveRules[] = {
    {"x", &MemoryCall::x, "BTHD", Type::state, true},
    {"norm", &MemoryCall::norm, "BTH", Type::float64, true},
    {"h_segments", &MemoryCall::h_segments, "SHDD", Type::state, true},
};
constexpr Rule<MemoryCall> kMemoryRules[] = {
    {"u_segments", &MemoryCall::u_segments, "SHDV", Type::state, true},
};
constexpr Rule<MemoryCall> kStateGradientRules[] = {
    {"d_h", &MemoryCall::d_h, "NHDD", Type::state},
    {"d_u", &MemoryCall::d_u, "NHDV", Type::state},
};

// The block's small operations. 1 is one, P is W − 1.
constexpr Rule<ConvCall> kConvRules[] = {
    {"x", &ConvCall::x, "BTC", Type::data, true},
    {"weight", &ConvCall::weight, "C1W", Type::floating, true},
    {"bias", &ConvCall::bias, "C", Type::floating},
    {"initial_state", &ConvCall::initial_state, "NCP", Type::floating},
    {"d_y", &ConvCall::d_y, "BTC", Type::like_anchor},
    {"d_final_state", &ConvCall::d_final_state, "NCP", Type::like_anchor},
};
constexpr Rule<ConvCall> kConvStepRules[] = {
    {"x", &ConvCall::x, "BC", Type::data, true},
    {"weight", &ConvCall::weight, "C1W", Type::floating, true},
    {"bias", &ConvCall::bias, "C", Type::floating},
    {"state", &ConvCall::state, "NCP", Type::floating, true},
    {"state_indices", &ConvCall::state_indices, "B", Type::index, false, true},
};

constexpr Rule<MemoryCall> kStepRules[] = {
    {"q", &MemoryCall::q, "BHD", Type::data, true},
    {"k", &MemoryCall::k, "BhD", Type::like_anchor, true},
    {"v", &MemoryCall::v, "BhV", Type::like_anchor, true},
    {"log_decay", &MemoryCall::log_decay, "BH", Type::gate},
    {"beta", &MemoryCall::beta, "BH", Type::gate},
    {"alpha", &MemoryCall::alpha, "BH", Type::gate},
    {"ridge", &MemoryCall::ridge_diagonal, "HD", Type::floating},
    {"state h", &MemoryCall::h, "NHDD", Type::state, true},
    {"state u", &MemoryCall::u, "NHDV", Type::state, true},
    {"state_indices", &MemoryCall::state_indices, "B", Type::index, false, true},
    {"iterations", &MemoryCall::iterations_per_sequence, "B", Type::int32, false, true},
    {"certainty", &MemoryCall::certainty, "BH", Type::float64},
};

std::vector<at::ScalarType> types_taken(Type type, const at::Tensor& q) {
  switch (type) {
    case Type::data:
    case Type::floating: return {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
    case Type::like_anchor: return {q.scalar_type()};
    case Type::gate:
      if (q.scalar_type() == at::kDouble || q.scalar_type() == at::kFloat) return {q.scalar_type()};
      return {q.scalar_type(), at::kFloat};
    case Type::state: return {accumulation_type(q)};
    case Type::index: return {at::kInt, at::kLong};
    case Type::int32: return {at::kInt};
    case Type::float64: return {at::kDouble};
  }
  return {};
}

/// "float32", where c10 says "Float".
std::string_view type_name(at::ScalarType type) {
  if (const auto dtype = find_dtype(type)) return name_of(*dtype);
  switch (type) {
    case at::kLong: return "int64";
    case at::kInt: return "int32";
    case at::kShort: return "int16";
    case at::kChar: return "int8";
    case at::kByte: return "uint8";
    case at::kBool: return "bool";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    default: return c10::toString(type);
  }
}

std::string join(const std::vector<std::string>& parts, std::string_view last_separator) {
  std::string text;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += i + 1 == parts.size() ? last_separator : std::string_view(", ");
    text += parts[i];
  }
  return text;
}

constexpr char capital(char letter) { return letter == kSharedHeads ? 'H' : letter; }

std::string spelled(std::string_view shape) {
  std::vector<std::string> letters;
  for (const char letter : shape) letters.emplace_back(1, capital(letter));
  return "[" + join(letters, ", ") + "]";
}

std::string spelled(c10::SymIntArrayRef sizes) {
  std::vector<std::string> numbers;
  for (const auto& size : sizes) numbers.push_back(sentence(size));
  return "[" + join(numbers, ", ") + "]";
}

// A size that the tracer does not know yet is left to the run itself.
bool surely(const c10::SymBool& condition) { return TORCH_GUARD_OR_FALSE(condition); }

/// Goes through rules and remembers what the letters stand for.
class Checker {
 public:
  /// The others' types and devices are measured by those of the tensor `anchor`.
  Checker(std::string_view op, std::string_view anchor_name, const at::Tensor& anchor)
      : op_(op), anchor_name_(anchor_name), anchor_(anchor) {}

  std::string_view anchor_name() const { return anchor_name_; }

  void set(char letter, c10::SymInt size) { place(letter) = std::move(size); }
  c10::SymInt size(char letter) const { return place(letter).value_or(c10::SymInt(0)); }

  template <typename Call>
  void check(std::type_identity_t<std::span<const Rule<Call>>> rules, const Call& call) {
    for (const auto& rule : rules) check(rule, call);
  }

  template <typename Call>
  void check(const Rule<Call>& rule, const Call& call) {
    const at::Tensor& tensor = call.*rule.tensor;
    if (!tensor.defined()) {
      if (rule.required)
        fail_type(sentence(op_, ": ", rule.name, " takes a tensor ", spelled(rule.shape), ", got none"));
      return;
    }
    check_type(rule.name, rule.type, tensor);
    if (!rule.host || !tensor.device().is_cpu()) check_device(rule.name, tensor);
    check_shape(rule.name, rule.shape, tensor);
  }

  void check_dim(std::string_view name, char letter) const {
    const auto dim = size(letter);
    if (surely(dim.sym_lt(1)) || surely(dim.sym_gt(kLargestDim))) {
      fail_value(
          sentence(op_, ": ", name, " takes a last dimension ", letter, " from 1 to ", kLargestDim, ", got ", dim));
    }
  }

 private:
  void check_type(std::string_view name, Type type, const at::Tensor& tensor) const {
    const auto taken = types_taken(type, anchor_);
    if (std::find(taken.begin(), taken.end(), tensor.scalar_type()) != taken.end()) return;
    std::vector<std::string> names;
    for (const auto one : taken) names.emplace_back(type_name(one));
    const bool by_anchor = type == Type::like_anchor || type == Type::gate || type == Type::state;
    const auto why = by_anchor ? sentence(" beside ", anchor_name_, " in ", type_name(anchor_.scalar_type())) : "";
    fail_type(
        sentence(op_, ": ", name, " takes ", join(names, " or "), why, ", got ", type_name(tensor.scalar_type())));
  }

  void check_device(std::string_view name, const at::Tensor& tensor) const {
    const auto device = anchor_.device();
    if (tensor.device() == device) return;
    fail_value(sentence(op_, ": ", name, " takes a tensor on the device of ", anchor_name_, ", ", device,
                        ", got one on ", tensor.device()));
  }

  void check_shape(std::string_view name, std::string_view shape, const at::Tensor& tensor) {
    const auto got = tensor.sym_sizes();
    bool same = got.size() == shape.size();
    for (std::size_t i = 0; same && i < got.size(); ++i) {
      if (shape[i] == kSharedHeads) continue;
      auto& known = place(shape[i]);
      if (!known) known = got[i];
      same = !surely(known->sym_ne(got[i]));
    }
    if (same) {
      const auto at = shape.find(kSharedHeads);
      return at != std::string_view::npos ? check_shared_heads(name, got[at]) : void();
    }
    fail_value(sentence(op_, ": ", name, " takes shape ", spelled(shape), filled_in(shape), ", got ", spelled(got)));
  }

  void check_shared_heads(std::string_view name, const c10::SymInt& got) const {
    const auto heads = size('H');
    if (!surely(got.sym_ne(heads))) return;
    if (!surely(got.sym_lt(1)) && !surely((heads % got).sym_ne(0))) return;
    fail_value(sentence(op_, ": ", name, " takes as many heads as ", anchor_name_, ", ", heads,
                        ", or a divisor of them, got ", got));
  }

  /// " = [2, 5, 3, 16]" where the sizes are known.
  std::string filled_in(std::string_view shape) const {
    std::vector<c10::SymInt> sizes;
    for (const char letter : shape) {
      if (!place(capital(letter))) return "";
      sizes.push_back(*place(capital(letter)));
    }
    return " = " + spelled(c10::SymIntArrayRef(sizes));
  }

  // Letters are capitals, and 1.
  std::optional<c10::SymInt>& place(char letter) { return sizes_[static_cast<std::size_t>(letter - '1')]; }
  const std::optional<c10::SymInt>& place(char letter) const { return sizes_[static_cast<std::size_t>(letter - '1')]; }

  std::string_view op_;
  std::string_view anchor_name_;
  const at::Tensor& anchor_;
  std::array<std::optional<c10::SymInt>, 'Z' - '1' + 1> sizes_;
};

template <typename Call>
void check_packing(std::string_view op, const Call& call, Checker& checker) {
  const auto& cu_seqlens = call.cu_seqlens;
  if (!cu_seqlens.defined()) {
    checker.set('N', checker.size('B'));
    return;
  }
  constexpr Rule<Call> rule = {"cu_seqlens", &Call::cu_seqlens, "L", Type::index, false, true};
  checker.check(rule, call);
  if (surely(cu_seqlens.sym_size(0).sym_lt(1))) {
    fail_value(sentence(op, ": cu_seqlens takes one entry more than there are sequences, got none"));
  }
  if (surely(checker.size('B').sym_ne(1))) {
    fail_value(
        sentence(op, ": ", checker.anchor_name(), " takes batch size 1 beside cu_seqlens, got ", checker.size('B')));
  }
  checker.set('N', cu_seqlens.sym_size(0) - 1);
}

Sizes check_inputs(std::string_view op, const MemoryCall& call, Checker& checker) {
  checker.check(kCallRules[0], call);  // q, before anything is measured by it
  check_packing(op, call, checker);
  checker.check(std::span(kCallRules).subspan(1), call);
  checker.check_dim("q", 'D');
  if (remembers(call.part)) {
    if (!call.v.defined()) fail_type(sentence(op, ": v takes a tensor [B, T, H, V], got none"));
    checker.check_dim("v", 'V');
  }
  checker.set(
      'S', kernels::saved_segments(call.cu_seqlens.defined(), checker.size('B'), checker.size('T'), checker.size('N')));
  return {.batch = checker.size('B'),
          .tokens = checker.size('T'),
          .heads = checker.size('H'),
          .key_dim = checker.size('D'),
          .value_dim = checker.size('V'),
          .sequences = checker.size('N'),
          .segments = checker.size('S')};
}

/// Finds the first number of a tensor of up to three dimensions for which `bad` holds, and complains about it.
template <typename Bad>
void check_each(std::string_view op, std::string_view name, const at::Tensor& maybe_elsewhere, std::string_view takes,
                Bad&& bad) {
  if (!maybe_elsewhere.defined()) return;
  const at::Tensor tensor = maybe_elsewhere.cpu();
  std::int64_t size[3] = {1, 1, 1};
  std::int64_t stride[3] = {0, 0, 0};
  const auto skip = 3 - tensor.dim();
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    size[skip + d] = tensor.size(d);
    stride[skip + d] = tensor.stride(d);
  }
  const auto complain = [&](std::int64_t i, std::int64_t j, std::int64_t l, double value) {
    const c10::SymInt at[] = {i, j, l};
    const auto text = sentence(op, ": ", name, " takes ", takes, ", got ", value, " at ",
                               spelled(c10::SymIntArrayRef(at).slice(skip)));
    if (!std::isfinite(value)) throw NotFiniteError(text);
    fail_value(text);
  };
  kernels::with_type(kernel_dtype(tensor.scalar_type()), [&]<typename T>(T) {
    const auto* data = static_cast<const T*>(tensor.const_data_ptr());
    for (std::int64_t i = 0; i < size[0]; ++i) {
      for (std::int64_t j = 0; j < size[1]; ++j) {
        for (std::int64_t l = 0; l < size[2]; ++l) {
          const auto value = static_cast<double>(data[i * stride[0] + j * stride[1] + l * stride[2]]);
          if (bad(value)) complain(i, j, l, value);
        }
      }
    }
  });
}

std::vector<std::int64_t> integers(const at::Tensor& tensor) {
  const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
  const auto* data = host.const_data_ptr<std::int64_t>();
  return {data, data + host.numel()};
}

void check_cu_seqlens(std::string_view op, const at::Tensor& cu_seqlens, const at::Tensor& by_token) {
  if (!cu_seqlens.defined()) return;
  const auto bounds = integers(cu_seqlens);
  const auto tokens = by_token.size(1);
  if (bounds.front() != 0) fail_value(sentence(op, ": cu_seqlens takes 0 as its first entry, got ", bounds.front()));
  if (bounds.back() != tokens) {
    fail_value(
        sentence(op, ": cu_seqlens takes the number of tokens, ", tokens, ", as its last entry, got ", bounds.back()));
  }
  for (std::size_t i = 1; i < bounds.size(); ++i) {
    if (bounds[i] < bounds[i - 1]) {
      fail_value(sentence(op, ": cu_seqlens takes entries that never decrease, got ", bounds[i], " after ",
                          bounds[i - 1], " at ", i));
    }
  }
}

void check_slots(std::string_view op, const at::Tensor& state_indices, const at::Tensor& pool) {
  if (!state_indices.defined()) return;
  const auto slots = pool.size(0);
  std::set<std::int64_t> seen;
  for (const auto index : integers(state_indices)) {
    if (index < 0 || index >= slots) {
      fail_value(sentence(op, ": state_indices takes slots from 0 to ", slots - 1, " of the state, got ", index));
    }
    if (!seen.insert(index).second) {
      fail_value(sentence(op, ": state_indices takes distinct slots, got ", index, " twice"));
    }
  }
}

/// h and u are updated in place, one after the other: in one memory each would read what the other wrote.
void check_apart(std::string_view op, const at::Tensor& h, const at::Tensor& u) {
  if (!h.defined() || !u.defined() || h.numel() == 0 || u.numel() == 0) return;
  const auto* first = static_cast<const char*>(h.const_data_ptr());
  const auto* second = static_cast<const char*>(u.const_data_ptr());
  if (first + h.nbytes() <= second || second + u.nbytes() <= first) return;
  fail_value(sentence(op, ": state takes h and u in memory of their own, got tensors that share it"));
}

/// H has squares of keys, and in float32 those of 1e15 and above are too much for what follows (docs/mathematics.md).
void check_size_of_keys(std::string_view op, const at::Tensor& k) {
  constexpr double kLargest = 1e15;
  if (!k.defined() || k.numel() == 0 || k.scalar_type() == at::kDouble || k.scalar_type() == at::kHalf) return;
  const auto largest = k.detach().abs().max().item<double>();
  if (largest < kLargest || !std::isfinite(largest)) return;
  fail_value(sentence(op, ": k takes numbers below 1e15 in ", type_name(k.scalar_type()), ", got ", largest));
}

void check_in_place(std::string_view op, std::string_view name, const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  fail_value(sentence(op, ": ", name, " takes a contiguous tensor, because it is updated in place, got strides ",
                      spelled(tensor.sym_strides())));
}

void check_slot_count(std::string_view op, const at::Tensor& state_indices, const Checker& checker) {
  if (state_indices.defined() || !surely(checker.size('N').sym_ne(checker.size('B')))) return;
  fail_value(sentence(op, ": state takes one slot per sequence, ", checker.size('B'),
                      ", unless state_indices picks from a pool, got ", checker.size('N')));
}

/// x and weight, which set the sizes of everything else.
void check_taps(std::string_view op, std::span<const Rule<ConvCall>> rules, const ConvCall& call, Checker& checker) {
  checker.set('1', 1);
  checker.check(rules.first(2), call);
  const auto width = checker.size('W');
  if (surely(width.sym_lt(1)) || surely(width.sym_gt(kernels::kMaxConvWidth))) {
    fail_value(sentence(op, ": weight takes from 1 to ", kernels::kMaxConvWidth, " taps, got ", width));
  }
  checker.set('P', width - 1);
}

void check_heads(std::string_view op, const ConvCall& call, const Checker& checker) {
  if (call.l2_norm == L2Norm::none) return;
  const auto channels = checker.size('C');
  const auto dim = call.head_dim;
  if (dim < 1 || dim > kernels::kMaxConvHead || surely((channels % dim).sym_ne(0))) {
    fail_value(sentence(op, ": head_dim takes a divisor of the ", channels, " channels from 1 to ",
                        kernels::kMaxConvHead, " beside l2_norm, got ", dim));
  }
}

ConvSizes conv_sizes(const Checker& checker) {
  return {.batch = checker.size('B'),
          .tokens = checker.size('T'),
          .channels = checker.size('C'),
          .width = checker.size('W'),
          .sequences = checker.size('N')};
}

void check_eps(std::string_view op, double eps) {
  if (eps >= 0 && std::isfinite(eps)) return;
  fail_value(sentence(op, ": eps takes a finite number of at least 0, got ", eps));
}

void check_conv_options(std::string_view op, const ConvCall& call) {
  if (call.activation == Activation::sigmoid) {
    fail_value(sentence(op, ": activation takes none or silu, got \"", name_of(call.activation), "\""));
  }
  check_eps(op, call.eps);
}

void check_needs(std::string_view op, const std::vector<bool>& needs, std::size_t count) {
  if (needs.size() == count) return;
  fail_value(sentence(op, ": needs takes ", count, " entries, got ", needs.size()));
}

}  // namespace

void fail_value(const std::string& sentence) { throw c10::ValueError(sentence); }
void fail_type(const std::string& sentence) { throw c10::TypeError(sentence); }

std::string_view public_name(kernels::Part part) {
  switch (part) {
    case kernels::Part::both: return "gated_kalmanet";
    case kernels::Part::solve: return "ridge_solve";
    case kernels::Part::memory: return "linear_memory";
  }
  return "?";
}

kernels::DType kernel_dtype(at::ScalarType type) {
  if (const auto dtype = find_dtype(type)) return *dtype;
  fail_type(sentence("dtype takes float64, float32, bfloat16 or float16, got ", type_name(type)));
}

at::ScalarType accumulation_type(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

kernels::Options check_options(std::string_view op, const MemoryCall& call) {
  const kernels::Options options = {
      .part = call.part,
      .scale = call.scale,
      .ridge = call.ridge,
      .iterations = call.iterations,
      .solver = call.solver,
      .gradient = call.gradient,
      .ridge_mode = call.ridge_mode,
      .ridge_gradient = call.ridge_gradient,
      .decay_keys = call.decay_keys,
      .refine = call.refine,
  };
  if (options.iterations < 0 || options.iterations > kMostIterations) {
    const auto limit = options.iterations < 0 ? sentence("at least 0") : sentence("at most ", kMostIterations);
    fail_value(sentence(op, ": iterations takes a number of ", limit, ", got ", options.iterations));
  }
  if (!(options.ridge > 0) || !std::isfinite(options.ridge)) {
    fail_value(sentence(op, ": ridge takes a finite number above 0, got ", options.ridge));
  }
  if (call.ridge_diagonal.defined()) {
    if (options.ridge_mode != RidgeMode::constant) {
      fail_value(sentence(op, ": ridge takes a tensor only with ridge_mode \"constant\", got \"",
                          name_of(options.ridge_mode), "\""));
    }
    if (options.solver != Solver::conjugate_gradient && options.solver != Solver::exact) {
      fail_value(sentence(op, ": ridge takes a tensor only with the solvers conjugate_gradient and exact, got \"",
                          name_of(options.solver), "\""));
    }
  }
  return options;
}

Sizes check_call(std::string_view op, const MemoryCall& call) {
  Checker checker(op, "q", call.q);
  return check_inputs(op, call, checker);
}

Sizes check_backward(std::string_view op, const MemoryCall& call) {
  Checker checker(op, "q", call.q);
  const auto sizes = check_inputs(op, call, checker);
  if (solves(call.part)) checker.check(kSolveRules, call);
  if (remembers(call.part)) checker.check(kMemoryRules, call);
  checker.check(kStateGradientRules, call);
  const std::string_view shape = remembers(call.part) ? "BTHV" : "BTHD";
  checker.check(Rule<MemoryCall>{"d_o", &MemoryCall::d_o, shape, Type::like_anchor, true}, call);
  check_needs(op, call.needs, std::size(kDifferentiable));
  return sizes;
}

Sizes check_step(std::string_view op, const MemoryCall& call) {
  Checker checker(op, "q", call.q);
  checker.check(kStepRules, call);
  checker.check_dim("q", 'D');
  checker.check_dim("v", 'V');
  check_in_place(op, "state h", call.h);
  check_in_place(op, "state u", call.u);
  if (call.certainty.defined()) check_in_place(op, "certainty", call.certainty);
  check_slot_count(op, call.state_indices, checker);
  return {.batch = checker.size('B'),
          .tokens = 1,
          .heads = checker.size('H'),
          .key_dim = checker.size('D'),
          .value_dim = checker.size('V'),
          .sequences = checker.size('N'),
          .segments = 0};
}

void check_values(std::string_view op, const MemoryCall& call) {
  constexpr auto infinity = std::numeric_limits<double>::infinity();
  check_each(op, "log_decay", call.log_decay, "numbers of at most 0", [](double g) { return !(g <= 0); });
  check_each(op, "beta", call.beta, "numbers of at least 0", [](double b) { return b < 0; });
  check_each(op, "ridge", call.ridge_diagonal, "finite numbers above 0",
             [](double a) { return !(a > 0 && a < infinity); });
  check_cu_seqlens(op, call.cu_seqlens, call.q);
  check_slots(op, call.state_indices, call.h);
  check_apart(op, call.h, call.u);
  check_size_of_keys(op, call.k);
  if (call.iterations_per_sequence.defined()) {
    for (const auto iterations : integers(call.iterations_per_sequence)) {
      if (iterations < 0) fail_value(sentence(op, ": iterations takes numbers of at least 0, got ", iterations));
      if (iterations > kMostIterations) {
        fail_value(sentence(op, ": iterations takes numbers of at most ", kMostIterations, ", got ", iterations));
      }
    }
  }
}

ConvSizes check_short_conv(std::string_view op, const ConvCall& call) {
  check_conv_options(op, call);
  Checker checker(op, "x", call.x);
  check_taps(op, kConvRules, call, checker);
  check_packing(op, call, checker);
  checker.check(std::span(kConvRules).subspan(2), call);
  check_heads(op, call, checker);
  return conv_sizes(checker);
}

ConvSizes check_short_conv_backward(std::string_view op, const ConvCall& call) {
  check_needs(op, call.needs, 4);
  return check_short_conv(op, call);
}

ConvSizes check_short_conv_step(std::string_view op, const ConvCall& call) {
  check_conv_options(op, call);
  Checker checker(op, "x", call.x);
  check_taps(op, kConvStepRules, call, checker);
  checker.check(std::span(kConvStepRules).subspan(2), call);
  check_heads(op, call, checker);
  check_in_place(op, "state", call.state);
  check_slot_count(op, call.state_indices, checker);
  return conv_sizes(checker);
}

void check_values(std::string_view op, const ConvCall& call) {
  check_cu_seqlens(op, call.cu_seqlens, call.x);
  check_slots(op, call.state_indices, call.state);
}

void check_gated_rms_norm(std::string_view op, const NormCall& call) {
  check_eps(op, call.eps);
  Checker checker(op, "x", call.x);
  constexpr std::string_view kLetters = "BTHD";
  const auto dims = call.x.dim();
  if (dims < 1 || dims > 4) fail_value(sentence(op, ": x takes one to four dimensions, got ", dims));
  const auto shape = kLetters.substr(static_cast<std::size_t>(4 - dims));
  const Rule<NormCall> rules[] = {{"x", &NormCall::x, shape, Type::data, true},
                                  {"gate", &NormCall::gate, shape, Type::floating},
                                  {"weight", &NormCall::weight, "D", Type::floating},
                                  {"d_y", &NormCall::d_y, shape, Type::like_anchor}};
  checker.check(rules, call);
  const auto dim = checker.size('D');
  if (surely(dim.sym_lt(1)) || surely(dim.sym_gt(kernels::kMaxNormDim))) {
    fail_value(sentence(op, ": x takes a last dimension from 1 to ", kernels::kMaxNormDim, ", got ", dim));
  }
}

void check_gated_rms_norm_backward(std::string_view op, const NormCall& call) {
  check_needs(op, call.needs, 3);
  check_gated_rms_norm(op, call);
}

}  // namespace gka::ops
