# gka_export_own_names(target [pattern…]): of a shared library's names only gka's own are visible to whoever loads it.
#
# Headers leave copies of std::, c10:: and nlohmann:: functions in every library. Were they visible, the linker would take
# a program's own copy for ours as well, and one compiled otherwise (JSON_NOEXCEPTION, say) would run in gka; so would
# NVIDIA's runtime, which is linked into libgka.so, in torch.
function(gka_export_own_names target)
  set(names "*3gka*" ${ARGN})  # as the compiler mangles the namespace
  list(JOIN names "; " names)
  set(script ${PROJECT_BINARY_DIR}/${target}.map)
  file(CONFIGURE OUTPUT ${script} CONTENT "{ global: @names@; local: *; };\n" @ONLY)
  target_link_options(${target} PRIVATE "-Wl,--version-script=${script}")
  set_target_properties(${target} PROPERTIES LINK_DEPENDS ${script})
endfunction()
