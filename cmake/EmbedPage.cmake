# Writes OUTPUT, a C++ file with the page's files (FOLDER/*) as texts: cmake -DOUTPUT=… -DFOLDER=… -P EmbedPage.cmake
set(types html "text/html; charset=utf-8" css "text/css; charset=utf-8" js "text/javascript; charset=utf-8" svg "image/svg+xml")
set(entries "")
set(arrays "")
set(number 0)
foreach(name IN ITEMS index.html style.css app.js icon.svg)
  file(READ ${FOLDER}/${name} bytes HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  get_filename_component(ending ${name} LAST_EXT)
  string(SUBSTRING ${ending} 1 -1 ending)
  list(FIND types ${ending} place)
  math(EXPR place "${place} + 1")
  list(GET types ${place} type)
  set(path "/${name}")
  if(name STREQUAL "index.html")
    set(path "/")
  endif()
  string(APPEND arrays "constexpr unsigned char kFile${number}[] = {${bytes}};\n")
  string(APPEND entries "    {\"${path}\", \"${type}\", {reinterpret_cast<const char*>(kFile${number}), sizeof(kFile${number})}},\n")
  math(EXPR number "${number} + 1")
endforeach()
file(WRITE ${OUTPUT} "// Made by cmake/EmbedPage.cmake.
#include \"serve/page.h\"

namespace gka::serve {
namespace {

${arrays}
}  // namespace

const PageFile* find_page_file(std::string_view path) {
  static const PageFile kFiles[] = {
${entries}  };
  for (const auto& file : kFiles) {
    if (file.path == path) return &file;
  }
  return nullptr;
}

}  // namespace gka::serve
")
