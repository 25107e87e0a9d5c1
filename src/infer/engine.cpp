// The engine: a mailbox that any thread may fill, and one thread that empties it, steps the scheduler and calls back.
#include "infer/engine.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "infer/make_engine.h"
#include "infer/memories.h"
#include "infer/scheduler.h"
#include "models/checkpoint.h"
#include "models/placement.h"

namespace gka::infer {
namespace {

constexpr std::int64_t kMostSlots = 256, kLongContext = std::int64_t{1} << 30;

[[noreturn]] void refuse(Refused::Reason reason, const char* field, std::string sentence) {
  throw Refused(reason, field, std::move(sentence));
}
[[noreturn]] void refuse(const char* field, std::string sentence) {
  refuse(Refused::Reason::bad_request, field, std::move(sentence));
}

std::string in_words(std::int64_t value) { return std::to_string(value); }

std::int64_t physical_memory() {
  return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
}

/// What a step computes in takes a fifth of a small card and ten gigabytes of a large one, at the most.
std::int64_t without_activations(std::int64_t free) { return free - std::min(free / 5, std::int64_t{10} << 30); }

bool has_gka(const models::ModelConfig& config) { return std::ranges::count(config.layer_types, "GKA") > 0; }

/// Solver steps after which Chebyshev's bound on the error is below what bfloat16 shows; never more than the model's.
std::int64_t automatic_iterations(const layers::GkaConfig& gka) {
  const double ratio = std::sqrt((1 + gka.ridge_strength) / gka.ridge_strength);
  const double shrinks = (ratio - 1) / (ratio + 1);
  const auto enough = static_cast<std::int64_t>(std::ceil(std::log(2 * 0x1p9) / -std::log(shrinks)));
  return std::clamp<std::int64_t>(enough, 1, std::max<std::int64_t>(gka.num_iter, 1));
}

/// What the model was made for. Without full attention no length is too long.
std::int64_t own_context(const models::ModelConfig& config) {
  const bool attends = std::ranges::count(config.layer_types, "*") > 0;
  return attends && config.max_position_embeddings > 0 ? config.max_position_embeddings : kLongContext;
}

}  // namespace

bool has_int8_cache(const std::string& argument, const std::string& kv_cache_dtype) {
  if (kv_cache_dtype.empty() || kv_cache_dtype == "auto") return false;
  if (kv_cache_dtype == "int8") return true;
  throw std::invalid_argument(argument + " takes auto (the activations' type) or int8, and got '" + kv_cache_dtype +
                              "'");
}

SchedulerOptions scheduler_options(const models::Decoder& decoder, const EngineOptions& options) {
  for (const auto& [name, value] : {std::pair("slots", options.slots),
                                    {"context", options.context},
                                    {"step_tokens", options.step_tokens},
                                    {"cache_bytes", options.cache_bytes}}) {
    if (value < 0) {
      throw std::invalid_argument(std::string(name) + " takes 0 (the engine's choice) or more, and got " +
                                  std::to_string(value));
    }
  }
  const bool cpu = decoder.device().is_cpu();
  const auto memory = cpu ? physical_memory() / 4 : without_activations(free_memory(decoder.device()));
  SchedulerOptions chosen;
  auto& pool = chosen.pool;
  pool.grows = cpu;
  pool.context = options.context > 0 ? options.context : own_context(decoder.config());
  pool.int8_pages = has_int8_cache("kv_cache_dtype", options.kv_cache_dtype);
  const auto bytes = sequence_bytes(decoder, pool.context, pool.int8_pages);
  const auto for_states = bytes.page > 0 ? memory / 8 : memory / 2;
  pool.slots = options.slots;
  if (pool.slots == 0) {
    pool.slots = std::clamp<std::int64_t>(for_states / std::max<std::int64_t>(bytes.state, 1), 1, kMostSlots);
  }
  chosen.snapshot_bytes = options.snapshot_bytes != 0 ? options.snapshot_bytes : memory / (bytes.page > 0 ? 16 : 8);
  if (bytes.page > 0) {  // what a long context needs most of: all that the others leave
    const auto others = pool.slots * bytes.state + std::max<std::int64_t>(chosen.snapshot_bytes, 0);
    const auto cache = options.cache_bytes > 0 ? options.cache_bytes : std::max(memory - others, memory / 4);
    pool.pages = std::max<std::int64_t>(1, cache / bytes.page);
    pool.pages = std::min(pool.pages, pool.slots * pages_for(pool.context));
    if (options.context == 0) pool.context = std::min(pool.context, pool.pages * kGrid);
  }
  chosen.step_tokens = options.step_tokens > 0 ? options.step_tokens : cpu ? 256 : 16384;
  chosen.deterministic = options.deterministic;
  const bool any_size = !cpu && !options.deterministic;
  chosen.piece_tokens = any_size ? 2048 : kGrid;
  chosen.alone_tokens = any_size ? 16384 : kGrid;
  chosen.record = chosen.ahead = !cpu;
  return chosen;
}

namespace {

class EngineOnAThread final : public Engine {
 public:
  EngineOnAThread(models::Decoder decoder, const EngineOptions& options)
      : decoder_(std::move(decoder)),
        options_(options),
        fitting_(scheduler_options(decoder_, options)),
        memories_(options.memories) {
    std::unique_lock lock(mutex_);
    thread_ = std::thread([this] { work(); });
    changed_.wait(lock, [&] { return ready_ || failure_; });
    if (!failure_) return;
    lock.unlock();
    thread_.join();
    std::rethrow_exception(failure_);
  }

