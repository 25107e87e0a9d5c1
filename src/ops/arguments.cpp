#include "ops/arguments.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>

#include "ops/checks.h"

namespace gka::ops {

template <typename Call>
struct Field {
  std::string_view name;
  std::variant<at::Tensor Call::*, double Call::*, std::int64_t Call::*, bool Call::*, std::vector<bool> Call::*,
               kernels::Part Call::*, Solver Call::*, Gradient Call::*, RidgeMode Call::*, Activation Call::*,
               L2Norm Call::*>
      member;
};

namespace {

constexpr Field<MemoryCall> kMemoryFields[] = {
    {"q", &MemoryCall::q},
    {"k", &MemoryCall::k},
    {"v", &MemoryCall::v},
    {"log_decay", &MemoryCall::log_decay},
    {"beta", &MemoryCall::beta},
    {"alpha", &MemoryCall::alpha},
    {"ridge_diagonal", &MemoryCall::ridge_diagonal},
    {"h0", &MemoryCall::h0},
    {"u0", &MemoryCall::u0},
    {"cu_seqlens", &MemoryCall::cu_seqlens},
    {"part", &MemoryCall::part},
    {"scale", &MemoryCall::scale},
    {"ridge", &MemoryCall::ridge},
    {"iterations", &MemoryCall::iterations},
    {"solver", &MemoryCall::solver},
    {"gradient", &MemoryCall::gradient},
    {"ridge_mode", &MemoryCall::ridge_mode},
    {"ridge_gradient", &MemoryCall::ridge_gradient},
    {"decay_keys", &MemoryCall::decay_keys},
    {"refine", &MemoryCall::refine},
    {"output_final_state", &MemoryCall::output_final_state},
    {"save", &MemoryCall::save},
    {"x", &MemoryCall::x},
    {"norm", &MemoryCall::norm},
    {"h_segments", &MemoryCall::h_segments},
    {"u_segments", &MemoryCall::u_segments},
    {"d_o", &MemoryCall::d_o},
    {"d_h", &MemoryCall::d_h},
    {"d_u", &MemoryCall::d_u},
    {"needs", &MemoryCall::needs},
    {"h", &MemoryCall::h},
    {"u", &MemoryCall::u},
    {"state_indices", &MemoryCall::state_indices},
    {"iterations_per_sequence", &MemoryCall::iterations_per_sequence},
    {"certainty", &MemoryCall::certainty},
};

constexpr Field<ConvCall> kConvFields[] = {
    {"x", &ConvCall::x},
    {"weight", &ConvCall::weight},
    {"bias", &ConvCall::bias},
    {"initial_state", &ConvCall::initial_state},
    {"cu_seqlens", &ConvCall::cu_seqlens},
    {"activation", &ConvCall::activation},
    {"l2_norm", &ConvCall::l2_norm},
    {"head_dim", &ConvCall::head_dim},
    {"eps", &ConvCall::eps},
    {"output_final_state", &ConvCall::output_final_state},
    {"d_y", &ConvCall::d_y},
    {"d_final_state", &ConvCall::d_final_state},
    {"needs", &ConvCall::needs},
    {"state", &ConvCall::state},
    {"state_indices", &ConvCall::state_indices},
};

constexpr Field<NormCall> kNormFields[] = {
    {"x", &NormCall::x},           {"gate", &NormCall::gate},
    {"weight", &NormCall::weight}, {"activation", &NormCall::activation},
    {"eps", &NormCall::eps},       {"d_y", &NormCall::d_y},
    {"needs", &NormCall::needs},
};

template <typename Call>
constexpr std::span<const Field<Call>> fields_of() {
  if constexpr (std::is_same_v<Call, MemoryCall>) return kMemoryFields;
  if constexpr (std::is_same_v<Call, ConvCall>) return kConvFields;
  if constexpr (std::is_same_v<Call, NormCall>) return kNormFields;
}

template <typename Call>
const Field<Call>* field_named(std::string_view name) {
  const auto fields = fields_of<Call>();
  const auto found = std::ranges::find(fields, name, &Field<Call>::name);
  TORCH_INTERNAL_ASSERT(found != fields.end(), "no field for the argument ", name);
  return &*found;
}

template <typename Call>
void set(std::string_view op, Call& call, const Field<Call>& field, const c10::IValue& value) {
  std::visit(
      [&](auto member) {
        using Value = std::remove_reference_t<decltype(call.*member)>;
        if constexpr (std::is_same_v<Value, at::Tensor>) {
          if (!value.isNone()) call.*member = value.toTensor();
        } else if constexpr (std::is_same_v<Value, std::vector<bool>>) {
          const auto list = value.toBoolList();
          (call.*member).assign(list.begin(), list.end());
        } else if constexpr (std::is_enum_v<Value>) {
          call.*member = parse_choice<Value>(op, field.name, value.toStringRef());
        } else {
          call.*member = value.to<Value>();
        }
      },
      field.member);
}

template <typename Call>
c10::IValue get(const Call& call, const Field<Call>& field) {
  return std::visit(
      [&](auto member) -> c10::IValue {
        const auto& value = call.*member;
        using Value = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, at::Tensor>) {
          return value.defined() ? c10::IValue(value) : c10::IValue();
        } else if constexpr (std::is_same_v<Value, std::vector<bool>>) {
          c10::List<bool> list;
          for (const bool entry : value) list.push_back(entry);
          return list;
        } else if constexpr (std::is_enum_v<Value>) {
          return std::string(name_of(value));
        } else {
          return value;
        }
      },
      field.member);
}

/// Whether a backward pass finds it by pack_scalars: all but tensors and `needs`, which it makes itself.
template <typename Call>
bool is_scalar(const Field<Call>& field) {
  return !std::holds_alternative<at::Tensor Call::*>(field.member) &&
         !std::holds_alternative<std::vector<bool> Call::*>(field.member);
}

c10::OperatorHandle find(std::string_view name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("gka::" + std::string(name)).c_str(), "");
}

}  // namespace

