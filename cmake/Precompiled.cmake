# Headers compiled once for many sources: gka_precompile_torch(target …) those of torch; in a build without torch, which is
# that of the sanitizers, gka_precompile_json(target …) JSON's, whose code is then compiled in one file alone.
#
# Worth six seconds per source file with torch, and four per file with JSON under the sanitizers, from nothing, which is
# what CI builds. Off elsewhere: it ties every object file to one large file that ccache cannot look into, so a change of
# any flag would recompile them all.
option(GKA_PRECOMPILE "Compile headers once for all sources: for builds from nothing" OFF)

set(GKA_PRECOMPILED_TORCH
    <ATen/core/Tensor.h> <ATen/core/grad_mode.h> <ATen/TensorOperators.h> <ATen/ops/empty.h>
    <algorithm> <functional> <map> <optional> <sstream> <stdexcept> <string> <vector>)
# What is compiled of JSON's code is in json_once.cpp then, and not again in every file.
set(GKA_JSON_ONCE ${PROJECT_SOURCE_DIR}/src/base/json_once)
set(GKA_PRECOMPILED_JSON
    <algorithm> <filesystem> <functional> <map> <memory> <optional> <sstream> <stdexcept> <string> <vector> ${GKA_JSON_ONCE}.h)

# _gka_precompile(name LIBRARY library HEADERS header… TARGETS target…): in a target of its own, for a header serves only
# sources with all of its definitions and the same flags.
function(_gka_precompile name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LIBRARY" "HEADERS;TARGETS")
  set(empty ${PROJECT_BINARY_DIR}/${name}.cpp)
  file(CONFIGURE OUTPUT ${empty} CONTENT "")
  add_library(${name} OBJECT ${empty})
  gka_own_code(${name})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARY})
  target_precompile_headers(${name} PRIVATE ${arg_HEADERS})
  foreach(target IN LISTS arg_TARGETS ITEMS ${name})
    if(NOT TARGET ${target})
      continue()
    endif()
    if(NOT target STREQUAL name)
      target_precompile_headers(${target} REUSE_FROM ${name})
    endif()
    # Programs would have -fPIE. GCC 12 forgets which of the precompiled code is the standard library's, and so complains
    # of its copies of strings (bug 105651 again).
    target_compile_options(${target} PRIVATE -fPIC -Winvalid-pch
                           "$<$<BOOL:${GKA_FALSE_WARNINGS}>:-Wno-stringop-overflow;-Wno-array-bounds>")
  endforeach()
endfunction()

function(gka_precompile_torch)
  if(GKA_PRECOMPILE AND TARGET gka::torch)
    _gka_precompile(gka_precompiled LIBRARY gka::torch HEADERS ${GKA_PRECOMPILED_TORCH} TARGETS ${ARGN})
  endif()
endfunction()

function(gka_precompile_json)
  if(GKA_PRECOMPILE AND TARGET gka_data_files AND NOT TARGET gka::torch AND NOT GKA_LIBFUZZER)
    find_package(nlohmann_json REQUIRED)
    target_sources(gka_data_files PRIVATE ${GKA_JSON_ONCE}.cpp)
    set_source_files_properties(${GKA_JSON_ONCE}.cpp TARGET_DIRECTORY gka_data_files PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    _gka_precompile(gka_precompiled_json LIBRARY nlohmann_json::nlohmann_json HEADERS ${GKA_PRECOMPILED_JSON}
                    TARGETS ${ARGN})
  endif()
endfunction()
