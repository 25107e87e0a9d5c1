// Runs a parsed template. Whatever a template does, it ends: steps, output and depth have limits.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/jinja/parser.h"
#include "serve/jinja/value.h"

namespace gka::serve::jinja {

struct Limits {
  std::int64_t steps = 20'000'000;            // expressions, statements, and each 64 bytes of text made
  std::size_t bytes = std::size_t{64} << 20;  // of one text
  int depth = 500;                            // of what is being evaluated, macros in macros included
  std::optional<std::time_t> now{};           // for strftime_now; none: the clock's
};

class Interpreter {
 public:
  explicit Interpreter(Limits limits) : limits_(limits) {}

  Text run(const Node& root, const Value& variables);

  // What filters, tests and methods need:
  Value call(const Value& function, const Arguments& arguments);
  Value filter(std::string_view name, const Value& subject, const Arguments& arguments);
  bool test(std::string_view name, const Value& subject, const Arguments& arguments);
  Value attribute(const Value& subject, std::string_view name);
  Value item(const Value& subject, const Value& index);
  /// Counts work; throws where there is too much of it.
  void charge(std::size_t bytes);
  const Limits& limits() const { return limits_; }

 private:
  struct Scope {
    std::vector<std::pair<std::string, Value>> variables;
    std::shared_ptr<Scope> parent;

    Value* find(std::string_view name);
    void set(std::string_view name, Value value);
  };
  enum class Flow : std::uint8_t { on, leave, next };
  class Inside;   // a new scope as long as it lives
  class Capture;  // output into a text of its own as long as it lives
  class Deeper;

  Flow execute(const Node& node);
  Flow sequence(const Node& node);
  Flow branch(const Node& node);
  Flow loop(const Node& node);
  Flow run_loop(const Node& node, const Value& list, std::int64_t depth);
  void set(const Node& node);
  void set_block(const Node& node);
  void assign(const Node& target, const Value& value);
  void define_macro(const Node& node);
  void call_block(const Node& node);
  Flow filter_block(const Node& node);
  Flow with(const Node& node);
  Value macro_of(const Node& node, const Node& body, std::string name);
  Value run_macro(const Node& node, const Node& body, const std::shared_ptr<Scope>& defined,
                  const Arguments& arguments);
  void write(const Text& text);

  Value evaluate(const Node& node);
  Value evaluate_inner(const Node& node);
  Value name(const Node& node);
  Value slice(const Node& node);
  Value binary(const Node& node);
  Value comparison(const Node& node);
  Value dict(const Node& node);
  std::vector<Value> all(const Node& node, std::size_t from = 0);
  Arguments arguments(const Node& node);
  Value loop_variable(const std::vector<Value>& items, std::size_t at, const Value& changed, const Node& node,
                      std::int64_t depth);

  Limits limits_;
  std::int64_t steps_ = 0;
  int depth_ = 0;
  std::shared_ptr<Scope> scope_;
  Text* out_ = nullptr;
  Value captured_;
};

/// Arithmetic as Python has it: "+", "-", "*", "/", "//", "%", "**", "~".
Value arithmetic(Interpreter& run, std::string_view op, const Value& a, const Value& b);
/// subject[from:to:step].
Value slice_of(const Value& subject, std::optional<std::int64_t> from, std::optional<std::int64_t> to,
               std::int64_t step);

// The tables in builtins.cpp; null where there is no such name.
using Filter = Value (*)(Interpreter& run, const Value& subject, const Arguments& arguments);
using Test = bool (*)(Interpreter& run, const Value& subject, const Arguments& arguments);
Filter find_filter(std::string_view name);
Test find_test(std::string_view name);
Filter find_method(const Value& subject, std::string_view name);
/// range, namespace, dict, raise_exception, strftime_now, …
std::optional<Value> find_global(std::string_view name);

}  // namespace gka::serve::jinja
