#include "train/device.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <stdexcept>

#include "models/dtypes.h"

namespace gka::train {
namespace {

at::Device choose_device(const std::string& name) {
  const bool any = at::hasCUDA() && at::getNumGPUs() > 0;
  if (name == "cpu" || (name == "auto" && !any)) return at::kCPU;
  const at::Device device(name == "auto" ? "cuda" : name);
  const auto index = device.has_index() ? device.index() : at::DeviceIndex{0};
  const auto count = any ? at::getNumGPUs() : 0;
  if (static_cast<std::size_t>(index) >= count) {
    throw std::runtime_error("device is \"" + name + "\", but torch sees " + std::to_string(count) +
                             " GPUs here; `gka info` says why, and --set device=cpu trains on the CPU.");
  }
  return {at::kCUDA, index};
}

at::ScalarType choose_activations(const std::string& name, at::Device device) {
  if (name == "auto") return device.is_cuda() ? at::kBFloat16 : at::kFloat;
  return models::dtype_named(name).value_or(at::kFloat);
}

double resident_bytes() {
  double total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

struct TensorBytes {
  double current, peak;
};

/// It answers only once torch has been on the device.
c10::DeviceAllocator& allocator_of(at::Device device) {
  at::globalContext().lazyInitDevice(device.type());
  return *c10::getDeviceAllocator(device.type());
}

TensorBytes tensor_bytes(at::Device device) {
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator_of(device).getDeviceStats(device.index());
  const auto& bytes = stats.allocated_bytes[kAll];
  return {static_cast<double>(bytes.current), static_cast<double>(bytes.peak)};
}

}  // namespace

Compute choose_compute(const Config& config) {
  const auto device = choose_device(config.device);
  const auto activations = choose_activations(config.dtype, device);
  return {device, activations, activations == at::kDouble ? at::kDouble : at::kFloat};
}

double memory_in_use(at::Device device) { return device.is_cpu() ? resident_bytes() : tensor_bytes(device).peak; }

double memory_now(at::Device device) { return device.is_cpu() ? resident_bytes() : tensor_bytes(device).current; }

void reset_memory(at::Device device) {
  if (device.is_cpu()) return;
  auto& allocator = allocator_of(device);
  allocator.emptyCache();
  allocator.resetPeakStats(device.index());
}

void wait_for(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

Determinism::Determinism(at::Device device) : on_(!device.is_cpu()), guard_(&once_) {
  if (!on_) return;
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // cuBLAS reads it when it starts
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

Determinism::~Determinism() {
  if (on_) at::globalContext().setDeterministicAlgorithms(false, false);
}

void Determinism::Once::process(const c10::Warning& warning) {
  if (said.insert(warning.msg()).second) c10::WarningHandler::process(warning);
}

}  // namespace gka::train