  ~EngineOnAThread() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  RequestId submit(Request request, Sink sink) override {
    auto sequence = std::make_unique<Sequence>();
    sequence->tokens = request.prompt;
    sequence->prompt = std::ssize(sequence->tokens);
    if (!request.memory.empty()) put_before(*sequence, own_memory(request.memory));
    sequence->request = std::move(request);
    sequence->sink = std::move(sink);
    check(*sequence, sequence->cuts);
    return post(std::move(sequence));
  }

  void cancel(RequestId id) override {
    {
      const std::lock_guard lock(mutex_);
      cancelled_.push_back(id);
    }
    changed_.notify_all();
  }

  Stats stats() const override {
    const std::lock_guard lock(mutex_);
    auto stats = stats_;
    stats.waiting += std::ssize(inbox_);
    return stats;
  }

  void drain() override {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.wait(lock, [&] { return idle_ && inbox_.empty(); });
  }

  MemoryInfo create_memory(std::vector<std::int64_t> tokens, std::string name,
                           std::optional<std::int64_t> keep_tokens) override {
    return make_memory(Memory{}, std::move(tokens), std::move(name), keep_tokens);
  }

  MemoryInfo fork_memory(const std::string& id, std::vector<std::int64_t> more, std::string name,
                         std::optional<std::int64_t> keep_tokens) override {
    return make_memory(own_memory(id), std::move(more), std::move(name), keep_tokens);
  }

  /// Those that this model made: a folder may hold others'.
  std::vector<MemoryInfo> memories() const override {
    for (const auto& gone : memories_.look_again()) let_go_of(gone);
    return memories_.empty() ? std::vector<MemoryInfo>() : memories_.list(model());
  }

  std::optional<MemoryInfo> memory(const std::string& id) const override {
    const auto found = known_memory(id);
    return found && found->model == model() ? std::optional(found->info) : std::nullopt;
  }

  bool delete_memory(const std::string& id) override {
    const auto gone = memory(id) ? memories_.remove(id) : std::nullopt;
    if (gone) let_go_of(*gone);
    return gone.has_value();
  }

  std::int64_t vocabulary() const override { return decoder_.config().vocab_size; }
  std::int64_t context() const override { return fitting_.pool.context; }
  std::vector<std::int64_t> end_tokens() const override { return decoder_.config().eos_token_id; }
  std::int64_t iterations() const override {
    return has_gka(decoder_.config()) ? decoder_.config().mixer.gka.num_iter : 0;
  }

 private:
  static Tokens on_grid(const Tokens& tokens) {
    return {tokens.begin(), tokens.begin() + grid_floor(std::ssize(tokens))};
  }
  /// Of the sequences that go on from a memory with the model's own solver steps.
  Kind own_kind(const Memory& memory) const {
    return {.iterations = decoder_.config().mixer.gka.num_iter, .cuts = memory.cuts};
  }
  /// Its snapshot is one like any other from now on.
  void let_go_of(const Memory& memory) const {
    if (!memory.resident) return;
    post_task([tokens = on_grid(memory.tokens), kind = own_kind(memory)](Scheduler& scheduler) {
      scheduler.snapshots().unpin(kind, tokens);
    });
  }
  std::int64_t page_bytes() const { return sequence_bytes(decoder_, context(), fitting_.pool.int8_pages).page; }

  /// The model's hash, which takes a look at every weight: made when first asked for.
  std::string model() const {
    std::call_once(hashed_, [&] { hash_ = hash_of(decoder_); });
    return hash_;
  }

