// What a server reads: requests off a socket, and the chat templates that come with a model.
#include <algorithm>
#include <memory>
#include <vector>

#include "fake_engine.h"
#include "serve/http_parser.h"
#include "serve/plan.h"
#include "targets.h"

namespace gka::fuzz {
namespace {

using serve::http::Parser;

/// Everything in `data`, given to the parser in pieces of `size` bytes. The last one may be a failure.
std::vector<serve::http::Request> parsed(std::string_view data, std::size_t size, int& failure) {
  Parser parser(4096, 65536);
  std::vector<serve::http::Request> requests;
  while (!data.empty() && parser.state() != Parser::State::failed) {
    data.remove_prefix(parser.feed(data.substr(0, size)));
    if (parser.state() == Parser::State::complete) requests.push_back(parser.take());
  }
  failure = parser.state() == Parser::State::failed ? parser.status() : 0;
  return requests;
}

std::shared_ptr<serve::Model> make_model() {
  return std::make_shared<serve::Model>(serve::Model{
      .name = "fuzz",
      .folder = {},
      .encoder = serve::Encoder(data::Tokenizer::load("bytes")),
      .chat = serve::ChatTemplate::load(""),
      .engine = std::make_unique<serve::testing::FakeEngine>(serve::testing::FakeEngine::Options{.context = 512}),
      .end_tokens = {serve::testing::FakeEngine::kEnd}});
}

/// An answer's first tokens under its filter: there is always one that may come next.
void follow(infer::TokenFilter& filter) {
  std::vector<std::int64_t> said;
  std::vector<bool> mask;
  for (int i = 0; i < 8 && filter.allowed(said, mask); ++i) {
    const auto next = std::ranges::find(mask, true);
    if (next == mask.end()) std::abort();
    said.push_back(next - mask.begin());
  }
}

}  // namespace

int fuzz_request(Bytes bytes) {
  static const auto model = make_model();
  int failure = 0, failure_in_pieces = 0;
  const auto requests = parsed(text_of(bytes), bytes.size() + 1, failure);
  const auto again = parsed(text_of(bytes), 7, failure_in_pieces);
  const auto same = [](const auto& a, const auto& b) {
    return a.method == b.method && a.path == b.path && a.headers == b.headers && a.body == b.body;
  };
  if (failure != failure_in_pieces || !std::ranges::equal(requests, again, same)) std::abort();
  for (const auto& request : requests) {
    for (const auto endpoint : {serve::kCompletions, serve::kChat, serve::kResponses}) {
      expect_sentence([&] {
        const auto plan = serve::make_plan(model, serve::read_ask(serve::parse_body(request.body), endpoint), endpoint);
        for (const auto& choice : plan.requests) {
          for (const auto token : choice.prompt) {
            if (token < 0 || token >= model->engine->vocabulary()) std::abort();
          }
        }
        if (!plan.requests.empty() && plan.requests[0].filter) follow(*plan.requests[0].filter);
      });
    }
  }
  return 0;
}

int fuzz_template(Bytes bytes) {
  using namespace serve::jinja;
  static const auto variables = Value::from_json(
      Json::parse(
          R"({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "h\u00e9 <b>"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5]}}}]}],
        "tools": [{"function": {"name": "f"}}], "add_generation_prompt": true, "n": 7, "none": null})"),
      Origin::request);
  return expect_sentence([&] {
    try {
      Template::parse(text_of(bytes)).render(variables, {.steps = 20'000, .bytes = 1 << 20, .now = 0});
    } catch (const Raised&) {  // a sentence of the template's own
    }
  });
}

}  // namespace gka::fuzz
