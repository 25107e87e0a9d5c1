// A template as a tree. One node type for statements and expressions; what its children are is beside each kind.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/jinja/value.h"

namespace gka::serve::jinja {

enum class Kind : std::uint8_t {
  // statements
  data,          // value
  output,        // [expression]
  sequence,      // statements
  branch,        // condition, body, condition, body, …, and perhaps a last body
  loop,          // target, list, condition or null, body, else or null; name "recursive" or ""
  set,           // target, expression
  set_block,     // target, body, and filters to apply: a chain of filter nodes over `captured`, or null
  macro,         // body; named: parameters with defaults or null
  call_block,    // call, body; named: parameters of caller()
  filter_block,  // chain of filters over `captured`, body
  with,          // body; named: variables
  leave,         // {% break %}
  next,          // {% continue %}
  // expressions
  constant,     // value
  captured,     // the text a block has written
  name,         // name
  list,         // items
  tuple,        // items
  dict,         // key, value, key, value, …
  attribute,    // subject; name
  subscript,    // subject, index
  slice,        // subject, from, to, step; each may be null
  call,         // function, arguments; named
  filter,       // subject, arguments; name; named
  test,         // subject, arguments; name; named
  negation,     // not x
  unary,        // x; name "-" or "+"
  binary,       // a, b; name is the operator, "and" and "or" among them
  comparison,   // a, b, c, …; operators between them in `named`, with null nodes
  conditional,  // value, condition, otherwise or null
};

struct Node;
using NodePtr = std::unique_ptr<Node>;

struct Node {
  Kind kind;
  int line;
  std::string name{};
  Value value{};
  std::vector<NodePtr> children{};
  std::vector<std::pair<std::string, NodePtr>> named{};
};

/// Throws Error with the line.
NodePtr parse(std::string_view source);

}  // namespace gka::serve::jinja
