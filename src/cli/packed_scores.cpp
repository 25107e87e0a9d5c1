#include "cli/packed_scores.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "infer/sampling.h"
#include "layers/functions.h"
#include "models/loss.h"

namespace gka::cli {
namespace {

/// Some endings laid end to end. The last token of each is only predicted, so it is not read.
struct Pass {
  std::size_t first = 0;  // the first ending of it
  std::vector<std::int64_t> ids{}, bounds{0};
  std::vector<std::int64_t> places{}, targets{};  // what is predicted where

  void add(const Ending& ending) {
    const auto read = ending.tokens.first(ending.tokens.size() - 1);
    ids.insert(ids.end(), read.begin(), read.end());
    const auto end = std::ssize(ids);
    bounds.push_back(end);
    for (auto place = end - ending.scored; place < end; ++place) places.push_back(place);
    const auto last = ending.tokens.last(static_cast<std::size_t>(ending.scored));
    targets.insert(targets.end(), last.begin(), last.end());
  }
};

/// log p and the likeliest token at every place of a pass, in slices that keep the logits small.
std::vector<infer::TokenEvent> run(const models::Decoder& decoder, const Pass& pass) {
  if (pass.places.empty()) return {};
  const auto device = decoder.device();
  const auto sequences = layers::Sequences::packed(pass.bounds, device);
  const auto hidden = decoder.forward(at::tensor(pass.ids, at::kLong).unsqueeze(0), sequences).hidden.squeeze(0);
  const auto wanted = hidden.index_select(0, layers::upload(at::tensor(pass.places, at::kLong), device));
  const auto most = device.is_cpu() ? models::kSliceOnCpu : models::kSliceElsewhere;
  const auto slice = std::max<std::int64_t>(1, most / decoder.config().vocab_size);
  std::vector<infer::TokenEvent> events;
  for (std::int64_t row = 0; row < wanted.size(0); row += slice) {
    const auto count = std::min(slice, wanted.size(0) - row);
    const auto part = std::span(pass.targets).subspan(static_cast<std::size_t>(row), static_cast<std::size_t>(count));
    auto found = infer::score(decoder.logits(wanted.narrow(0, row, count)), part, 1);
    std::ranges::move(found, std::back_inserter(events));
  }
  return events;
}

}  // namespace

std::int64_t usual_pass(at::Device device) { return device.is_cpu() ? 2048 : 65536; }

std::vector<ScoredEnding> score_packed(const models::Decoder& decoder, std::span<const Ending> endings,
                                       std::int64_t tokens, const std::function<void(std::size_t)>& seen) {
  const at::NoGradGuard no_gradient;
  std::vector<ScoredEnding> scores(endings.size());
  for (std::size_t next = 0; next < endings.size();) {
    Pass pass{.first = next};
    do {
      pass.add(endings[next++]);
    } while (next < endings.size() && std::ssize(pass.ids) + std::ssize(endings[next].tokens) <= tokens);
    const auto events = run(decoder, pass);
    auto event = events.begin();
    for (auto i = pass.first; i < next; ++i) {
      for (std::int64_t n = 0; n < endings[i].scored; ++n, ++event) {
        scores[i].log_probabilities.push_back(event->logprob);
        scores[i].greedy = scores[i].greedy && event->top[0].token == event->token;
      }
    }
    if (seen) seen(next);
  }
  return scores;
}

}  // namespace gka::cli
