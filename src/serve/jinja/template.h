// Chat templates: Jinja as Hugging Face runs it (trim_blocks, lstrip_blocks, loop controls, raise_exception,
// strftime_now, tojson that keeps Unicode), without Python.
//
//   const auto chat = jinja::Template::parse(text);
//   Text prompt = chat.render(jinja::Dict{…});
//
// A parsed template may be rendered by many threads at once.
#pragma once

#include <memory>
#include <string_view>

#include "serve/jinja/interpreter.h"

namespace gka::serve::jinja {

class Template {
 public:
  /// Throws Error, with the line, where the template is not well-formed.
  static Template parse(std::string_view source);

  /// `variables` is a dictionary. Throws Raised where the template itself raises, Error where it fails.
  Text render(const Value& variables, Limits limits = {}) const { return Interpreter(limits).run(*root_, variables); }

 private:
  explicit Template(std::shared_ptr<const Node> root) : root_(std::move(root)) {}
  std::shared_ptr<const Node> root_;
};

}  // namespace gka::serve::jinja
