// JSON as a machine with a stack. A schema becomes a tree of `Form`s; a `State` is what has been read so far: a stack
// of frames, each a value that is open. A token is allowed when all of its bytes lead from one state to the next.
//
// What a schema may say: type (one or several), properties, required, additionalProperties (true, false), items,
// minItems, maxItems, enum, const, anyOf/oneOf, $ref into $defs, and string, number, integer, boolean, null without
// further limits. Properties come in the order the schema has them. Anything else is refused by name.
#include "serve/grammar.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "data/unicode.h"

namespace gka::serve {
namespace {

constexpr int kDeepest = 48;             // of open values: an answer cannot nest for ever
constexpr std::size_t kMostStates = 64;  // readings kept at once, where a schema allows several
constexpr int kMostSpace = 2;            // white space in a row: a model that likes it would never end

struct Form {
  enum class Kind : std::uint8_t { any, object, array, string, number, integer, literal, choice } kind = Kind::any;
  struct Property {
    std::string key;  // as JSON, with its quotes
    std::shared_ptr<const Form> value;
    bool required = false;
  };
  std::vector<Property> properties{};
  bool open = true;  // of an object: other keys too
  std::shared_ptr<const Form> items{};
  std::size_t least = 0, most = SIZE_MAX;            // of an array
  std::string text{};                                // of a literal, as JSON
  std::vector<std::shared_ptr<const Form>> forms{};  // of a choice
};
using FormPtr = std::shared_ptr<const Form>;

// --- schema to forms

FormPtr literal(const Json& value) {
  auto form = std::make_shared<Form>();
  form->kind = Form::Kind::literal;
  form->text = dumped(value);
  return form;
}

FormPtr any_of(std::vector<FormPtr> forms) {
  if (forms.size() == 1) return forms[0];
  auto form = std::make_shared<Form>();
  form->kind = Form::Kind::choice;
  form->forms = std::move(forms);
  return form;
}

class SchemaReader {
 public:
  /// `param`: the field of the request that the schema stands in.
  explicit SchemaReader(const Json& root, std::string param = "response_format")
      : root_(root), param_(std::move(param)) {}

  FormPtr read(const Json& schema, int depth = 0) {
    if (depth > 32) throw problem("is nested too deep, or refers to itself");
    if (schema.is_boolean() && schema.get<bool>()) return std::make_shared<Form>();
    if (!schema.is_object()) throw problem("has a part that is not an object");
    check_keywords(schema);
    if (schema.contains("$ref")) return read(referred(schema["$ref"]), depth + 1);
    if (schema.contains("const")) return literal(schema["const"]);
    if (schema.contains("enum")) return enumeration(schema["enum"]);
    for (const auto* word : {"anyOf", "oneOf"}) {
      if (schema.contains(word)) return choice(schema[word], depth);
    }
    if (!schema.contains("type"))
      return schema.contains("properties") ? object(schema, depth) : std::make_shared<Form>();
    if (schema["type"].is_array()) return types(schema, depth);
    return typed(schema, schema["type"], depth);
  }

 private:
  Problem problem(const std::string& what) const {
    return bad_request("the schema of '" + param_ + "' " + what, param_, "unsupported_schema");
  }

  void check_keywords(const Json& schema) const {
    static constexpr std::string_view kKnown[] = {"type",    "properties",  "required", "additionalProperties",
                                                  "items",   "minItems",    "maxItems", "enum",
                                                  "const",   "anyOf",       "oneOf",    "$ref",
                                                  "$defs",   "definitions", "title",    "description",
                                                  "default", "examples",    "$schema",  "$id",
                                                  "strict",  "nullable",    "$comment", "deprecated"};
    for (const auto& [key, value] : schema.items()) {
      if (std::ranges::find(kKnown, key) == std::end(kKnown))
        throw problem("has '" + key.substr(0, 40) + "', which is not supported");
    }
  }

  const Json& referred(const Json& reference) const {
    const std::string path = reference.is_string() ? reference.get<std::string>() : "";
    if (!path.starts_with("#/")) throw problem("has a $ref that does not start with #/");
    try {
      return root_.at(Json::json_pointer(path.substr(1)));
    } catch (const nlohmann::json::exception&) {
      throw problem("has a $ref to '" + path.substr(0, 60) + "', which is not there");
    }
  }

  FormPtr enumeration(const Json& values) const {
    if (!values.is_array() || values.empty() || values.size() > 256)
      throw problem("has an enum that is not a list of 1 to 256 values");
    std::vector<FormPtr> forms;
    for (const auto& value : values) forms.push_back(literal(value));
    return any_of(std::move(forms));
  }

