// Every backend that answers on the host, as a parameter: a property that holds for one is tested on all. A new backend
// is one line here.
#pragma once

#include <array>
#include <optional>

#include "kernels/cpu_support.h"

namespace gka::kernels::test {

struct Backend {
  const char* name;
  const char* instruction_set;  // nullptr: the reference
};

inline constexpr std::array kBackends{Backend{"reference", nullptr}, Backend{"cpu_portable", "portable"},
                                      Backend{"cpu_avx2", "avx2"}, Backend{"cpu_avx512", "avx512"}};

/// A test that runs on every backend, by calling these instead of a backend's own functions.
class OnEveryBackend : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (is_reference()) return;
    forced_.emplace(GetParam().instruction_set);
    if (!forced_->available()) GTEST_SKIP() << "this machine has no " << GetParam().instruction_set;
  }

  bool is_reference() const { return GetParam().instruction_set == nullptr; }

  void forward(const Problem& problem, const Outputs& outputs) const {
    is_reference() ? reference::forward(problem, outputs) : cpu::forward(problem, outputs, executor());
  }
  void take_step(const Step& step) const { is_reference() ? reference::step(step) : cpu::step(step, executor()); }

  OwnedOutputs forward(const Case& c) const { return forward(c, c.spec().dtype); }
  OwnedOutputs forward(const Case& c, DType dtype) const {
    OwnedOutputs out = c.outputs(dtype);
    forward(c.problem(), out.pointers());
    return out;
  }

  OwnedGradients backward(const Case& c) const { return backward(c, c.gradients()); }
  OwnedGradients backward(const Case& c, OwnedGradients out) const {
    if (is_reference()) {
      reference::backward(c.problem(), out.pointers());
    } else {
      const OwnedOutputs kept = c.outputs();
      cpu::forward(c.problem(), kept.pointers(), executor());
      cpu::backward(c.problem(), kept.pointers().saved, out.pointers(), executor());
    }
    return out;
  }

 private:
  std::optional<ForcedInstructionSet> forced_;
};

inline std::string backend_name(const testing::TestParamInfo<Backend>& info) { return info.param.name; }

}  // namespace gka::kernels::test
