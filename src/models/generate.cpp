#include "models/generate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>

namespace gka::models {
namespace {

using Tokens = std::vector<std::int64_t>;

/// Prompts that go through the model together have at most so many tokens (a longer one goes alone).
constexpr std::int64_t kPromptTokens = 8192;
constexpr std::int64_t kRoom = 256;  // tokens a cache gets beyond the prompt, and doubles by from there

at::Tensor on_device(const Tokens& values, at::Device device) { return at::tensor(values, at::kLong).to(device); }

/// A sequence that goes on.
struct Live {
  std::size_t place;      // among the prompts, and its slot in the pool
  std::int64_t position;  // tokens the model has seen
  std::int64_t last;      // the token it sees next
};

class Generation {
 public:
  Generation(const Decoder& decoder, const std::vector<Tokens>& prompts, const GenerateOptions& options)
      : decoder_(decoder), prompts_(prompts), options_(options), results_(prompts.size()) {
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      if (prompts[i].empty()) {
        throw std::invalid_argument("prompt " + std::to_string(i) + " is empty; the model needs a token to begin with");
      }
      auto sampling = options.sampling;
      sampling.seed += i;
      samplers_.emplace_back(sampling);
      capacity_ = std::max(capacity_, static_cast<std::int64_t>(prompts[i].size()) + kRoom);
    }
  }

  std::vector<Tokens> run() {
    if (options_.max_tokens <= 0) return std::move(results_);
    pool_ = decoder_.make_state(
        static_cast<std::int64_t>(prompts_.size()),
        {.device = decoder_.device(), .dtype = decoder_.parameters().options().dtype, .capacity = capacity_});
    for (std::size_t begin = 0; begin < prompts_.size();) begin = read_prompts(begin);
    while (!live_.empty()) step();
    return std::move(results_);
  }

 private:
  /// Reads as many prompts from `begin` on as go together, and draws the first token of each.
  std::size_t read_prompts(std::size_t begin) {
    Tokens ids, bounds{0}, slots, ends;
    auto end = begin;
    while (end < prompts_.size()) {
      const auto& prompt = prompts_[end];
      if (end > begin && std::ssize(ids) + std::ssize(prompt) > kPromptTokens) break;
      ids.insert(ids.end(), prompt.begin(), prompt.end());
      bounds.push_back(std::ssize(ids));
      ends.push_back(std::ssize(ids) - 1);
      slots.push_back(static_cast<std::int64_t>(end++));
    }
    const auto sequences = layers::Sequences::packed(bounds, decoder_.device());
    const auto read = decoder_.forward(at::tensor(ids, at::kLong).unsqueeze(0), sequences, {.want_state = true});
    decoder_.scatter(read.state, pool_, on_device(slots, decoder_.device()));
    std::vector<Live> sequences_read;
    for (auto place = begin; place < end; ++place) {
      sequences_read.push_back({.place = place, .position = std::ssize(prompts_[place]), .last = 0});
    }
    draw(sequences_read, read.hidden.squeeze(0).index_select(0, on_device(ends, decoder_.device())));
    return end;
  }

  void step() {
    Tokens ids, slots, positions;
    for (const auto& sequence : live_) {
      ids.push_back(sequence.last);
      slots.push_back(static_cast<std::int64_t>(sequence.place));
      positions.push_back(sequence.position);
    }
    const auto needed = *std::ranges::max_element(positions) + 1;
    if (needed > capacity_) {
      capacity_ = 2 * needed;
      decoder_.reserve(pool_, capacity_);
    }
    const auto device = decoder_.device();
    const auto hidden =
        decoder_.step(at::tensor(ids, at::kLong), pool_, on_device(slots, device), on_device(positions, device));
    auto sequences = std::move(live_);
    live_.clear();
    for (auto& sequence : sequences) ++sequence.position;
    draw(sequences, hidden);
  }

  /// Draws the next token of each sequence from its row of `hidden`, and keeps those that go on.
  void draw(std::vector<Live> sequences, const at::Tensor& hidden) {
    const auto logits = decoder_.logits(hidden).to(at::kCPU, at::kFloat).contiguous();
    const auto width = static_cast<std::size_t>(logits.size(1));
    const auto& ends = decoder_.config().eos_token_id;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      auto& sequence = sequences[i];
      auto& tokens = results_[sequence.place];
      sequence.last = samplers_[sequence.place].next({logits.const_data_ptr<float>() + i * width, width});
      tokens.push_back(sequence.last);
      const bool over =
          std::ranges::find(ends, sequence.last) != ends.end() || std::ssize(tokens) >= options_.max_tokens;
      if (!over) live_.push_back(sequence);
      if (options_.on_token) options_.on_token(sequence.place, sequence.last, over);
    }
  }

  const Decoder& decoder_;
  const std::vector<Tokens>& prompts_;
  const GenerateOptions& options_;
  std::vector<Tokens> results_;
  std::vector<Sampler> samplers_;
  std::int64_t capacity_ = 0;
  DecoderState pool_;
  std::vector<Live> live_;
};

}  // namespace

std::vector<Tokens> generate(const Decoder& decoder, const std::vector<Tokens>& prompts,
                             const GenerateOptions& options) {
  const at::NoGradGuard no_gradient;
  return Generation(decoder, prompts, options).run();
}

}  // namespace gka::models
