# What `cmake --install` and `pip install` put where, and the package files behind find_package(gka).
include(CMakePackageConfigHelpers)

set(GKA_CMAKE_DIR lib/cmake/gka)

install(DIRECTORY include/gka DESTINATION include)
install(FILES LICENSE DESTINATION share/gka)
install(DIRECTORY configs DESTINATION share/gka FILES_MATCHING PATTERN "*.json")
install(TARGETS gka_kernels EXPORT gkaKernels ARCHIVE DESTINATION lib)
install(EXPORT gkaKernels NAMESPACE gka:: DESTINATION ${GKA_CMAKE_DIR})

if(TARGET gka)
  install(TARGETS gka gka_engine EXPORT gkaTorch LIBRARY DESTINATION lib)
  install(EXPORT gkaTorch NAMESPACE gka:: DESTINATION ${GKA_CMAKE_DIR})
endif()
if(TARGET gka_floors)
  install(TARGETS gka_floors EXPORT gkaModels LIBRARY DESTINATION lib)
  install(EXPORT gkaModels NAMESPACE gka:: DESTINATION ${GKA_CMAKE_DIR})
  foreach(floor IN ITEMS base ops layers models data)
    install(DIRECTORY src/${floor} DESTINATION include/gka/floors FILES_MATCHING PATTERN "*.h"
            REGEX "/(${GKA_FLOORS_LEFT_OUT}|json_once)[.]h" EXCLUDE)
  endforeach()
  install(FILES src/kernels/cuda/fused.h DESTINATION include/gka/floors/kernels/cuda)  # ops/gates.h names it
endif()
if(TARGET gka_python)
  install(TARGETS gka_python LIBRARY DESTINATION lib)
endif()
if(TARGET gka_cli)
  install(TARGETS gka_cli gka_cli_torch RUNTIME DESTINATION bin)
endif()

# With the CUDA kernels inside, whoever links them needs NVIDIA's runtime library.
set(GKA_NEEDS_CUDA OFF)
if(TARGET gka_cuda_objects)
  set(GKA_NEEDS_CUDA ON)
endif()

# In a folder of their own, where find_package does not look when CMAKE_PREFIX_PATH names the build folder by mistake.
set(package ${PROJECT_BINARY_DIR}/package)
configure_package_config_file(cmake/gkaConfig.cmake.in ${package}/gkaConfig.cmake INSTALL_DESTINATION ${GKA_CMAKE_DIR})
write_basic_package_version_file(${package}/gkaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/GkaTorch.cmake ${package}/gkaConfig.cmake ${package}/gkaConfigVersion.cmake DESTINATION ${GKA_CMAKE_DIR})
