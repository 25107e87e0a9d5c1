#include "serve/service.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>

#include "data/unicode.h"
#include "gka/info.h"
#include "serve/completion.h"
#include "serve/ids.h"
#include "serve/keys.h"
#include "serve/log.h"
#include "serve/metrics.h"
#include "serve/openapi.h"
#include "serve/page.h"
#include "serve/plan.h"
#include "serve/routes.h"
#include "serve/workers.h"

namespace gka::serve {
namespace {

using ExchangePtr = std::shared_ptr<http::Exchange>;

/// The route of a path, and what stands for {id} in it.
struct Match {
  const Route* route = nullptr;
  std::string id;
  std::string methods{};  // that the path takes; none: there is no such path
};

bool matches(std::string_view pattern, std::string_view path, std::string& id) {
  const auto brace = pattern.find("{id}");
  if (brace == std::string_view::npos) return pattern == path;
  const auto before = pattern.substr(0, brace), after = pattern.substr(brace + 4);
  if (!path.starts_with(before) || path.size() < before.size() + after.size() || !path.ends_with(after)) return false;
  const auto middle = path.substr(before.size(), path.size() - before.size() - after.size());
  id = middle;
  const bool model = pattern.starts_with("/v1/models");  // whose names may have slashes
  return !middle.empty() && (model || middle.find('/') == std::string_view::npos);
}

Match find_route(std::string_view method, std::string_view path) {
  Match match;
  for (const auto& route : kRoutes) {
    std::string id;
    if (!matches(route.path, path, id)) continue;
    match.methods +=
        (match.methods.empty() ? "" : ", ") + std::string(route.method == "GET" ? "GET, HEAD" : route.method);
    if (route.method == method || (method == "HEAD" && route.method == "GET")) return {&route, id};
  }
  return match;
}

/// A request's own id, where it is one that may go into a log and a header.
std::string request_id(const http::Request& request) {
  const std::string given(request.header("x-request-id"));
  const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
  return !given.empty() && given.size() <= 64 && std::ranges::all_of(given, plain) ? given : fresh_id();
}

/// A host as --host has it or as the header Host does, with or without a port.
bool loopback(std::string_view host) {
  if (host == "::1") return true;
  const auto colon = host.starts_with('[') ? host.find("]:") : host.rfind(':');
  if (colon != std::string_view::npos) host = host.substr(0, host.starts_with('[') ? colon + 1 : colon);
  return host == "localhost" || host == "127.0.0.1" || host == "[::1]" || host.starts_with("127.");
}

/// Of the actions that answer from a model's tokens, and nothing of the others.
std::optional<Endpoint> endpoint_of(Action action) {
  switch (action) {
    case Action::completions: return kCompletions;
    case Action::chat: return kChat;
    case Action::respond: return kResponses;
    case Action::page:
    case Action::health:
    case Action::version:
    case Action::models:
    case Action::model:
    case Action::response:
    case Action::delete_response:
    case Action::response_items:
    case Action::embeddings:
    case Action::tokenize:
    case Action::detokenize:
    case Action::tokenizer_info:
    case Action::apply_template:
    case Action::memories:
    case Action::memory:
    case Action::create_memory:
    case Action::fork_memory:
    case Action::delete_memory:
    case Action::props:
    case Action::slots:
    case Action::metrics:
    case Action::openapi: break;
  }
  return std::nullopt;
}

/// The name of an answer. A response's may be asked for again, so that no client can choose it.
std::string answer_id(Endpoint endpoint, const std::string& request) {
  if (endpoint == kResponses) return "resp_" + fresh_id();
  return (endpoint == kChat ? "chatcmpl-" : "cmpl-") + request;
}

Json memory_json(const infer::MemoryInfo& memory, const Model& model) {
  return {{"id", memory.id},
          {"object", "memory"},
          {"name", memory.name},
          {"model", model.name},
          {"tokens", memory.tokens},
          {"state_bytes", memory.state_bytes},
          {"cache_bytes", memory.cache_bytes},
          {"kept_tokens", memory.kept_tokens},
          {"created", memory.created}};
}

/// Whether a body has a field; null is as good as absent.
bool given(const Json& body, const char* name) {
  const auto found = body.find(name);
  return found != body.end() && !found->is_null();
}

std::string text_field(const Json& body, const char* name) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return {};
  if (!found->is_string()) throw bad_request(std::string("'") + name + "' takes a text", name);
  return found->get<std::string>();
}

bool flag_field(const Json& body, const char* name, bool otherwise) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return otherwise;
  if (!found->is_boolean()) throw bad_request(std::string("'") + name + "' takes true or false", name);
  return found->get<bool>();
}

}  // namespace

