// What a JSON Schema asks of an answer, as a tree of forms that a machine can follow byte by byte (grammar.cpp).
//
// What a schema may say: type (one or several), properties, required, additionalProperties, items, prefixItems,
// minItems, maxItems, minLength, maxLength, pattern, format, minimum, maximum and their exclusive kin, enum, const,
// anyOf, oneOf, allOf, nullable and $ref, also to itself; a propertyNames that lists names, and draft 7's list of items
// with additionalItems. Properties come in the order the schema has them. What only describes is passed over; anything
// else is refused by name.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "serve/pattern.h"
#include "serve/problem.h"

namespace gka::serve {

struct Form {
  enum class Kind : std::uint8_t {
    any,
    object,
    array,
    string,
    number,
    integer,
    literal,
    choice,
    link,
    calls  // of tools, each between its marks: `items` and, of how many there may be, `most`
  } kind = Kind::any;
  struct Property {
    std::string key;  // as JSON, with its quotes
    std::shared_ptr<const Form> value;
    bool required = false;
  };
  std::vector<Property> properties{};
  bool open = true;                                  // of an object: other keys too
  std::vector<std::shared_ptr<const Form>> first{};  // of an array's items
  std::shared_ptr<const Form> items{};               // the others, or the values of an object's other keys
  std::size_t least = 0, most = SIZE_MAX;            // of an array's items, of a text's characters
  std::shared_ptr<const Pattern> pattern{};          // of a text
  bool bounded = false;                              // of a number: by low and high
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
  bool above_low = false, below_high = false;        // the bound itself is out
  std::string text{};                                // of a literal, as JSON
  std::vector<std::shared_ptr<const Form>> forms{};  // of a choice
  const Form* target = nullptr;                      // of a link: what stands elsewhere, or around it

  bool limited() const { return least > 0 || most < SIZE_MAX || pattern != nullptr; }
};
using FormPtr = std::shared_ptr<const Form>;

/// A form, and whatever its links lead to.
struct Schema {
  FormPtr root;
  std::vector<FormPtr> linked{};
};

/// `param`: the field of the request that the schema stands in. Throws Problem where it asks for what is not done here.
Schema read_schema(const Json& schema, const std::string& param);

FormPtr literal(const Json& value);
FormPtr any_of(std::vector<FormPtr> forms);

}  // namespace gka::serve
