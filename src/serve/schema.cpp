#include "serve/schema.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace gka::serve {
namespace {

constexpr int kDeepest = 32;
constexpr double kLargest = 1e15;           // numbers within bounds have so few digits that their value is exact
constexpr std::size_t kMostForms = 20'000;  // a schema that refers to a part often is as large as all of it

/// Says nothing about what is allowed.
constexpr std::array kDescribing{
    "$schema",       "$id",      "$defs",      "definitions",  "$comment",  "title",           "description",
    "default",       "examples", "deprecated", "readOnly",     "writeOnly", "contentEncoding", "contentMediaType",
    "discriminator", "strict",   "example",    "externalDocs", "xml",       "$anchor"};
/// What is looked at. The rest is refused by name.
constexpr std::array kUnderstood{"type",
                                 "properties",
                                 "required",
                                 "additionalProperties",
                                 "propertyNames",
                                 "items",
                                 "additionalItems",
                                 "minItems",
                                 "maxItems",
                                 "enum",
                                 "prefixItems",
                                 "const",
                                 "anyOf",
                                 "oneOf",
                                 "allOf",
                                 "$ref",
                                 "nullable",
                                 "minLength",
                                 "maxLength",
                                 "pattern",
                                 "format",
                                 "minimum",
                                 "maximum",
                                 "exclusiveMinimum",
                                 "exclusiveMaximum"};

/// Formats that a text is held to; others only describe. Every date and time they allow there is.
constexpr std::array<std::pair<std::string_view, std::string_view>, 9> kFormats{{
    {"date",
     R"(^[12]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))$)"},
    {"time", R"(^([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$)"},
    {"date-time",
     R"(^[12]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])))"
     R"(T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$)"},
    {"duration", R"(^P(\d+[YMWD]|(\d+D)?T\d+[HMS])$)"},
    {"uuid", R"(^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$)"},
    {"email", R"(^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9]+(-[A-Za-z0-9]+)*\.)+[A-Za-z]{2,24}$)"},
    {"ipv4", R"(^((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)$)"},
    {"ipv6", R"(^([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}$)"},
    {"uri", R"(^[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+$)"},
}};

template <std::size_t N>
bool among(const std::array<const char*, N>& words, std::string_view word) {
  return std::ranges::find(words, word) != words.end();
}

bool says_nothing(const Json& schema) {
  return std::ranges::all_of(schema.items(), [](const auto& entry) { return among(kDescribing, entry.key()); });
}

class SchemaReader {
 public:
  SchemaReader(const Json& root, std::string param) : root_(root), param_(std::move(param)) {}

  Schema read() {
    Schema schema{.root = read(root_, 0)};
    for (const auto& link : links_) check_link(*link.second);
    for (auto& [path, link] : links_) schema.linked.push_back(link);
    schema.linked.insert(schema.linked.end(), targets_.begin(), targets_.end());
    return schema;
  }

 private:
  Problem problem(const std::string& what) const {
    return bad_request("the schema of '" + param_ + "' " + what, param_, "unsupported_schema");
  }

  FormPtr read(const Json& schema, int depth) {
    if (depth > kDeepest) throw problem("is nested too deep");
    if (++forms_ > kMostForms) throw problem("is too large");
    if (schema.is_boolean() && schema.get<bool>()) return std::make_shared<Form>();
    if (!schema.is_object()) throw problem("has a part that is not an object");
    check_keywords(schema);
    if (const auto null = schema.find("nullable"); null != schema.end()) {
      auto rest = schema;
      rest.erase("nullable");
      return *null == true ? any_of({read(rest, depth + 1), literal(nullptr)}) : read(rest, depth + 1);
    }
    if (schema.contains("$ref") || schema.contains("allOf")) return combined(schema, depth);
    if (schema.contains("const")) return literal(schema["const"]);
    if (schema.contains("enum")) return enumeration(schema["enum"]);
    for (const auto* word : {"anyOf", "oneOf"}) {
      if (schema.contains(word)) return choice(schema, word, depth);
    }
    const auto type = schema.contains("type") ? schema["type"] : implied_type(schema);
    if (type.is_null()) return std::make_shared<Form>();
    return type.is_array() ? types(schema, type, depth) : typed(schema, type, depth);
  }

  void check_keywords(const Json& schema) const {
    for (const auto& [key, value] : schema.items()) {
      if (!among(kUnderstood, key) && !among(kDescribing, key))
        throw problem("has '" + key.substr(0, 40) + "', which is not supported");
    }
  }

