// The same targets for clang's libFuzzer: one program each, which GKA_FUZZ_TARGET names.
#include <cstdint>

#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return gka::fuzz::GKA_FUZZ_TARGET(std::as_bytes(std::span(data, size)));
}
