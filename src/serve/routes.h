// What can be asked for, in one table.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace gka::serve {

enum class Action : std::uint8_t {
  page,
  health,
  version,
  models,
  model,
  completions,
  chat,
  respond,
  response,
  delete_response,
  response_items,
  embeddings,
  tokenize,
  detokenize,
  tokenizer_info,
  apply_template,
  memories,
  memory,
  create_memory,
  fork_memory,
  delete_memory,
  props,
  slots,
  metrics,
  openapi
};

/// Where an action runs: at once on the server's thread, on a thread that reads requests, or on the one for what takes
/// long.
enum class Place : std::uint8_t { here, worker, slow };

struct Route {
  std::string_view method, path;  // "{id}" stands for one part of a path
  Action action;
  Place place;
  bool open;  // needs no key
  std::string_view about;
};

inline constexpr std::array kRoutes{
    Route{"GET", "/", Action::page, Place::here, true, "The page"},
    Route{"GET", "/health", Action::health, Place::here, true, "200 once models are loaded, 503 before"},
    Route{"GET", "/version", Action::version, Place::here, false, "The version"},
    Route{"GET", "/v1/models", Action::models, Place::here, false, "The models that are served"},
    Route{"GET", "/v1/models/{id}", Action::model, Place::here, false, "One of them"},
    Route{"POST", "/v1/completions", Action::completions, Place::worker, false, "Continue a text"},
    Route{"POST", "/v1/chat/completions", Action::chat, Place::worker, false, "Answer a conversation"},
    Route{"POST", "/v1/responses", Action::respond, Place::worker, false, "Answer a conversation, as items and events"},
    Route{"GET", "/v1/responses/{id}", Action::response, Place::worker, false, "A response that is kept"},
    Route{"DELETE", "/v1/responses/{id}", Action::delete_response, Place::worker, false, "Forget it"},
    Route{"GET", "/v1/responses/{id}/input_items", Action::response_items, Place::worker, false,
          "The items it answered, a page at a time"},
    Route{"POST", "/v1/embeddings", Action::embeddings, Place::here, false, "Refused"},
    Route{"POST", "/tokenize", Action::tokenize, Place::worker, false, "Text or messages to tokens"},
    Route{"POST", "/detokenize", Action::detokenize, Place::worker, false, "Tokens to text"},
    Route{"GET", "/tokenizer_info", Action::tokenizer_info, Place::worker, false, "Special tokens and sizes"},
    Route{"POST", "/apply-template", Action::apply_template, Place::worker, false,
          "Messages to the prompt they become"},
    Route{"GET", "/v1/memories", Action::memories, Place::worker, false, "The memories there are"},
    Route{"POST", "/v1/memories", Action::create_memory, Place::slow, false,
          "Read a text or messages once, and keep it"},
    Route{"GET", "/v1/memories/{id}", Action::memory, Place::worker, false, "One of them"},
    Route{"DELETE", "/v1/memories/{id}", Action::delete_memory, Place::slow, false, "Forget a memory"},
    Route{"POST", "/v1/memories/{id}/fork", Action::fork_memory, Place::slow, false,
          "A memory and more after it, as a new one"},
    Route{"GET", "/props", Action::props, Place::worker, false, "What is served, and how"},
    Route{"GET", "/slots", Action::slots, Place::here, false, "What runs now"},
    Route{"GET", "/metrics", Action::metrics, Place::here, false, "For Prometheus"},
    Route{"GET", "/openapi.json", Action::openapi, Place::here, false, "This description"},
};

}  // namespace gka::serve
