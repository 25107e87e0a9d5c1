# libgka_models.so: the floors layers, models and data for programs outside, as target gka::models. Their headers are
# installed as they are included here ("models/checkpoint.h"), with those of base and ops that they name.
#
# One shared library and no archives: PCRE2 is inside it, and whoever links it need not have it. Reading compressed text
# stays with the command line, for Debian's libz.a cannot become part of a shared library.
if(NOT TARGET gka_models OR NOT TARGET gka_data)
  return()
endif()
find_package(nlohmann_json REQUIRED)
set(GKA_FLOORS_LEFT_OUT "text_input|documents")

add_library(gka_floors SHARED)
add_library(gka::models ALIAS gka_floors)
gka_own_code(gka_floors)
gka_export_own_names(gka_floors)
foreach(part IN ITEMS gka_layers_files gka_layers gka_models_files gka_models gka_data_files gka_data)
  target_sources(gka_floors PRIVATE "$<FILTER:$<TARGET_OBJECTS:${part}>,EXCLUDE,/(${GKA_FLOORS_LEFT_OUT})[.]cpp>")
endforeach()
target_include_directories(gka_floors INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
                                                $<INSTALL_INTERFACE:include/gka/floors>)
target_link_libraries(gka_floors PUBLIC gka::gka nlohmann_json::nlohmann_json PRIVATE Threads::Threads)
if(GKA_PCRE2 AND GKA_PCRE2_INCLUDE AND GKA_PCRE2_LIBRARY)
  target_link_libraries(gka_floors PRIVATE ${GKA_PCRE2_LIBRARY})
endif()
set_target_properties(gka_floors PROPERTIES EXPORT_NAME models OUTPUT_NAME gka_models LINKER_LANGUAGE CXX
                      INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib;${GKA_TORCH_DIR}/lib")
