#include "models/matching.h"

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <stdexcept>

namespace gka::models {
namespace {

std::string shape_of(c10::IntArrayRef shape) {
  std::ostringstream text;
  text << shape;
  return text.str();
}

/// "a, b, c and 12 more"
std::string some_of(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

}  // namespace

void refuse_shape(const std::string& name, c10::IntArrayRef stored, c10::IntArrayRef wanted, const std::string& more) {
  throw std::runtime_error("'" + name + "' has the shape " + shape_of(stored) + " in the checkpoint and " +
                           shape_of(wanted) + " by its configuration" + more);
}

void refuse_missing(const std::vector<std::string>& names) {
  if (!names.empty()) throw std::runtime_error("the checkpoint lacks tensors of this model: " + some_of(names));
}

void refuse_others(const std::vector<std::string>& names) {
  if (names.empty()) return;
  throw std::runtime_error(
      "the checkpoint has tensors that this model has no use for, so it is another model than its config.json says: " +
      some_of(names));
}

}  // namespace gka::models
