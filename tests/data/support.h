// A folder that goes away with the test, and token files in it.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "data/token_file.h"

namespace gka::data {

class InFolder : public testing::Test {
 protected:
  InFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "gka-data-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw file_error("create", name);
    folder_ = name;
  }
  ~InFolder() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  /// A token file of the byte tokenizer with these documents.
  std::string write(const std::string& name, const std::vector<std::vector<Token>>& documents,
                    std::optional<Token> end = 256) const {
    TokenFileWriter writer(path(name), Tokenizer::load("bytes"), end);
    for (const auto& document : documents) writer.add(document);
    writer.commit();
    return path(name);
  }

  /// One document 0, 1, 2, … of `count` tokens, modulo 256, without an end token.
  std::string write_counting(const std::string& name, int count) const {
    std::vector<Token> document;
    for (int i = 0; i < count; ++i) document.push_back(i % 256);
    return write(name, {document}, std::nullopt);
  }

  std::filesystem::path folder_;
};

/// The message of what `body` throws.
template <typename Body>
std::string complaint(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' does not say '" << part << "'";
}

}  // namespace gka::data
