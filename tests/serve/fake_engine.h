// An engine without a model, for tests of the server: bytes are tokens, and what it says is in the prompt. After
// "SAY:" it repeats what follows (up to the last byte) and ends; otherwise it counts through the alphabet. Every
// token's log-probability follows from the tokens before it, so that equal prompts have equal numbers.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "infer/engine.h"

namespace gka::serve::testing {

class FakeEngine : public infer::Engine {
 public:
  struct Options {
    std::int64_t slots = 4, queue = 64, context = 4096;
    std::chrono::microseconds step{0};
  };
  static constexpr std::int64_t kEnd = 256;

  explicit FakeEngine(Options options) : options_(options), thread_([this] { work(); }) {}
  ~FakeEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  infer::RequestId submit(infer::Request request, infer::Sink sink) override {
    using Reason = infer::Refused::Reason;
    const std::lock_guard lock(mutex_);
    if (drained_) throw infer::Refused(Reason::stopping, "", "the engine is stopping");
    if (static_cast<std::int64_t>(waiting_.size()) >= options_.queue) {
      throw infer::Refused(Reason::queue_full, "", "the queue is full");
    }
    Job job{.id = ++last_id_, .request = std::move(request), .sink = std::move(sink)};
    if (!job.request.memory.empty()) {
      const auto memory = memories_.find(job.request.memory);
      if (memory == memories_.end()) throw infer::Refused(Reason::unknown_memory, "memory", "there is no such memory");
      job.history = memory->second.second;
      job.usage.remembered_tokens = static_cast<std::int64_t>(job.history.size());
      job.usage.kept_tokens = memory->second.first.kept_tokens;
    }
    job.history.insert(job.history.end(), job.request.prompt.begin(), job.request.prompt.end());
    job.usage.prompt_tokens = static_cast<std::int64_t>(job.history.size());
    if (job.usage.remembered_tokens == 0) job.usage.why_not_more = "this engine remembers nothing";
    job.script = script_of(job.history);
    waiting_.push_back(std::move(job));
    wake_.notify_all();
    return last_id_;
  }

  void cancel(infer::RequestId id) override {
    const std::lock_guard lock(mutex_);
    cancelled_.push_back(id);
    wake_.notify_all();
  }

  infer::Stats stats() const override {
    const std::lock_guard lock(mutex_);
    auto stats = stats_;
    stats.running = stats.slots_in_use = static_cast<std::int64_t>(running_);
    stats.waiting = static_cast<std::int64_t>(waiting_.size());
    stats.slots = options_.slots;
    return stats;
  }
  void drain() override {
    const std::lock_guard lock(mutex_);
    drained_ = true;
  }

  /// A byte of cache for each token that is kept.
  infer::MemoryInfo create_memory(std::vector<std::int64_t> tokens, std::string name,
                                  std::optional<std::int64_t> keep_tokens) override {
    const std::lock_guard lock(mutex_);
    const auto all = static_cast<std::int64_t>(tokens.size());
    const auto kept = std::min(all, keep_tokens.value_or(all));
    infer::MemoryInfo info{.id = "mem-" + std::to_string(++last_memory_),
                           .name = std::move(name),
                           .tokens = all,
                           .state_bytes = 1024,
                           .cache_bytes = kept,
                           .created = 1,
                           .kept_tokens = kept};
    memories_[info.id] = {info, std::move(tokens)};
    return info;
  }
  infer::MemoryInfo fork_memory(const std::string& id, std::vector<std::int64_t> more, std::string name,
                                std::optional<std::int64_t> keep_tokens) override {
    std::vector<std::int64_t> tokens;
    {
      const std::lock_guard lock(mutex_);
      const auto found = memories_.find(id);
      if (found == memories_.end()) {
        throw infer::Refused(infer::Refused::Reason::unknown_memory, "memory", "there is no such memory");
      }
      tokens = found->second.second;
    }
    tokens.insert(tokens.end(), more.begin(), more.end());
    return create_memory(std::move(tokens), std::move(name), keep_tokens);
  }
  std::vector<infer::MemoryInfo> memories() const override {
    const std::lock_guard lock(mutex_);
    std::vector<infer::MemoryInfo> all;
    for (const auto& [id, memory] : memories_) all.push_back(memory.first);
    return all;
  }
  std::optional<infer::MemoryInfo> memory(const std::string& id) const override {
    const std::lock_guard lock(mutex_);
    const auto found = memories_.find(id);
    return found == memories_.end() ? std::nullopt : std::optional(found->second.first);
  }
  bool delete_memory(const std::string& id) override {
    const std::lock_guard lock(mutex_);
    return memories_.erase(id) > 0;
  }

  std::int64_t vocabulary() const override { return 257; }
  std::int64_t context() const override { return options_.context; }
  std::vector<std::int64_t> end_tokens() const override { return {kEnd}; }
  std::int64_t iterations() const override { return 30; }

 private:
  struct Job {
    infer::RequestId id;
    infer::Request request;
    infer::Sink sink;
    infer::Usage usage{};
    std::vector<std::int64_t> history{}, generated{};
    std::string script{};
    bool begun = false;
  };

  static std::string script_of(const std::vector<std::int64_t>& history) {
    std::string text;
    for (const auto token : history) text += token < 256 ? static_cast<char>(token) : '\n';
    const auto at = text.rfind("SAY:");
    if (at == std::string::npos) return {};
    text = text.substr(at + 4);
    const auto end = text.find("\nassistant:");
    return end == std::string::npos ? text : text.substr(0, end);
  }

