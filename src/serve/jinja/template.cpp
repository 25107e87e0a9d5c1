#include "serve/jinja/template.h"

namespace gka::serve::jinja {

Template Template::parse(std::string_view source) {
  constexpr std::size_t kLargest = std::size_t{1} << 20;
  if (source.size() > kLargest) {
    throw Error("a template has at most 1 MiB, and this one has " + std::to_string(source.size()) + " bytes");
  }
  return Template(std::shared_ptr<const Node>(jinja::parse(source)));
}

}  // namespace gka::serve::jinja
