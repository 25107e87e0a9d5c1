#include <ATen/autocast_mode.h>

#include "ops/autograd.h"

namespace gka::ops {

template <int count>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto first = stack->size() - op.schema().arguments().size();
  const auto device = (*stack)[first].toTensor().device().type();
  const c10::impl::ExcludeDispatchKeyGuard without(c10::autocast_dispatch_keyset);
  for (std::size_t i = first; i < first + count; ++i) {
    auto& value = (*stack)[i];
    value = at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), value.toTensor(), device);
  }
  op.callBoxed(stack);
}

template void autocast<2>(const c10::OperatorHandle&, torch::jit::Stack*);
template void autocast<3>(const c10::OperatorHandle&, torch::jit::Stack*);

}  // namespace gka::ops
