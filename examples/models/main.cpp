// losses MODEL TEXT…: the mean loss of some texts, packed into one row, and the length of its gradient. The tokenizer
// is the model's own where its folder has one, else bytes.
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "base/labels.h"
#include "data/tokenizer.h"
#include "models/checkpoint.h"

namespace {

struct Packed {
  std::vector<std::int64_t> ids, labels, bounds{0};  // labels[t] is what follows ids[t]
};

Packed pack(const gka::data::Tokenizer& tokenizer, int count, char** texts) {
  Packed packed;
  for (int i = 0; i < count; ++i) {
    const auto tokens = tokenizer.encode(texts[i]);
    packed.ids.insert(packed.ids.end(), tokens.begin(), tokens.end());
    if (!tokens.empty()) packed.labels.insert(packed.labels.end(), tokens.begin() + 1, tokens.end());
    if (!tokens.empty()) packed.labels.push_back(gka::kIgnoredLabel);  // nothing follows the last one
    packed.bounds.push_back(static_cast<std::int64_t>(packed.ids.size()));
  }
  return packed;
}

at::Tensor row(const std::vector<std::int64_t>& numbers) { return at::tensor(numbers).unsqueeze(0); }

double gradient_length(const gka::layers::Parameters& parameters) {
  double square = 0;
  for (const auto& parameter : parameters.all())
    if (parameter.value.grad().defined()) square += parameter.value.grad().square().sum().item<double>();
  return std::sqrt(square);
}

void run(const std::string& folder, int count, char** texts) {
  const bool own = std::filesystem::exists(std::filesystem::path(folder) / "tokenizer.json");
  const auto packed = pack(gka::data::Tokenizer::load(own ? folder : "bytes"), count, texts);
  const auto decoder = gka::models::load_model(folder, {.dtype = at::kFloat, .requires_grad = true});
  const auto sequences = gka::layers::Sequences::packed(packed.bounds, at::kCPU);
  const auto [hidden, state] = decoder.forward(row(packed.ids), sequences, {.want_state = true});
  const auto loss = decoder.loss(hidden, row(packed.labels));
  loss.mean.backward();
  std::printf("%zu tokens of %d texts, %zu blocks: loss %.6f, gradient %.6f\n", packed.ids.size(), count,
              state.blocks.size(), loss.mean.item<double>(), gradient_length(decoder.parameters()));
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::fputs("losses MODEL TEXT...\n", stderr);
    return 2;
  }
  try {
    run(words[1], count - 2, words + 2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
