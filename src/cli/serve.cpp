// `gka serve`: models behind OpenAI's API, and a page. Listens at once and says 503 on /health while models load; the
// line with the address comes when they are there.
#include <CLI/CLI.hpp>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/model_inputs.h"
#include "cli/numbers.h"
#include "cli/progress.h"
#include "cli/white_space.h"
#include "data/model_tokenizer.h"
#include "infer/engine.h"
#include "models/checkpoint.h"
#include "models/dtypes.h"
#include "models/vision_config.h"
#include "serve/service.h"
#include "serve/signals.h"

namespace gka::cli {
namespace {

struct Arguments {
  std::vector<std::string> models, names;
  std::string tokenizer, key_file;
  infer::EngineOptions engine;
  serve::ServiceOptions service;
  std::string memories;
  double drain_seconds = 30;
  std::int64_t max_body_mib = 32, stored_responses = 1000, stored_mib = 64;
};

/// The folder with the model's files; of a training run, its newest checkpoint.
std::filesystem::path files_of(const std::filesystem::path& folder) {
  const auto latest = folder / "latest";
  const bool run = !std::filesystem::exists(folder / "config.json") && std::filesystem::exists(latest / "config.json");
  return run ? latest : folder;
}

data::Tokenizer tokenizer_of(const Arguments& arguments, const std::filesystem::path& folder) {
  if (!arguments.tokenizer.empty()) {
    auto named = data::Tokenizer::load(arguments.tokenizer);
    data::check_model_tokenizer(folder, named.fingerprint(), "--tokenizer " + arguments.tokenizer);
    return named;
  }
  if (std::filesystem::exists(folder / "tokenizer.json") || std::filesystem::exists(folder / "vocab.json")) {
    return data::Tokenizer::load(folder.string());
  }
  const auto config = folder / "config.json";
  if (std::filesystem::exists(config) && models::is_vision(models::read_json(config))) {
    (void)models::load_config(folder);  // has the sentence for it
  }
  throw std::runtime_error("the model " + folder.string() +
                           " has no tokenizer.json; name one with --tokenizer ('bytes' for a model of bytes)");
}

/// The folder's own name, or a longer one where two models share it.
std::string name_of(const std::filesystem::path& folder, std::set<std::string>& taken) {
  const auto whole = std::filesystem::absolute(folder).lexically_normal();
  auto name = whole.has_filename() ? whole.filename().string() : whole.parent_path().filename().string();
  for (int i = 2; !taken.insert(name).second; ++i) name += "-" + std::to_string(i);
  return name;
}

std::shared_ptr<serve::Model> load_model(const Arguments& arguments, std::size_t at, std::set<std::string>& taken) {
  const std::filesystem::path given(arguments.models[at]);
  const auto folder = files_of(given);
  auto options = arguments.engine;
  LiveLine line;
  options.on_load = [&](double fraction) {
    line.show(
        [&] { return "loading " + given.string() + ": " + std::to_string(static_cast<int>(100 * fraction)) + "%"; });
  };
  const auto name = at < arguments.names.size() ? arguments.names[at] : name_of(given, taken);
  if (!arguments.memories.empty()) {
    options.memories = std::filesystem::path(arguments.memories);
    // Models share the folder: each knows its own. Where an older gka has given one a folder of its own, it stays
    // there.
    if (std::filesystem::is_directory(options.memories / name)) options.memories /= name;
    std::error_code failed;
    std::filesystem::create_directories(options.memories, failed);
    if (failed)
      throw std::runtime_error("cannot make --memories " + options.memories.string() + ": " + failed.message());
  }
  if (!std::filesystem::is_directory(given)) throw std::runtime_error("there is no folder " + given.string());
  auto tokenizer = tokenizer_of(arguments, folder);
  auto chat = serve::ChatTemplate::load(folder);
  auto engine = infer::Engine::load(given, options);
  (void)engine->memories();  // whose they are takes a look at every weight: now, and not when the first is asked for
  auto ends = engine->end_tokens();
  if (tokenizer.vocab_size() > engine->vocabulary()) {
    throw std::runtime_error("the tokenizer of " + given.string() + " has " + std::to_string(tokenizer.vocab_size()) +
                             " tokens, and the model a vocabulary of " + std::to_string(engine->vocabulary()));
  }
  return std::make_shared<serve::Model>(serve::Model{.name = name,
                                                     .folder = given,
                                                     .encoder = serve::Encoder(std::move(tokenizer)),
                                                     .chat = std::move(chat),
                                                     .engine = std::move(engine),
                                                     .defaults = serve::sampling_defaults(folder),
                                                     .end_tokens = std::move(ends)});
}

/// One key a line; empty lines and those that start with # do not count.
std::vector<std::string> read_keys(const std::string& path) {
  std::vector<std::string> keys;
  std::istringstream text(read_text(path));
  for (std::string line; std::getline(text, line);) {
    const auto key = without_leading_space(without_trailing_space(line));
    if (!key.empty() && key[0] != '#') keys.emplace_back(key);
  }
  if (keys.empty()) throw std::runtime_error("the file of keys " + path + " has none");
  return keys;
}

/// A browser names a page's site with its scheme and port and nothing after them; another text would never match.
std::string check_origin(const std::string& text) {
  const auto place = text.find("://");
  const bool site =
      place != std::string::npos && place + 3 < text.size() && text.find('/', place + 3) == std::string::npos;
  return site || text == "*" ? "" : "takes a site as in https://example.com, or *, and got '" + text + "'";
}

void check_names(const Arguments& arguments) {
  const auto& names = arguments.names;
  if (names.size() > arguments.models.size()) {
    throw std::runtime_error("--name is given " + std::to_string(names.size()) + " times, and there are " +
                             std::to_string(arguments.models.size()) + " models");
  }
  if (std::set<std::string>(names.begin(), names.end()).size() < names.size()) {
    throw std::runtime_error("two models have the same --name");
  }
}

int run(Arguments& arguments) {
  check_names(arguments);
  sigset_t signals;  // blocked before any thread starts, so that one alone waits for them
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  auto& options = arguments.service;
  if (!arguments.key_file.empty()) {
    const auto more = read_keys(arguments.key_file);
    options.keys.insert(options.keys.end(), more.begin(), more.end());
  }
  options.http.max_body = static_cast<std::size_t>(arguments.max_body_mib) << 20;
  options.stored = {.responses = static_cast<std::size_t>(arguments.stored_responses),
                    .bytes = static_cast<std::size_t>(arguments.stored_mib) << 20};
  options.queue = static_cast<std::size_t>(arguments.engine.queue);
  options.drain_limit = std::chrono::milliseconds(static_cast<std::int64_t>(arguments.drain_seconds * 1000));
  serve::Service service(options);

  std::optional<std::string> failure;
  std::thread loader([&] {
    try {
      std::set<std::string> taken(arguments.names.begin(), arguments.names.end());
      for (std::size_t i = 0; i < arguments.models.size(); ++i) service.add(load_model(arguments, i, taken));
      service.ready();
      std::cout << service.address() << std::endl;
    } catch (const std::exception& error) {
      failure = error.what();
      service.shutdown();
    }
  });
  const serve::SignalWatch watch(service, signals);
  service.run();
  loader.join();
  if (failure) throw std::runtime_error(*failure);
  return 0;
}

}  // namespace

Action declare_serve(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  auto& http = arguments->service.http;
  auto& service = arguments->service;
  auto& engine = arguments->engine;
  app.add_option("MODEL", arguments->models, "Folders with config.json and weights, or training runs")->required();
  const auto not_empty = [](const std::string& text) { return text.empty() ? "takes a text" : std::string(); };
  app.add_option("--name", arguments->names,
                 "Names of the models for clients, one each in order (default: their folders' names)")
      ->check(not_empty)
      ->allow_extra_args(false);
  app.add_option("--host", http.host, "Address to listen on; 0.0.0.0: all of the machine's")->capture_default_str();
  http.port = 8000;
  app.add_option("--port", http.port, "Port to listen on; 0: any free port")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535));
  app.add_option("--api-key", service.keys, "A key clients must send; may be given several times")
      ->check(not_empty)
      ->allow_extra_args(false);
  app.add_option("--api-key-file", arguments->key_file, "A file with one key a line")->type_name("FILE");
  app.add_option("--memories", arguments->memories, "Folder that keeps memories; without it they end with the server")
      ->type_name("FOLDER");
  app.add_option("--device", engine.device, "cpu, cuda or cuda:N (default: a GPU where there is one)");
  app.add_option("--dtype", engine.dtype,
                 models::list_dtypes() + " (default: float32 on the CPU, elsewhere the checkpoint's own)");
  add_weights_option(app, engine.weights);
  add_cache_option(app, engine.kv_cache_dtype);
  app.add_option("--tokenizer", arguments->tokenizer,
                 "bytes, a tokenizer.json or a folder that holds one (the model's by default)");
  app.add_option("--slots", engine.slots, "Sequences at once (0: what fits)")->check(non_negative_number());
  app.add_option("--context", engine.context, "Longest sequence (0: the model's, or what fits)")
      ->check(non_negative_number());
  app.add_option("--queue", engine.queue, "Requests that may wait; more get 429")
      ->capture_default_str()
      ->check(positive_number());
  app.add_flag("--deterministic", engine.deterministic, "Answers have the same bits whatever else runs; slower");
  app.add_option("--streams-per-key", service.streams_per_key, "Requests one key may have running (0: any number)")
      ->check(non_negative_number());
  app.add_option("--max-body", arguments->max_body_mib, "Largest request")
      ->type_name("MIB")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--stored-responses", arguments->stored_responses,
                 "Responses kept for each key, to go on from by previous_response_id (0: none)")
      ->capture_default_str()
      ->check(non_negative_number());
  app.add_option("--stored-size", arguments->stored_mib, "The most that kept responses may take together, for each key")
      ->type_name("MIB")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option(
         "--cors-origin", service.cors,
         "A site whose pages may call this server, as in https://example.com ('*': any); may be given several times")
      ->check(check_origin)
      ->allow_extra_args(false);
  app.add_option("--certificate", http.certificate, "Serve TLS with this PEM file")->type_name("FILE");
  app.add_option("--certificate-key", http.key, "The certificate's private key")->type_name("FILE");
  app.add_option("--drain-seconds", arguments->drain_seconds, "How long running answers may take after SIGTERM")
      ->capture_default_str()
      ->check(non_negative_number());
  app.add_flag("--log-json", service.log_json, "Log lines as JSON");
  app.add_flag("--log-text", service.log_text, "Log answers' text too");
  app.add_flag("--quiet", service.quiet, "Log nothing");
  app.footer(
      "Prints its address once models are loaded. A browser finds a chat page there, OpenAI's clients the API under "
      "/v1.\n"
      "Ctrl-C or SIGTERM lets running answers end; a second one stops at once.\n"
      "\n"
      "Examples:\n"
      "  gka serve model\n"
      "  gka serve runs/book --tokenizer bytes --port 0 --memories kept\n"
      "  gka serve chat-model recall-8m --name chat --name recall --weights bfloat16\n"
      "  gka serve model --host 0.0.0.0 --api-key-file keys.txt --certificate cert.pem --certificate-key key.pem\n"
      "\n"
      "  curl http://127.0.0.1:8000/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": "
      "\"Hello\"}]}'");
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
