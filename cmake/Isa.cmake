# gka_add_isa(name sources…): the same sources once more, for one instruction set. Their objects come back in the
# variable GKA_ISA_OBJECTS of the caller.
#
# The danger is the linker, not the compiler. A file compiled with -mavx512f also emits std::vector<float>::resize and
# the like as weak symbols, and if the linker keeps that copy for the whole program, a machine without AVX-512 dies in
# code that never asked for it. So each set's objects are joined into one, and of that one only the names in the set's
# own namespace, gka::kernels::cpu::<name>, stay visible. tests/repo checks it.

set(GKA_ISA_FLAGS_portable "")
set(GKA_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(GKA_ISA_FLAGS_avx512 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(GKA_X86 1)
  set(GKA_ISAS portable avx2 avx512)
else()
  set(GKA_X86 0)
  set(GKA_ISAS portable)
endif()

# Sanitized objects keep their symbols (the sanitizer's own bookkeeping is among them): they run where they are built.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_OBJCOPY AND NOT GKA_SANITIZE)
  set(GKA_ISOLATE_ISA ON)
else()
  set(GKA_ISOLATE_ISA OFF)
endif()

function(gka_add_isa name)
  set(target gka_isa_${name})
  add_library(${target} OBJECT ${ARGN})
  gka_own_code(${target})
  gka_kernel_flags(${target})
  target_compile_definitions(${target} PRIVATE GKA_ISA=${name})
  target_compile_options(${target} PRIVATE ${GKA_ISA_FLAGS_${name}}
                         $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)

  if(NOT GKA_ISOLATE_ISA)
    set(GKA_ISA_OBJECTS $<TARGET_OBJECTS:${target}> PARENT_SCOPE)
    return()
  endif()

  string(LENGTH ${name} length)
  set(own_names "_ZN3gka7kernels3cpu${length}${name}*")
  set(joined ${CMAKE_CURRENT_BINARY_DIR}/isa_${name}.o)
  add_custom_command(
    OUTPUT ${joined}
    COMMAND ${CMAKE_LINKER} -r --force-group-allocation -o ${joined}.tmp $<TARGET_OBJECTS:${target}>
    COMMAND ${CMAKE_OBJCOPY} --wildcard "--keep-global-symbol=${own_names}" ${joined}.tmp ${joined}
    COMMAND ${CMAKE_COMMAND} -E rm ${joined}.tmp
    DEPENDS ${target} $<TARGET_OBJECTS:${target}>
    COMMENT "Joining the ${name} kernels"
    COMMAND_EXPAND_LISTS VERBATIM)
  set_source_files_properties(${joined} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  set(GKA_ISA_OBJECTS ${joined} PARENT_SCOPE)
endfunction()
