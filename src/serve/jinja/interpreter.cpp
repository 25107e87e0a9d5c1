#include "serve/jinja/interpreter.h"

#include <algorithm>
#include <cmath>

namespace gka::serve::jinja {
namespace {

/// Runs `body`, and gives an error that has no line this one.
template <typename Body>
auto with_line(int line, Body&& body) {
  try {
    return body();
  } catch (Error& error) {
    if (error.line == 0) error.line = line;
    throw;
  }
}

[[noreturn]] void fail_undefined(const Value& value) {
  throw Error("'" + value.as<Undefined>()->name + "' is undefined");
}

}  // namespace

class Interpreter::Inside {
 public:
  Inside(Interpreter& run, const std::shared_ptr<Scope>& parent) : run_(run), before_(run.scope_) {
    run_.scope_ = std::make_shared<Scope>(Scope{{}, parent});
  }
  explicit Inside(Interpreter& run) : Inside(run, run.scope_) {}
  ~Inside() {
    run_.scope_->variables.clear();  // a macro defined in it holds the scope, and the scope the macro
    run_.scope_ = before_;
  }
  Inside(const Inside&) = delete;

 private:
  Interpreter& run_;
  std::shared_ptr<Scope> before_;
};

class Interpreter::Capture {
 public:
  explicit Capture(Interpreter& run) : run_(run), before_(run.out_) { run_.out_ = &text_; }
  ~Capture() { run_.out_ = before_; }
  Capture(const Capture&) = delete;

  Text take() { return std::move(text_); }

 private:
  Interpreter& run_;
  Text* before_;
  Text text_;
};

class Interpreter::Deeper {
 public:
  explicit Deeper(Interpreter& run) : run_(run) {
    if (++run_.depth_ > run_.limits_.depth) {
      --run_.depth_;
      throw Error("the template goes more than " + std::to_string(run_.limits_.depth) + " levels deep");
    }
  }
  ~Deeper() { --run_.depth_; }
  Deeper(const Deeper&) = delete;

