// Requests come in pieces of any size, and what two readers might understand differently is refused.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "serve/answer.h"
#include "serve/http_parser.h"
#include "serve/keys.h"

using namespace gka::serve;
using http::Parser;

namespace {

/// Everything the parser makes of `data`, given in pieces of `size` bytes.
std::vector<std::string> read_all(const std::string& data, std::size_t size) {
  Parser parser(1000, 100);
  std::vector<std::string> seen;
  for (std::size_t at = 0; at < data.size();) {
    const auto used = parser.feed(std::string_view(data).substr(at, size));
    at += used;
    if (parser.state() == Parser::State::failed) {
      seen.push_back("failed " + std::to_string(parser.status()));
      break;
    }
    if (parser.state() == Parser::State::complete) {
      const auto request = parser.take();
      seen.push_back(request.method + " " + request.path + "?" + request.query + " " + request.body);
    }
  }
  return seen;
}

TEST(Http, RequestsAreTheSameHoweverTheirBytesArrive) {
  const std::string data =
      "\r\nGET /a%20b?c=d HTTP/1.1\r\nHost: x\r\n\r\n"
      "POST /p HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
      "POST /q HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
      "GET / HTTP/1.0\n\n";
  const std::vector<std::string> expected{"GET /a b?c=d ", "POST /p? hello", "POST /q? abcde", "GET /? "};
  for (std::size_t size = 1; size <= data.size(); ++size) EXPECT_EQ(read_all(data, size), expected) << size;
}

TEST(Http, WhatTwoReadersMightReadDifferentlyIsRefused) {
  const std::string start = "POST / HTTP/1.1\r\n";
  for (const std::string head :
       {"Content-Length: 5\r\nContent-Length: 6\r\n", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n", "Content-Length: +5\r\n", "Content-Length: -5\r\n",
        "Content-Length: 5 5\r\n", "Content-Length:\r\n", "Bad Name: x\r\n", "NoColon\r\n", ": x\r\n", "A: b\rc\r\n",
        " folded: x\r\n"}) {
    EXPECT_EQ(read_all(start + head + "\r\nhello", 7).at(0), "failed 400") << head;
  }
  EXPECT_EQ(read_all(start + "Content-Length: 101\r\n\r\n", 9).at(0), "failed 413");
  EXPECT_EQ(read_all(start + "Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n", 9).at(0), "failed 413");
  EXPECT_EQ(read_all(start + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 9).at(0), "failed 400");
  EXPECT_EQ(read_all(start + "A: " + std::string(2000, 'x') + "\r\n\r\n", 100).at(0), "failed 431");
  EXPECT_EQ(read_all("GET  HTTP/1.1\r\n\r\n", 100).at(0), "failed 400");
  EXPECT_EQ(read_all("GET / HTTP/2\r\n\r\n", 100).at(0), "failed 400");
}

/// What a parser makes of an answer in pieces of `size` bytes: reasoning as [r …], a call as [name(arguments)].
std::string told(const std::string& text, std::size_t size, AnswerParser::Options options, bool* called = nullptr) {
  AnswerParser parser(options);
  std::string all;
  bool reasoning = false, calling = false;
  for (std::size_t at = 0; at < text.size(); at += size) {
    for (const auto& part : parser.push(text.substr(at, size), at + size >= text.size())) {
      if (calling && part.kind != Part::Kind::arguments) all += ")]";
      if (reasoning && part.kind != Part::Kind::reasoning) all += "]";
      if (!reasoning && part.kind == Part::Kind::reasoning) all += "[r ";
      calling = part.kind == Part::Kind::call || part.kind == Part::Kind::arguments;
      reasoning = part.kind == Part::Kind::reasoning;
      all += part.kind == Part::Kind::call ? "[" + part.text + "(" : part.text;
    }
  }
  if (called != nullptr) *called = parser.called();
  return all + (calling ? ")]" : reasoning ? "]" : "");
}

TEST(Answers, PartsAreTheSameHoweverTheTextIsCut) {
  struct Case {
    std::string text, told;
    bool called = true;
    AnswerParser::Options options{.tools = true};
  };
  const std::string f = R"(<tool_call>{"name": "f", "arguments": {"a": [1, {}]}}</tool_call>)",
                    g = R"([f({"a": [1, {}]})])";
  const Case cases[] = {
      {"<think>a</thin</think>\n\nsay <tool_cal " + f + " <tool_call>x",
       "[r a</thin]say <tool_cal " + g + "<tool_call>x",
       true,
       {.reasoning = true, .tools = true}},
      {f + "\n" + f + "\n then so", g + g + "then so"},
      {f + "\n" + f + " then", g, true, {.tools = true, .single = true}},
      {"<tool_call>no</tool_call>" + f + f, "<tool_call>no</tool_call>" + g, true, {.tools = true, .single = true}},
      // A marker in a text is text; one that was left open ends with its line.
      {R"(<tool_call>{"name":"f","arguments":{"a":"\"</tool_call>}"}}</tool_call>.)",
       R"([f({"a":"\"</tool_call>}"})].)"},
      {"<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"b}\n</tool_call>.", "[f({\"a\":\"b}\n)].", false},
      // Broken off in its arguments it is a call, before them it is what was said.
      {R"(<tool_call>{"name":"f","arguments":{"a": 1)", R"([f({"a": 1)])", false},
      {R"(<tool_call>{"name":"f","arguments":{"a": 1}</too)", R"([f({"a": 1})])"},
      {R"(<tool_call>{"name":"f","argum)", R"(<tool_call>{"name":"f","argum)", false},
      {R"(<tool_call>{"name":"","arguments":{}}</tool_call>)", R"(<tool_call>{"name":"","arguments":{}}</tool_call>)",
       false},
      {R"(<tool_call>{"name":5,"arguments":{}}</tool_call>)", R"(<tool_call>{"name":5,"arguments":{}}</tool_call>)",
       false},
      // Other forms come whole.
      {R"(<tool_call>{"arguments":{"a": 1}, "name":"f"}</tool_call>)", R"([f({"a":1})])"},
      {R"(<tool_call>{"name":"f","arguments":"{\"a\": 1}"}</tool_call>)", R"([f({"a": 1})])"},
      {R"(<tool_call>{"name":"f"}</tool_call>)", "[f({})]"},
      {R"(<tool_call> { "name" : "a\"\u00e9" , "arguments" : {"b": 2}, "id": 7 }</tool_call>)",
       "[a\"\u00e9({\"b\": 2})]"},
      // One that the prompt has opened is all of the answer.
      {R"({"name": "f", "arguments": {"a": "<think> </tool_call> <tool_call>"}})",
       R"([f({"a": "<think> </tool_call> <tool_call>"})])",
       true,
       {.tools = true, .calling = true}},
      {R"({"name": "f", "arguments": {"a": 1)", R"([f({"a": 1)])", false, {.tools = true, .calling = true}},
      {R"({"name": "f)", R"({"name": "f)", false, {.tools = true, .calling = true}},
  };
  for (const auto& one : cases) {
    for (std::size_t size = 1; size <= one.text.size(); ++size) {
      bool called = false;
      EXPECT_EQ(told(one.text, size, one.options, &called), one.told) << size;
      EXPECT_EQ(called, one.called) << size << " " << one.text;
    }
  }
}

