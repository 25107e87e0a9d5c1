// Where commands write.
#pragma once

#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>

namespace gka::cli {

/// Throws where what `option` names is one of the files that are read: it would be written over, and be gone.
inline void keep_apart(const char* option, const std::filesystem::path& out, std::span<const std::string> inputs) {
  std::error_code not_there;
  for (const auto& input : inputs) {
    if (!std::filesystem::equivalent(out, input, not_there)) continue;
    throw std::runtime_error(std::string(option) + " is " + out.string() +
                             ", which is read and would be written over; name another file.");
  }
}

}  // namespace gka::cli