  /// What a schema without a type speaks of.
  static Json implied_type(const Json& schema) {
    struct Implied {
      const char *type, *words[6];
    };
    static constexpr Implied kImplied[] = {
        {"object", {"properties", "required", "additionalProperties", "propertyNames"}},
        {"array", {"items", "prefixItems", "minItems", "maxItems"}},
        {"string", {"minLength", "maxLength", "pattern", "format"}},
        {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}}};
    for (const auto& [type, words] : kImplied) {
      for (const auto* word : words) {
        if (word != nullptr && schema.contains(word)) return type;
      }
    }
    return nullptr;
  }

  // --- what refers, and what holds together

  static std::string path_of(const Json& reference) {
    return reference.is_string() ? reference.get<std::string>() : std::string();
  }

  const Json& referred(const Json& reference) const {
    const auto path = path_of(reference);
    if (path == "#") return root_;
    if (!path.starts_with("#/")) throw problem("has a $ref that does not start with #/");
    try {
      return root_.at(Json::json_pointer(path.substr(1)));
    } catch (const nlohmann::json::exception&) {
      throw problem("has a $ref to '" + path.substr(0, 60) + "', which is not there");
    }
  }

  /// Read once, however often and from wherever it is referred to.
  FormPtr linked(const Json& reference, int depth) {
    const auto& target = referred(reference);
    const auto [found, fresh] = links_.try_emplace(path_of(reference), nullptr);
    if (!fresh) return found->second;
    auto link = std::make_shared<Form>();
    link->kind = Form::Kind::link;
    found->second = link;
    targets_.push_back(read(target, depth + 1));
    link->target = targets_.back().get();
    return link;
  }

  /// A link that leads back to itself, and nothing else on the way, describes nothing.
  void check_link(const Form& link) const {
    std::vector<const Form*> waiting{link.target};
    std::set<const Form*> seen;
    while (!waiting.empty()) {
      const auto* form = waiting.back();
      waiting.pop_back();
      if (form == &link) throw problem("has a $ref that leads back to itself");
      if (!seen.insert(form).second) continue;
      if (form->kind == Form::Kind::link) waiting.push_back(form->target);
      for (const auto& one : form->forms) waiting.push_back(one.get());
    }
  }

  FormPtr combined(const Json& schema, int depth) {
    auto rest = schema;
    rest.erase("$ref");
    rest.erase("allOf");
    const bool alone = says_nothing(rest);
    if (alone && !schema.contains("allOf")) return linked(schema["$ref"], depth);
    auto parts = schema.value("allOf", Json::array());
    if (!parts.is_array() || parts.size() > 32) throw problem("has an allOf that is not a list of up to 32 schemas");
    if (schema.contains("$ref")) parts.insert(parts.begin(), Json{{"$ref", schema["$ref"]}});
    if (alone && parts.size() == 1) return read(parts[0], depth + 1);
    for (const auto& part : parts) merge(rest, flattened(part, depth + 1), depth);
    return read(rest, depth + 1);
  }

  /// A schema without $ref and allOf at its top.
  Json flattened(const Json& schema, int depth) {
    if (depth > kDeepest) throw problem("is nested too deep, or refers to itself in an allOf");
    if (!schema.is_object()) throw problem("has a part that is not an object");
    check_keywords(schema);
    auto flat = schema;
    flat.erase("$ref");
    flat.erase("allOf");
    if (schema.contains("$ref")) merge(flat, flattened(referred(schema["$ref"]), depth + 1), depth);
    for (const auto& part : schema.value("allOf", Json::array())) merge(flat, flattened(part, depth + 1), depth);
    return flat;
  }

  /// What both ask for.
  void merge(Json& into, const Json& part, int depth) const {
    if (depth > kDeepest) throw problem("is nested too deep");
    for (const auto& [key, value] : part.items()) {
      if (among(kDescribing, key) || !into.contains(key)) {
        if (!into.contains(key)) into[key] = value;
        continue;
      }
      auto& mine = into[key];
      if (mine == value) continue;
      const bool numbers = mine.is_number() && value.is_number();
      const bool least = key.starts_with("min") || key == "exclusiveMinimum";
      const bool most = key.starts_with("max") || key == "exclusiveMaximum";
      if (key == "properties" && mine.is_object() && value.is_object()) {
        for (const auto& [name, property] : value.items()) {
          mine[name] = mine.contains(name) ? Json{{"allOf", Json::array({mine[name], property})}} : property;
        }
      } else if (key == "required" && mine.is_array() && value.is_array()) {
        for (const auto& name : value) {
          if (std::ranges::find(mine, name) == mine.end()) mine.push_back(name);
        }
      } else if (numbers && (least || most)) {
        if (least == (value.get<double>() > mine.get<double>())) mine = value;
      } else if (key == "additionalProperties" && (mine == false || value == false)) {
        mine = false;
      } else if (key == "type" && (mine == "number" || mine == "integer") &&
                 (value == "number" || value == "integer")) {
        mine = "integer";
      } else {
        throw problem("asks for two things at once in '" + key.substr(0, 40) + "'");
      }
    }
  }

