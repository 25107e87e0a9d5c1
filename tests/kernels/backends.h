// Every backend that answers on the host, as a parameter: a property that holds for one is tested on all. A new backend
// is one line here.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "gka/block_kernels.h"
#include "kernels/cpu_support.h"
#include "kernels/cuda_support.h"

namespace gka::kernels::test {

struct Backend {
  const char* name;
  const char* instruction_set = nullptr;  // of the CPU, forced for the length of a test
  const char* path = nullptr;             // of the GPU, likewise
  std::string (*missing)() = nullptr;     // why it cannot run here; empty: it can
  /// Kernels for tensor cores carry a part of the operator, in 16-bit types, and are less exact than float32.
  bool tensor_cores = false;
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

/// One path of the kernels on a GPU.
constexpr Backend on_gpu(const char* name, const char* path) {
  const bool tensor_cores = std::string_view(path) == "hopper";
  return {.name = name,
          .path = path,
          .missing = tensor_cores ? CudaDevice::missing_hopper : CudaDevice::missing,
          .tensor_cores = tensor_cores,
          .forward = tensor_cores ? CudaDevice::hopper_forward : CudaDevice::forward,
          .backward = CudaDevice::backward,
          .step = CudaDevice::step,
          .short_conv = CudaDevice::short_conv,
          .short_conv_backward = CudaDevice::short_conv_backward,
          .short_conv_step = CudaDevice::short_conv_step,
          .gated_rms_norm = CudaDevice::gated_rms_norm,
          .gated_rms_norm_backward = CudaDevice::gated_rms_norm_backward};
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
            .gated_rms_norm_backward = [](const auto& norm,
                                          const auto& out) { CudaOnHost::gated_rms_norm_backward(norm, out); }},
    on_gpu("cuda", "plain"),
    on_gpu("hopper", "hopper"),
};

/// All that are tested against the reference.
inline auto fast_backends() { return testing::ValuesIn(kBackends.begin() + 1, kBackends.end()); }
/// The same for what no tensor cores compute: steps, the block's small operations.
inline auto fast_backends_without_tensor_cores() {
  std::vector<Backend> rows(kBackends.begin() + 1, kBackends.end());
  std::erase_if(rows, [](const Backend& row) { return row.tensor_cores; });
  return testing::ValuesIn(rows);
}

/// A test that runs on every backend, by calling these instead of a backend's own functions.
class OnEveryBackend : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    const Backend& backend = GetParam();
    if (backend.path != nullptr) path_.emplace("GKA_GPU", backend.path);
    if (backend.missing != nullptr && !backend.missing().empty()) GTEST_SKIP() << backend.missing();
    if (backend.instruction_set == nullptr) return;
    forced_.emplace(backend.instruction_set);
    if (!forced_->available()) GTEST_SKIP() << "this machine has no " << backend.instruction_set;
  }

  /// A test that left out every case has checked nothing, and says so.
  void TearDown() override {
    if (refused_ > 0 && carried_ == 0 && !IsSkipped()) GTEST_SKIP() << "it carries none of this test's cases";
  }

  bool is_reference() const { return GetParam().is_reference(); }

  /// The spec in the type, and with the widths, chunks and iterations, that the backend carries in both directions
  /// and in which its bounds hold.
  CaseSpec suited(CaseSpec spec) const {
    if (!GetParam().tensor_cores) return spec;
    for (std::int64_t* width : {&spec.key_dim, &spec.value_dim}) *width = (*width + 3) / 4 * 4;
    return suited_forward(spec);
  }
  /// The same for the forward pass alone.
  CaseSpec suited_forward(CaseSpec spec) const {
    if (!GetParam().tensor_cores) return spec;
    if (!CudaDevice::hopper_takes(spec.dtype)) spec.dtype = DType::bfloat16;
    if (spec.dtype == DType::float16) spec.float32_gates = true;  // where a memory fades, dβ leaves float16's range
    spec.options.chunk = 0;
    spec.options.refine = true;
    spec.options.iterations = 30;  // fewer have not converged, and two schedules that have not are not the same
    spec.options.ridge = std::max(spec.options.ridge, 0.02);
    return spec;
  }
  /// Whether it carries these options at all.
  bool carries(const Options& o) const {
    const bool carried = !GetParam().tensor_cores ||
                         (o.part == Part::both && o.solver == Solver::chebyshev && o.gradient == Gradient::implicit &&
                          o.ridge_mode == RidgeMode::adaptive && o.decay_keys);
    ++(carried ? carried_ : refused_);
    return carried;
  }
  /// How far from the truth a value may be that should be within `tight` of it in float64.
  double within(double tight) const { return GetParam().tensor_cores ? kValues : tight; }
  double gradients_within(double tight) const { return GetParam().tensor_cores ? kGradients : tight; }
  double states_within(double tight) const { return GetParam().tensor_cores ? kStates : tight; }

  void forward(const Problem& problem, const Outputs& outputs) const { GetParam().forward(problem, outputs); }
  void backward(const Problem& problem, const Saved& saved, const Gradients& gradients) const {
    GetParam().backward(problem, saved, gradients);
  }
  void take_step(const Step& step) const { GetParam().step(step); }

  /// Room for what the backend writes: reports, but for certainty, come from kernels in float32 or better.
  OwnedOutputs outputs(const Case& c) const { return outputs(c, c.spec().dtype); }
  OwnedOutputs outputs(const Case& c, DType dtype) const {
    OwnedOutputs out = c.outputs(dtype);
    if (GetParam().tensor_cores) {
      for (Array* array : {&out.norm, &out.ridge, &out.residual, &out.true_residual, &out.variance, &out.x}) {
        *array = Array();
      }
    }
    return out;
  }

  OwnedOutputs forward(const Case& c) const { return forward(c, c.spec().dtype); }
  OwnedOutputs forward(const Case& c, DType dtype) const {
    OwnedOutputs out = outputs(c, dtype);
    forward(c.problem(), out.pointers());
    return out;
  }

  OwnedGradients backward(const Case& c) const { return backward(c, c.gradients()); }
  OwnedGradients backward(const Case& c, OwnedGradients out) const {
    const OwnedOutputs kept = outputs(c);
    if (!is_reference()) forward(c.problem(), kept.pointers());  // the reference recomputes
    backward(c.problem(), kept.pointers().saved, out.pointers());
    return out;
  }

 private:
  // Of 16-bit types on tensor cores: results rounded to bfloat16 (1.7e-3 by itself), states in float32.
  static constexpr double kValues = 5e-3, kGradients = 1e-2, kStates = 1e-5;

  mutable int carried_ = 0, refused_ = 0;  // cases
  std::optional<ForcedInstructionSet> forced_;
  std::optional<Forced> path_;
};

inline std::string backend_name(const testing::TestParamInfo<Backend>& info) { return info.param.name; }

}  // namespace gka::kernels::test
