#include "infer/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "layers/functions.h"
#include "ops/sample.h"

namespace gka::infer {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename T>
at::Tensor row_of(const std::vector<T>& values, at::ScalarType type, const at::Tensor& like) {
  return layers::upload(at::tensor(values, type), like.device());
}

template <typename Pair>
auto first_of(const std::vector<Pair>& pairs) {
  std::vector<std::int64_t> firsts;
  for (const auto& pair : pairs) firsts.push_back(pair.first);
  return firsts;
}

bool adjusts(const Row& row) {
  const auto& s = *row.sampling;
  return (s.repetition_penalty != 1 && !row.seen.empty()) ||
         ((s.presence_penalty != 0 || s.frequency_penalty != 0) && !row.came.empty()) || !s.logit_bias.empty() ||
         !row.banned.empty() || row.allowed != nullptr;
}

/// Penalties, biases and masks, in place.
void adjust(at::Tensor logits, const Row& row) {
  const auto& s = *row.sampling;
  if (s.repetition_penalty != 1 && !row.seen.empty()) {
    const auto places = row_of(row.seen, at::kLong, logits);
    const auto values = logits.index_select(0, places);
    logits.index_copy_(0, places,
                       at::where(values.gt(0), values / s.repetition_penalty, values * s.repetition_penalty));
  }
  if ((s.presence_penalty != 0 || s.frequency_penalty != 0) && !row.came.empty()) {
    std::vector<double> costs;
    for (const auto& [token, count] : row.came) {
      costs.push_back(-s.presence_penalty - s.frequency_penalty * static_cast<double>(count));
    }
    logits.index_add_(0, row_of(first_of(row.came), at::kLong, logits), row_of(costs, logits.scalar_type(), logits));
  }
  if (!s.logit_bias.empty()) {
    std::vector<double> biases;
    for (const auto& [token, bias] : s.logit_bias) biases.push_back(bias);
    logits.index_add_(0, row_of(first_of(s.logit_bias), at::kLong, logits),
                      row_of(biases, logits.scalar_type(), logits));
  }
  if (!row.banned.empty()) logits.index_fill_(0, row_of(row.banned, at::kLong, logits), -kInfinity);
  if (row.allowed != nullptr) {
    const auto mask = at::empty({static_cast<std::int64_t>(row.allowed->size())}, at::kBool);
    std::ranges::copy(*row.allowed, mask.data_ptr<bool>());
    logits.masked_fill_(layers::upload(mask, logits.device()).logical_not(), -kInfinity);
  }
}

bool truncates(const Sampling& s) { return s.top_p < 1 || s.top_k > 0 || s.min_p > 0; }

/// One number of each row's sampling, as a column.
template <typename Field>
at::Tensor column(std::span<const Row> rows, const std::vector<std::int64_t>& which, const at::Tensor& like,
                  const Field& field) {
  std::vector<double> values;
  for (const auto i : which) values.push_back(field(rows[static_cast<std::size_t>(i)]));
  return row_of(values, at::kDouble, like).unsqueeze(1);
}

/// The first place of each row where the running sum of `weights` is above that row's share of its total.
at::Tensor pick(const at::Tensor& weights, const at::Tensor& share) {
  const auto sums = weights.cumsum(1);
  return at::searchsorted(sums, share * sums.narrow(1, sums.size(1) - 1, 1), /*out_int32=*/false, /*right=*/true)
      .clamp_max(sums.size(1) - 1);
}

/// Draws for the rows `which`, which either all truncate or all do not; int64 [rows].
at::Tensor draw_some(const at::Tensor& logits, std::span<const Row> rows, const std::vector<std::int64_t>& which,
                     bool truncated) {
  const auto places = row_of(which, at::kLong, logits);
  const auto some = logits.index_select(0, places).to(at::kDouble);
  const auto temperature = column(rows, which, logits, [](const Row& r) { return r.sampling->temperature; });
  const auto share = column(rows, which, logits, [](const Row& r) { return uniform(r.sampling->seed, r.drawn); });
  auto weights = ((some - some.amax(1, true)) / temperature).exp();
  if (!truncated) return pick(weights, share).squeeze(1);

  const auto [sorted, order] = weights.sort(/*stable=*/true, 1, /*descending=*/true);
  const auto width = logits.size(1);
  const auto top_k = column(rows, which, logits, [&](const Row& r) {
    return static_cast<double>(r.sampling->top_k > 0 ? std::min(r.sampling->top_k, width) : width);
  });
  const auto top_p = column(rows, which, logits, [](const Row& r) { return r.sampling->top_p; });
  const auto min_p = column(rows, which, logits, [](const Row& r) { return r.sampling->min_p; });
  const auto among = at::arange(width, sorted.options()).lt(top_k);
  const auto kept = at::where(among, sorted, 0.0);
  const auto before = kept.cumsum(1) - kept;
  const auto left =
      among.logical_and(before.lt(top_p * kept.sum(1, true))).logical_and(sorted.ge(min_p * sorted.narrow(1, 0, 1)));
  return order.gather(1, pick(at::where(left, sorted, 0.0), share)).squeeze(1);
}

std::string why_not(double logprob, double adjusted) {
  if (std::isnan(logprob)) return "the model gave logits that are not numbers; its weights or states are damaged";
  if (adjusted == -kInfinity || std::isnan(adjusted)) return "no token is left to draw: the masks forbid all of them";
  return {};
}

/// Whether every row draws from all tokens, or takes the likeliest, by the model's own logits: then one kernel does it.
bool draws_plainly(const at::Tensor& logits, std::span<const Row> rows) {
  return ops::has_sample(logits) && std::ranges::none_of(rows, [](const Row& row) {
           return adjusts(row) || row.top > 0 || (row.sampling->temperature > 0 && truncates(*row.sampling));
         });
}

at::Tensor draw_plainly(const at::Tensor& logits, std::span<const Row> rows) {
  std::vector<double> how;
  for (const auto& row : rows) {
    how.push_back(row.sampling->temperature);
    how.push_back(uniform(row.sampling->seed, row.drawn));
  }
  return ops::sample(logits, row_of(how, at::kDouble, logits).view({-1, 2}));
}

std::string number(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

}  // namespace

double uniform(std::uint64_t seed, std::uint64_t n) {
  // Two rounds of SplitMix64: neighbouring seeds and neighbouring draws have nothing to do with each other.
  const auto mix = [](std::uint64_t z) {
    z += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  };
  return static_cast<double>(mix(mix(seed) ^ (n * 0xD1B54A32D192ED03)) >> 12) * 0x1p-52;
}

void check_sampling(const Sampling& s, std::int64_t vocabulary) {
  const auto refuse = [](const char* field, const std::string& sentence) {
    throw Refused(Refused::Reason::bad_request, field, sentence);
  };
  const auto finite = [&](const char* field, double value) {
    if (!std::isfinite(value)) refuse(field, std::string(field) + " must be a number, and is " + number(value));
  };
  if (!(s.temperature >= 0) || !std::isfinite(s.temperature)) {
    refuse("temperature", "temperature must be 0 (the likeliest token) or above, and is " + number(s.temperature));
  }
  if (!(s.top_p > 0 && s.top_p <= 1)) {
    refuse("top_p", "top_p must be above 0 and at most 1, and is " + number(s.top_p));
  }
  if (s.top_k < 0) refuse("top_k", "top_k must be 0 (off) or above, and is " + std::to_string(s.top_k));
  if (!(s.min_p >= 0 && s.min_p <= 1)) refuse("min_p", "min_p must be from 0 to 1, and is " + number(s.min_p));
  if (!(s.repetition_penalty > 0) || !std::isfinite(s.repetition_penalty)) {
    refuse("repetition_penalty", "repetition_penalty must be above 0, and is " + number(s.repetition_penalty));
  }
  finite("presence_penalty", s.presence_penalty);
  finite("frequency_penalty", s.frequency_penalty);
  for (const auto& [token, bias] : s.logit_bias) {
    if (token < 0 || token >= vocabulary) {
      refuse("logit_bias", "logit_bias names the token " + std::to_string(token) + ", and the vocabulary has " +
                               std::to_string(vocabulary));
    }
    finite("logit_bias", bias);
  }
}

Draws begin_draw(const at::Tensor& logits, std::span<const Row> rows) {
  std::vector<std::int64_t> tops;
  for (const auto& row : rows) tops.push_back(row.top);
  if (draws_plainly(logits, rows)) return {draw_plainly(logits, rows), std::move(tops)};
  const auto raw = layers::accumulate(logits);
  auto scores = raw;
  std::vector<std::int64_t> plain, truncated;
  std::int64_t top = 0;
  for (std::int64_t i = 0; i < std::ssize(rows); ++i) {
    const auto& row = rows[static_cast<std::size_t>(i)];
    if (adjusts(row)) {
      if (scores.is_same(raw)) scores = raw.clone();
      adjust(scores[i], row);
    }
    if (row.sampling->temperature > 0) (truncates(*row.sampling) ? truncated : plain).push_back(i);
    top = std::max(top, row.top);
  }
  auto tokens = scores.argmax(1);
  if (!plain.empty()) tokens.index_copy_(0, row_of(plain, at::kLong, raw), draw_some(scores, rows, plain, false));
  if (!truncated.empty()) {
    tokens.index_copy_(0, row_of(truncated, at::kLong, raw), draw_some(scores, rows, truncated, true));
  }

  const auto logprobs = at::log_softmax(raw, 1);
  const auto chosen = tokens.unsqueeze(1);
  const auto likeliest = logprobs.topk(std::min(top, raw.size(1)), 1);
  const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
  return {at::cat({wide(chosen), wide(logprobs.gather(1, chosen)), wide(scores.gather(1, chosen)),
                   wide(std::get<0>(likeliest)), wide(std::get<1>(likeliest))},
                  1),
          std::move(tops)};
}

std::vector<Drawn> draw(const at::Tensor& logits, std::span<const Row> rows) { return begin_draw(logits, rows).wait(); }

Draws::Draws(const at::Tensor& numbers, std::vector<std::int64_t> tops) : numbers_(numbers), tops_(std::move(tops)) {
  const auto device = numbers.device();
  if (device.is_cpu()) {
    host_ = numbers.contiguous();
    return;
  }
  host_ = at::empty(numbers.sizes(), numbers.options().device(at::kCPU).pinned_memory(true));
  host_.copy_(numbers, /*non_blocking=*/true);
  arrived_.emplace(device.type());
  arrived_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

at::Tensor Draws::tokens() const { return numbers_.select(1, 0).to(at::kLong); }

std::vector<Drawn> Draws::wait() {
  if (arrived_) arrived_->synchronize();
  const auto width = host_.size(1), found = std::max<std::int64_t>(0, (width - 3) / 2);
  std::vector<Drawn> drawn(tops_.size());
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    const auto* values = host_.const_data_ptr<double>() + static_cast<std::int64_t>(i) * width;
    drawn[i].event = {.token = static_cast<std::int64_t>(values[0]), .logprob = static_cast<float>(values[1])};
    drawn[i].error = why_not(values[1], width > 2 ? values[2] : values[1]);
    for (std::int64_t k = 0; k < std::min(found, tops_[i]); ++k) {
      drawn[i].event.top.push_back(
          {.token = static_cast<std::int64_t>(values[3 + found + k]), .logprob = static_cast<float>(values[3 + k])});
    }
  }
  return drawn;
}

std::vector<TokenEvent> score(const at::Tensor& logits, std::span<const std::int64_t> tokens, std::int64_t top) {
  const auto logprobs = at::log_softmax(layers::accumulate(logits), 1);
  const auto chosen = row_of(std::vector(tokens.begin(), tokens.end()), at::kLong, logits).unsqueeze(1);
  const auto likeliest = logprobs.topk(std::min(top, logprobs.size(1)), 1);
  const auto host = at::cat({logprobs.gather(1, chosen).to(at::kDouble), std::get<0>(likeliest).to(at::kDouble),
                             std::get<1>(likeliest).to(at::kDouble)},
                            1)
                        .cpu()
                        .contiguous();
  const auto found = (host.size(1) - 1) / 2;
  std::vector<TokenEvent> events(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto* values = host.const_data_ptr<double>() + static_cast<std::int64_t>(i) * host.size(1);
    events[i] = {.token = tokens[i], .logprob = static_cast<float>(values[0])};
    for (std::int64_t k = 0; k < found; ++k) {
      events[i].top.push_back(
          {.token = static_cast<std::int64_t>(values[1 + found + k]), .logprob = static_cast<float>(values[1 + k])});
    }
  }
  return events;
}

}  // namespace gka::infer
