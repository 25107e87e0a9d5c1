// The page and its parts, which the build puts into the program.
#pragma once

#include <string_view>

namespace gka::serve {

struct PageFile {
  std::string_view path, type, data;
};

/// Null where the page has no such file.
const PageFile* find_page_file(std::string_view path);

}  // namespace gka::serve