  std::optional<Memory> known_memory(const std::string& id) const {
    auto memory = memories_.find(id);
    if (!memory || !Memories::was_removed(*memory)) return memory;
    for (const auto& gone : memories_.look_again()) let_go_of(gone);
    return std::nullopt;
  }

  Memory own_memory(const std::string& id) const {
    const auto memory = known_memory(id);
    if (!memory) refuse(Refused::Reason::unknown_memory, "memory", "there is no memory '" + id + "'");
    if (memory->model != model()) refuse("memory", "the memory '" + id + "' was made with another model");
    return *memory;
  }

  /// What `before` has (nothing, or a memory's) and more after it, as a memory of its own.
  MemoryInfo make_memory(const Memory& before, Tokens more, std::string name, std::optional<std::int64_t> keep_tokens) {
    auto tokens = before.tokens;
    tokens.insert(tokens.end(), more.begin(), more.end());
    auto cuts = cuts_with(before.cuts, std::ssize(tokens), keep_tokens);
    auto memory = memories_.make(std::move(name), std::move(tokens), std::move(cuts), model());
    auto sequence = std::make_unique<Sequence>();
    sequence->tokens = memory.tokens;
    sequence->prompt = memory.info.tokens;
    sequence->cuts = memory.cuts;
    sequence->request = {.prompt = memory.tokens, .max_tokens = 0};
    check(*sequence, before.cuts);
    fetch_before(*sequence, before);
    const auto remembered = remember(std::move(sequence), memory);
    try {
      if (!memory.file.empty()) write_memory(memory, remembered);
    } catch (...) {
      let_go_of(memory);  // or a disk that is full would fill the caches too
      throw;
    }
    memories_.add(memory);
    return memory.info;
  }

  /// The pages that lie wholly before the last `keep_tokens` of so many are dropped, once all that ends on the grid is
  /// read. Without attention there is nothing to drop.
  Cuts cuts_with(Cuts cuts, std::int64_t tokens, std::optional<std::int64_t> keep_tokens) const {
    if (!keep_tokens) return cuts;
    if (*keep_tokens < 0) {
      refuse("keep_tokens", "keep_tokens must be 0 or more, and is " + in_words(*keep_tokens));
    }
    const auto from = grid_floor(std::max<std::int64_t>(0, tokens - *keep_tokens));
    if (page_bytes() > 0 && from > dropped_by(cuts)) cuts.push_back({.at = grid_floor(tokens), .from = from});
    return cuts;
  }

  /// Reads a memory's tokens up to its last grid point; waits until that is done, and says in `memory` what it takes.
  Remembered remember(std::unique_ptr<Sequence> sequence, Memory& memory) {
    Remembered remembered;
    sequence->tokens = on_grid(memory.tokens);
    sequence->prompt = std::ssize(sequence->tokens);
    if (sequence->tokens.empty()) return remembered;
    std::promise<std::string> done;
    sequence->on_read = [&remembered](Scheduler& scheduler, Sequence& read) {
      remembered.snapshot = Scheduler::snapshot_of(read);
      if (scheduler.pool().pages_needed()) remembered.pages = scheduler.pool().read_pages(read.pages);
      scheduler.snapshots().add(read.kind_at(read.prompt), read.tokens, remembered.snapshot, read.pages,
                                /*pinned=*/true);
    };
    sequence->sink.on_end = [&done](Finish finish, const Usage&, const std::string& error) {
      done.set_value(finish == Finish::length ? "" : error.empty() ? "the engine stopped before it was read" : error);
    };
    post(std::move(sequence));
    const auto error = done.get_future().get();
    if (!error.empty()) throw std::runtime_error("the memory was not made: " + error);
    memory.resident = true;
    memory.info.state_bytes = remembered.snapshot.bytes;
    for (const auto& page : remembered.pages) memory.info.cache_bytes += static_cast<std::int64_t>(page.nbytes());
    return remembered;
  }

  /// Puts a memory's tokens before the prompt.
  void put_before(Sequence& sequence, const Memory& memory) {
    sequence.tokens.insert(sequence.tokens.begin(), memory.tokens.begin(), memory.tokens.end());
    sequence.before = memory.info.tokens;
    sequence.prompt = std::ssize(sequence.tokens);
    sequence.cuts = memory.cuts;
    sequence.usage.kept_tokens = memory.info.kept_tokens;
    fetch_before(sequence, memory);
  }

  /// A memory that lies on the disk alone is fetched when the turn comes of a sequence that goes on from it.
  void fetch_before(Sequence& sequence, const Memory& memory) {
    if (memory.resident || memory.file.empty()) return;
    sequence.on_begin = [this, id = memory.info.id](Scheduler& scheduler, Sequence& waiting) {
      if (fetch(scheduler, id)) waiting.on_begin = {};
    };
  }

