# gka_precompile_torch(target …): torch's most used headers, compiled once for all of these targets.
#
# Worth six seconds per source file from nothing, which is what CI builds. Off elsewhere: it ties every object file to one
# large file that ccache cannot look into, so a change of any flag would recompile them all.
option(GKA_PRECOMPILE "Compile torch's headers once for all sources: for builds from nothing" OFF)

set(GKA_PRECOMPILED_HEADERS
    <ATen/core/Tensor.h> <ATen/core/grad_mode.h> <ATen/TensorOperators.h> <ATen/ops/empty.h>
    <algorithm> <functional> <map> <optional> <sstream> <stdexcept> <string> <vector>)

function(gka_precompile_torch)
  if(NOT GKA_PRECOMPILE OR NOT TARGET gka::torch)
    return()
  endif()
  # A target of its own: the header serves only sources with all of its definitions and the same flags.
  file(WRITE ${PROJECT_BINARY_DIR}/precompiled.cpp "")
  add_library(gka_precompiled OBJECT ${PROJECT_BINARY_DIR}/precompiled.cpp)
  gka_own_code(gka_precompiled)
  target_link_libraries(gka_precompiled PRIVATE gka::torch)
  target_precompile_headers(gka_precompiled PRIVATE ${GKA_PRECOMPILED_HEADERS})
  foreach(target IN LISTS ARGN ITEMS gka_precompiled)
    if(NOT TARGET ${target})
      continue()
    endif()
    if(NOT target STREQUAL gka_precompiled)
      target_precompile_headers(${target} REUSE_FROM gka_precompiled)
    endif()
    # Programs would have -fPIE. GCC 12 forgets which of the precompiled code is the standard library's, and so complains
    # of its copies of strings (bug 105651 again).
    target_compile_options(${target} PRIVATE -fPIC -Winvalid-pch
                           "$<$<BOOL:${GKA_FALSE_WARNINGS}>:-Wno-stringop-overflow;-Wno-array-bounds>")
  endforeach()
endfunction()