class Service::Core {
 public:
  explicit Core(ServiceOptions options)
      : options_(std::move(options)),
        keys_(options_.keys),
        responses_(options_.stored),
        log_(options_.log_json, options_.quiet),
        server_(
            options_.http, [this](const ExchangePtr& exchange) { handle(exchange); },
            [this](int status, const std::string& problem) {  // no request came of it
              metrics_.answered("none", status);
              log_.say("no request", {{"status", status}, {"why", problem}});
              return dumped(error_json(status, problem));
            }),
        workers_(std::make_unique<Workers>(options_.threads)),
        slow_(std::make_unique<Workers>(1)) {}

  ~Core() {
    slow_.reset();  // their threads use what stands above
    workers_.reset();
    // An engine's thread may be the last to let go of a request, and with it of the model: it cannot wait for itself.
    for (const auto& model : models_) model->engine.reset();
  }

  int port() const { return server_.port(); }
  std::string address() const {
    const auto& host = options_.http.host;
    const bool six = host.find(':') != std::string::npos;
    return std::string(server_.tls() ? "https://" : "http://") + (six ? "[" + host + "]" : host) + ":" +
           std::to_string(port());
  }
  void add(std::shared_ptr<Model> model) { models_.push_back(std::move(model)); }
  void ready() {
    ready_ = true;
    for (const auto& model : models_) {
      if (model->chat.plain())
        log_.say("the model has no chat template, so a plain one stands in", {{"model", model->name}});
    }
    for (const auto& model : models_) {
      if (!model->defaults.empty()) {
        auto values = model->defaults;
        values["model"] = model->name;
        log_.say("where a request does not say how to draw, the model's generation_config.json does", values);
      }
    }
    if (!keys_.any() && !loopback(options_.http.host)) {
      log_.say("whoever can reach this machine can use the server; --api-key asks them for a key",
               {{"host", options_.http.host}});
    }
  }

  void run() {
    server_.every(std::chrono::milliseconds(100), [this] { check_drained(); });
    server_.every(options_.heartbeat / 4, [this] {
      const auto running = active_;  // one that cannot be written to leaves them
      for (const auto& completion : running) completion->beat(options_.heartbeat);
    });
    server_.run();
  }