 private:
  Interpreter& run_;
};

Value* Interpreter::Scope::find(std::string_view name) {
  for (auto* scope = this; scope != nullptr; scope = scope->parent.get()) {
    const auto found = std::ranges::find_if(scope->variables, [&](const auto& entry) { return entry.first == name; });
    if (found != scope->variables.end()) return &found->second;
  }
  return nullptr;
}

void Interpreter::Scope::set(std::string_view name, Value value) {
  const auto found = std::ranges::find_if(variables, [&](const auto& entry) { return entry.first == name; });
  if (found != variables.end()) {
    found->second = std::move(value);
  } else {
    variables.emplace_back(std::string(name), std::move(value));
  }
}

Text Interpreter::run(const Node& root, const Value& variables) {
  Text out;
  out_ = &out;
  const Inside inside(*this, nullptr);
  for (const auto& [key, value] : variables.dict()->items) scope_->set(key.text()->bytes(), value);
  execute(root);
  return out;
}

void Interpreter::charge(std::size_t bytes) {
  if (bytes > limits_.bytes) {
    throw Error("the template makes a text of more than " + std::to_string(limits_.bytes) + " bytes");
  }
  steps_ += 1 + static_cast<std::int64_t>(bytes / 64);
  if (steps_ > limits_.steps) throw Error("the template takes more than " + std::to_string(limits_.steps) + " steps");
}

void Interpreter::write(const Text& text) {
  charge(text.size());
  if (out_->size() + text.size() > limits_.bytes) charge(out_->size() + text.size());
  *out_ += text;
}

// --- statements

Interpreter::Flow Interpreter::execute(const Node& node) {
  return with_line(node.line, [&] {
    const Deeper deeper(*this);
    charge(0);
    switch (node.kind) {
      case Kind::data: write(*node.value.text()); return Flow::on;
      case Kind::output: write(to_text(evaluate(*node.children[0]))); return Flow::on;
      case Kind::sequence: return sequence(node);
      case Kind::branch: return branch(node);
      case Kind::loop: return loop(node);
      case Kind::set: set(node); return Flow::on;
      case Kind::set_block: set_block(node); return Flow::on;
      case Kind::macro: define_macro(node); return Flow::on;
      case Kind::call_block: call_block(node); return Flow::on;
      case Kind::filter_block: return filter_block(node);
      case Kind::with: return with(node);
      case Kind::leave: return Flow::leave;
      case Kind::next: return Flow::next;
      default: throw Error("an expression stands where a statement belongs");
    }
  });
}

Interpreter::Flow Interpreter::sequence(const Node& node) {
  for (const auto& child : node.children) {
    if (const auto flow = execute(*child); flow != Flow::on) return flow;
  }
  return Flow::on;
}

Interpreter::Flow Interpreter::branch(const Node& node) {
  const auto& parts = node.children;
  std::size_t i = 0;
  for (; i + 1 < parts.size(); i += 2) {
    if (evaluate(*parts[i]).truth()) return execute(*parts[i + 1]);
  }
  return i < parts.size() ? execute(*parts[i]) : Flow::on;
}

Interpreter::Flow Interpreter::loop(const Node& node) { return run_loop(node, evaluate(*node.children[1]), 0); }

Value Interpreter::loop_variable(const std::vector<Value>& items, std::size_t at, const Value& changed,
                                 const Node& node, std::int64_t depth) {
  const auto count = static_cast<std::int64_t>(items.size()), index = static_cast<std::int64_t>(at);
  Dict loop{.items = {{"index", index + 1},
                      {"index0", index},
                      {"revindex", count - index},
                      {"revindex0", count - index - 1},
                      {"first", at == 0},
                      {"last", index + 1 == count},
                      {"length", count},
                      {"depth", depth + 1},
                      {"depth0", depth},
                      {"changed", changed}},
            .name_space = true};
  if (at > 0) loop.set("previtem", items[at - 1]);
  if (index + 1 < count) loop.set("nextitem", items[at + 1]);
  const auto cycle = [at](Interpreter&, const Arguments& arguments) -> Value {
    if (arguments.positional.empty()) throw Error("loop.cycle takes at least one value");
    return arguments.positional[at % arguments.positional.size()];
  };
  loop.set("cycle", Function{"cycle", cycle});
  if (node.name == "recursive") {
    const auto again = [&node, depth](Interpreter& run, const Arguments& arguments) -> Value {
      Capture capture(run);
      run.run_loop(node, arguments.need(0, "iterable"), depth + 1);
      return capture.take();
    };
    loop.set("()", Function{"loop", again});
  }
  return loop;
}

/// Names set in a body are forgotten after each round.
Interpreter::Flow Interpreter::run_loop(const Node& node, const Value& list, std::int64_t depth) {
  const auto &target = *node.children[0], &body = *node.children[3];
  auto items = with_line(node.line, [&] { return iterate(list); });
  if (node.children[2]) {
    std::erase_if(items, [&](const Value& item) {
      const Inside inside(*this);
      assign(target, item);
      return !evaluate(*node.children[2]).truth();
    });
  }
  const auto last = std::make_shared<std::optional<Value>>();
  const Value changed = Function{"changed", [last](Interpreter&, const Arguments& arguments) -> Value {
                                   const auto now = Value::list(arguments.positional);
                                   const bool same = last->has_value() && equal(**last, now);
                                   *last = now;
                                   return !same;
                                 }};
  for (std::size_t at = 0; at < items.size(); ++at) {
    const Inside inside(*this);
    scope_->set("loop", loop_variable(items, at, changed, node, depth));
    assign(target, items[at]);
    if (execute(body) == Flow::leave) return Flow::on;
  }
  return items.empty() && node.children[4] ? execute(*node.children[4]) : Flow::on;
}

void Interpreter::assign(const Node& target, const Value& value) {
  if (target.kind == Kind::name) return scope_->set(target.name, value);
  if (target.kind == Kind::attribute) {
    const auto object = evaluate(*target.children[0]);
    if (!object.dict() || !object.dict()->name_space) throw Error("only attributes of a namespace can be set");
    return object.dict()->set(target.name, value);
  }
  const auto items = iterate(value);
  if (items.size() != target.children.size()) {
    throw Error(std::to_string(target.children.size()) + " names are set from " + std::to_string(items.size()) +
                " values");
  }
  for (std::size_t i = 0; i < items.size(); ++i) assign(*target.children[i], items[i]);
}

void Interpreter::set(const Node& node) { assign(*node.children[0], evaluate(*node.children[1])); }

void Interpreter::set_block(const Node& node) {
  Text text;
  {
    Capture capture(*this);
    const Inside inside(*this);
    execute(*node.children[1]);
    text = capture.take();
  }
  captured_ = std::move(text);
  assign(*node.children[0], node.children[2] ? evaluate(*node.children[2]) : captured_);
}

Interpreter::Flow Interpreter::filter_block(const Node& node) {
  Text text;
  Flow flow;
  {
    Capture capture(*this);
    const Inside inside(*this);
    flow = execute(*node.children[1]);
    text = capture.take();
  }
  captured_ = std::move(text);
  write(to_text(evaluate(*node.children[0])));
  return flow;
}

Interpreter::Flow Interpreter::with(const Node& node) {
  std::vector<Value> values;
  for (const auto& [name, value] : node.named) values.push_back(evaluate(*value));
  const Inside inside(*this);
  for (std::size_t i = 0; i < values.size(); ++i) scope_->set(node.named[i].first, values[i]);
  return execute(*node.children[0]);
}

Value Interpreter::run_macro(const Node& node, const Node& body, const std::shared_ptr<Scope>& defined,
                             const Arguments& arguments) {
  const auto& parameters = node.named;
  if (arguments.positional.size() > parameters.size()) {
    throw Error("the macro '" + node.name + "' takes " + std::to_string(parameters.size()) + " arguments, and got " +
                std::to_string(arguments.positional.size()));
  }
  const Inside inside(*this, defined);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, otherwise] = parameters[i];
    if (const auto* given = arguments.find(i, name)) {
      scope_->set(name, *given);
    } else {
      scope_->set(name, otherwise ? evaluate(*otherwise) : Value(Undefined{name}));
    }
  }
  for (const auto& [name, value] : arguments.named) {
    const bool known =
        std::ranges::any_of(parameters, [&given = name](const auto& entry) { return entry.first == given; });
    if (!known && name != "caller") throw Error("the macro '" + node.name + "' has no argument '" + name + "'");
    if (!known) scope_->set(name, value);
  }
  Capture capture(*this);
  execute(body);
  return capture.take();
}

