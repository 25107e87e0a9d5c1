#include "layers/sequences.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "layers/functions.h"

namespace gka::layers {
namespace {

using Ints = std::vector<std::int64_t>;

at::Tensor to_device(const Ints& values, at::Device device) { return upload(at::tensor(values, at::kLong), device); }

Ints checked_past(Ints past, std::int64_t count) {
  if (past.empty()) past.assign(count, 0);
  if (static_cast<std::int64_t>(past.size()) != count) {
    throw std::invalid_argument("past has " + std::to_string(past.size()) + " entries for " + std::to_string(count) +
                                " sequences; give one number per sequence, or none.");
  }
  return past;
}

void check_bounds(const Ints& bounds) {
  if (bounds.empty() || bounds.front() != 0 || !std::is_sorted(bounds.begin(), bounds.end())) {
    throw std::invalid_argument("cu_seqlens must begin with 0 and never decrease.");
  }
}

/// The order of the sequences by how many chunks they have, most first; equals stay as they were.
Ints longest_first(const Ints& chunks) {
  Ints order(chunks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return chunks[a] > chunks[b]; });
  return order;
}

ChunkPlan make_plan(const Ints& bounds, std::int64_t size, at::Device device) {
  const auto count = static_cast<std::int64_t>(bounds.size()) - 1;
  Ints chunks(count);
  for (std::int64_t n = 0; n < count; ++n) chunks[n] = (bounds[n + 1] - bounds[n] + size - 1) / size;
  const Ints order = longest_first(chunks);

  ChunkPlan plan;
  plan.size = size;
  plan.chunks = std::accumulate(chunks.begin(), chunks.end(), std::int64_t{0});
  Ints gather(plan.chunks * size, 0), scatter(bounds.back());
  std::vector<char> padding(gather.size(), 1);
  std::int64_t place = 0;
  const std::int64_t steps = count == 0 ? 0 : chunks[order[0]];
  for (std::int64_t step = 0; step < steps; ++step) {
    std::int64_t alive = 0;
    for (; alive < count && chunks[order[alive]] > step; ++alive) {
      const std::int64_t n = order[alive], begin = bounds[n] + step * size;
      const std::int64_t end = std::min(begin + size, bounds[n + 1]);
      for (std::int64_t token = begin; token < end; ++token) {
        const std::int64_t at = place + token - begin;
        gather[at] = token;
        scatter[token] = at;
        padding[at] = 0;
      }
      place += size;
    }
    plan.alive.push_back(alive);
  }

  plan.gather = to_device(gather, device);
  plan.scatter = to_device(scatter, device);
  if (static_cast<std::int64_t>(gather.size()) != bounds.back()) {
    plan.padding = at::empty({static_cast<std::int64_t>(padding.size())}, at::kBool);
    std::copy(padding.begin(), padding.end(), plan.padding.data_ptr<bool>());
    plan.padding = upload(plan.padding, device);
  }
  plan.even = !plan.padding.defined() && steps > 0 && plan.alive.back() == count;
  if (!std::is_sorted(order.begin(), order.end())) {
    Ints inverse(count);
    for (std::int64_t i = 0; i < count; ++i) inverse[order[i]] = i;
    plan.order = to_device(order, device);
    plan.inverse = to_device(inverse, device);
  }
  return plan;
}

}  // namespace

Sequences Sequences::rows(std::int64_t batch, std::int64_t tokens, at::Device device, Ints past) {
  Sequences s;
  s.batch_ = batch;
  s.tokens_ = tokens;
  for (std::int64_t b = 0; b <= batch; ++b) s.bounds_.push_back(b * tokens);
  const bool fresh = past.empty();
  s.past_ = checked_past(std::move(past), batch);
  s.positions_ = at::arange(tokens, at::TensorOptions(at::kLong).device(device)).expand({batch, tokens});
  if (!fresh) s.positions_ = s.positions_ + to_device(s.past_, device).unsqueeze(1);
  return s;
}

Sequences Sequences::packed(Ints bounds, at::Device device, Ints past) {
  check_bounds(bounds);
  Sequences s;
  s.batch_ = 1;
  s.tokens_ = bounds.back();
  s.bounds_ = std::move(bounds);
  s.past_ = checked_past(std::move(past), s.count());
  s.cu_seqlens_ = to_device(s.bounds_, device);
  Ints positions(s.tokens_);
  for (std::int64_t n = 0; n < s.count(); ++n) {
    std::iota(positions.begin() + s.bounds_[n], positions.begin() + s.bounds_[n + 1], s.past_[n]);
  }
  s.positions_ = to_device(positions, device).unsqueeze(0);
  return s;
}

Sequences Sequences::packed(const at::Tensor& cu_seqlens, at::Device device, Ints past) {
  const auto host = cu_seqlens.to(at::kCPU, at::kLong).contiguous();
  const auto* data = host.data_ptr<std::int64_t>();
  return packed(Ints(data, data + host.numel()), device, std::move(past));
}

Sequences Sequences::padded(const Ints& lengths, std::int64_t tokens, at::Device device, Ints past) {
  const auto batch = static_cast<std::int64_t>(lengths.size());
  Sequences s = rows(batch, tokens, device, past);
  Ints bounds{0}, kept;
  for (std::int64_t b = 0; b < batch; ++b) {
    if (lengths[b] < 0 || lengths[b] > tokens) {
      throw std::invalid_argument("A row of " + std::to_string(tokens) + " tokens cannot hold a sequence of " +
                                  std::to_string(lengths[b]) + ".");
    }
    for (std::int64_t t = 0; t < lengths[b]; ++t) kept.push_back(b * tokens + t);
    bounds.push_back(bounds.back() + lengths[b]);
  }
  s.kept_ = to_device(kept, device);
  s.dense_ = std::make_shared<const Sequences>(packed(std::move(bounds), device, std::move(past)));
  return s;
}

std::int64_t Sequences::longest() const {
  std::int64_t longest = 0;
  for (std::int64_t n = 0; n < count(); ++n) longest = std::max(longest, bounds_[n + 1] - bounds_[n]);
  return longest;
}

const ChunkPlan& Sequences::chunks(std::int64_t size) const {
  for (const auto& plan : *plans_) {
    if (plan->size == size) return *plan;
  }
  plans_->push_back(std::make_unique<const ChunkPlan>(make_plan(bounds_, size, positions_.device())));
  return *plans_->back();
}

}  // namespace gka::layers
