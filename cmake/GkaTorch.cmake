# gka_find_torch([REQUIRED]): the LibTorch inside an installed `torch` package (CPU or CUDA alike), as target gka::torch.
#
# Used by this build and, installed beside gkaConfig.cmake, by projects that use gka, so both find the same torch. Only
# headers and three libraries are needed; torch's own CMake package would ask for a CUDA toolkit as soon as the
# installed torch is a CUDA build, which a program that runs no CUDA compiler does not have.
#
# Where it looks, first found first taken:
#   GKA_TORCH_DIR      the folder that holds include/ and lib/ (…/site-packages/torch, or an unpacked LibTorch)
#   GKA_TORCH_HINTS    folders to try, set by gkaConfig.cmake
#   a Python           GKA_PYTHON, or else the Python that runs the build, an active virtual environment, .venv, python3

set(GKA_TORCH_MINIMUM 2.10)

# The interpreters to ask, in this order; one that is named is the only one.
function(_gka_list_pythons out)
  set(pythons "${GKA_PYTHON}")
  if(NOT GKA_PYTHON)
    find_program(python3 python3 NO_CACHE)
    set(pythons "${Python_EXECUTABLE}" "${Python3_EXECUTABLE}")
    if(DEFINED ENV{VIRTUAL_ENV})
      list(APPEND pythons "$ENV{VIRTUAL_ENV}/bin/python")
    endif()
    list(APPEND pythons "${PROJECT_SOURCE_DIR}/.venv/bin/python" "${python3}")
  endif()
  set(${out} "${pythons}" PARENT_SCOPE)
endfunction()

# Where that interpreter has torch, without importing it (which would take seconds); "" if nowhere.
function(_gka_ask_python python out)
  set(question "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')")
  execute_process(COMMAND "${python}" -c "${question}" OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${out} "${answer}" PARENT_SCOPE)
endfunction()

function(_gka_locate_torch out)
  if(GKA_TORCH_DIR)
    set(${out} "${GKA_TORCH_DIR}" PARENT_SCOPE)
    return()
  endif()
  foreach(hint IN LISTS GKA_TORCH_HINTS)
    if(EXISTS "${hint}/lib/libtorch_cpu.so")
      set(${out} "${hint}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  _gka_list_pythons(pythons)
  foreach(python IN LISTS pythons)
    if(python AND EXISTS "${python}")
      _gka_ask_python("${python}" dir)
      if(dir)
        set(${out} "${dir}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

function(_gka_torch_version dir out)
  set(version 0)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${dir}/include/${header}")
      file(STRINGS "${dir}/include/${header}" lines REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
      string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
      list(JOIN numbers "." version)
      break()
    endif()
  endforeach()
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

# Why there is no usable torch in `dir`, or "" where there is one.
function(_gka_why_not dir version out)
  set(advice "Install torch (pip install torch) into the Python in use, or name its folder: -DGKA_TORCH_DIR=…/site-packages/torch.")
  if(NOT dir)
    set(reason "gka needs torch ${GKA_TORCH_MINIMUM} or newer, and no Python here has it. ${advice}")
  elseif(NOT EXISTS "${dir}/lib/libtorch_cpu.so" OR NOT EXISTS "${dir}/include")
    set(reason "There is no LibTorch in '${dir}' (no lib/libtorch_cpu.so or no include/). ${advice}")
  elseif(version VERSION_LESS GKA_TORCH_MINIMUM)
    set(reason "The torch in '${dir}' is ${version}; gka needs ${GKA_TORCH_MINIMUM} or newer.")
  else()
    set(reason "")
  endif()
  set(${out} "${reason}" PARENT_SCOPE)
endfunction()

# Exceptions cross between gka and torch, so both must use one libstdc++.so. A toolchain that offers only libstdc++.a
# would put a second one inside libgka.so, and the first error message would be a crash: name the shared one before it.
function(_gka_share_libstdcxx)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so OUTPUT_VARIABLE shared
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT EXISTS "${shared}")
    find_library(GKA_LIBSTDCXX libstdc++.so.6 PATHS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE} /usr/lib64 /usr/lib)
    if(NOT GKA_LIBSTDCXX)
      message(FATAL_ERROR "This compiler has no shared libstdc++, which gka must have in common with torch; install the "
                          "libstdc++ development package that belongs to it.")
    endif()
    target_link_libraries(gka::torch INTERFACE "${GKA_LIBSTDCXX}")
  endif()
endfunction()

function(_gka_import_torch dir)
  foreach(library IN ITEMS torch_cpu c10)
    add_library(gka::${library} SHARED IMPORTED GLOBAL)
    set_target_properties(gka::${library} PROPERTIES IMPORTED_LOCATION "${dir}/lib/lib${library}.so")
  endforeach()
  add_library(gka::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(gka::torch SYSTEM INTERFACE "${dir}/include" "${dir}/include/torch/csrc/api/include")
  # libtorch.so is empty but for its list of needed libraries, with libtorch_cuda.so among them where torch has CUDA;
  # only --no-as-needed keeps it, and with it the CUDA operators in a program that has no Python to load them.
  # What libtorch_cpu.so itself needs (cuBLAS and so on) is found at run time, by its own path.
  # libstdc++ comes first: some libtorch.so export a std::filesystem of their own, part of which a program would call in
  # the place of its own and crash (remove_all of torch 2.11 for CUDA).
  # One word, so that CMake keeps it together; in such a word it does not quote a path with spaces itself.
  target_link_libraries(gka::torch INTERFACE
    "-Wl,--push-state,--no-as-needed,-l:libstdc++.so.6,\"${dir}/lib/libtorch.so\",--pop-state" gka::torch_cpu gka::c10)
  target_link_options(gka::torch INTERFACE -Wl,--allow-shlib-undefined)
endfunction()

function(gka_find_torch)
  cmake_parse_arguments(PARSE_ARGV 0 arg "REQUIRED" "" "")
  if(TARGET gka::torch)
    return()
  endif()
  _gka_locate_torch(dir)
  _gka_torch_version("${dir}" version)
  _gka_why_not("${dir}" "${version}" reason)
  if(reason)
    if(arg_REQUIRED)
      message(FATAL_ERROR "${reason}")
    endif()
    set(GKA_TORCH_NOT_FOUND "${reason}" PARENT_SCOPE)
    return()
  endif()
  file(REAL_PATH "${dir}" dir)
  # Kept, so that a later run of CMake by another Python (pip's, say) does not change what is already compiled.
  set(GKA_TORCH_DIR "${dir}" CACHE PATH "The torch package gka is built against")
  set(GKA_TORCH_VERSION "${version}" CACHE INTERNAL "Its version")
  message(STATUS "gka: torch ${version} in ${dir}")
  _gka_import_torch("${dir}")
  _gka_share_libstdcxx()
endfunction()