  /// On the engine's thread. Where there is no room for its pages (false: there may be later), or they are of another
  /// kind than this engine's, its tokens are simply read again.
  bool fetch(Scheduler& scheduler, const std::string& id) {
    const auto memory = memories_.find(id);
    if (!memory || memory->resident) return true;
    const auto tokens = on_grid(memory->tokens);
    if (tokens.empty()) return true;
    auto& pool = scheduler.pool();
    const auto count = pool.pages_needed() ? pages_for(std::ssize(tokens) - dropped_by(memory->cuts)) : 0;
    if (pool.pages_free() < count && !scheduler.snapshots().free_pages(count)) return false;
    Remembered remembered;
    try {
      remembered = read_remembered(memory->file, decoder_, fitting_.pool.int8_pages);
    } catch (const std::exception&) {
      if (memories_.find(id)) throw;  // else it was deleted as it was read
    }
    if (!remembered.snapshot.hidden.defined()) return true;
    const auto pages = pool.take_pages(count);
    if (pool.pages_needed()) pool.write_pages(*pages, remembered.pages);
    scheduler.snapshots().add(own_kind(*memory), tokens, remembered.snapshot, *pages, /*pinned=*/true);
    for (const auto page : *pages) pool.release(page);
    if (!memories_.set_resident(id)) scheduler.snapshots().unpin(own_kind(*memory), tokens);
    return true;
  }

  void post_task(std::function<void(Scheduler&)> task) const {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

  /// `before`: the cuts of the memory that it goes on from.
  void check(Sequence& sequence, const Cuts& before) const {
    const auto& request = sequence.request;
    if (sequence.tokens.empty()) refuse("prompt", "the prompt is empty; the model needs a token to begin with");
    const auto check_token = [&](const char* field, std::int64_t token) {
      if (token >= 0 && token < vocabulary()) return;
      refuse(field, std::string(field) + " has the token " + in_words(token) + ", outside the vocabulary of " +
                        in_words(vocabulary()) + " tokens");
    };
    for (const auto token : request.prompt) check_token("prompt", token);
    for (const auto token : request.stop_tokens) check_token("stop_tokens", token);
    check_sampling(request.sampling, vocabulary());
    if (request.max_tokens < 0) {
      refuse("max_tokens", "max_tokens must be 0 or more, and is " + in_words(request.max_tokens));
    }
    if (request.min_tokens < 0 || request.min_tokens > request.max_tokens) {
      refuse("min_tokens", "min_tokens must be from 0 to max_tokens (" + in_words(request.max_tokens) + "), and is " +
                               in_words(request.min_tokens));
    }
    if (request.top_logprobs < 0 || request.top_logprobs > vocabulary()) {
      refuse("top_logprobs", "top_logprobs must be from 0 to the vocabulary's " + in_words(vocabulary()) + ", and is " +
                                 in_words(request.top_logprobs));
    }
    for (const auto boundary : request.boundaries) {
      if (boundary >= 0 && boundary <= std::ssize(request.prompt)) continue;
      refuse("boundaries", "boundaries has " + in_words(boundary) + ", and the prompt has " +
                               in_words(std::ssize(request.prompt)) + " tokens");
    }
    sequence.iterations = checked_iterations(request);
    check_length(sequence, before);
  }

  std::int64_t checked_iterations(const Request& request) const {
    const auto& gka = decoder_.config().mixer.gka;
    if (!request.iterations && !request.auto_iterations) return gka.num_iter;
    if (iterations() == 0) refuse("iterations", "iterations: the model has no GKA layer that solves");
    if (request.auto_iterations) return automatic_iterations(gka);
    if (*request.iterations < 0 || *request.iterations > gka.num_iter) {
      refuse("iterations", "iterations must be from 0 to the model's own " + in_words(gka.num_iter) + ", and is " +
                               in_words(*request.iterations));
    }
    return *request.iterations;
  }

  /// What can never fit, also where all of a memory that can be remembered is.
  void check_length(const Sequence& sequence, const Cuts& before) const {
    const auto prompt = sequence.prompt, most = sequence.request.max_tokens;
    if (most > context() || prompt > context() - most) {
      refuse(Refused::Reason::too_long, "prompt",
             "the prompt's " + in_words(prompt) + " tokens and max_tokens of " + in_words(most) +
                 " are more than the context of " + in_words(context()) + " tokens");
    }
    const auto bytes = page_bytes();
    Snapshots::Hit start;
    start.dropped = dropped_by(before);
    start.tokens = before.empty() ? 0 : before.back().at;
    const auto pages = (start.tokens - start.dropped) / kGrid + Scheduler::most_pages(sequence, start);
    if (bytes > 0 && pages > fitting_.pool.pages) {
      refuse(Refused::Reason::too_long, "prompt",
             "a sequence of " + in_words(prompt + most) + " tokens needs " + in_words(pages * bytes) +
                 " bytes of cache, and there are " + in_words(fitting_.pool.pages * bytes));
    }
  }

  RequestId post(std::unique_ptr<Sequence> sequence) {
    RequestId id = 0;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) refuse(Refused::Reason::stopping, "", "the engine is stopping and takes no new requests");
      if (std::ssize(inbox_) + stats_.waiting >= options_.queue) {
        refuse(Refused::Reason::queue_full, "",
               in_words(options_.queue) + " requests are waiting already; try again later");
      }
      id = sequence->id = ++last_id_;
      inbox_.push_back(std::move(sequence));
      idle_ = false;
    }
    changed_.notify_all();
    return id;
  }

