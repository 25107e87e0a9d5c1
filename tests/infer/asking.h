// Small engines, and questions that wait for their answer.
#pragma once

#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "infer/engine.h"
#include "infer/make_engine.h"
#include "models/tiny.h"

namespace gka::infer::test {

using Tokens = std::vector<std::int64_t>;

/// All that happened to one request.
struct Answer {
  Tokens tokens{};
  std::vector<float> logprobs{};
  std::vector<TokenEvent> events{}, prompt{};
  Finish finish = Finish::none;
  Usage usage{};
  std::string error{};
};

inline std::future<Answer> ask_later(Engine& engine, Request request) {
  struct Open {
    Answer answer;
    std::promise<Answer> promise;
  };
  auto open = std::make_shared<Open>();
  auto future = open->promise.get_future();
  engine.submit(std::move(request),
                {.on_prompt = [open](const std::vector<TokenEvent>& prompt) { open->answer.prompt = prompt; },
                 .on_token =
                     [open](const TokenEvent& event) {
                       open->answer.tokens.push_back(event.token);
                       open->answer.logprobs.push_back(event.logprob);
                       open->answer.events.push_back(event);
                     },
                 .on_end =
                     [open](Finish finish, const Usage& usage, const std::string& error) {
                       open->answer.finish = finish;
                       open->answer.usage = usage;
                       open->answer.error = error;
                       open->promise.set_value(open->answer);
                     }});
  return future;
}

inline Answer ask(Engine& engine, Request request) { return ask_later(engine, std::move(request)).get(); }

inline std::unique_ptr<Engine> engine_of(const models::ModelConfig& config, const EngineOptions& options = {},
                                         at::ScalarType dtype = at::kFloat) {
  return make_engine(models::test::tiny_model(config, dtype), options);
}
inline std::unique_ptr<Engine> engine_of(const std::string& pattern, const EngineOptions& options = {}) {
  return engine_of(models::test::tiny_config(pattern), options);
}

inline Tokens random_tokens(std::int64_t count, std::uint64_t seed = 3) {
  std::mt19937_64 random(seed);
  Tokens tokens;
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<std::int64_t>(random() % 61));
  return tokens;
}

inline Tokens joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline const Sampling kGreedy{.temperature = 0};

}  // namespace gka::infer::test