  FormPtr choice(const Json& schemas, int depth) {
    if (!schemas.is_array() || schemas.empty() || schemas.size() > 32)
      throw problem("has an anyOf that is not a list of 1 to 32 schemas");
    std::vector<FormPtr> forms;
    for (const auto& schema : schemas) forms.push_back(read(schema, depth + 1));
    return any_of(std::move(forms));
  }

  FormPtr types(const Json& schema, int depth) {
    std::vector<FormPtr> forms;
    for (const auto& type : schema["type"]) forms.push_back(typed(schema, type, depth));
    if (forms.empty()) throw problem("has an empty list of types");
    return any_of(std::move(forms));
  }

  FormPtr typed(const Json& schema, const Json& type, int depth) {
    if (type == "object") return object(schema, depth);
    if (type == "array") return array(schema, depth);
    if (type == "null") return literal(nullptr);
    if (type == "boolean") return any_of({literal(true), literal(false)});
    auto form = std::make_shared<Form>();
    if (type == "string") {
      form->kind = Form::Kind::string;
    } else if (type == "number") {
      form->kind = Form::Kind::number;
    } else if (type == "integer") {
      form->kind = Form::Kind::integer;
    } else {
      throw problem("has the type " + dumped(type).substr(0, 40) + ", which is none");
    }
    return form;
  }

  FormPtr object(const Json& schema, int depth) {
    auto form = std::make_shared<Form>();
    form->kind = Form::Kind::object;
    const auto required = schema.value("required", Json::array());
    const auto needed = [&](const std::string& key) {
      return required.is_array() && std::ranges::find(required, Json(key)) != required.end();
    };
    const auto properties = schema.value("properties", Json::object());
    if (!properties.is_object() || properties.size() > 256)
      throw problem("has properties that are not an object of up to 256");
    for (const auto& [key, value] : properties.items()) {
      form->properties.push_back({dumped(Json(key)), read(value, depth + 1), needed(key)});
    }
    for (const auto& key : required.is_array() ? required : Json::array()) {
      if (!key.is_string() || !properties.contains(key.get<std::string>()))
        throw problem("requires a property it does not describe");
    }
    const auto others = schema.value("additionalProperties", Json(properties.empty()));
    if (others.is_object()) {
      form->items = read(others, depth + 1);
    } else if (!others.is_boolean()) {
      throw problem("has additionalProperties that are neither true, false nor a schema");
    }
    // Keys the schema does not name are allowed only where it names none: in between they would hide its own.
    form->open = form->properties.empty() && (others.is_object() || others.get<bool>());
    return form;
  }

  FormPtr array(const Json& schema, int depth) {
    auto form = std::make_shared<Form>();
    form->kind = Form::Kind::array;
    if (schema.contains("items")) form->items = read(schema["items"], depth + 1);
    const auto count = [&](const char* name, std::size_t otherwise) {
      if (!schema.contains(name)) return otherwise;
      if (!schema[name].is_number_unsigned()) throw problem(std::string("has a ") + name + " that is no whole number");
      return schema[name].get<std::size_t>();
    };
    form->least = count("minItems", 0);
    form->most = count("maxItems", SIZE_MAX);
    return form;
  }