  FormPtr enumeration(const Json& values) const {
    if (!values.is_array() || values.empty() || values.size() > 1000)
      throw problem("has an enum that is not a list of 1 to 1000 values");
    std::vector<FormPtr> forms;
    for (const auto& value : values) forms.push_back(literal(value));
    return any_of(std::move(forms));
  }

  /// One of several, each together with what stands beside them.
  FormPtr choice(const Json& schema, const char* word, int depth) {
    const auto& schemas = schema[word];
    if (!schemas.is_array() || schemas.empty() || schemas.size() > 64)
      throw problem(std::string("has an ") + word + " that is not a list of 1 to 64 schemas");
    auto rest = schema;
    rest.erase(word);
    std::vector<FormPtr> forms;
    for (const auto& one : schemas) {
      forms.push_back(read(says_nothing(rest) ? one : Json{{"allOf", Json::array({rest, one})}}, depth + 1));
    }
    return any_of(std::move(forms));
  }

  // --- by type

  FormPtr types(const Json& schema, const Json& list, int depth) {
    std::vector<FormPtr> forms;
    for (const auto& type : list) forms.push_back(typed(schema, type, depth));
    if (forms.empty()) throw problem("has an empty list of types");
    return any_of(std::move(forms));
  }

  FormPtr typed(const Json& schema, const Json& type, int depth) {
    if (type == "object") return object(schema, depth);
    if (type == "array") return array(schema, depth);
    if (type == "null") return literal(nullptr);
    if (type == "boolean") return any_of({literal(true), literal(false)});
    if (type == "string") return string(schema);
    if (type == "number" || type == "integer") return number(schema, type == "integer");
    throw problem("has the type " + dumped(type).substr(0, 40) + ", which is none");
  }

  std::size_t count(const Json& schema, const char* name, std::size_t otherwise) const {
    if (!schema.contains(name)) return otherwise;
    std::int64_t value = -1;
    if (!json::read(schema[name], value) || value < 0)
      throw problem(std::string("has a ") + name + " that is no whole number");
    return static_cast<std::size_t>(value);
  }

  void read_counts(const Json& schema, const char* least, const char* most, Form& form) const {
    form.least = count(schema, least, 0);
    form.most = std::min(form.most, count(schema, most, SIZE_MAX));
    if (form.least > form.most) throw problem(std::string("has a ") + least + " above its " + most);
  }

  FormPtr string(const Json& schema) {
    auto form = std::make_shared<Form>();
    form->kind = Form::Kind::string;
    read_counts(schema, "minLength", "maxLength", *form);
    const auto format = schema.value("format", Json());
    const auto* known = std::ranges::find_if(kFormats, [&](const auto& entry) { return format == entry.first; });
    if (schema.contains("pattern")) {
      if (!schema["pattern"].is_string()) throw problem("has a pattern that is no text");
      form->pattern = compiled(schema["pattern"].get<std::string>());
    } else if (known != kFormats.end()) {
      form->pattern = compiled(std::string(known->second));
    }
    const auto* pattern = form->pattern.get();
    if (pattern != nullptr &&
        (pattern->least(Pattern::kStart) > form->most || pattern->most(Pattern::kStart) < form->least))
      throw problem("has a pattern that no text of the length it asks for matches");
    return form;
  }

  std::shared_ptr<const Pattern> compiled(const std::string& expression) {
    auto& pattern = patterns_[expression];
    if (pattern) return pattern;
    try {
      pattern = Pattern::compile(expression, budget_);
    } catch (const std::invalid_argument& wrong) {
      throw problem("has the pattern " + dumped(expression).substr(0, 60) + ", which " + wrong.what());
    }
    return pattern;
  }

  FormPtr number(const Json& schema, bool whole) const {
    auto form = std::make_shared<Form>();
    form->kind = whole ? Form::Kind::integer : Form::Kind::number;
    const auto bound = [&](const char* name) {
      if (!schema.contains(name)) return std::numeric_limits<double>::quiet_NaN();
      if (!schema[name].is_number()) throw problem(std::string("has a ") + name + " that is no number");
      form->bounded = true;
      return schema[name].get<double>();
    };
    const auto low = bound("minimum"), above = bound("exclusiveMinimum");
    const auto high = bound("maximum"), below = bound("exclusiveMaximum");
    if (!std::isnan(low)) form->low = low;
    if (!std::isnan(above) && !(form->low > above)) {
      form->low = above;
      form->above_low = true;
    }
    if (!std::isnan(high)) form->high = high;
    if (!std::isnan(below) && !(form->high < below)) {
      form->high = below;
      form->below_high = true;
    }
    if (whole) {  // the whole numbers that are left
      const auto lowest = std::ceil(form->low), highest = std::floor(form->high);
      form->low = lowest + (form->above_low && lowest == form->low ? 1 : 0);
      form->high = highest - (form->below_high && highest == form->high ? 1 : 0);
      form->above_low = form->below_high = false;
    }
    const bool none = form->low == form->high && (form->above_low || form->below_high);
    if (form->low > form->high || none || form->low >= kLargest || form->high <= -kLargest)
      throw problem("has bounds that leave no number");
    return form;
  }

