#include "ops/backends.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/limits.h"
#include "kernels/cuda/choose.h"
#include "ops/on_gpu.h"

namespace gka {
namespace ops {
namespace {

constexpr Backend kCpu = {
    .forward = [](const auto& problem, const auto& outputs,
                  c10::Device) { kernels::cpu::forward(problem, outputs, torch_executor()); },
    .backward = [](const auto& problem, const auto& saved, const auto& gradients,
                   c10::Device) { kernels::cpu::backward(problem, saved, gradients, torch_executor()); },
    .step = [](const auto& step, c10::Device) { kernels::cpu::step(step, torch_executor()); }};

#ifdef GKA_HAS_CUDA
constexpr Backend kCuda = {
    .forward =
        [](const auto& problem, const auto& outputs, c10::Device device) {
          on_cuda(device, [&](const auto& where) { kernels::cuda::forward(problem, outputs, where); });
        },
    .backward =
        [](const auto& problem, const auto& saved, const auto& gradients, c10::Device device) {
          on_cuda(device, [&](const auto& where) { kernels::cuda::backward(problem, saved, gradients, where); });
        },
    .step = [](const auto& step,
               c10::Device device) { on_cuda(device, [&](const auto& where) { kernels::cuda::step(step, where); }); }};

// ---- What a call takes on a GPU -----------------------------------------------------------------------------------

/// As much of a problem as decides its path.
kernels::Problem outline(const CallInfo& call) {
  kernels::Problem problem{.key_dim = call.key_dim, .value_dim = call.value_dim};
  problem.q.dtype = call.dtype;
  problem.options.part = call.part;
  problem.options.solver = call.solver;
  problem.options.gradient = call.gradient;
  problem.options.ridge_mode = call.ridge_mode;
  problem.options.iterations = call.iterations;
  problem.options.decay_keys = call.decay_keys;
  problem.options.ridge = call.ridge;
  problem.options.refine = call.refine;
  return problem;
}

kernels::cuda::Choice choose_forward(const CallInfo& call) {
  kernels::Outputs outputs;
  outputs.o.dtype = call.dtype;
  double asked_for = 0;  // only whether there is a pointer counts
  if (call.report) outputs.report.norm = &asked_for;
  return kernels::cuda::choose(outline(call), outputs, call.device_index);
}

kernels::cuda::Choice choose_backward(const CallInfo& call) {
  kernels::Gradients gradients;
  for (kernels::View* view : {&gradients.d_o, &gradients.d_q, &gradients.d_k, &gradients.d_v}) {
    view->dtype = call.dtype;
  }
  return kernels::cuda::choose(outline(call), gradients, call.device_index);
}
#endif

// ---- What is listed -----------------------------------------------------------------------------------------------

std::string reference_detail() {
  return "float64, one token at a time; the definition the others are tested against, reached through gka::kernels";
}

std::string cpu_detail() {
  const int threads = at::get_num_threads();
  return std::string(kernels::cpu::instruction_set()) + ", " + std::to_string(threads) +
         (threads == 1 ? " thread" : " threads");
}

#ifdef GKA_HAS_CUDA
std::string cuda_detail() {
  return "float32 and float64 arithmetic on any card from Ampere on; " + kernels::cuda::describe();
}

std::string hopper_detail() {
  const auto choice = choose_forward({.device = "cuda", .dtype = kernels::DType::bfloat16});
  if (choice.path != kernels::cuda::Path::hopper) throw std::runtime_error(choice.why);
  return "bfloat16 and float16 on tensor cores, gated_kalmanet with its default solver; " + kernels::cuda::describe();
}
#else
std::string cuda_detail() { return "this library was built without CUDA (GKA_CUDA=ON)"; }
std::string hopper_detail() { return cuda_detail(); }
#endif

struct Row {
  std::string_view name;
  bool built;
  bool chosen;  // whether an operator can take it
  /// What `backends()` says about it on this machine; throws what is wrong where it cannot run.
  std::string (*detail)();
};

/// In the order of preference on each device.
constexpr Row kRows[] = {
    {"reference", true, false, reference_detail},
    {"cpu", true, true, cpu_detail},
    {"hopper", kernels::cuda::kHopperBuilt, true, hopper_detail},
    {"cuda", kHasCuda, true, cuda_detail},
};

std::string built_names() {
  std::string names;
  for (const auto& row : kRows) {
    if (!row.built || !row.chosen) continue;
    if (!names.empty()) names += ", ";
    names += row.name;
  }
  return names;
}

KernelChoice no_kernel(const std::string& why) { return {.kernel = "", .reason = why + "; built: " + built_names()}; }

/// What the operators refuse whatever the kernel; "" for a call they take.
std::string refusal_of(const CallInfo& call) {
  const auto outside = [](std::int64_t dim) { return dim < 1 || dim > kLargestDim; };
  const auto dims = "from 1 to " + std::to_string(kLargestDim) + ", got ";
  if (outside(call.key_dim)) return "q and k take a last dimension D " + dims + std::to_string(call.key_dim);
  if (outside(call.value_dim)) return "v takes a last dimension V " + dims + std::to_string(call.value_dim);
  if (call.iterations < 0 || call.iterations > kMostIterations) {
    return "iterations takes a number of 0 to " + std::to_string(kMostIterations) + ", got " +
           std::to_string(call.iterations);
  }
  if (!(call.ridge > 0 && std::isfinite(call.ridge))) return "ridge takes a finite number above 0";
  return "";
}

KernelChoice choose_on_cpu(const CallInfo&) {
  return {.kernel = "cpu", .reason = "cpu takes this call (" + cpu_detail() + ")"};
}

#ifdef GKA_HAS_CUDA
KernelChoice choose_on_cuda(const CallInfo& call) {
  using kernels::cuda::Path;
  const auto forward = choose_forward(call);
  const std::string why = forward.why;
  switch (forward.path) {
    case Path::none: return no_kernel("hopper: " + why + "; cuda: " + why);
    case Path::plain:
      return {.kernel = "cuda", .reason = "hopper: " + why + "; cuda takes this call (" + cuda_detail() + ")"};
    case Path::hopper: break;
  }
  const auto backward = choose_backward(call);
  const std::string remark =
      backward.path == Path::hopper ? "" : std::string(", its backward pass is cuda's: ") + backward.why;
  return {.kernel = "hopper", .reason = "hopper takes this call" + remark + " (" + hopper_detail() + ")"};
}
#else
KernelChoice choose_on_cuda(const CallInfo&) {
  return no_kernel("hopper: " + hopper_detail() + "; cuda: " + cuda_detail());
}
#endif

}  // namespace

const Backend& backend_for(std::string_view op, c10::Device device) {
  if (device.is_cpu()) return kCpu;
#ifdef GKA_HAS_CUDA
  if (device.is_cuda()) return kCuda;
#endif
  const CallInfo call{.device = c10::DeviceTypeName(device.type(), /*lower_case=*/true)};
  throw c10::NotImplementedError(std::string(op) + ": q takes a device this build has kernels for, got " + call.device +
                                 " (" + choose_kernel(call).reason + ")");
}

}  // namespace ops

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> list;
  for (const auto& row : ops::kRows) {
    BackendInfo info{.name = std::string(row.name), .built = row.built, .available = row.built, .detail = ""};
    try {
      info.detail = row.detail();
    } catch (const std::exception& error) {  // GKA_CPU or GKA_GPU asks for what this machine lacks
      info.available = false;
      info.detail = error.what();
    }
    list.push_back(std::move(info));
  }
  return list;
}

KernelChoice choose_kernel(const CallInfo& call) {
  if (auto refusal = ops::refusal_of(call); !refusal.empty()) return {.kernel = "", .reason = std::move(refusal)};
  if (call.device == "cpu") return ops::choose_on_cpu(call);
  if (call.device == "cuda") return ops::choose_on_cuda(call);
  return ops::no_kernel("no kernels for the device " + call.device);
}

}  // namespace gka
