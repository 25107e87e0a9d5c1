// Every backend that answers on the host, as a parameter: a property that holds for one is tested on all. A new backend
// is one line here.
#pragma once

#include <array>
#include <optional>

#include "gka/block_kernels.h"
#include "kernels/cpu_support.h"
#include "kernels/cuda_support.h"

namespace gka::kernels::test {

struct Backend {
  const char* name;
  const char* instruction_set = nullptr;  // forced for the length of a test
  std::string (*missing)() = nullptr;     // why it cannot run here; empty: it can
  void (*forward)(const Problem&, const Outputs&);
  void (*backward)(const Problem&, const Saved&, const Gradients&);
  void (*step)(const Step&);

  void (*short_conv)(const ShortConv&, const ShortConvOutputs&);
  void (*short_conv_backward)(const ShortConv&, const ShortConvGradients&);
  void (*short_conv_step)(const ShortConvStep&);
  void (*gated_rms_norm)(const GatedRmsNorm&, const View& y);
  void (*gated_rms_norm_backward)(const GatedRmsNorm&, const GatedRmsNormGradients&);

  bool is_reference() const { return std::string_view(name) == "reference"; }
};

/// One instruction set of the CPU kernels.
constexpr Backend on_cpu(const char* name, const char* instruction_set) {
  return {
      .name = name,
      .instruction_set = instruction_set,
      .forward = [](const Problem& p, const Outputs& out) { cpu::forward(p, out, executor()); },
      .backward = [](const Problem& p, const Saved& saved,
                     const Gradients& out) { cpu::backward(p, saved, out, executor()); },
      .step = [](const Step& s) { cpu::step(s, executor()); },
      .short_conv = [](const auto& conv, const auto& out) { cpu::short_conv(conv, out, executor()); },
      .short_conv_backward = [](const auto& conv, const auto& out) { cpu::short_conv_backward(conv, out, executor()); },
      .short_conv_step = [](const auto& step) { cpu::short_conv_step(step, executor()); },
      .gated_rms_norm = [](const auto& norm, const View& y) { cpu::gated_rms_norm(norm, y, executor()); },
      .gated_rms_norm_backward = [](const auto& norm,
                                    const auto& out) { cpu::gated_rms_norm_backward(norm, out, executor()); }};
}

inline constexpr std::array kBackends{
    Backend{.name = "reference",
            .forward = reference::forward,
            .backward = [](const Problem& p, const Saved&, const Gradients& out) { reference::backward(p, out); },
            .step = reference::step,
            .short_conv = reference::short_conv,
            .short_conv_backward = reference::short_conv_backward,
            .short_conv_step = reference::short_conv_step,
            .gated_rms_norm = reference::gated_rms_norm,
            .gated_rms_norm_backward = reference::gated_rms_norm_backward},
    on_cpu("cpu_portable", "portable"),
    on_cpu("cpu_avx2", "avx2"),
    on_cpu("cpu_avx512", "avx512"),
    Backend{.name = "cuda_on_host",
            .forward = CudaOnHost::forward,
            .backward = CudaOnHost::backward,
            .step = CudaOnHost::step,
            .short_conv = CudaOnHost::short_conv,
            .short_conv_backward = CudaOnHost::short_conv_backward,
            .short_conv_step = CudaOnHost::short_conv_step,
            .gated_rms_norm = CudaOnHost::gated_rms_norm,
            .gated_rms_norm_backward = CudaOnHost::gated_rms_norm_backward},
    Backend{.name = "cuda",
            .missing = CudaDevice::missing,
            .forward = CudaDevice::forward,
            .backward = CudaDevice::backward,
            .step = CudaDevice::step,
            .short_conv = CudaDevice::short_conv,
            .short_conv_backward = CudaDevice::short_conv_backward,
            .short_conv_step = CudaDevice::short_conv_step,
            .gated_rms_norm = CudaDevice::gated_rms_norm,
            .gated_rms_norm_backward = CudaDevice::gated_rms_norm_backward},
};

/// All that are tested against the reference.
inline auto fast_backends() { return testing::ValuesIn(kBackends.begin() + 1, kBackends.end()); }

/// A test that runs on every backend, by calling these instead of a backend's own functions.
class OnEveryBackend : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    const Backend& backend = GetParam();
    if (backend.missing != nullptr && !backend.missing().empty()) GTEST_SKIP() << backend.missing();
    if (backend.instruction_set == nullptr) return;
    forced_.emplace(backend.instruction_set);
    if (!forced_->available()) GTEST_SKIP() << "this machine has no " << backend.instruction_set;
  }

  bool is_reference() const { return GetParam().is_reference(); }

  void forward(const Problem& problem, const Outputs& outputs) const { GetParam().forward(problem, outputs); }
  void backward(const Problem& problem, const Saved& saved, const Gradients& gradients) const {
    GetParam().backward(problem, saved, gradients);
  }
  void take_step(const Step& step) const { GetParam().step(step); }

  OwnedOutputs forward(const Case& c) const { return forward(c, c.spec().dtype); }
  OwnedOutputs forward(const Case& c, DType dtype) const {
    OwnedOutputs out = c.outputs(dtype);
    forward(c.problem(), out.pointers());
    return out;
  }

  OwnedGradients backward(const Case& c) const { return backward(c, c.gradients()); }
  OwnedGradients backward(const Case& c, OwnedGradients out) const {
    const OwnedOutputs kept = c.outputs();
    if (!is_reference()) forward(c.problem(), kept.pointers());  // the reference recomputes
    backward(c.problem(), kept.pointers().saved, out.pointers());
    return out;
  }

 private:
  std::optional<ForcedInstructionSet> forced_;
};

inline std::string backend_name(const testing::TestParamInfo<Backend>& info) { return info.param.name; }

}  // namespace gka::kernels::test
