// What the operators throw where a kind of mistake deserves a type of its own.
#pragma once

#include <c10/util/Exception.h>

namespace gka {

/// An operator was given a NaN or an infinity where it takes numbers. In Python it is a ValueError.
class NotFiniteError : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};

}  // namespace gka
