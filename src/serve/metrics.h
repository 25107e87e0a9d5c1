// What happened, for Prometheus: our names, and vLLM's as aliases so that dashboards people have show something.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "infer/engine.h"

namespace gka::serve {

/// Counts per bucket, as Prometheus has it.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1, 0) {}
  void add(double value, std::uint64_t times = 1);
  void write(std::string& out, const std::string& name, const std::string& labels) const;

 private:
  std::vector<double> bounds_;
  std::vector<std::uint64_t> counts_;
  double sum_ = 0;
};

/// One finished (or abandoned) answer.
struct Finished {
  std::string reason;  // stop, length, abort, error
  double first_token_seconds = -1, seconds = 0, token_seconds = -1, answering_seconds = 0;
  infer::Usage usage{};
  std::int64_t iterations = 0;
  std::vector<float> certainty{};
};

class Metrics {
 public:
  void finished(const std::string& model, const Finished& answer);
  /// Of all the answers that one request asked for.
  void longest_answer(const std::string& model, std::size_t tokens);
  void answered(const std::string& route, int status);
  std::string write(std::span<const std::pair<std::string, infer::Stats>> engines, std::size_t connections) const;

 private:
  struct PerModel {
    Histogram first{{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}};
    Histogram between{{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5}};
    Histogram whole{{0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480}};
    Histogram queued = whole, reading = whole, answering = whole;
    Histogram prompt{{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}};
    Histogram generated{{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000}};
    Histogram longest = generated;
    Histogram certainty{{0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1}};
    Histogram iterations{{0, 1, 2, 4, 8, 12, 16, 20, 24, 30, 40, 60}};
    std::map<std::string, std::uint64_t> reasons, why_not;
  };
  mutable std::mutex mutex_;
  std::map<std::string, PerModel> models_;
  std::map<std::pair<std::string, int>, std::uint64_t> routes_;
};

}  // namespace gka::serve