  const Json& root_;
  std::string param_;
};

// --- the machine

/// A value that is open. What `place` counts depends on the kind: characters of a literal, a property's number, …
struct Frame {
  enum class At : std::uint8_t {
    value,         // before a value (white space may come)
    literal,       // in one, `place` characters in
    string,        // in a text; `place` is a state of `string_step`
    number,        // in a number; `place` is a state of `number_step`
    object_start,  // after '{'
    key,           // in a key of the schema, `place` characters in, property `index`
    free_key,      // in a key of any kind (as `string`)
    colon,         // after a key
    object_next,   // after a member's value
    array_start,   // after '['
    array_next,    // after an item
  } at = At::value;
  const Form* form = nullptr;
  std::uint32_t place = 0, index = 0, count = 0;
  bool operator==(const Frame&) const = default;
};

struct State {
  std::vector<Frame> stack;
  int space = 0;  // white space just read
  bool done = false;
  bool operator==(const State&) const = default;
  bool in_text() const {
    if (stack.empty() || stack.back().place != 0) return false;
    return stack.back().at == Frame::At::string || stack.back().at == Frame::At::free_key;
  }
};

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Numbers: 0 start, 1 after '-', 2 after a leading 0, 3 in digits, 4 after '.', 5 in the fraction, 6 after 'e', 7 after
// its sign, 8 in its digits.
int number_step(int at, char c, bool whole) {
  switch (at) {
    case 0: return c == '-' ? 1 : c == '0' ? 2 : is_digit(c) ? 3 : -1;
    case 1: return c == '0' ? 2 : is_digit(c) ? 3 : -1;
    case 2:
    case 3:
      if (at == 3 && is_digit(c)) return 3;
      if (whole) return -1;
      return c == '.' ? 4 : c == 'e' || c == 'E' ? 6 : -1;
    case 4: return is_digit(c) ? 5 : -1;
    case 5: return is_digit(c) ? 5 : c == 'e' || c == 'E' ? 6 : -1;
    case 6: return c == '+' || c == '-' ? 7 : is_digit(c) ? 8 : -1;
    default: return is_digit(c) ? 8 : -1;
  }
}
bool number_ends(std::uint32_t at) { return at == 2 || at == 3 || at == 5 || at == 8; }

/// The next place inside a text; -1: not allowed, -2: the text ends. 9 and above: bytes of a character still to come.
int string_step(std::uint32_t at, char character) {
  const auto c = static_cast<unsigned char>(character);
  if (at == 0) {
    if (c == '"') return -2;
    if (c == '\\') return 1;
    if (c < 0x20) return -1;
    if (c < 0x80) return 0;
    if (c >= 0xC2 && c <= 0xDF) return 9;
    if (c >= 0xE0 && c <= 0xEF) return c == 0xE0 ? 12 : c == 0xED ? 13 : 10;
    return c >= 0xF0 && c <= 0xF4 ? (c == 0xF0 ? 14 : c == 0xF4 ? 15 : 11) : -1;
  }
  if (at == 1)
    return character == 'u' ? 2 : std::string_view("\"\\/bfnrt").find(character) != std::string_view::npos ? 0 : -1;
  if (at <= 5) return std::isxdigit(c) != 0 ? (at == 5 ? 0 : static_cast<int>(at) + 1) : -1;
  const bool more = (c & 0xC0U) == 0x80U;
  if (!more || (at == 12 && c < 0xA0) || (at == 13 && c >= 0xA0) || (at == 14 && c < 0x90) || (at == 15 && c >= 0x90))
    return -1;
  return at == 9 ? 0 : at == 11 || at == 14 || at == 15 ? 10 : 9;
}

class Machine {
 public:
  explicit Machine(FormPtr root) : root_(std::move(root)) {}

  std::vector<State> start() const { return {State{.stack = {Frame{.at = Frame::At::value, .form = root_.get()}}}}; }

  std::vector<State> step(const std::vector<State>& states, char c) const {
    std::vector<State> next;
    for (const auto& state : states) advance(state, c, next);
    return next;
  }

  static bool done(const std::vector<State>& states) {
    return std::ranges::any_of(states, [](const State& s) {
      return s.done || (s.stack.size() == 1 && s.stack[0].at == Frame::At::number && number_ends(s.stack[0].place));
    });
  }

 private:
  using At = Frame::At;

  static void keep(State state, std::vector<State>& next) {
    if (next.size() < kMostStates && std::ranges::find(next, state) == next.end()) next.push_back(std::move(state));
  }

  /// The value on top is complete: what it stands in goes on.
  static void close(State& state) {
    state.stack.pop_back();
    if (state.stack.empty()) state.done = true;
  }

  void advance(const State& state, char c, std::vector<State>& next) const {
    if (state.done) return;  // nothing follows
    const auto& top = state.stack.back();
    switch (top.at) {
      case At::value: return open_value(state, c, next);
      case At::literal: return in_literal(state, c, next);
      case At::string: return in_string(state, c, next);
      case At::number: return in_number(state, c, next);
      case At::object_start: return in_object(state, c, true, next);
      case At::key: return in_key(state, c, next);
      case At::free_key: return in_free_key(state, c, next);
      case At::colon: return after_key(state, c, next);
      case At::object_next: return in_object(state, c, false, next);
      case At::array_start: return in_array(state, c, true, next);
      case At::array_next: return in_array(state, c, false, next);
    }
  }

  /// White space keeps everything as it is; true where c was some.
  static bool spaced(const State& state, char c, std::vector<State>& next) {
    if (!is_space(c)) return false;
    if (state.space >= kMostSpace) return true;
    State same = state;
    ++same.space;
    keep(std::move(same), next);
    return true;
  }

