#include "infer/sequence.h"

#include <algorithm>
#include <span>

namespace gka::infer {

Kind Sequence::kind_at(std::int64_t point) const {
  Kind kind{.iterations = iterations, .cuts = cuts};
  std::erase_if(kind.cuts, [&](const Cut& cut) { return cut.at > point; });
  return kind;
}

bool looks_back(const Request& request) {
  const auto& s = request.sampling;
  return request.filter != nullptr || s.repetition_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0;
}

Row row_of(Sequence& sequence, const std::vector<std::int64_t>& end_tokens, std::int64_t vocabulary,
           std::int64_t ahead) {
  const auto& request = sequence.request;
  const auto drawn = sequence.generated() + ahead;
  Row row{.sampling = &request.sampling, .drawn = static_cast<std::uint64_t>(drawn), .top = request.top_logprobs};
  if (request.sampling.repetition_penalty != 1) {
    if (sequence.seen.empty()) sequence.seen.insert(sequence.tokens.begin(), sequence.tokens.end());
    row.seen.assign(sequence.seen.begin(), sequence.seen.end());
  }
  if (request.sampling.presence_penalty != 0 || request.sampling.frequency_penalty != 0) {
    row.came.assign(sequence.came.begin(), sequence.came.end());
  }
  if (drawn < request.min_tokens) {
    row.banned = request.stop_tokens;
    if (!request.ignore_eos) row.banned.insert(row.banned.end(), end_tokens.begin(), end_tokens.end());
    std::erase_if(row.banned, [&](auto token) { return token < 0 || token >= vocabulary; });
  }
  if (request.filter) {
    const auto answer = std::span(sequence.tokens).subspan(static_cast<std::size_t>(sequence.prompt));
    sequence.mask.assign(static_cast<std::size_t>(vocabulary), false);
    if (request.filter->allowed(answer, sequence.mask)) row.allowed = &sequence.mask;
    sequence.mask.resize(static_cast<std::size_t>(vocabulary), false);
  }
  return row;
}

Finish finish_of(const Sequence& sequence, const std::vector<std::int64_t>& end_tokens) {
  const auto token = sequence.tokens.back();
  const auto& request = sequence.request;
  if (std::ranges::count(request.stop_tokens, token) > 0) return Finish::stop;
  if (!request.ignore_eos && std::ranges::count(end_tokens, token) > 0) return Finish::stop;
  return sequence.generated() >= request.max_tokens ? Finish::length : Finish::none;
}

}  // namespace gka::infer