  void work() {
    std::unique_ptr<Scheduler> scheduler;
    try {
      scheduler = std::make_unique<Scheduler>(decoder_, fitting_);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      ready_ = true;
      if (scheduler) stats_ = scheduler->stats();
    }
    changed_.notify_all();
    while (scheduler && take_mail(*scheduler)) {
      try {
        scheduler->step();
      } catch (const std::exception& error) {
        scheduler->end_all(Finish::error, error.what());
      }
    }
    if (!scheduler) return;
    {
      const std::lock_guard lock(mutex_);  // nobody posts any more
      for (auto& sequence : inbox_) scheduler->add(std::move(sequence));
      inbox_.clear();
    }
    scheduler->end_all(Finish::cancelled, "");  // calls back, and who is called may call us
  }

  /// Waits for something to do; false: it is over.
  bool take_mail(Scheduler& scheduler) {
    std::deque<std::unique_ptr<Sequence>> arrived;
    std::vector<RequestId> cancelled;
    std::vector<std::function<void(Scheduler&)>> tasks;
    {
      std::unique_lock lock(mutex_);
      stats_ = scheduler.stats();
      idle_ = scheduler.idle() && inbox_.empty();
      if (idle_) changed_.notify_all();
      changed_.wait(lock, [&] {
        return closing_ || !scheduler.idle() || !inbox_.empty() || !cancelled_.empty() || !tasks_.empty();
      });
      arrived.swap(inbox_);
      tasks.swap(tasks_);
      cancelled.swap(cancelled_);
      stats_.waiting += std::ssize(arrived);
    }
    for (const auto& task : tasks) task(scheduler);
    for (auto& sequence : arrived) scheduler.add(std::move(sequence));
    for (const auto id : cancelled) scheduler.cancel(id);
    const std::lock_guard lock(mutex_);
    return !closing_;
  }

  const models::Decoder decoder_;
  const EngineOptions options_;
  const SchedulerOptions fitting_;
  mutable Memories memories_;  // whose folder others change
  mutable std::once_flag hashed_;
  mutable std::string hash_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::unique_ptr<Sequence>> inbox_;
  std::vector<RequestId> cancelled_;
  mutable std::vector<std::function<void(Scheduler&)>> tasks_;
  Stats stats_{};
  RequestId last_id_ = 0;
  bool ready_ = false, stopping_ = false, closing_ = false, idle_ = true;
  std::exception_ptr failure_;
  std::thread thread_;
};

/// "": a GPU where there is one.
at::Device device_of(const std::string& name) {
  if (name.empty()) return at::hasCUDA() ? at::Device(at::kCUDA) : at::Device(at::kCPU);
  return models::device_named("device", name);
}

}  // namespace

std::unique_ptr<Engine> make_engine(models::Decoder decoder, const EngineOptions& options) {
  return std::make_unique<EngineOnAThread>(std::move(decoder), options);
}

std::unique_ptr<Engine> Engine::load(const std::filesystem::path& model, const EngineOptions& options) {
  const auto latest = model / "latest";
  const bool run = !std::filesystem::exists(model / "config.json") && std::filesystem::exists(latest / "config.json");
  const auto device = device_of(options.device);
  if (options.on_load) options.on_load(0);
  auto decoder = models::load_model(run ? latest : model, {.device = device,
                                                           .dtype = models::dtype_on("dtype", options.dtype, device),
                                                           .weights = models::weights_named("weights", options.weights),
                                                           .progress = options.on_load});
  if (options.on_load) options.on_load(1);
  return make_engine(std::move(decoder), options);
}

}  // namespace gka::infer