template <typename Call>
Operator<Call>::Operator(std::string_view name) : Operator(find(name)) {}

template <typename Call>
Operator<Call>::Operator(const c10::OperatorHandle& handle)
    : handle_(handle), name_(handle.schema().name().substr(std::string_view("gka::").size())) {
  for (const auto& formal : handle.schema().arguments()) fields_.push_back(field_named<Call>(formal.name()));
}

template <typename Call>
Call Operator<Call>::pop(torch::jit::Stack& stack) const {
  Call call;
  const auto values = torch::jit::last(stack, fields_.size());
  for (std::size_t i = 0; i < fields_.size(); ++i) set(name_, call, *fields_[i], values[i]);
  torch::jit::drop(stack, fields_.size());
  return call;
}

template <typename Call>
std::vector<at::Tensor> Operator<Call>::operator()(const Call& call) const {
  torch::jit::Stack stack;
  stack.reserve(fields_.size());
  const auto& formals = handle_.schema().arguments();
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    stack.push_back(get(call, *fields_[i]));
    if (stack.back().isNone() && formals[i].type()->kind() == c10::TypeKind::TensorType) {
      throw c10::TypeError(name_ + ": " + formals[i].name() + " takes a tensor, got none");
    }
  }
  handle_.callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (auto& value : stack) results.push_back(std::move(value).toTensor());
  return results;
}

template <typename Call>
c10::IValue pack_scalars(const Call& call) {
  c10::impl::GenericList scalars(c10::AnyType::get());
  for (const auto& field : fields_of<Call>()) {
    if (is_scalar(field)) scalars.push_back(get(call, field));
  }
  return scalars;
}

template <typename Call>
void unpack_scalars(Call& call, const c10::IValue& packed) {
  const auto scalars = packed.toList();
  std::size_t next = 0;
  for (const auto& field : fields_of<Call>()) {
    if (is_scalar(field)) set("backward", call, field, scalars.get(next++));
  }
}

void push_results(torch::jit::Stack& stack, const std::vector<at::Tensor>& results) {
  for (const auto& result : results) stack.emplace_back(result);
}

template class Operator<MemoryCall>;
template class Operator<ConvCall>;
template class Operator<NormCall>;
template c10::IValue pack_scalars(const MemoryCall&);
template c10::IValue pack_scalars(const ConvCall&);
template c10::IValue pack_scalars(const NormCall&);
template void unpack_scalars(MemoryCall&, const c10::IValue&);
template void unpack_scalars(ConvCall&, const c10::IValue&);
template void unpack_scalars(NormCall&, const c10::IValue&);

}  // namespace gka::ops
