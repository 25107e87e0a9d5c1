// One element of an array of any type, read and written as float64.
#pragma once

#include "kernels/problem.h"

namespace gka::kernels::reference {

inline double read_element(const void* data, DType dtype, std::int64_t index) {
  return with_type(dtype, [&](auto zero) { return convert<double>(static_cast<const decltype(zero)*>(data)[index]); });
}

inline void write_element(void* data, DType dtype, std::int64_t index, double value) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(data)[index] = convert<T>(value);
  });
}

/// `otherwise` where the array was left out.
inline double read_element(const View& view, std::int64_t index, double otherwise) {
  return view ? read_element(view.data, view.dtype, index) : otherwise;
}

/// Nothing happens where the array was left out.
inline void write_element(const View& view, std::int64_t index, double value) {
  if (view) write_element(view.data, view.dtype, index, value);
}

}  // namespace gka::kernels::reference
