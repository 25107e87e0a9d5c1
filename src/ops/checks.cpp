#include "ops/checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <vector>

#include "gka/block_kernels.h"
#include "kernels/problem.h"

namespace gka::ops {
namespace {

constexpr std::int64_t kLargestDim = 256;

template <typename... Parts>
std::string sentence(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// What types an argument takes.
enum class Type { data, like_anchor, gate, state, floating, index, int32, float64 };

/// One tensor argument. Each letter of `shape` is a size, and means the same in every rule of a call: the first tensor
/// that has it sets it.
struct Rule {
  std::string_view name;  // as the user knows it
  at::Tensor Arguments::* tensor;
  std::string_view shape;
  Type type;
  bool required = false;
  bool host = false;  // may stay on the CPU whatever the device
};

constexpr Rule kCallRules[] = {
    {"q", &Arguments::q, "BTHD", Type::data, true},
    {"k", &Arguments::k, "BTHD", Type::like_anchor, true},
    {"v", &Arguments::v, "BTHV", Type::like_anchor},
    {"log_decay", &Arguments::log_decay, "BTH", Type::gate},
    {"beta", &Arguments::beta, "BTH", Type::gate},
    {"alpha", &Arguments::alpha, "BTH", Type::gate},
    {"ridge", &Arguments::ridge_diagonal, "HD", Type::floating},
    {"initial_state h", &Arguments::h0, "NHDD", Type::state},
    {"initial_state u", &Arguments::u0, "NHDV", Type::state},
};

// What the backward pass takes besides, by what the forward pass did: solved, remembered values, or either.
constexpr Rule kSolveRules[] = {
    {"x", &Arguments::x, "BTHD", Type::state, true},
    {"norm", &Arguments::norm, "BTH", Type::float64, true},
    {"h_segments", &Arguments::h_segments, "SHDD", Type::state, true},
};
constexpr Rule kMemoryRules[] = {
    {"u_segments", &Arguments::u_segments, "SHDV", Type::state, true},
};
constexpr Rule kStateGradientRules[] = {
    {"d_h", &Arguments::d_h, "NHDD", Type::state},
    {"d_u", &Arguments::d_u, "NHDV", Type::state},
};

// The block's small operations. 1 is one, P is W − 1.
constexpr Rule kConvRules[] = {
    {"x", &Arguments::x, "BTC", Type::data, true},
    {"weight", &Arguments::weight, "C1W", Type::floating, true},
    {"bias", &Arguments::bias, "C", Type::floating},
    {"initial_state", &Arguments::initial_state, "NCP", Type::floating},
    {"d_y", &Arguments::d_y, "BTC", Type::like_anchor},
    {"d_final_state", &Arguments::d_final_state, "NCP", Type::like_anchor},
};
constexpr Rule kConvStepRules[] = {
    {"x", &Arguments::x, "BC", Type::data, true},
    {"weight", &Arguments::weight, "C1W", Type::floating, true},
    {"bias", &Arguments::bias, "C", Type::floating},
    {"state", &Arguments::state, "NCP", Type::floating, true},
    {"state_indices", &Arguments::state_indices, "B", Type::index, false, true},
};

constexpr Rule kStepRules[] = {
    {"q", &Arguments::q, "BHD", Type::data, true},
    {"k", &Arguments::k, "BHD", Type::like_anchor, true},
    {"v", &Arguments::v, "BHV", Type::like_anchor, true},
    {"log_decay", &Arguments::log_decay, "BH", Type::gate},
    {"beta", &Arguments::beta, "BH", Type::gate},
    {"alpha", &Arguments::alpha, "BH", Type::gate},
    {"ridge", &Arguments::ridge_diagonal, "HD", Type::floating},
    {"state h", &Arguments::h, "NHDD", Type::state, true},
    {"state u", &Arguments::u, "NHDV", Type::state, true},
    {"state_indices", &Arguments::state_indices, "B", Type::index, false, true},
    {"iterations", &Arguments::iterations_per_sequence, "B", Type::int32, false, true},
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
  static const std::map<at::ScalarType, std::string_view> names = {{at::kDouble, "float64"},
                                                                   {at::kFloat, "float32"},
                                                                   {at::kBFloat16, "bfloat16"},
                                                                   {at::kHalf, "float16"},
                                                                   {at::kLong, "int64"},
                                                                   {at::kInt, "int32"},
                                                                   {at::kShort, "int16"},
                                                                   {at::kChar, "int8"},
                                                                   {at::kByte, "uint8"},
                                                                   {at::kBool, "bool"},
                                                                   {at::kComplexFloat, "complex64"},
                                                                   {at::kComplexDouble, "complex128"}};
  const auto found = names.find(type);
  return found == names.end() ? std::string_view(c10::toString(type)) : found->second;
}

std::string join(const std::vector<std::string>& parts, std::string_view last_separator) {
  std::string text;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += i + 1 == parts.size() ? last_separator : std::string_view(", ");
    text += parts[i];
  }
  return text;
}

std::string spelled(std::string_view shape) {
  std::vector<std::string> letters;
  for (const char letter : shape) letters.emplace_back(1, letter);
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
  Checker(std::string_view op, const Arguments& arguments, std::string_view anchor_name = "q",
          at::Tensor Arguments::* anchor = &Arguments::q)
      : op_(op), arguments_(arguments), anchor_name_(anchor_name), anchor_(arguments.*anchor) {}

  std::string_view anchor_name() const { return anchor_name_; }

  void set(char letter, c10::SymInt size) { sizes_[letter] = std::move(size); }
  c10::SymInt size(char letter) const {
    const auto found = sizes_.find(letter);
    return found == sizes_.end() ? c10::SymInt(0) : found->second;
  }

  void check(std::span<const Rule> rules) {
    for (const auto& rule : rules) check(rule);
  }

  void check(const Rule& rule) {
    const at::Tensor& tensor = arguments_.*rule.tensor;
    if (!tensor.defined()) {
      if (rule.required)
        fail_type(sentence(op_, ": ", rule.name, " takes a tensor ", spelled(rule.shape), ", got none"));
      return;
    }
    check_type(rule, tensor);
    check_device(rule, tensor);
    check_shape(rule, tensor);
  }

  void check_dim(std::string_view name, char letter) const {
    const auto dim = size(letter);
    if (surely(dim.sym_lt(1)) || surely(dim.sym_gt(kLargestDim))) {
      fail_value(
          sentence(op_, ": ", name, " takes a last dimension ", letter, " from 1 to ", kLargestDim, ", got ", dim));
    }
  }

 private:
  void check_type(const Rule& rule, const at::Tensor& tensor) const {
    const auto taken = types_taken(rule.type, anchor_);
    if (std::find(taken.begin(), taken.end(), tensor.scalar_type()) != taken.end()) return;
    std::vector<std::string> names;
    for (const auto type : taken) names.emplace_back(type_name(type));
    const bool by_anchor = rule.type == Type::like_anchor || rule.type == Type::gate || rule.type == Type::state;
    const auto why = by_anchor ? sentence(" beside ", anchor_name_, " in ", type_name(anchor_.scalar_type())) : "";
    fail_type(
        sentence(op_, ": ", rule.name, " takes ", join(names, " or "), why, ", got ", type_name(tensor.scalar_type())));
  }

  void check_device(const Rule& rule, const at::Tensor& tensor) const {
    const auto device = anchor_.device();
    if (tensor.device() == device || (rule.host && tensor.device().is_cpu())) return;
    fail_value(sentence(op_, ": ", rule.name, " takes a tensor on the device of ", anchor_name_, ", ", device,
                        ", got one on ", tensor.device()));
  }

  void check_shape(const Rule& rule, const at::Tensor& tensor) {
    const auto got = tensor.sym_sizes();
    bool same = got.size() == rule.shape.size();
    for (std::size_t i = 0; same && i < got.size(); ++i) {
      const auto [known, first] = sizes_.try_emplace(rule.shape[i], got[i]);
      same = first || !surely(known->second.sym_ne(got[i]));
    }
    if (same) return;
    fail_value(sentence(op_, ": ", rule.name, " takes shape ", spelled(rule.shape), filled_in(rule.shape), ", got ",
                        spelled(got)));
  }

  /// " = [2, 5, 3, 16]" where the sizes are known.
  std::string filled_in(std::string_view shape) const {
    std::vector<c10::SymInt> sizes;
    for (const char letter : shape) {
      const auto found = sizes_.find(letter);
      if (found == sizes_.end()) return "";
      sizes.push_back(found->second);
    }
    return " = " + spelled(c10::SymIntArrayRef(sizes));
  }

  std::string_view op_;
  const Arguments& arguments_;
  std::string_view anchor_name_;
  const at::Tensor& anchor_;
  std::map<char, c10::SymInt> sizes_;
};

template <typename Enum>
Enum parse(std::string_view op, std::string_view name, const std::string& text) {
  if (const auto value = parse_name<Enum>(text)) return *value;
  fail_value(sentence(op, ": ", name, " takes one of ", list_names<Enum>(), ", got \"", text, "\""));
}

void check_packing(std::string_view op, const Arguments& arguments, Checker& checker) {
  const auto& cu_seqlens = arguments.cu_seqlens;
  if (!cu_seqlens.defined()) {
    checker.set('N', checker.size('B'));
    return;
  }
  constexpr Rule rule = {"cu_seqlens", &Arguments::cu_seqlens, "L", Type::index, false, true};
  checker.check(rule);
  if (surely(cu_seqlens.sym_size(0).sym_lt(1))) {
    fail_value(sentence(op, ": cu_seqlens takes one entry more than there are sequences, got none"));
  }
  if (surely(checker.size('B').sym_ne(1))) {
    fail_value(
        sentence(op, ": ", checker.anchor_name(), " takes batch size 1 beside cu_seqlens, got ", checker.size('B')));
  }
  checker.set('N', cu_seqlens.sym_size(0) - 1);
}

Sizes check_inputs(std::string_view op, const Arguments& arguments, Checker& checker) {
  checker.check(kCallRules[0]);  // q, before anything is measured by it
  check_packing(op, arguments, checker);
  checker.check(std::span(kCallRules).subspan(1));
  checker.check_dim("q", 'D');
  if (arguments.part != "solve") {
    if (!arguments.v.defined()) fail_type(sentence(op, ": v takes a tensor [B, T, H, V], got none"));
    checker.check_dim("v", 'V');
  }
  checker.set('S', kernels::saved_segments(arguments.cu_seqlens.defined(), checker.size('B'), checker.size('T'),
                                           checker.size('N')));
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
    fail_value(sentence(op, ": ", name, " takes ", takes, ", got ", value, " at ",
                        spelled(c10::SymIntArrayRef(at).slice(skip))));
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

void check_slots(std::string_view op, const Arguments& arguments, const at::Tensor& pool) {
  if (!arguments.state_indices.defined()) return;
  const auto slots = pool.size(0);
  std::set<std::int64_t> seen;
  for (const auto index : integers(arguments.state_indices)) {
    if (index < 0 || index >= slots) {
      fail_value(sentence(op, ": state_indices takes slots from 0 to ", slots - 1, " of the state, got ", index));
    }
    if (!seen.insert(index).second) {
      fail_value(sentence(op, ": state_indices takes distinct slots, got ", index, " twice"));
    }
  }
}

void check_in_place(std::string_view op, std::string_view name, const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  fail_value(sentence(op, ": ", name, " takes a contiguous tensor, because it is updated in place, got strides ",
                      spelled(tensor.sym_strides())));
}

void check_slot_count(std::string_view op, const Arguments& arguments, const Checker& checker) {
  if (arguments.state_indices.defined() || !surely(checker.size('N').sym_ne(checker.size('B')))) return;
  fail_value(sentence(op, ": state takes one slot per sequence, ", checker.size('B'),
                      ", unless state_indices picks from a pool, got ", checker.size('N')));
}

/// x and weight, which set the sizes of everything else.
void check_taps(std::string_view op, std::span<const Rule> rules, Checker& checker) {
  checker.set('1', 1);
  checker.check(rules.first(2));
  const auto width = checker.size('W');
  if (surely(width.sym_lt(1)) || surely(width.sym_gt(kernels::kMaxConvWidth))) {
    fail_value(sentence(op, ": weight takes from 1 to ", kernels::kMaxConvWidth, " taps, got ", width));
  }
  checker.set('P', width - 1);
}

void check_heads(std::string_view op, const Arguments& arguments, const Checker& checker) {
  if (arguments.l2_norm == "none") return;
  const auto channels = checker.size('C');
  const auto dim = arguments.head_dim;
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

ConvSizes check_conv(std::string_view op, const Arguments& arguments) {
  Checker checker(op, arguments, "x", &Arguments::x);
  check_taps(op, kConvRules, checker);
  check_packing(op, arguments, checker);
  checker.check(std::span(kConvRules).subspan(2));
  check_heads(op, arguments, checker);
  return conv_sizes(checker);
}

void check_eps(std::string_view op, double eps) {
  if (eps >= 0 && std::isfinite(eps)) return;
  fail_value(sentence(op, ": eps takes a finite number of at least 0, got ", eps));
}

void check_norm(std::string_view op, const Arguments& arguments) {
  Checker checker(op, arguments, "x", &Arguments::x);
  constexpr std::string_view kLetters = "BTHD";
  const auto dims = arguments.x.dim();
  if (dims < 1 || dims > 4) fail_value(sentence(op, ": x takes one to four dimensions, got ", dims));
  const auto shape = kLetters.substr(static_cast<std::size_t>(4 - dims));
  checker.check({"x", &Arguments::x, shape, Type::data, true});
  checker.check({"gate", &Arguments::gate, shape, Type::floating});
  checker.check({"weight", &Arguments::weight, "D", Type::floating});
  checker.check({"d_y", &Arguments::d_y, shape, Type::like_anchor});
  const auto dim = checker.size('D');
  if (surely(dim.sym_lt(1)) || surely(dim.sym_gt(kernels::kMaxNormDim))) {
    fail_value(sentence(op, ": x takes a last dimension from 1 to ", kernels::kMaxNormDim, ", got ", dim));
  }
}

void check_needs(std::string_view op, const Arguments& arguments, std::size_t count) {
  if (arguments.needs.size() == count) return;
  fail_value(sentence(op, ": needs takes ", count, " entries, got ", arguments.needs.size()));
}

}  // namespace

void fail_value(const std::string& sentence) { throw c10::ValueError(sentence); }
void fail_type(const std::string& sentence) { throw c10::TypeError(sentence); }

std::string_view public_name(const Arguments& arguments) {
  if (arguments.part == "solve") return "ridge_solve";
  if (arguments.part == "memory") return "linear_memory";
  return "gated_kalmanet";
}

kernels::DType kernel_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return kernels::DType::float64;
    case at::kBFloat16: return kernels::DType::bfloat16;
    case at::kHalf: return kernels::DType::float16;
    default: break;
  }
  if (type != at::kFloat)
    fail_type(sentence("dtype takes float64, float32, bfloat16 or float16, got ", type_name(type)));
  return kernels::DType::float32;
}

at::ScalarType accumulation_type(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

kernels::Options parse_options(std::string_view op, const Arguments& arguments) {
  const kernels::Options options = {
      .part = parse<kernels::Part>(op, "part", arguments.part),
      .scale = arguments.scale,
      .ridge = arguments.ridge,
      .iterations = arguments.iterations,
      .solver = parse<Solver>(op, "solver", arguments.solver),
      .gradient = parse<Gradient>(op, "gradient", arguments.gradient),
      .ridge_mode = parse<RidgeMode>(op, "ridge_mode", arguments.ridge_mode),
      .ridge_gradient = arguments.ridge_gradient,
      .decay_keys = arguments.decay_keys,
      .refine = arguments.refine,
  };
  if (options.iterations < 0) {
    fail_value(sentence(op, ": iterations takes a number of at least 0, got ", options.iterations));
  }
  if (!(options.ridge > 0) || !std::isfinite(options.ridge)) {
    fail_value(sentence(op, ": ridge takes a finite number above 0, got ", options.ridge));
  }
  if (arguments.ridge_diagonal.defined()) {
    if (options.ridge_mode != RidgeMode::constant) {
      fail_value(
          sentence(op, ": ridge takes a tensor only with ridge_mode \"constant\", got \"", arguments.ridge_mode, "\""));
    }
    if (options.solver != Solver::conjugate_gradient && options.solver != Solver::exact) {
      fail_value(sentence(op, ": ridge takes a tensor only with the solvers conjugate_gradient and exact, got \"",
                          arguments.solver, "\""));
    }
  }
  return options;
}

Sizes check_call(std::string_view op, const Arguments& arguments) {
  Checker checker(op, arguments);
  return check_inputs(op, arguments, checker);
}

Sizes check_backward(const Arguments& arguments) {
  constexpr std::string_view op = "gated_kalmanet_backward";
  Checker checker(op, arguments);
  const auto sizes = check_inputs(op, arguments, checker);
  if (arguments.part != "memory") checker.check(kSolveRules);
  if (arguments.part != "solve") checker.check(kMemoryRules);
  checker.check(kStateGradientRules);
  const Rule d_o = {"d_o", &Arguments::d_o, arguments.part == "solve" ? "BTHD" : "BTHV", Type::like_anchor, true};
  checker.check(d_o);
  check_needs(op, arguments, std::size(kDifferentiable));
  return sizes;
}

Sizes check_step(const Arguments& arguments) {
  constexpr std::string_view op = "gated_kalmanet_step";
  Checker checker(op, arguments);
  checker.check(kStepRules);
  checker.check_dim("q", 'D');
  checker.check_dim("v", 'V');
  check_in_place(op, "state h", arguments.h);
  check_in_place(op, "state u", arguments.u);
  check_slot_count(op, arguments, checker);
  return {.batch = checker.size('B'),
          .tokens = 1,
          .heads = checker.size('H'),
          .key_dim = checker.size('D'),
          .value_dim = checker.size('V'),
          .sequences = checker.size('N'),
          .segments = 0};
}

ConvSizes check_short_conv(const Arguments& arguments) { return check_conv("short_conv", arguments); }

ConvSizes check_short_conv_backward(const Arguments& arguments) {
  check_needs("short_conv_backward", arguments, 4);
  return check_conv("short_conv_backward", arguments);
}

ConvSizes check_short_conv_step(const Arguments& arguments) {
  constexpr std::string_view op = "short_conv_step";
  Checker checker(op, arguments, "x", &Arguments::x);
  check_taps(op, kConvStepRules, checker);
  checker.check(std::span(kConvStepRules).subspan(2));
  check_heads(op, arguments, checker);
  check_in_place(op, "state", arguments.state);
  check_slot_count(op, arguments, checker);
  return conv_sizes(checker);
}

void check_gated_rms_norm(const Arguments& arguments) { check_norm("gated_rms_norm", arguments); }

void check_gated_rms_norm_backward(const Arguments& arguments) {
  check_needs("gated_rms_norm_backward", arguments, 3);
  check_norm("gated_rms_norm_backward", arguments);
}

ConvOptions parse_conv_options(std::string_view op, const Arguments& arguments) {
  const ConvOptions options = {.activation = parse<Activation>(op, "activation", arguments.activation),
                               .l2_norm = parse<L2Norm>(op, "l2_norm", arguments.l2_norm)};
  if (options.activation == Activation::sigmoid) {
    fail_value(sentence(op, ": activation takes none or silu, got \"", arguments.activation, "\""));
  }
  check_eps(op, arguments.eps);
  return options;
}

Activation parse_gate_options(std::string_view op, const Arguments& arguments) {
  check_eps(op, arguments.eps);
  return parse<Activation>(op, "activation", arguments.activation);
}

void check_conv_values(std::string_view op, const Arguments& arguments) {
  check_cu_seqlens(op, arguments.cu_seqlens, arguments.x);
  check_slots(op, arguments, arguments.state);
}

void check_values(std::string_view op, const Arguments& arguments) {
  constexpr auto infinity = std::numeric_limits<double>::infinity();
  check_each(op, "log_decay", arguments.log_decay, "numbers of at most 0", [](double g) { return !(g <= 0); });
  check_each(op, "beta", arguments.beta, "numbers of at least 0", [](double b) { return b < 0; });
  check_each(op, "ridge", arguments.ridge_diagonal, "finite numbers above 0",
             [](double a) { return !(a > 0 && a < infinity); });
  check_cu_seqlens(op, arguments.cu_seqlens, arguments.q);
  check_slots(op, arguments, arguments.h);
  if (arguments.iterations_per_sequence.defined()) {
    for (const auto iterations : integers(arguments.iterations_per_sequence)) {
      if (iterations < 0) fail_value(sentence(op, ": iterations takes numbers of at least 0, got ", iterations));
    }
  }
}

}  // namespace gka::ops
