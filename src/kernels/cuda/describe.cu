// What this machine has to run the kernels on.
#include "gka/kernels.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/memory/memory.h"

namespace gka::kernels::cuda {

std::string describe(int device) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || device >= count) {
    cudaGetLastError();  // or the next launch would report it
    throw std::runtime_error("this machine has no CUDA device");
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "reading a device's properties");
  if (properties.major < 8) {
    throw std::runtime_error(std::string(properties.name) + " is older than compute capability 8.0");
  }
  return std::string(properties.name) + ", " + std::to_string(properties.multiProcessorCount) + " multiprocessors";
}

bool has_room_for_chunks(int device) { return shared_memory_per_block(device) >= ChunkedMemory::kSharedBytes; }

}  // namespace gka::kernels::cuda