Value Interpreter::macro_of(const Node& node, const Node& body, std::string name) {
  return Function{std::move(name), [&node, &body, defined = scope_](Interpreter& run, const Arguments& arguments) {
                    return run.run_macro(node, body, defined, arguments);
                  }};
}

void Interpreter::define_macro(const Node& node) {
  scope_->set(node.name, macro_of(node, *node.children[0], node.name));
}

void Interpreter::call_block(const Node& node) {
  const auto& call_node = *node.children[0];
  auto given = arguments(call_node);
  given.named.emplace_back("caller", macro_of(node, *node.children[1], "caller"));
  write(to_text(call(evaluate(*call_node.children[0]), given)));
}

// --- expressions

Value Interpreter::evaluate(const Node& node) {
  return with_line(node.line, [&] {
    const Deeper deeper(*this);
    charge(0);
    return evaluate_inner(node);
  });
}

Value Interpreter::evaluate_inner(const Node& node) {
  const auto child = [&](std::size_t i) { return evaluate(*node.children[i]); };
  switch (node.kind) {
    case Kind::constant: return node.value;
    case Kind::captured: return captured_;
    case Kind::name: return name(node);
    case Kind::list: return Value::list(all(node));
    case Kind::tuple: return Value::tuple(all(node));
    case Kind::dict: return dict(node);
    case Kind::attribute: return attribute(child(0), node.name);
    case Kind::subscript: {
      const auto subject = child(0);
      return item(subject, child(1));
    }
    case Kind::slice: return slice(node);
    case Kind::call: {
      const auto function = child(0);
      return call(function, arguments(node));
    }
    case Kind::filter: {
      const auto subject = child(0);
      return filter(node.name, subject, arguments(node));
    }
    case Kind::test: {
      const auto subject = child(0);
      return test(node.name, subject, arguments(node));
    }
    case Kind::negation: return !child(0).truth();
    case Kind::unary: return arithmetic(*this, node.name, std::int64_t{0}, child(0));
    case Kind::binary: return binary(node);
    case Kind::comparison: return comparison(node);
    case Kind::conditional:
      if (child(1).truth()) return child(0);
      return node.children[2] ? child(2) : Value(Undefined{"the other side of an inline if"});
    default: throw Error("a statement stands where an expression belongs");
  }
}

