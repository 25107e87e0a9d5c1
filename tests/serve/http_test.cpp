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

TEST(Answers, PartsAreTheSameHoweverTheTextIsCut) {
  const std::string text =
      "<think>a</thin</think>\n\nsay <tool_cal <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call> "
      "<tool_call>x";
  for (std::size_t size = 1; size <= text.size(); ++size) {
    AnswerParser parser({.reasoning = true, .inside = false, .tools = true});
    std::string reasoning, content, calls;
    for (std::size_t at = 0; at < text.size(); at += size) {
      for (const auto& part : parser.push(text.substr(at, size), at + size >= text.size())) {
        if (part.kind == Part::Kind::reasoning) reasoning += part.text;
        if (part.kind == Part::Kind::content) content += part.text;
        if (part.kind == Part::Kind::call) calls += part.call.name + part.call.arguments;
      }
    }
    EXPECT_EQ(reasoning, "a</thin") << size;
    EXPECT_EQ(content, "say <tool_cal <tool_call>x") << size;
    EXPECT_EQ(calls, "f{\"a\":1}") << size;
  }
}

TEST(Answers, ACallThatThePromptHasOpenedIsAllOfTheAnswer) {
  const std::string call = R"({"name": "f", "arguments": {"a": "<think> </tool_call> <tool_call>"}})";
  for (const auto size : {std::size_t{1}, std::size_t{7}, call.size()}) {
    AnswerParser parser({.tools = true, .calling = true});
    std::vector<Part> parts;
    for (std::size_t at = 0; at < call.size(); at += size) {
      for (auto& part : parser.push(call.substr(at, size), at + size >= call.size())) parts.push_back(std::move(part));
    }
    ASSERT_EQ(parts.size(), 1U) << size;
    EXPECT_EQ(parts[0].call.name, "f");
    EXPECT_EQ(parts[0].call.arguments, R"({"a":"<think> </tool_call> <tool_call>"})");
  }
}

TEST(Keys, OnlyTheWholeKeyIsAKey) {
  const Keys keys({"secret", "", "secretsecret"});
  EXPECT_EQ(keys.find("secret"), 0U);
  EXPECT_EQ(keys.find("secretsecret"), 2U);
  for (const auto* guess : {"secre", "secret2", "Secret", "secretsecretsecret"})
    EXPECT_FALSE(keys.find(guess)) << guess;
}

}  // namespace
