// A stand-in for device memory, for one call.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

namespace gka::kernels::test {

/// Calls body(device) with memory that starts out as NaN; returned is how many bytes of it were asked for.
template <typename Device, typename Body>
std::size_t with_scratch(Body&& body) {
  std::vector<std::unique_ptr<char[]>> scratch;
  std::size_t all = 0;
  body(Device{.index = 0, .stream = nullptr, .allocate = [&](std::size_t bytes) {
                scratch.push_back(std::make_unique_for_overwrite<char[]>(bytes));
                std::memset(scratch.back().get(), 0xff, bytes);
                all += bytes;
                return static_cast<void*>(scratch.back().get());
              }});
  return all;
}

}  // namespace gka::kernels::test
