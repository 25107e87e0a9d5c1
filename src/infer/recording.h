// Work on a GPU recorded once and then played again by a single launch (a CUDA graph). The step of a small model is
// hundreds of kernels of a few microseconds, and launching them one by one takes several times as long as running them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace gka::infer {

class Recorder {
 public:
  /// Whether this build can record on the device.
  static bool serves(at::Device device);

  /// While it lives, what its thread does on the device goes to a stream of its own: the default one cannot be
  /// recorded.
  explicit Recorder(at::Device device);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Records what `work` launches, without running it; calling the result runs it, on the same memory every time. The
  /// work must have run once before (libraries set themselves up at first use), and must neither wait for the device
  /// nor read from the host.
  std::function<void()> record(const std::function<void()>& work);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// Bytes of memory that nobody uses on a GPU; 8 GiB where this build cannot ask.
std::int64_t free_memory(at::Device device);

}  // namespace gka::infer