std::vector<Value> Interpreter::all(const Node& node, std::size_t from) {
  std::vector<Value> values;
  for (auto i = from; i < node.children.size(); ++i) values.push_back(evaluate(*node.children[i]));
  return values;
}

Arguments Interpreter::arguments(const Node& node) {
  Arguments made{.positional = all(node, 1), .named = {}};
  for (const auto& [name, value] : node.named) made.named.emplace_back(name, evaluate(*value));
  return made;
}

Value Interpreter::name(const Node& node) {
  if (const auto* value = scope_->find(node.name)) return *value;
  if (auto known = find_global(node.name)) return *std::move(known);
  return Undefined{node.name};
}

Value Interpreter::dict(const Node& node) {
  Dict made;
  for (std::size_t i = 0; i + 1 < node.children.size(); i += 2) {
    auto key = evaluate(*node.children[i]);
    if (key.list() || key.dict()) throw Error("a " + std::string(key.kind()) + " cannot be a dictionary's key");
    made.set(std::move(key), evaluate(*node.children[i + 1]));
  }
  return made;
}

Value Interpreter::attribute(const Value& subject, std::string_view name) {
  if (subject.is_undefined()) fail_undefined(subject);
  if (const auto method = find_method(subject, name)) {
    return Function{std::string(name), [subject, method](Interpreter& run, const Arguments& arguments) {
                      return method(run, subject, arguments);
                    }};
  }
  if (const auto* dict = subject.dict()) {
    if (const auto* value = dict->named(name)) return *value;
  }
  return Undefined{std::string(name)};
}

Value Interpreter::item(const Value& subject, const Value& index) {
  if (subject.is_undefined()) fail_undefined(subject);
  if (const auto* dict = subject.dict()) {
    if (const auto* value = dict->find(index)) return *value;
  }
  const auto place = integer_of(index);
  if (place && (subject.list() || subject.text())) {
    const auto length = *length_of(subject);
    const auto at = *place < 0 ? *place + length : *place;
    if (at < 0 || at >= length) return Undefined{std::to_string(*place)};
    if (subject.list()) return subject.list()->items[static_cast<std::size_t>(at)];
    return slice_of(subject, at, at + 1, 1);
  }
  if (index.text()) return attribute(subject, index.text()->bytes());
  return Undefined{to_text(index).bytes()};
}

Value Interpreter::slice(const Node& node) {
  const auto subject = evaluate(*node.children[0]);
  if (subject.is_undefined()) fail_undefined(subject);
  std::optional<std::int64_t> parts[3];
  for (std::size_t i = 0; i < 3; ++i) {
    if (!node.children[i + 1]) continue;
    const auto value = evaluate(*node.children[i + 1]);
    if (!value.is_none()) parts[i] = need_integer(value, "a slice");
  }
  charge(static_cast<std::size_t>(length_of(subject).value_or(0)));
  return slice_of(subject, parts[0], parts[1], parts[2].value_or(1));
}

Value Interpreter::binary(const Node& node) {
  const auto left = evaluate(*node.children[0]);
  if (node.name == "and") return left.truth() ? evaluate(*node.children[1]) : left;
  if (node.name == "or") return left.truth() ? left : evaluate(*node.children[1]);
  return arithmetic(*this, node.name, left, evaluate(*node.children[1]));
}

