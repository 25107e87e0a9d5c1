// A stand-in for device memory, for one call.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

namespace gka::kernels::test {

/// Calls body(device) with memory that starts out as NaN.
template <typename Device, typename Body>
void with_scratch(Body&& body) {
  std::vector<std::unique_ptr<char[]>> scratch;
  body(Device{.index = 0, .stream = nullptr, .allocate = [&](std::size_t bytes) {
                scratch.push_back(std::make_unique<char[]>(bytes));
                std::memset(scratch.back().get(), 0xff, bytes);
                return static_cast<void*>(scratch.back().get());
              }});
}

}  // namespace gka::kernels::test