TEST(Answers, ACallsNameComesFirstAndItsArgumentsAsTheyAreWritten) {
  AnswerParser parser({.tools = true});
  std::vector<std::string> pieces;
  for (const char c : std::string(R"(<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>)")) {
    for (const auto& part : parser.push(std::string(1, c), false)) pieces.push_back(part.text);
  }
  EXPECT_EQ(pieces, (std::vector<std::string>{"f", "{\"", "a", "\"", ":", " ", "1", "}"}));
  EXPECT_TRUE(parser.called());
}

TEST(Http, AParameterOfAPathIsFoundAndDecoded) {
  http::Request request;
  request.query = "a=1&model=x%2Fy+z&model=2&b";
  EXPECT_EQ(request.parameter("model"), "x/y z");
  EXPECT_EQ(request.parameter("b"), "");
  EXPECT_EQ(request.parameter("c"), "");
}

TEST(Keys, OnlyTheWholeKeyIsAKey) {
  const Keys keys({"secret", "", "secretsecret"});
  EXPECT_EQ(keys.find("secret"), 0U);
  EXPECT_EQ(keys.find("secretsecret"), 2U);
  for (const auto* guess : {"secre", "secret2", "Secret", "secretsecretsecret"})
    EXPECT_FALSE(keys.find(guess)) << guess;
}

}  // namespace
