// What options with numbers take where there is no upper end of their own. CLI11 has such checks too, and says in their
// errors what the largest number of all is, with its 309 digits; of a whole number that has no room in 64 bits it makes
// the largest that has, without a word.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace gka::cli {

constexpr double kLargest = 0x1p53;  // sums and differences of such numbers have room, too

inline CLI::Validator number_from(double least, bool included, const char* takes, const char* name) {
  const auto check = [=](const std::string& text) {
    double number = 0;
    const bool fine = CLI::detail::lexical_cast(text, number) && (included ? number >= least : number > least);
    if (!fine) return std::string("takes ") + takes + ", and got " + text;
    return number <= kLargest ? std::string() : "takes at most 2^53, and got " + text;
  };
  return {check, name};
}

inline CLI::Validator positive_number() { return number_from(0, false, "a number above 0", "POSITIVE"); }
inline CLI::Validator non_negative_number() { return number_from(0, true, "a number of at least 0", "NONNEGATIVE"); }

}  // namespace gka::cli
