#include "serve/metrics.h"

#include <algorithm>
#include <cmath>

#include "serve/problem.h"

namespace gka::serve {
namespace {

std::string number(double value) { return Json(value).dump(); }

std::string label_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "\"";
}

void header(std::string& out, const std::string& name, const char* type, const char* about) {
  out += "# HELP " + name + " " + about + "\n# TYPE " + name + " " + type + "\n";
}

/// A why-not sentence without its numbers: a label must not have endless values.
std::string without_numbers(const std::string& sentence) {
  std::string out;
  for (const char c : sentence) {
    if (c >= '0' && c <= '9') {
      if (out.empty() || out.back() != 'N') out += 'N';
    } else {
      out += c;
    }
  }
  return out.substr(0, 200);
}

struct Gauge {
  const char *ours, *theirs, *type, *about;
  double (*value)(const infer::Stats& stats);
};
constexpr Gauge kGauges[] = {
    {"gka_requests_running", "vllm:num_requests_running", "gauge", "Requests that have a slot",
     [](const infer::Stats& s) { return static_cast<double>(s.running); }},
    {"gka_requests_waiting", "vllm:num_requests_waiting", "gauge", "Requests that wait for one",
     [](const infer::Stats& s) { return static_cast<double>(s.waiting); }},
    {"gka_cache_usage", "vllm:kv_cache_usage_perc", "gauge", "Share of the attention caches in use",
     [](const infer::Stats& s) {
       return s.cache_bytes > 0 ? static_cast<double>(s.cache_bytes_in_use) / static_cast<double>(s.cache_bytes) : 0.0;
     }},
    {"gka_states_in_use", nullptr, "gauge", "Slots for recurrent states in use",
     [](const infer::Stats& s) { return static_cast<double>(s.slots_in_use); }},
    {"gka_states", nullptr, "gauge", "Slots for recurrent states",
     [](const infer::Stats& s) { return static_cast<double>(s.slots); }},
    {"gka_cache_bytes_in_use", nullptr, "gauge", "Bytes of attention caches in use",
     [](const infer::Stats& s) { return static_cast<double>(s.cache_bytes_in_use); }},
    {"gka_snapshot_bytes", nullptr, "gauge", "Bytes that remembered prefixes take",
     [](const infer::Stats& s) { return static_cast<double>(s.snapshot_bytes); }},
    {"gka_snapshots", nullptr, "gauge", "Remembered prefixes",
     [](const infer::Stats& s) { return static_cast<double>(s.snapshots); }},
    {"gka_prompt_tokens_total", "vllm:prompt_tokens_total", "counter", "Tokens of prompts",
     [](const infer::Stats& s) { return static_cast<double>(s.prompt_tokens); }},
    {"gka_generated_tokens_total", "vllm:generation_tokens_total", "counter", "Tokens of answers",
     [](const infer::Stats& s) { return static_cast<double>(s.generated_tokens); }},
    {"gka_remembered_tokens_total", "vllm:prefix_cache_hits_total", "counter", "Tokens of prompts that were remembered",
     [](const infer::Stats& s) { return static_cast<double>(s.remembered_tokens); }},
    {"gka_prompt_tokens_looked_up_total", "vllm:prefix_cache_queries_total", "counter",
     "Tokens of prompts, those that were remembered among them",
     [](const infer::Stats& s) { return static_cast<double>(s.prompt_tokens + s.remembered_tokens); }},
    {"gka_snapshot_hits_total", nullptr, "counter", "Prompts of which something was remembered",
     [](const infer::Stats& s) { return static_cast<double>(s.snapshot_hits); }},
    {"gka_snapshot_misses_total", nullptr, "counter", "Prompts of which nothing was remembered",
     [](const infer::Stats& s) { return static_cast<double>(s.snapshot_misses); }},
    {"gka_steps_total", nullptr, "counter", "Steps of the engine",
     [](const infer::Stats& s) { return static_cast<double>(s.steps); }},
};

}  // namespace

void Histogram::add(double value, std::uint64_t times) {
  if (!std::isfinite(value)) return;
  const auto bucket = std::ranges::lower_bound(bounds_, value) - bounds_.begin();
  counts_[static_cast<std::size_t>(bucket)] += times;
  sum_ += value * static_cast<double>(times);
}

void Histogram::write(std::string& out, const std::string& name, const std::string& labels) const {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    total += counts_[i];
    const auto bound = i < bounds_.size() ? number(bounds_[i]) : "+Inf";
    out += name + "_bucket{" + labels + ",le=\"" + bound + "\"} " + std::to_string(total) + "\n";
  }
  out += name + "_sum{" + labels + "} " + number(sum_) + "\n";
  out += name + "_count{" + labels + "} " + std::to_string(total) + "\n";
}

