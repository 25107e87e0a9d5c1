#include <ATen/autocast_mode.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "ops/autograd.h"

namespace gka::ops {

void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  constexpr std::array<std::string_view, 3> kCast = {"q", "k", "v"};
  const auto& formals = op.schema().arguments();
  const auto first = stack->size() - formals.size();
  const auto device = (*stack)[first].toTensor().device().type();
  const c10::impl::ExcludeDispatchKeyGuard without(c10::autocast_dispatch_keyset);
  for (std::size_t i = 0; i < formals.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (std::find(kCast.begin(), kCast.end(), formals[i].name()) == kCast.end() || !value.isTensor()) continue;
    value = at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), value.toTensor(), device);
  }
  op.callBoxed(stack);
}

}  // namespace gka::ops