  FormPtr object(const Json& schema, int depth) {
    auto form = std::make_shared<Form>();
    form->kind = Form::Kind::object;
    const auto required = schema.value("required", Json::array());
    if (!required.is_array()) throw problem("has a required that is no list");
    const auto needed = [&](const std::string& key) {
      return std::ranges::find(required, Json(key)) != required.end();
    };
    const auto properties = schema.value("properties", Json::object());
    if (!properties.is_object() || properties.size() > 256)
      throw problem("has properties that are not an object of up to 256");
    for (const auto& [key, value] : properties.items()) {
      form->properties.push_back({dumped(Json(key)), read(value, depth + 1), needed(key)});
    }
    const auto others = schema.value("additionalProperties", Json(properties.empty()));
    if (others.is_object()) {
      form->items = read(others, depth + 1);
    } else if (!others.is_boolean()) {
      throw problem("has additionalProperties that are neither true, false nor a schema");
    }
    for (const auto& name : others == false ? Json::array() : property_names(schema)) {
      if (!properties.empty()) throw problem("has propertyNames that list names beside properties");
      form->properties.push_back({dumped(name), form->items ? form->items : std::make_shared<Form>(), needed(name)});
    }
    for (const auto& key : required) {
      if (!key.is_string()) throw problem("requires a property whose name is no text");
      const auto written = dumped(key);
      if (std::ranges::find(form->properties, written, &Form::Property::key) != form->properties.end()) continue;
      const bool forbidden = schema.value("additionalProperties", Json(true)) == false;
      if (forbidden) throw problem("requires a property that it does not allow");
      form->properties.push_back({written, form->items ? form->items : std::make_shared<Form>(), true});
    }
    // Keys the schema does not name are allowed only where it names none: in between they would hide its own.
    form->open = form->properties.empty() && (others.is_object() || others.get<bool>());
    return form;
  }

  /// The names that an object's keys are limited to; none where any will do.
  Json property_names(const Json& schema) const {
    const auto names = schema.value("propertyNames", Json(true));
    if (names == true || names == Json::object() || names == Json{{"type", "string"}}) return Json::array();
    auto listed = names.is_object() && names.contains("const") ? Json::array({names["const"]})
                  : names.is_object()                          ? names.value("enum", Json())
                                                               : Json();
    const bool texts = listed.is_array() && !listed.empty() && listed.size() <= 256 &&
                       std::ranges::all_of(listed, [](const Json& name) { return name.is_string(); });
    if (!texts) throw problem("has propertyNames that are no list of up to 256 names (an enum)");
    return listed;
  }

  /// Draft 7 has a list of `items`, and `additionalItems` for what follows them.
  static Json with_prefix_items(Json schema) {
    if (!schema.contains("items") || !schema["items"].is_array()) return schema;
    schema["prefixItems"] = std::exchange(schema["items"], schema.value("additionalItems", Json(true)));
    return schema;
  }

  FormPtr array(const Json& given, int depth) {
    const auto schema = with_prefix_items(given);
    auto form = std::make_shared<Form>();
    form->kind = Form::Kind::array;
    const auto first = schema.value("prefixItems", Json::array());
    if (!first.is_array() || first.size() > 256) throw problem("has prefixItems that are not a list of up to 256");
    for (const auto& one : first) form->first.push_back(read(one, depth + 1));
    if (schema.contains("items")) {
      if (schema["items"] == false) {
        form->most = first.size();
      } else {
        form->items = read(schema["items"], depth + 1);
      }
    }
    read_counts(schema, "minItems", "maxItems", *form);
    return form;
  }

  const Json& root_;
  std::string param_;
  std::map<std::string, std::shared_ptr<Form>> links_;
  std::vector<FormPtr> targets_;
  std::map<std::string, std::shared_ptr<const Pattern>> patterns_;
  Pattern::Budget budget_;
  std::size_t forms_ = 0;
};

}  // namespace

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

Schema read_schema(const Json& schema, const std::string& param) { return SchemaReader(schema, param).read(); }

}  // namespace gka::serve
