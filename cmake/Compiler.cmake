# Compilers that are too old are refused by name before they fail in the middle of a header. What they lack is _Float16,
# which g++ has on x86 from 12 on and clang from 15. (The fuzz targets have no kernels, and Debian 12's clang is 14.)
set(GKA_OLDEST_GNU 12)
set(GKA_OLDEST_Clang 15)

set(oldest "${GKA_OLDEST_${CMAKE_CXX_COMPILER_ID}}")
if(oldest AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS oldest AND NOT GKA_LIBFUZZER)
  message(FATAL_ERROR "gka needs g++ ${GKA_OLDEST_GNU} or clang ${GKA_OLDEST_Clang} or newer, and ${CMAKE_CXX_COMPILER} is "
                      "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}. Name another in a fresh build folder: "
                      "-DCMAKE_CXX_COMPILER=g++-${GKA_OLDEST_GNU}.")
endif()
