// What filters and methods share: texts cut, trimmed, split and joined with the origin of every byte kept.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/jinja/interpreter.h"

namespace gka::serve::jinja {

enum class Side : std::uint8_t { left = 1, right = 2, both = 3 };

/// Without white space, or any of `characters`, at its ends.
Text stripped(const Text& text, const Value* characters, Side side);
Text replaced(Interpreter& run, const Text& text, const Text& from, const Text& to, std::int64_t times);
std::vector<Value> split(const Text& text, const Value* separator, std::int64_t times, bool from_right);
std::vector<Value> lines_of(const Text& text, bool keep_ends);
Text joined(Interpreter& run, const std::vector<Value>& items, const Text& between);

Text upper(const Text& text);
Text lower(const Text& text);
/// The first letter large, the others small.
Text capitalized(const Text& text);
/// Every letter large that follows a place where starts(character before) holds.
Text titled(const Text& text, const std::function<bool(char)>& starts);

/// Python's text % values, and text.format(values), without widths and precisions other than %.Nf.
Text percent_format(const Text& format, const Arguments& values);
Text brace_format(const Text& format, const Arguments& values);

/// The argument as a number, or what stands in for it.
std::int64_t integer_or(const Arguments& arguments, std::size_t place, std::string_view name, std::int64_t otherwise);
bool flag_or(const Arguments& arguments, std::size_t place, std::string_view name, bool otherwise);

}  // namespace gka::serve::jinja
