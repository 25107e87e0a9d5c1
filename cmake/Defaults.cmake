# What a build does when nobody says otherwise: Release, C++20, position-independent code, ccache where there is one.

# Tests are for people who work on gka itself: not for a project that includes it, nor for `pip install`.
if(PROJECT_IS_TOP_LEVEL AND NOT SKBUILD)
  set(GKA_DEVELOPER_BUILD ON)
else()
  set(GKA_DEVELOPER_BUILD OFF)
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  if(PROJECT_IS_TOP_LEVEL)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
  else()
    # In these folders alone: what else is in the project that includes gka keeps its flags, and its assertions. By
    # options, for with a build type of its own gka's targets would be left out where that project is installed.
    add_compile_options("$<$<CONFIG:>:-O3;-DNDEBUG>")
  endif()
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# The layout of the installed tree is the layout of the build tree and of the wheel: bin/, lib/, include/ side by side.
# lib is never lib64 or lib/x86_64-linux-gnu, because Python looks for gka/lib/libgka.so.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)

find_program(GKA_CCACHE ccache DOC "Compiler cache, used where present")
if(GKA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # The sloppiness is what ccache asks for before it takes files that use a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${GKA_CCACHE})
endif()