Value Interpreter::comparison(const Node& node) {
  using Compare = bool (*)(const Value&, const Value&);
  static constexpr std::pair<std::string_view, Compare> kOperators[] = {
      {"==", [](const Value& a, const Value& b) { return equal(a, b); }},
      {"!=", [](const Value& a, const Value& b) { return !equal(a, b); }},
      {"<", [](const Value& a, const Value& b) { return less(a, b); }},
      {">", [](const Value& a, const Value& b) { return less(b, a); }},
      {"<=", [](const Value& a, const Value& b) { return less(a, b) || equal(a, b); }},
      {">=", [](const Value& a, const Value& b) { return less(b, a) || equal(a, b); }},
      {"in", [](const Value& a, const Value& b) { return contains(b, a); }},
      {"not in", [](const Value& a, const Value& b) { return !contains(b, a); }},
  };
  auto left = evaluate(*node.children[0]);
  for (std::size_t i = 0; i < node.named.size(); ++i) {
    auto right = evaluate(*node.children[i + 1]);
    charge(static_cast<std::size_t>(length_of(right).value_or(0)));
    const auto* found =
        std::ranges::find_if(kOperators, [&](const auto& entry) { return entry.first == node.named[i].first; });
    if (!found->second(left, right)) return false;
    left = std::move(right);
  }
  return true;
}

Value Interpreter::call(const Value& function, const Arguments& arguments) {
  const Deeper deeper(*this);
  if (const auto* known = function.function()) return known->call(*this, arguments);
  if (const auto* dict = function.dict(); dict && dict->name_space) {
    if (const auto* again = dict->named("()")) return again->function()->call(*this, arguments);
  }
  if (function.is_undefined()) fail_undefined(function);
  throw Error("a value of type " + std::string(function.kind()) + " cannot be called");
}

Value Interpreter::filter(std::string_view name, const Value& subject, const Arguments& arguments) {
  const auto known = find_filter(name);
  if (known == nullptr) throw Error("there is no filter '" + std::string(name) + "'");
  charge(static_cast<std::size_t>(length_of(subject).value_or(0)));
  return known(*this, subject, arguments);
}

bool Interpreter::test(std::string_view name, const Value& subject, const Arguments& arguments) {
  const auto known = find_test(name);
  if (known == nullptr) throw Error("there is no test '" + std::string(name) + "'");
  return known(*this, subject, arguments);
}

// --- arithmetic

namespace {

[[noreturn]] void fail_operator(std::string_view op, const Value& a, const Value& b) {
  for (const auto* side : {&a, &b}) {
    if (side->is_undefined()) fail_undefined(*side);
  }
  throw Error("'" + std::string(op) + "' is not defined between " + std::string(a.kind()) + " and " +
              std::string(b.kind()));
}

std::int64_t checked(bool overflow, std::int64_t value) {
  if (overflow) throw Error("a number is too large");
  return value;
}

std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  if (b == 0) throw Error("a division by zero");
  if (b == -1) return checked(a == INT64_MIN, a == INT64_MIN ? a : -a);
  const auto quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

std::int64_t power(std::int64_t base, std::int64_t exponent) {
  std::int64_t result = 1;
  for (std::int64_t i = 0; i < exponent && result != 0 && !(result == 1 && base == 1); ++i) {
    const bool overflow = __builtin_mul_overflow(result, base, &result);
    result = checked(overflow, result);
    if (base == -1 && i > 1) return exponent % 2 == 0 ? 1 : -1;
  }
  return result;
}

std::optional<Value> whole_numbers(std::string_view op, std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  bool overflow = false;
  if (op == "+" || op == "-" || op == "*") {
    if (op == "+") overflow = __builtin_add_overflow(a, b, &result);
    if (op == "-") overflow = __builtin_sub_overflow(a, b, &result);
    if (op == "*") overflow = __builtin_mul_overflow(a, b, &result);
    return checked(overflow, result);
  }
  if (op == "//") return floor_divide(a, b);
  if (op == "%") return b == -1 ? Value(std::int64_t{0}) : Value(a - floor_divide(a, b) * b);
  if (op == "**" && b >= 0) return power(a, b);
  return std::nullopt;
}

Value real_numbers(std::string_view op, double a, double b) {
  if (op == "+") return a + b;
  if (op == "-") return a - b;
  if (op == "*") return a * b;
  if (op == "**") return std::pow(a, b);
  if (b == 0) throw Error("a division by zero");
  if (op == "/") return a / b;
  const double floored = std::floor(a / b);
  return op == "//" ? floored : a - floored * b;
}

Value repeated(Interpreter& run, const Value& value, std::int64_t times) {
  times = std::max<std::int64_t>(times, 0);
  const auto size = value.text() ? value.text()->size() : value.list()->items.size() * 64;
  if (size > 0 && static_cast<std::size_t>(times) > run.limits().bytes / size) run.charge(run.limits().bytes + 1);
  run.charge(size * static_cast<std::size_t>(times));
  if (value.text()) {
    Text text;
    for (std::int64_t i = 0; i < times && size > 0; ++i) text += *value.text();
    return text;
  }
  List list{.items = {}, .tuple = value.list()->tuple};
  for (std::int64_t i = 0; i < times && size > 0; ++i) {
    list.items.insert(list.items.end(), value.list()->items.begin(), value.list()->items.end());
  }
  return list;
}

Value joined(Interpreter& run, const Value& a, const Value& b) {
  run.charge(64 * (a.list()->items.size() + b.list()->items.size()));
  List list = *a.list();
  list.items.insert(list.items.end(), b.list()->items.begin(), b.list()->items.end());
  return list;
}

Value texts_joined(Interpreter& run, const Text& a, const Text& b) {
  run.charge(a.size() + b.size());
  return a + b;
}

}  // namespace