void Metrics::finished(const std::string& model, const Finished& answer) {
  const std::lock_guard lock(mutex_);
  auto& m = models_[model];
  ++m.reasons[answer.reason];
  if (answer.first_token_seconds >= 0) m.first.add(answer.first_token_seconds);
  if (answer.token_seconds >= 0) m.between.add(answer.token_seconds);
  if (answer.first_token_seconds >= 0) {
    m.queued.add(answer.usage.queued_seconds);
    m.reading.add(std::max(0.0, answer.first_token_seconds - answer.usage.queued_seconds));
    m.answering.add(answer.answering_seconds);
  }
  m.whole.add(answer.seconds);
  m.prompt.add(static_cast<double>(answer.usage.prompt_tokens));
  m.generated.add(static_cast<double>(answer.usage.completion_tokens));
  if (answer.iterations > 0) m.iterations.add(static_cast<double>(answer.iterations));
  for (const auto value : answer.certainty) m.certainty.add(value);
  if (answer.usage.why_not_more.empty()) return;
  const auto why = without_numbers(answer.usage.why_not_more);
  if (m.why_not.size() < 100 || m.why_not.contains(why)) ++m.why_not[why];
}

void Metrics::longest_answer(const std::string& model, std::size_t tokens) {
  const std::lock_guard lock(mutex_);
  models_[model].longest.add(static_cast<double>(tokens));
}

void Metrics::answered(const std::string& route, int status) {
  const std::lock_guard lock(mutex_);
  ++routes_[{route, status}];
}

std::string Metrics::write(std::span<const std::pair<std::string, infer::Stats>> engines,
                           std::size_t connections) const {
  std::string out;
  const auto label = [](const std::string& model) { return "model_name=" + label_text(model); };
  for (const auto& gauge : kGauges) {
    for (const auto* name : {gauge.ours, gauge.theirs}) {
      if (name == nullptr) continue;
      header(out, name, gauge.type, gauge.about);
      for (const auto& [model, stats] : engines)
        out += std::string(name) + "{" + label(model) + "} " + number(gauge.value(stats)) + "\n";
    }
  }
  const std::lock_guard lock(mutex_);
  struct Series {
    const char *ours, *theirs, *about;
    Histogram PerModel::* histogram;
  };
  static constexpr Series kSeries[] = {
      {"gka_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", "From a request to its first token",
       &PerModel::first},
      {"gka_time_per_token_seconds", "vllm:inter_token_latency_seconds", "Between tokens, the mean of an answer",
       &PerModel::between},
      {"gka_request_queue_seconds", "vllm:request_queue_time_seconds", "From a request to the first look at its prompt",
       &PerModel::queued},
      {"gka_request_prompt_seconds", "vllm:request_prefill_time_seconds", "From there to the first token",
       &PerModel::reading},
      {"gka_request_answer_seconds", "vllm:request_decode_time_seconds", "From the first token to the last",
       &PerModel::answering},
      {"gka_request_seconds", "vllm:e2e_request_latency_seconds", "From a request to its answer's end",
       &PerModel::whole},
      {"gka_request_prompt_tokens", "vllm:request_prompt_tokens", "Tokens of a request's prompt", &PerModel::prompt},
      {"gka_request_generated_tokens", "vllm:request_generation_tokens", "Tokens of an answer", &PerModel::generated},
      {"gka_request_longest_answer_tokens", "vllm:request_max_num_generation_tokens",
       "Tokens of the longest of a request's answers", &PerModel::longest},
      {"gka_certainty", nullptr, "Certainty of tokens, where it was asked for", &PerModel::certainty},
      {"gka_iterations", nullptr, "Solver steps that requests asked for", &PerModel::iterations},
  };
  for (const auto& series : kSeries) {
    for (const auto* name : {series.ours, series.theirs}) {
      if (name == nullptr) continue;
      header(out, name, "histogram", series.about);
      for (const auto& [model, values] : models_) (values.*series.histogram).write(out, name, label(model));
    }
  }
  for (const auto* name : {"gka_requests_finished_total", "vllm:request_success_total"}) {
    header(out, name, "counter", "Answers, by how they ended");
    for (const auto& [model, values] : models_) {
      for (const auto& [reason, count] : values.reasons) {
        out += std::string(name) + "{" + label(model) + ",finished_reason=" + label_text(reason) + "} " +
               std::to_string(count) + "\n";
      }
    }
  }
  header(out, "gka_why_not_more_total", "counter", "Why a prompt, or all of it, was not remembered");
  for (const auto& [model, values] : models_) {
    for (const auto& [why, count] : values.why_not) {
      out += "gka_why_not_more_total{" + label(model) + ",why=" + label_text(why) + "} " + std::to_string(count) + "\n";
    }
  }
  header(out, "gka_http_requests_total", "counter", "HTTP requests, by route and status");
  for (const auto& [key, count] : routes_) {
    out += "gka_http_requests_total{route=" + label_text(key.first) + ",status=\"" + std::to_string(key.second) +
           "\"} " + std::to_string(count) + "\n";
  }
  header(out, "gka_http_connections", "gauge", "Open connections");
  out += "gka_http_connections " + std::to_string(connections) + "\n";
  return out;
}

}  // namespace gka::serve