  void open_value(const State& state, char c, std::vector<State>& next) const {
    if (spaced(state, c, next)) return;
    begin(state, *state.stack.back().form, c, next);
  }

  void begin(const State& state, const Form& form, char c, std::vector<State>& next) const {
    using Kind = Form::Kind;
    const auto open = [&](At at, std::uint32_t place) {
      State opened = state;
      opened.space = 0;
      opened.stack.back() = Frame{.at = at, .form = &form, .place = place};
      if (opened.stack.size() <= kDeepest) keep(std::move(opened), next);
    };
    const bool any = form.kind == Kind::any;
    if (form.kind == Kind::choice) {
      for (const auto& one : form.forms) begin(state, *one, c, next);
      return;
    }
    if (any) {
      for (const auto* word : {&kTrue, &kFalse, &kNull}) begin(state, *word, c, next);
    }
    if ((any || form.kind == Kind::object) && c == '{') open(At::object_start, 0);
    if ((any || form.kind == Kind::array) && c == '[') open(At::array_start, 0);
    if ((any || form.kind == Kind::string) && c == '"') open(At::string, 0);
    if (any || form.kind == Kind::number || form.kind == Kind::integer) {
      const int place = number_step(0, c, form.kind == Kind::integer);
      if (place > 0) open(At::number, static_cast<std::uint32_t>(place));
    }
    if (form.kind == Kind::literal && form.text[0] == c) {
      State opened = state;
      opened.space = 0;
      opened.stack.back() = Frame{.at = At::literal, .form = &form, .place = 1};
      if (form.text.size() == 1) close(opened);
      keep(std::move(opened), next);
    }
  }

  void in_literal(const State& state, char c, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    if (top.form->text[top.place] != c) return;
    State read = state;
    if (++read.stack.back().place == top.form->text.size()) close(read);
    keep(std::move(read), next);
  }

  void in_string(const State& state, char c, std::vector<State>& next) const {
    const int place = string_step(state.stack.back().place, c);
    if (place == -1) return;
    State read = state;
    if (place == -2) {
      close(read);
    } else {
      read.stack.back().place = static_cast<std::uint32_t>(place);
    }
    keep(std::move(read), next);
  }

  /// A number ends where something else comes: that belongs to what it stands in.
  void in_number(const State& state, char c, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    const int place =
        top.count < 40 ? number_step(static_cast<int>(top.place), c, top.form->kind == Form::Kind::integer) : -1;
    if (place >= 0) {
      State read = state;
      read.stack.back().place = static_cast<std::uint32_t>(place);
      ++read.stack.back().count;
      keep(std::move(read), next);
    }
    if (!number_ends(top.place) || state.stack.size() == 1) return;
    State closed = state;
    close(closed);
    advance(closed, c, next);
  }

  static bool complete(const Form& form, std::uint32_t from) {
    return std::ranges::none_of(form.properties.begin() + from, form.properties.end(), &Form::Property::required);
  }

  /// Before a key, or after a member. `index` is the next property that may come.
  void in_object(const State& state, char c, bool first, std::vector<State>& next) const {
    if (spaced(state, c, next)) return;
    const auto& top = state.stack.back();
    const auto& form = *top.form;
    const bool anything = form.kind == Form::Kind::any || form.open;
    if (c == '}' && top.place == 0 && (anything || complete(form, top.index))) {
      State closed = state;
      closed.space = 0;
      close(closed);
      return keep(std::move(closed), next);
    }
    if (!first && top.place == 0) {
      if (c != ',' || (!anything && top.index >= form.properties.size())) return;
      State read = state;
      read.space = 0;
      read.stack.back().place = 1;  // a comma came: a key has to follow
      return keep(std::move(read), next);
    }
    if (c != '"') return;
    if (anything) {
      State read = state;
      read.space = 0;
      read.stack.back().at = At::free_key;
      read.stack.back().place = 0;
      return keep(std::move(read), next);
    }
    for (auto i = top.index; i < form.properties.size(); ++i) {
      State read = state;
      read.space = 0;
      read.stack.back().at = At::key;
      read.stack.back().index = i;
      read.stack.back().place = 1;
      keep(std::move(read), next);
      if (form.properties[i].required) break;  // it cannot be left out
    }
  }

  void in_key(const State& state, char c, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    const auto& key = top.form->properties[top.index].key;
    if (key[top.place] != c) return;
    State read = state;
    auto& frame = read.stack.back();
    if (++frame.place == key.size()) {
      frame.at = At::colon;
      frame.place = 0;
    }
    keep(std::move(read), next);
  }