Value arithmetic(Interpreter& run, std::string_view op, const Value& a, const Value& b) {
  if (op == "~") return texts_joined(run, to_text(a), to_text(b));
  const auto x = number_of(a), y = number_of(b);
  if (x && y) {
    const auto i = integer_of(a), j = integer_of(b);
    if (i && j) {
      if (auto whole = whole_numbers(op, *i, *j)) return *std::move(whole);
    }
    return real_numbers(op, *x, *y);
  }
  if (op == "+" && a.text() && b.text()) return texts_joined(run, *a.text(), *b.text());
  if (op == "+" && a.list() && b.list() && a.list()->tuple == b.list()->tuple) return joined(run, a, b);
  if (op == "*" && (a.text() || a.list()) && integer_of(b)) return repeated(run, a, *integer_of(b));
  if (op == "*" && (b.text() || b.list()) && integer_of(a)) return repeated(run, b, *integer_of(a));
  if (op == "%" && a.text()) {
    const auto values = b.list() && b.list()->tuple ? b.list()->items : std::vector<Value>{b};
    return run.filter("format", a, {.positional = values, .named = {}});
  }
  fail_operator(op, a, b);
}

Value slice_of(const Value& subject, std::optional<std::int64_t> from, std::optional<std::int64_t> to,
               std::int64_t step) {
  if (step == 0) throw Error("a slice's step cannot be 0");
  if (!subject.text() && !subject.list()) {
    throw Error("a value of type " + std::string(subject.kind()) + " cannot be sliced");
  }
  const auto length = *length_of(subject);
  const auto place = [&](std::optional<std::int64_t> given, std::int64_t otherwise) {
    if (!given) return otherwise;
    const auto at = *given < 0 ? *given + length : *given;
    return step > 0 ? std::clamp<std::int64_t>(at, 0, length) : std::clamp<std::int64_t>(at, -1, length - 1);
  };
  const auto begin = place(from, step > 0 ? 0 : length - 1), end = place(to, step > 0 ? length : -1);
  std::vector<std::size_t> places;
  for (auto i = begin; step > 0 ? i < end : i > end;) {
    places.push_back(static_cast<std::size_t>(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  if (const auto* list = subject.list()) {
    List part{.items = {}, .tuple = list->tuple};
    for (const auto i : places) part.items.push_back(list->items[i]);
    return part;
  }
  const auto& text = *subject.text();
  const auto starts = character_starts(text.bytes());
  if (step == 1) {
    if (places.empty()) return Text();
    return text.cut(starts[places.front()], starts[places.back() + 1] - starts[places.front()]);
  }
  Text part;
  for (const auto i : places) part += text.cut(starts[i], starts[i + 1] - starts[i]);
  return part;
}

}  // namespace gka::serve::jinja
