#include "ops/arguments.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>

namespace gka::ops {
namespace {

using Member = std::variant<at::Tensor Arguments::*, double Arguments::*, std::int64_t Arguments::*, bool Arguments::*,
                            std::string Arguments::*, std::vector<bool> Arguments::*>;

struct Field {
  std::string_view name;
  Member member;
};

constexpr Field kFields[] = {
    {"q", &Arguments::q},
    {"k", &Arguments::k},
    {"v", &Arguments::v},
    {"log_decay", &Arguments::log_decay},
    {"beta", &Arguments::beta},
    {"alpha", &Arguments::alpha},
    {"ridge_diagonal", &Arguments::ridge_diagonal},
    {"h0", &Arguments::h0},
    {"u0", &Arguments::u0},
    {"cu_seqlens", &Arguments::cu_seqlens},
    {"scale", &Arguments::scale},
    {"ridge", &Arguments::ridge},
    {"iterations", &Arguments::iterations},
    {"solver", &Arguments::solver},
    {"gradient", &Arguments::gradient},
    {"ridge_mode", &Arguments::ridge_mode},
    {"ridge_gradient", &Arguments::ridge_gradient},
    {"decay_keys", &Arguments::decay_keys},
    {"refine", &Arguments::refine},
    {"output_final_state", &Arguments::output_final_state},
    {"part", &Arguments::part},
    {"save", &Arguments::save},
    {"x", &Arguments::x},
    {"norm", &Arguments::norm},
    {"h_segments", &Arguments::h_segments},
    {"u_segments", &Arguments::u_segments},
    {"d_o", &Arguments::d_o},
    {"d_h", &Arguments::d_h},
    {"d_u", &Arguments::d_u},
    {"needs", &Arguments::needs},
    {"h", &Arguments::h},
    {"u", &Arguments::u},
    {"state_indices", &Arguments::state_indices},
    {"iterations_per_sequence", &Arguments::iterations_per_sequence},
    {"weight", &Arguments::weight},
    {"bias", &Arguments::bias},
    {"gate", &Arguments::gate},
    {"initial_state", &Arguments::initial_state},
    {"state", &Arguments::state},
    {"d_y", &Arguments::d_y},
    {"d_final_state", &Arguments::d_final_state},
    {"activation", &Arguments::activation},
    {"l2_norm", &Arguments::l2_norm},
    {"head_dim", &Arguments::head_dim},
    {"eps", &Arguments::eps},
};

const Field& field(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kFields), std::end(kFields), [&](const Field& f) { return f.name == name; });
  TORCH_INTERNAL_ASSERT(found != std::end(kFields), "no field for the argument ", name);
  return *found;
}

/// The field of each argument of an operator, found once.
const std::vector<const Field*>& fields_of(const c10::FunctionSchema& schema) {
  static std::mutex mutex;
  static std::unordered_map<const c10::FunctionSchema*, std::vector<const Field*>> known;
  const std::lock_guard lock(mutex);
  auto& fields = known[&schema];
  if (fields.empty()) {
    for (const auto& formal : schema.arguments()) fields.push_back(&field(formal.name()));
  }
  return fields;
}

void set(Arguments& arguments, const Field& field, const c10::IValue& value) {
  std::visit(
      [&](auto member) {
        using Value = std::remove_reference_t<decltype(arguments.*member)>;
        if constexpr (std::is_same_v<Value, at::Tensor>) {
          if (!value.isNone()) arguments.*member = value.toTensor();
        } else if constexpr (std::is_same_v<Value, std::vector<bool>>) {
          const auto list = value.toBoolList();
          (arguments.*member).assign(list.begin(), list.end());
        } else {
          arguments.*member = value.to<Value>();
        }
      },
      field.member);
}

c10::IValue get(const Arguments& arguments, const Field& field) {
  return std::visit(
      [&](auto member) -> c10::IValue {
        const auto& value = arguments.*member;
        using Value = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, at::Tensor>) {
          return value.defined() ? c10::IValue(value) : c10::IValue();
        } else if constexpr (std::is_same_v<Value, std::vector<bool>>) {
          c10::List<bool> list;
          for (const bool entry : value) list.push_back(entry);
          return list;
        } else {
          return value;
        }
      },
      field.member);
}

}  // namespace

Arguments pop_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  Arguments arguments;
  const auto& fields = fields_of(schema);
  const auto values = torch::jit::last(stack, fields.size());
  for (std::size_t i = 0; i < fields.size(); ++i) set(arguments, *fields[i], values[i]);
  torch::jit::drop(stack, fields.size());
  return arguments;
}

std::vector<at::Tensor> call(std::string_view name, const Arguments& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("gka::" + std::string(name)).c_str(), "");
  torch::jit::Stack stack;
  stack.reserve(op.schema().arguments().size());
  for (const auto& formal : op.schema().arguments()) {
    stack.push_back(get(arguments, field(formal.name())));
    if (stack.back().isNone() && formal.type()->kind() == c10::TypeKind::TensorType) {
      throw c10::TypeError(std::string(name) + ": " + formal.name() + " takes a tensor, got none");
    }
  }
  op.callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (auto& value : stack) results.push_back(std::move(value).toTensor());
  return results;
}

void push_results(torch::jit::Stack& stack, const std::vector<at::Tensor>& results) {
  for (const auto& result : results) stack.emplace_back(result);
}

std::vector<std::pair<std::string, c10::IValue>> save_scalars(const Arguments& arguments) {
  std::vector<std::pair<std::string, c10::IValue>> scalars;
  for (const auto& field : kFields) {
    if (std::holds_alternative<at::Tensor Arguments::*>(field.member) || field.name == "needs") continue;
    scalars.emplace_back(field.name, get(arguments, field));
  }
  return scalars;
}

void load_scalar(Arguments& arguments, std::string_view name, const c10::IValue& value) {
  set(arguments, field(name), value);
}

}  // namespace gka::ops