  void in_free_key(const State& state, char c, std::vector<State>& next) const {
    const int place = string_step(state.stack.back().place, c);
    if (place == -1) return;
    State read = state;
    read.stack.back().place = place == -2 ? 0 : static_cast<std::uint32_t>(place);
    if (place == -2) read.stack.back().at = At::colon;
    keep(std::move(read), next);
  }

  void after_key(const State& state, char c, std::vector<State>& next) const {
    if (spaced(state, c, next) || c != ':') return;
    State read = state;
    read.space = 0;
    auto& frame = read.stack.back();
    const auto& form = *frame.form;
    const Form* value = &kAny;
    if (!form.properties.empty()) {
      value = form.properties[frame.index].value.get();
      ++frame.index;
    } else if (form.items) {
      value = form.items.get();
    }
    frame.at = At::object_next;
    frame.place = 0;
    read.stack.push_back(Frame{.at = At::value, .form = value});
    keep(std::move(read), next);
  }

  void in_array(const State& state, char c, bool first, std::vector<State>& next) const {
    if (spaced(state, c, next)) return;
    const auto& top = state.stack.back();
    const auto& form = *top.form;
    if (c == ']' && top.place == 0 && top.count >= form.least) {
      State closed = state;
      closed.space = 0;
      close(closed);
      return keep(std::move(closed), next);
    }
    if (top.count >= form.most) return;
    State read = state;
    read.space = 0;
    auto& frame = read.stack.back();
    if (!first) {
      if (c != ',') return;
      frame.at = At::array_next;
      ++frame.count;
      read.stack.push_back(Frame{.at = At::value, .form = form.items ? form.items.get() : &kAny});
      return keep(std::move(read), next);
    }
    frame.at = At::array_next;
    ++frame.count;
    read.stack.push_back(Frame{.at = At::value, .form = form.items ? form.items.get() : &kAny});
    open_value(read, c, next);
  }

  static Form word(const char* text) {
    Form form;
    form.kind = Form::Kind::literal;
    form.text = text;
    return form;
  }
  static inline const Form kAny{};
  static inline const Form kTrue = word("true"), kFalse = word("false"), kNull = word("null");

  FormPtr root_;
};

// --- tokens

/// The vocabulary as a tree of bytes, so that tokens with one beginning are walked once. Made once per model.
struct TokenTree {
  struct Node {
    std::vector<std::pair<char, std::uint32_t>> next;
    std::vector<std::int32_t> tokens;  // that end here
  };
  std::vector<Node> nodes = std::vector<Node>(1);

  void add(std::string_view bytes, std::int32_t token) {
    std::uint32_t at = 0;
    for (const char c : bytes) {
      auto found = std::ranges::find_if(nodes[at].next, [&](const auto& entry) { return entry.first == c; });
      if (found == nodes[at].next.end()) {
        nodes[at].next.emplace_back(c, static_cast<std::uint32_t>(nodes.size()));
        at = static_cast<std::uint32_t>(nodes.size());
        nodes.emplace_back();
      } else {
        at = found->second;
      }
    }
    nodes[at].tokens.push_back(token);
  }
};

/// Inside a text nearly every token is fine: those that stay in it whatever comes are known beforehand, and only the
/// others are walked.
struct Vocabulary {
  TokenTree all, not_plain;
  std::vector<bool> plain;
};

bool plain_text(std::string_view bytes) {
  const auto ends = [](unsigned char c) { return c == '"' || c == '\\' || c < 0x20; };
  return std::ranges::none_of(bytes, ends) && data::is_utf8(bytes);
}

}  // namespace

struct JsonTokens {
  std::mutex mutex;
  std::shared_ptr<const Vocabulary> vocabulary;
};

std::shared_ptr<JsonTokens> make_json_tokens() { return std::make_shared<JsonTokens>(); }

namespace {

std::shared_ptr<const Vocabulary> vocabulary_of(const Model& model) {
  const std::lock_guard lock(model.json_tokens->mutex);
  auto& vocabulary = model.json_tokens->vocabulary;
  if (vocabulary) return vocabulary;
  auto made = std::make_shared<Vocabulary>();
  const auto size = model.engine->vocabulary();
  made->plain.assign(static_cast<std::size_t>(size), false);
  for (std::int64_t token = 0; token < std::min(size, model.tokenizer().vocab_size()); ++token) {
    const auto bytes = model.bytes(token);
    if (bytes.empty() || model.tokenizer().is_special(static_cast<data::Token>(token))) continue;
    made->all.add(bytes, static_cast<std::int32_t>(token));
    if (plain_text(bytes)) {
      made->plain[static_cast<std::size_t>(token)] = true;
    } else {
      made->not_plain.add(bytes, static_cast<std::int32_t>(token));
    }
  }
  vocabulary = made;
  return vocabulary;
}

class JsonFilter : public infer::TokenFilter {
 public:
  JsonFilter(FormPtr form, const Model& model)
      : machine_(std::move(form)), states_(machine_.start()), vocabulary_(vocabulary_of(model)), model_(model) {}

