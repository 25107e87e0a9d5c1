// GoogleTest assertions about cases: a failure prints the tensor, its error and the case.
#pragma once

#include <gtest/gtest.h>

#include "kernels/case.h"

namespace gka::kernels::test {

/// Every tensor of `got` within `tolerance` of `want`, and the gaps of padded arrays untouched.
template <typename Results>
void expect_close(const Results& got, const Results& want, double tolerance, const std::string& what) {
  for (const auto& [name, error] : compare(got.named(), want.named())) {
    EXPECT_LE(error, tolerance) << name << " of " << what;
  }
  for (const auto& [name, array] : got.named()) {
    EXPECT_TRUE(array->gaps_intact()) << name << " was written outside its elements, in " << what;
  }
}

inline void expect_close(const Array& got, const Array& want, double tolerance, const std::string& what) {
  EXPECT_LE(relative_error(got, want), tolerance) << what;
}

}  // namespace gka::kernels::test
