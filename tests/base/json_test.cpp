// JSON: one limit on depth, and errors in sentences of our own.
#include "base/json.h"

#include <gtest/gtest.h>

#include "models/scratch.h"

namespace gka {
namespace {

std::string nested(std::size_t levels, const char* open = "[", const char* close = "]") {
  std::string text;
  for (std::size_t i = 0; i < levels; ++i) text += open;
  text += "1";
  for (std::size_t i = 0; i < levels; ++i) text += close;
  return text;
}

TEST(JsonText, IsTakenUpToTheDeepestLevelAndNotBeyond) {
  EXPECT_EQ(parse_json(nested(kDeepestJson), "x").dump(), nested(kDeepestJson));
  EXPECT_ERROR(parse_json(nested(kDeepestJson + 1), "x"), "x is nested more than 100 levels deep");
  EXPECT_ERROR(parse_json(nested(100000), "x"), "x is nested more than 100 levels deep");
  EXPECT_ERROR(parse_json(nested(100000, "{\"a\":", "}"), "x"), "x is nested more than 100 levels deep");
  EXPECT_TRUE(parse_json_if_any(nested(100000)).is_discarded());
}

TEST(JsonText, MayHaveBracketsInsideOfTexts) {
  const auto text = "[\"" + std::string(500, '[') + "\\\"" + std::string(500, '{') + "\"]";
  EXPECT_EQ(parse_json(text, "x")[0].get<std::string>().size(), 1001);
}

TEST(JsonText, ThatIsNoneSaysWhere) {
  EXPECT_ERROR(parse_json("{\n\n1", "x"), "x is not valid JSON: there is a mistake in line 3");
  EXPECT_ERROR(parse_json("[1e999]", "x"), "x is not valid JSON: it has a number too large");
}

TEST(JsonText, IsShownShortAndWhateverItsBytes) {
  EXPECT_EQ(shown(Json("a\xff")), "\"a\xEF\xBF\xBD\"");
  EXPECT_LE(shown(Json(std::string(1000, 'a'))).size(), 60);
}

}  // namespace
}  // namespace gka
