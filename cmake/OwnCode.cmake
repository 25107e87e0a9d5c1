# gka_own_code(target): warnings, sanitizers and the include paths of code that is ours. Other people's headers come in
# as SYSTEM, so a warning there never stops a build here.
find_package(Threads REQUIRED)

# -Og with line numbers alone: a third of the compile time of -O1 -g, and all a report needs.
set(GKA_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)

# What libFuzzer steers by: which branches an input reached.
option(GKA_LIBFUZZER "Build the fuzz targets with clang's libFuzzer as well" OFF)
if(GKA_LIBFUZZER)
  list(APPEND GKA_SANITIZE_FLAGS -fsanitize=fuzzer-no-link)
endif()

# GCC places the frames it keeps for this check at 32 bytes, where AVX-512 code expects 64 (its bug 110027).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND GKA_SANITIZE_FLAGS --param=asan-use-after-return=0)
endif()

# GCC 12 sees overlapping copies in "text" + std::string where there are none (its bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(GKA_FALSE_WARNINGS -Wno-restrict)
endif()

function(gka_own_code target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE -Wall -Wextra ${GKA_FALSE_WARNINGS} $<$<BOOL:${GKA_WERROR}>:-Werror>)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  if(GKA_SANITIZE)
    target_compile_options(${target} PRIVATE ${GKA_SANITIZE_FLAGS} -Og -g1)
    target_link_options(${target} PUBLIC ${GKA_SANITIZE_FLAGS})
  endif()
endfunction()