  static float logprob_of(const std::vector<std::int64_t>& before, std::size_t length, std::int64_t token) {
    std::uint64_t hash = 1469598103934665603ULL;
    for (std::size_t i = 0; i < length; ++i) hash = (hash ^ static_cast<std::uint64_t>(before[i])) * 1099511628211ULL;
    hash = (hash ^ static_cast<std::uint64_t>(token)) * 1099511628211ULL;
    return -0.001F * static_cast<float>(1 + (hash >> 40) % 5000);
  }

  infer::TokenEvent event_of(const Job& job, const std::vector<std::int64_t>& before, std::size_t length,
                             std::int64_t token) const {
    infer::TokenEvent event{.token = token,
                            .logprob = logprob_of(before, length, token),
                            .top = {},
                            .certainty = {},
                            .layer_certainty = {}};
    if (length == 0) event.logprob = std::numeric_limits<float>::quiet_NaN();
    for (std::int64_t other = 0; other < 257 && job.request.top_logprobs > 0; ++other) {
      event.top.push_back({other, logprob_of(before, length, other)});
    }
    std::ranges::stable_sort(event.top, [](const auto& a, const auto& b) { return a.logprob > b.logprob; });
    event.top.resize(std::min(event.top.size(), static_cast<std::size_t>(job.request.top_logprobs)));
    if (job.request.certainty) {
      event.certainty = static_cast<float>(token % 100) / 100.0F;
      event.layer_certainty = {*event.certainty, 1 - *event.certainty};
    }
    return event;
  }

  /// The scripted token; under a filter the first allowed one after it, counted round.
  std::int64_t next_token(Job& job) const {
    const auto at = job.generated.size();
    std::int64_t token = job.script.empty() ? 'a' + static_cast<std::int64_t>((at + job.request.sampling.seed) % 26)
                         : at < job.script.size() ? static_cast<unsigned char>(job.script[at])
                                                  : kEnd;
    std::vector<bool> mask;
    if (job.request.filter && job.request.filter->allowed(job.generated, mask)) {
      // A request without a seed has one of 64 bits: reduced first, so that nothing overflows to a negative place.
      const auto shift = job.script.empty() ? (job.request.sampling.seed % 257 * 7 + at * 31) % 257 : 0;
      const auto start = (token + static_cast<std::int64_t>(shift)) % 257;
      for (std::int64_t i = 0; i < 257; ++i) {
        token = (start + i) % 257;
        if (mask[static_cast<std::size_t>(token)]) return token;
      }
    }
    return token;
  }

  void begin(Job& job) {
    job.begun = true;
    if (!job.request.prompt_logprobs || !job.sink.on_prompt) return;
    std::vector<infer::TokenEvent> events;
    const auto first = job.history.size() - job.request.prompt.size();
    for (auto i = first; i < job.history.size(); ++i) events.push_back(event_of(job, job.history, i, job.history[i]));
    job.sink.on_prompt(events);
  }

  /// One token further; how it ended, or none.
  infer::Finish step(Job& job) {
    if (!job.begun) begin(job);
    if (static_cast<std::int64_t>(job.generated.size()) >= job.request.max_tokens) return infer::Finish::length;
    const auto token = next_token(job);
    const auto event = event_of(job, job.history, job.history.size(), token);
    job.history.push_back(token);
    job.generated.push_back(token);
    ++job.usage.completion_tokens;
    if (job.sink.on_token) job.sink.on_token(event);
    const auto& stops = job.request.stop_tokens;
    if ((token == kEnd && !job.request.ignore_eos) || std::ranges::find(stops, token) != stops.end())
      return infer::Finish::stop;
    return static_cast<std::int64_t>(job.generated.size()) >= job.request.max_tokens ? infer::Finish::length
                                                                                     : infer::Finish::none;
  }

  void work() {
    std::vector<Job> jobs;
    for (;;) {
      std::vector<infer::RequestId> cancelled;
      {
        std::unique_lock lock(mutex_);
        running_ = jobs.size();
        wake_.wait(lock, [&] { return stopping_ || !jobs.empty() || !waiting_.empty() || !cancelled_.empty(); });
        while (!waiting_.empty() && static_cast<std::int64_t>(jobs.size()) < options_.slots) {
          jobs.push_back(std::move(waiting_.front()));
          waiting_.pop_front();
        }
        cancelled.swap(cancelled_);
        for (auto job = waiting_.begin(); job != waiting_.end();) {  // those that never got a slot
          if (std::ranges::find(cancelled, job->id) == cancelled.end()) {
            ++job;
            continue;
          }
          jobs.push_back(std::move(*job));
          job = waiting_.erase(job);
        }
        running_ = jobs.size();
        if (stopping_) break;
      }
      const auto ended = [&](Job& job) {
        const bool gone = std::ranges::find(cancelled, job.id) != cancelled.end();
        const auto finish = gone ? infer::Finish::cancelled : step(job);
        if (finish == infer::Finish::none) return false;
        job.sink.on_end(finish, job.usage, "");
        return true;
      };
      std::erase_if(jobs, ended);
      if (options_.step.count() > 0) std::this_thread::sleep_for(options_.step);
    }
    for (auto& job : jobs) job.sink.on_end(infer::Finish::cancelled, job.usage, "");
  }

  Options options_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> waiting_;
  std::vector<infer::RequestId> cancelled_;
  std::map<std::string, std::pair<infer::MemoryInfo, std::vector<std::int64_t>>> memories_;
  infer::Stats stats_{};
  std::size_t running_ = 0;
  infer::RequestId last_id_ = 0;
  int last_memory_ = 0;
  bool stopping_ = false, drained_ = false;
  std::thread thread_;
};

}  // namespace gka::serve::testing
