#include "ops/backends.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>

#ifndef GKA_VERSION
#error "GKA_VERSION, the version as a string, comes from the build"
#endif

namespace gka {
namespace ops {
namespace {

std::string takes_everything(const CallInfo&) { return ""; }

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

std::string needs_a_gpu(const CallInfo&) {
  static const std::string missing = [] {
    try {
      kernels::cuda::describe();
      return std::string();
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  }();
  return missing;
}

constexpr Backend kCuda = {
    .name = "cuda",
    .device = "cuda",
    .built = true,
    .refuses = needs_a_gpu,
    .detail = cuda_detail,
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

/// As much of a problem as decides whether the Hopper kernels take it.
kernels::Problem outline(const CallInfo& call) {
  kernels::Problem problem{.key_dim = call.key_dim, .value_dim = call.value_dim};
  problem.q.dtype = call.dtype;
  problem.options.solver = call.solver;
  problem.options.gradient = call.gradient;
  problem.options.ridge_mode = call.ridge_mode;
  problem.options.iterations = call.iterations;
  problem.options.decay_keys = call.decay_keys;
  problem.options.ridge = call.ridge;
  return problem;
}

std::string hopper_refuses(const CallInfo& call) {
  if (const auto missing = needs_a_gpu(call); !missing.empty()) return missing;
  return kernels::cuda::why_not_hopper(outline(call));
}

#ifdef GKA_HAS_HOPPER
std::string hopper_detail() {
  const std::string device = kernels::cuda::describe();
  const auto refusal = [](kernels::DType dtype) { return hopper_refuses({.device = "cuda", .dtype = dtype}); };
  if (const auto reason = refusal(kernels::DType::bfloat16); !reason.empty()) throw std::runtime_error(reason);
  const std::string types = refusal(kernels::DType::float16).empty() ? "bfloat16 and float16" : "bfloat16";
  return types + " on tensor cores, gated_kalmanet with its default solver; " + device;
}
#else
std::string hopper_detail() { return kernels::cuda::why_not_hopper({}); }
#endif

std::string hopper_remark(const CallInfo& call) {
  return kernels::cuda::hopper_takes_backward(outline(call)) ? "" : ", its backward pass is cuda's";
}

/// The kernels choose the path themselves, by the same rules: reports, halves of the operator and one-token steps are
/// the plain path's.
constexpr Backend hopper_row() {
  Backend row = kCuda;
  row.name = "hopper";
#ifndef GKA_HAS_HOPPER
  row.built = false;
#endif
  row.refuses = hopper_refuses;
  row.detail = hopper_detail;
  row.remark = hopper_remark;
  return row;
}
constexpr Backend kHopper = hopper_row();
#else
std::string built_without_cuda() { return "this library was built without CUDA (GKA_CUDA=ON)"; }

constexpr Backend kCuda = {.name = "cuda", .device = "cuda", .detail = built_without_cuda};
constexpr Backend kHopper = {.name = "hopper", .device = "cuda", .detail = built_without_cuda};
#endif

constexpr Backend kBackends[] = {
    {.name = "reference", .device = "", .built = true, .refuses = takes_everything, .detail = reference_detail},
    {.name = "cpu",
     .device = "cpu",
     .built = true,
     .refuses = takes_everything,
     .detail = cpu_detail,
     .forward = [](const auto& problem, const auto& outputs,
                   c10::Device) { kernels::cpu::forward(problem, outputs, torch_executor()); },
     .backward = [](const auto& problem, const auto& saved, const auto& gradients,
                    c10::Device) { kernels::cpu::backward(problem, saved, gradients, torch_executor()); },
     .step = [](const auto& step, c10::Device) { kernels::cpu::step(step, torch_executor()); }},
    kHopper,
    kCuda,
};

std::string built_names() {
  std::string names;
  for (const auto& backend : kBackends) {
    if (!backend.built || backend.device.empty()) continue;
    if (!names.empty()) names += ", ";
    names += backend.name;
  }
  return names;
}

struct Choice {
  const Backend* backend = nullptr;
  std::string passed_over;  // why not the ones before it
};

/// The first backend of the device that takes the call.
Choice choose(const CallInfo& call) {
  std::string passed_over;
  for (const auto& backend : kBackends) {
    if (backend.device != call.device) continue;
    const auto refusal = backend.built ? backend.refuses(call) : backend.detail();
    if (refusal.empty()) return {&backend, passed_over};
    passed_over += std::string(backend.name) + ": " + refusal + "; ";
  }
  return {nullptr, passed_over};
}

std::string why_none(const CallInfo& call, const Choice& choice) {
  const auto passed_over =
      choice.passed_over.empty() ? "no kernels for the device " + call.device + "; " : choice.passed_over;
  return passed_over + "built: " + built_names();
}

}  // namespace

std::span<const Backend> backend_table() { return kBackends; }

const Backend& backend_for(std::string_view op, const CallInfo& call) {
  const auto choice = choose(call);
  if (choice.backend == nullptr) {
    throw c10::NotImplementedError(std::string(op) + ": q takes a device this build has kernels for, got " +
                                   call.device + " (" + why_none(call, choice) + ")");
  }
  return *choice.backend;
}

}  // namespace ops

const char* version() { return GKA_VERSION; }

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> list;
  for (const auto& backend : ops::backend_table()) {
    BackendInfo info{
        .name = std::string(backend.name), .built = backend.built, .available = backend.built, .detail = ""};
    try {
      info.detail = backend.detail();
    } catch (const std::exception& error) {  // GKA_CPU or GKA_GPU asks for what this machine lacks
      info.available = false;
      info.detail = error.what();
    }
    list.push_back(std::move(info));
  }
  return list;
}

KernelChoice choose_kernel(const CallInfo& call) {
  const auto choice = ops::choose(call);
  if (choice.backend == nullptr) return {.kernel = "", .reason = ops::why_none(call, choice)};
  const std::string name(choice.backend->name);
  const std::string remark = choice.backend->remark != nullptr ? choice.backend->remark(call) : "";
  return {.kernel = name,
          .reason = choice.passed_over + name + " takes this call" + remark + " (" + choice.backend->detail() + ")"};
}

}  // namespace gka