  void shutdown() {
    server_.post([this] {
      if (draining_) return server_.stop();  // asked twice: at once
      draining_ = true;
      drain_until_ = Clock::now() + options_.drain_limit;
      server_.close_listener();
      if (ready_) log_.say("stopping: what runs may finish", {{"running", active_.size()}});
      check_drained();
    });
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Call {
    ExchangePtr exchange;
    const Route* route;
    std::string id;  // from the path
    std::string request_id;
    std::size_t key = 0;
    Clock::time_point start = Clock::now();
    const http::Request& request() const { return exchange->request(); }
  };

  // --- on the server's thread

  void check_drained() {
    if (!draining_) return;
    if (Clock::now() > drain_until_) {
      const auto running = active_;
      for (const auto& completion : running) completion->fail(Problem(503, "the server is stopping", "", "stopping"));
      server_.stop();
    } else if (active_.empty() && busy_ == 0) {
      server_.stop();
    }
  }

  void handle(const ExchangePtr& exchange) {
    const auto& request = exchange->request();
    Call call{.exchange = exchange, .route = nullptr, .id = {}, .request_id = request_id(request)};
    exchange->add_header("X-Request-Id", call.request_id);
    try {
      allow_origin(exchange);
      if (request.method == "OPTIONS") return exchange->reply(204, "", "");
      if ((request.method == "GET" || request.method == "HEAD") && serve_page(call)) return;
      const auto match = find_route(request.method, request.path);
      if (match.route == nullptr) {
        if (match.methods.empty()) {
          const bool near = !find_route("", "/v1" + request.path).methods.empty();
          throw Problem(404,
                        "there is no " + request.path.substr(0, 100) +
                            (near ? "; it is /v1" + request.path.substr(0, 100) + " (a client's base_url ends in /v1)"
                                  : "; GET /openapi.json lists what there is"));
        }
        exchange->add_header("Allow", match.methods + ", OPTIONS");
        throw Problem(405, request.path.substr(0, 100) + " does not take " + request.method.substr(0, 20));
      }
      call.route = match.route;
      call.id = match.id;
      if (!match.route->open) call.key = check_key(request);
      start(call);
    } catch (const Problem& problem) {
      refuse(call, problem);
    }
  }

  bool serve_page(const Call& call) {
    const auto* file = find_page_file(call.request().path);
    if (file == nullptr) return false;
    call.exchange->reply(
        200, file->type, file->data,
        {{"Content-Security-Policy",
          "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"},
         {"Cache-Control", "no-cache"},
         {"X-Content-Type-Options", "nosniff"}});
    return true;
  }

  /// What a browser asks before it sends a page's request. A site that may call may send what headers it likes:
  /// OpenAI's client has a dozen of its own.
  static void allow_headers(const ExchangePtr& exchange) {
    const auto asked = exchange->request().header("access-control-request-headers");
    exchange->add_header("Access-Control-Allow-Headers",
                         asked.empty() ? "authorization, content-type, x-request-id" : std::string(asked));
    exchange->add_header("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
    exchange->add_header("Access-Control-Max-Age", "600");
  }

  /// A page of another site may not use this server through its reader's browser, unless it was named.
  void allow_origin(const ExchangePtr& exchange) {
    const auto origin = exchange->request().header("origin");
    if (origin.empty()) return;
    const auto named =
        std::ranges::find_if(options_.cors, [&](const auto& one) { return one == "*" || one == origin; });
    if (named != options_.cors.end()) {
      exchange->add_header("Access-Control-Allow-Origin", *named == "*" ? "*" : std::string(origin));
      exchange->add_header("Access-Control-Expose-Headers", "x-request-id, retry-after");
      exchange->add_header("Vary", "Origin");
      if (exchange->request().method == "OPTIONS") allow_headers(exchange);
      return;
    }
    const auto host = exchange->request().header("host");
    const auto place = origin.find("://");
    const bool same = place != std::string_view::npos && origin.substr(place + 3) == host;
    const bool local = !loopback(options_.http.host) || loopback(host);
    if (!same || !local)
      throw Problem(403, "requests from pages of other sites are refused; --cors-origin allows one", "", "origin");
  }

  std::size_t check_key(const http::Request& request) const {
    if (!keys_.any()) return 0;
    const auto given = request.header("authorization");
    if (given.size() > 7 && (given.starts_with("Bearer ") || given.starts_with("bearer "))) {
      if (const auto found = keys_.find(given.substr(7))) return *found;
    }
    throw Problem(401, "this server asks for an API key (Authorization: Bearer KEY), and this is none of its keys", "",
                  "invalid_api_key");
  }

  void start(const Call& call) {
    const bool needs_model = call.route->action != Action::health && call.route->action != Action::version &&
                             call.route->action != Action::openapi && call.route->action != Action::metrics;
    if (!ready_ && needs_model) throw loading();
    if (const auto coding = call.request().header("content-encoding"); !coding.empty() && coding != "identity") {
      throw Problem(415,
                    "the body is packed as " + std::string(coding).substr(0, 40) + ", and is taken as plain JSON only",
                    "", "unsupported_encoding");
    }
    if (draining_ && call.request().method == "POST") throw Problem(503, "the server is stopping", "", "stopping");
    if (const auto endpoint = endpoint_of(call.route->action)) return start_completion(call, *endpoint);
    if (call.route->place == Place::here) return answer(call);
    ++busy_;
    const bool slow = call.route->place == Place::slow;
    const bool taken = (slow ? slow_ : workers_)
                           ->add(
                               [this, call] {
                                 const auto reply = made(call);
                                 server_.post([this, call, reply] {
                                   --busy_;
                                   send(call, reply);
                                 });
                               },
                               slow ? 64 : options_.queue);
    if (!taken) {
      --busy_;
      throw busy("too many requests wait already");
    }
  }

  static Problem loading() {
    Problem problem(503, "the model is being loaded", "", "loading");
    problem.retry_after = 2;
    return problem;
  }
  static Problem busy(const std::string& sentence) {
    Problem problem(429, sentence, "", "queue_full");
    problem.retry_after = 1;
    return problem;
  }

  struct Reply {
    int status = 200;
    std::string type = "application/json", body;
    int retry_after = 0;
    Json log = Json::object();
  };

  static Reply reply_of(const Problem& problem) {
    return {problem.status, "application/json",
            dumped(error_json(problem.status, problem.what(), problem.param, problem.code)), problem.retry_after,
            for_log(problem)};
  }

  /// Runs an action, and turns whatever it throws into an answer.
  Reply made(const Call& call) {
    try {
      if (call.route->action == Action::metrics) return {200, "text/plain; version=0.0.4; charset=utf-8", metrics()};
      return {200, "application/json", dumped(run_action(call))};
    } catch (const Problem& problem) {
      return reply_of(problem);
    } catch (const infer::Refused& refused) {
      return reply_of(problem_of(refused));
    } catch (const std::exception& error) {
      return reply_of(Problem(500, error.what()));
    }
  }

  void answer(const Call& call) { send(call, made(call)); }

  void send(const Call& call, const Reply& reply) {
    http::Headers headers;
    if (reply.retry_after > 0) headers.emplace_back("Retry-After", std::to_string(reply.retry_after));
    call.exchange->reply(reply.status, reply.type, reply.body, headers);
    record(call, reply.status, reply.log);
  }

  void refuse(const Call& call, const Problem& problem) { send(call, reply_of(problem)); }

  /// Counts and logs a request that is over.
  void record(const Call& call, int status, Json more = Json::object()) {
    metrics_.answered(call.route ? std::string(call.route->path) : "other", status);
    const bool dull = call.route && (call.route->action == Action::health || call.route->action == Action::metrics);
    if (dull && status < 400) return;
    const auto seconds = std::chrono::duration<double>(Clock::now() - call.start).count();
    Json values{{"status", status},
                {"ms", std::round(seconds * 1e4) / 10},
                {"id", call.request_id},
                {"peer", call.request().peer}};
    values.update(more);
    log_.say(call.request().method.substr(0, 20) + " " + call.request().path.substr(0, 100), values);
  }

  // --- completions

  void start_completion(const Call& call, Endpoint endpoint) {
    auto& streams = streams_[call.key];
    if (options_.streams_per_key > 0 && streams >= options_.streams_per_key) {
      throw busy("this key has " + std::to_string(streams) + " requests running, and may have " +
                 std::to_string(options_.streams_per_key));
    }
    const auto completion = std::make_shared<Completion>(
        answer_id(endpoint, call.request_id), call.exchange,
        Completion::Surroundings{
            .post = [this](std::function<void()> task) { server_.post(std::move(task)); },
            .metrics = &metrics_,
            .on_done = [this, call](const Completion& done,
                                    const std::string& outcome) { finished(call, done, outcome); },
            .keep = [this, key = call.key](KeptResponse response) { responses_.keep(key, std::move(response)); }});
    const bool taken =
        workers_->add([this, call, completion, endpoint] { prepare(call, completion, endpoint); }, options_.queue);
    if (!taken) throw busy("too many requests wait already");
    ++streams;
    active_.insert(completion);
    call.exchange->on_gone([completion] { completion->abandon("left"); });
  }

  /// On a worker: body to plan to engine.
  void prepare(const Call& call, const std::shared_ptr<Completion>& completion, Endpoint endpoint) {
    const auto refuse_later = [&](const Problem& problem) {
      server_.post([completion, problem] { completion->refuse(problem); });
    };
    try {
      auto body = parse_body(call.request().body);
      auto ask = read_ask(body, endpoint);
      const auto model = model_of(ask);
      if (!model->defaults.empty()) ask = read_ask(with_defaults(std::move(body), *model), endpoint);
      auto before = Json::array();
      if (!ask.previous_response_id.empty()) before = responses_.conversation(call.key, ask.previous_response_id);
      if (endpoint == kResponses) responses_.resolve(call.key, ask.input);
      ask.store = ask.store && responses_.any();
      completion->submit(make_plan(model, std::move(ask), endpoint, std::move(before)));
    } catch (const Problem& problem) {
      refuse_later(problem);
    } catch (const std::exception& error) {
      refuse_later(Problem(500, error.what()));
    }
  }

  void finished(const Call& call, const Completion& completion, const std::string& outcome) {
    const auto found = std::ranges::find_if(active_, [&](const auto& one) { return one.get() == &completion; });
    const auto keep = found == active_.end() ? nullptr : *found;
    if (keep) active_.erase(found);
    --streams_[call.key];
    call.exchange->on_gone({});
    Json more = Json::object();
    if (outcome == "done") {
      const auto usage = completion.usage();
      more = {{"model", completion.model()},
              {"prompt", usage.prompt_tokens},
              {"remembered", usage.remembered_tokens},
              {"answer", usage.completion_tokens}};
      if (options_.log_text) more["text"] = completion.text();
    } else {
      more = completion.refusal();
      more["outcome"] = outcome;
    }
    record(call, outcome == "left" ? 499 : call.exchange->status(), std::move(more));
  }

  // --- actions

  std::shared_ptr<Model> model_named(const std::string& name) const {
    if (name.empty()) {
      if (models_.size() == 1) return models_[0];
      throw bad_request("'model' is missing; GET /v1/models lists " + std::to_string(models_.size()), "model",
                        "missing_field");
    }
    const auto found = std::ranges::find_if(models_, [&](const auto& model) { return model->name == name; });
    if (found != models_.end()) return *found;
    throw Problem(404, "there is no model '" + name.substr(0, 100) + "'; GET /v1/models lists them", "model",
                  "model_not_found");
  }
  std::shared_ptr<Model> model_of(const Json& body, const std::shared_ptr<Model>& otherwise = nullptr) const {
    const auto name = text_field(body, "model");
    return name.empty() && otherwise ? otherwise : model_named(name);
  }
  static Problem belongs(const std::string& memory, const Model& model) {
    return bad_request("the memory '" + memory.substr(0, 100) + "' belongs to the model '" + model.name + "'", "memory",
                       "memory_of_another_model");
  }
  /// The model that a request asks: where it names none, the one that its memory belongs to.
  std::shared_ptr<Model> model_of(const Ask& ask) const {
    if (ask.memory.empty()) return model_named(ask.model);
    const auto owner = memory_named(ask.memory).first;
    if (ask.model.empty()) return owner;
    auto named = model_named(ask.model);
    if (named != owner && !named->engine->memory(ask.memory)) throw belongs(ask.memory, *owner);
    return named;
  }

  Json run_action(const Call& call) {
    switch (call.route->action) {
      case Action::health: return health();
      case Action::version: return {{"version", gka::version()}};
      case Action::models: return models();
      case Action::model: return model_json(*model_named(call.id));
      case Action::embeddings:
        throw bad_request("these models have no embeddings: they continue text", "model", "not_supported");
      case Action::tokenize: return tokenize(parse_body(call.request().body));
      case Action::detokenize: return detokenize(parse_body(call.request().body));
      case Action::tokenizer_info: return tokenizer_info(call.request().parameter("model"));
      case Action::apply_template: return apply_template(parse_body(call.request().body));
      case Action::response: return response(call);
      case Action::response_items: return response_items(call);
      case Action::delete_response:
        responses_.remove(call.key, call.id);
        return {{"id", call.id}, {"object", "response"}, {"deleted", true}};
      case Action::memories: return memories();
      case Action::memory: return memory(call.id);
      case Action::create_memory: return create_memory(parse_body(call.request().body));
      case Action::fork_memory:
        return fork_memory(call.id, call.request().body.empty() ? Json::object() : parse_body(call.request().body));
      case Action::delete_memory: return delete_memory(call.id);
      case Action::props: return props();
      case Action::slots: return slots();
      case Action::openapi: return described();
      case Action::page:  // these do not answer with one JSON object, and are taken elsewhere
      case Action::completions:
      case Action::chat:
      case Action::respond:
      case Action::metrics: break;
    }
    throw Problem(404, "there is nothing here");
  }

  Json health() const {
    if (!ready_) throw loading();
    if (draining_) throw Problem(503, "the server is stopping", "", "stopping");
    return {{"status", "ok"}};
  }

  static Json model_json(const Model& model) {
    return {{"id", model.name},
            {"object", "model"},
            {"created", model.created},
            {"owned_by", "gka"},
            {"max_model_len", model.engine->context()},
            {"gka",
             {{"iterations", model.engine->iterations()},
              {"vocabulary", model.engine->vocabulary()},
              {"chat_template", !model.chat.plain()}}}};
  }

  Json described() const {
    Described about{.keys = keys_.any()};
    for (const auto& model : ready_ ? models_ : std::vector<std::shared_ptr<Model>>()) {
      about.models.push_back(model->name);
      about.vocabulary = std::max(about.vocabulary, model->engine->vocabulary());
      about.iterations = std::max(about.iterations, model->engine->iterations());
    }
    return openapi(about);
  }

  Json models() const {
    Json list = Json::array();
    for (const auto& model : models_) list.push_back(model_json(*model));
    return {{"object", "list"}, {"data", list}};
  }

  Json tokenize(const Json& body) const {
    check_body(body, Action::tokenize);
    const auto model = model_of(body);
    Tokens tokens;
    if (given(body, "messages")) {
      tokens = model->encoder.encode(rendered(*model, body));
    } else {
      const char* name = given(body, "prompt") ? "prompt" : "content";
      if (!given(body, name)) throw bad_request("'prompt' (or 'content') is missing", "prompt", "missing_field");
      const bool add = flag_field(body, "add_special_tokens", flag_field(body, "add_special", true));
      tokens = model->encoder.encode(text_field(body, name), add, flag_field(body, "parse_special", true));
    }
    Json reply{{"tokens", tokens}, {"count", tokens.size()}, {"max_model_len", model->engine->context()}};
    if (flag_field(body, "return_token_strs", false)) {
      reply["token_strs"] = Json::array();
      for (const auto token : tokens) reply["token_strs"].push_back(model->shown(token));
    }
    return reply;
  }

  Json detokenize(const Json& body) const {
    check_body(body, Action::detokenize);
    const auto model = model_of(body);
    if (!given(body, "tokens")) throw bad_request("'tokens' is missing", "tokens", "missing_field");
    const auto tokens = read_tokens(body["tokens"], *model, "tokens");
    const std::vector<data::Token> ids(tokens.begin(), tokens.end());
    const auto text = data::replace_malformed(model->tokenizer().decode(ids));
    return {{"prompt", text}, {"content", text}};
  }

  Json tokenizer_info(const std::string& name) const {
    const auto& model = name.empty() ? *models_[0] : *model_named(name);
    auto eos = model.chat.eos();
    if (eos.empty() && !model.end_tokens.empty()) eos = model.shown(model.end_tokens[0]);
    if (eos.empty() && model.tokenizer().end_of_document()) eos = model.shown(*model.tokenizer().end_of_document());
    return {{"tokenizer_class", model.tokenizer().describe()},
            {"eos_token", eos.empty() ? Json(nullptr) : Json(eos)},
            {"bos_token", model.chat.bos().empty() ? Json(nullptr) : Json(model.chat.bos())},
            {"pad_token", nullptr},
            {"vocab_size", model.tokenizer().vocab_size()},
            {"model_max_length", model.engine->context()},
            {"chat_template", model.chat.source()}};
  }

  static jinja::Text rendered(const Model& model, const Json& body, bool generation = true) {
    const auto or_null = [&](const char* name) { return body.contains(name) ? body[name] : Json(nullptr); };
    if (!given(body, "messages")) throw bad_request("'messages' is missing", "messages", "missing_field");
    return model.chat.render({.messages = body["messages"],
                              .tools = or_null("tools"),
                              .values = or_null("chat_template_kwargs"),
                              .add_generation_prompt = flag_field(body, "add_generation_prompt", generation),
                              .continue_final_message = flag_field(body, "continue_final_message", false)});
  }

  Json apply_template(const Json& body) const {
    check_body(body, Action::apply_template);
    const auto model = model_of(body);
    const auto text = rendered(*model, body);
    return {{"prompt", text.bytes()}, {"tokens", model->encoder.encode(text)}};
  }

  // --- responses that are kept

  Json response(const Call& call) {
    const auto stream = call.request().parameter("stream");
    if (!stream.empty() && stream != "false") {
      throw bad_request("'stream' takes false: a response that is kept comes whole", "stream");
    }
    return responses_.response(call.key, call.id);
  }

  Json response_items(const Call& call) {
    const auto& request = call.request();
    return page_of(responses_.items(call.key, call.id), {.order = std::string(request.parameter("order")),
                                                         .limit = std::string(request.parameter("limit")),
                                                         .after = std::string(request.parameter("after"))});
  }

  // --- memories

  std::pair<std::shared_ptr<Model>, infer::MemoryInfo> memory_named(const std::string& id) const {
    for (const auto& model : models_) {
      if (auto memory = model->engine->memory(id)) return {model, *std::move(memory)};
    }
    throw Problem(404, "there is no memory '" + id.substr(0, 100) + "'; GET /v1/memories lists them", "memory",
                  "memory_not_found");
  }

  Json memories() const {
    Json list = Json::array();
    for (const auto& model : models_) {
      for (const auto& memory : model->engine->memories()) list.push_back(memory_json(memory, *model));
    }
    return {{"object", "list"}, {"data", list}};
  }

  Json memory(const std::string& id) const {
    const auto [model, info] = memory_named(id);
    return memory_json(info, *model);
  }

  /// What is to be remembered: `input` as text or token ids, or `messages`.
  static Tokens memory_tokens(const Model& model, const Json& body, bool may_be_empty, bool first) {
    check_body(body, Action::create_memory);  // a fork's has the same fields
    const bool input = given(body, "input"), messages = given(body, "messages");
    if (input && messages)
      throw bad_request("'input' and 'messages' are both given; a memory is made of one of them", "input");
    if (!input && !messages) {
      if (may_be_empty) return {};
      throw bad_request("'input' (a text or token ids) or 'messages' is missing", "input", "missing_field");
    }
    Tokens tokens;
    if (messages) {
      tokens = model.encoder.encode(rendered(model, body, false));
    } else if (body["input"].is_string()) {
      tokens =
          model.encoder.encode(body["input"].get<std::string>(), flag_field(body, "add_special_tokens", first), true);
    } else {
      tokens = read_tokens(body["input"], model, "input");
    }
    if (tokens.empty() && !may_be_empty) throw bad_request("'input' has no tokens", "input");
    return tokens;
  }

  static std::string memory_name(const Json& body) {
    auto name = text_field(body, "name");
    if (data::count_characters(name) > 200) throw bad_request("'name' takes at most 200 characters", "name");
    return name;
  }

  static std::optional<std::int64_t> keep_tokens(const Json& body) {
    const auto found = body.find("keep_tokens");
    if (found == body.end() || found->is_null()) return std::nullopt;
    std::int64_t count = -1;
    if (!json::read(*found, count) || count < 0) {
      throw bad_request("'keep_tokens' takes a whole number of 0 or more, and is " + dumped(*found).substr(0, 60),
                        "keep_tokens");
    }
    return count;
  }

  Json create_memory(const Json& body) const {
    const auto model = model_of(body);
    auto tokens = memory_tokens(*model, body, false, true);
    check_length(*model, static_cast<std::int64_t>(tokens.size()));
    return memory_json(model->engine->create_memory(std::move(tokens), memory_name(body), keep_tokens(body)), *model);
  }

  static void check_length(const Model& model, std::int64_t tokens) {
    if (tokens < model.engine->context()) return;
    throw too_long("the memory has " + std::to_string(tokens) + " tokens", model, "input");
  }

  Json fork_memory(const std::string& id, const Json& body) const {
    const auto [model, info] = memory_named(id);
    if (const auto asked = model_of(body, model); asked != model) throw belongs(id, *model);
    auto more = memory_tokens(*model, body, true, false);
    check_length(*model, info.tokens + static_cast<std::int64_t>(more.size()));
    return memory_json(model->engine->fork_memory(id, std::move(more), memory_name(body), keep_tokens(body)), *model);
  }

  Json delete_memory(const std::string& id) const {
    const auto [model, info] = memory_named(id);
    model->engine->delete_memory(id);
    return {{"id", id}, {"object", "memory.deleted"}, {"deleted", true}};
  }

  // --- state of the server

  Json props() const {
    const auto& model = *models_[0];
    const auto stats = model.engine->stats();
    return {{"version", gka::version()},
            {"model", model.name},
            {"models", models()["data"]},
            {"model_path", model.folder.string()},
            {"total_slots", stats.slots},
            {"default_generation_settings", {{"n_ctx", model.engine->context()}, {"params", model.defaults}}},
            {"chat_template", model.chat.source()},
            {"bos_token", model.chat.bos()},
            {"eos_token", model.chat.eos()},
            {"iterations", model.engine->iterations()},
            {"build_info", std::string("gka ") + gka::version()}};
  }

  Json slots() const {
    Json list = Json::array();
    for (const auto& completion : active_) {
      list.push_back({{"id", list.size()},
                      {"is_processing", true},
                      {"request", completion->id()},
                      {"model", completion->model_if_known()},
                      {"generated_tokens", completion->tokens_so_far()},
                      {"seconds", completion->seconds()}});
    }
    std::int64_t free = 0;
    for (const auto& model : models_) {
      const auto stats = model->engine->stats();
      free += std::max<std::int64_t>(stats.slots - stats.slots_in_use, 0);
    }
    for (std::int64_t i = 0; i < std::min<std::int64_t>(free, 1024); ++i)
      list.push_back({{"id", list.size()}, {"is_processing", false}});
    return list;
  }

  std::string metrics() const {
    std::vector<std::pair<std::string, infer::Stats>> engines;
    if (ready_) {
      for (const auto& model : models_) engines.emplace_back(model->name, model->engine->stats());
    }
    return metrics_.write(engines, server_.connections());
  }

  ServiceOptions options_;
  Keys keys_;
  ResponseStore responses_;
  Log log_;
  Metrics metrics_;
  std::vector<std::shared_ptr<Model>> models_;
  std::atomic<bool> ready_ = false;
  std::atomic<bool> draining_ = false;
  Clock::time_point drain_until_{};
  std::set<std::shared_ptr<Completion>> active_;
  std::map<std::size_t, std::int64_t> streams_;
  std::int64_t busy_ = 0;  // plain requests on their way
  http::Server server_;
  std::unique_ptr<Workers> workers_, slow_;
};

Service::Service(ServiceOptions options) : core_(std::make_unique<Core>(std::move(options))) {}
Service::~Service() = default;
int Service::port() const { return core_->port(); }
std::string Service::address() const { return core_->address(); }
void Service::add(std::shared_ptr<Model> model) { core_->add(std::move(model)); }
void Service::ready() { core_->ready(); }
void Service::run() { core_->run(); }
void Service::shutdown() { core_->shutdown(); }

}  // namespace gka::serve