  bool allowed(std::span<const std::int64_t> generated, std::vector<bool>& mask) override {
    if (generated.size() < read_) {  // asked for another beginning
      states_ = machine_.start();
      read_ = 0;
    }
    for (; read_ < generated.size(); ++read_) {
      for (const char c : model_.bytes(generated[read_])) states_ = machine_.step(states_, c);
    }
    if (states_.size() == 1 && states_[0].in_text()) {
      mask = vocabulary_->plain;
      walk(vocabulary_->not_plain, 0, states_, mask);
    } else {
      mask.assign(vocabulary_->plain.size(), false);
      walk(vocabulary_->all, 0, states_, mask);
    }
    if (Machine::done(states_) || states_.empty()) {
      for (const auto token : model_.end_tokens) mask[static_cast<std::size_t>(token)] = true;
    }
    return true;
  }

 private:
  void walk(const TokenTree& tree, std::uint32_t at, const std::vector<State>& states, std::vector<bool>& mask) const {
    for (const auto token : tree.nodes[at].tokens) mask[static_cast<std::size_t>(token)] = true;
    for (const auto& [c, child] : tree.nodes[at].next) {
      if (const auto next = machine_.step(states, c); !next.empty()) walk(tree, child, next, mask);
    }
  }

  Machine machine_;
  std::vector<State> states_;
  std::size_t read_ = 0;  // tokens of the answer that states_ has seen
  std::shared_ptr<const Vocabulary> vocabulary_;
  const Model& model_;
};

FormPtr call_of(const Json& tool) {
  const auto function = tool.value("function", Json());
  if (!function.is_object() || !function.value("name", Json()).is_string()) {
    throw bad_request("each of 'tools' takes a function with a name", "tools");
  }
  auto parameters = function.value("parameters", Json());
  if (parameters.empty()) parameters = {{"type", "object"}};  // whatever they are, arguments have names
  auto form = std::make_shared<Form>();
  form->kind = Form::Kind::object;
  form->open = false;
  form->properties = {{"\"name\"", literal(function["name"]), true},
                      {"\"arguments\"", SchemaReader(parameters, "tools").read(parameters), true}};
  return form;
}

void check_end_tokens(const Model& model, const std::string& param) {
  if (!model.end_tokens.empty()) return;
  throw bad_request("'" + param + "' needs a model with an end token (eos_token_id of config.json), and this has none",
                    param);
}

FormPtr form_of(const Json& format) {
  const auto type = format.value("type", Json());
  if (type == "json_object") return SchemaReader(Json::object()).read({{"type", "object"}});
  if (type != "json_schema") {
    throw bad_request(
        "'response_format.type' takes text, json_object or json_schema, and is " + dumped(type).substr(0, 60),
        "response_format");
  }
  const auto holder = format.value("json_schema", Json());
  if (!holder.is_object() || !holder.contains("schema")) {
    throw bad_request("'response_format.json_schema' takes an object with a schema", "response_format");
  }
  return SchemaReader(holder["schema"]).read(holder["schema"]);
}

}  // namespace

std::shared_ptr<infer::TokenFilter> filter_for(const Json& response_format, const Model& model) {
  if (response_format.is_null()) return nullptr;
  if (!response_format.is_object()) throw bad_request("'response_format' takes an object", "response_format");
  if (response_format.value("type", Json()) == "text") return nullptr;
  check_end_tokens(model, "response_format");
  return std::make_shared<JsonFilter>(form_of(response_format), model);
}

std::shared_ptr<infer::TokenFilter> call_filter(const Json& tools, const Model& model) {
  check_end_tokens(model, "tool_choice");
  std::vector<FormPtr> calls;
  for (const auto& tool : tools) calls.push_back(call_of(tool));
  return std::make_shared<JsonFilter>(any_of(std::move(calls)), model);
}

}  // namespace gka::serve
