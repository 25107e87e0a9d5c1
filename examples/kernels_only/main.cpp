// Runs a stream of tokens through one memory on plain arrays: first all at once, on all cores, then token by token with
// the state carried along, as a program that decodes would. Both give the same answers.
#include <gka/kernels.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

namespace kernels = gka::kernels;

constexpr std::int64_t kTokens = 512;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kWidth = 32;

/// [1, tokens, heads, channels], contiguous.
kernels::View view(std::vector<float>& data, std::int64_t channels = kWidth) {
  return {.data = data.data(),
          .dtype = kernels::DType::float32,
          .batch_stride = kTokens * kHeads * channels,
          .token_stride = kHeads * channels,
          .head_stride = channels};
}

/// One token of it, for a step.
kernels::View at_token(kernels::View all, std::int64_t token) {
  all.data = static_cast<float*>(all.data) + token * all.token_stride;
  return all;
}

struct Stream {
  std::vector<float> q, k, v, log_decay;

  Stream() : q(kTokens * kHeads * kWidth), k(q.size()), v(q.size()), log_decay(kTokens * kHeads, std::log(0.99f)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* array : {&q, &k, &v}) {
      for (float& x : *array) x = normal(random) / std::sqrt(static_cast<float>(kWidth));
    }
  }
};

std::vector<float> all_at_once(Stream& s, const kernels::Executor& executor) {
  std::vector<float> o(s.v.size());
  const kernels::Problem problem{.batch = 1,
                                 .tokens = kTokens,
                                 .heads = kHeads,
                                 .key_dim = kWidth,
                                 .value_dim = kWidth,
                                 .sequences = 1,
                                 .q = view(s.q),
                                 .k = view(s.k),
                                 .v = view(s.v),
                                 .log_decay = view(s.log_decay, 1)};
  kernels::cpu::forward(problem, {.o = view(o)}, executor);
  return o;
}

std::vector<float> token_by_token(Stream& s, const kernels::Executor& executor) {
  std::vector<float> o(s.v.size());
  std::vector<float> h(kHeads * kWidth * kWidth), u(h.size());
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const kernels::Step step{.batch = 1,
                             .heads = kHeads,
                             .key_dim = kWidth,
                             .value_dim = kWidth,
                             .q = at_token(view(s.q), t),
                             .k = at_token(view(s.k), t),
                             .v = at_token(view(s.v), t),
                             .log_decay = at_token(view(s.log_decay, 1), t),
                             .o = at_token(view(o), t),
                             .h = h.data(),
                             .u = u.data()};
    kernels::cpu::step(step, executor);
  }
  return o;
}

}  // namespace

int main() {
  Stream stream;
  const auto executor = kernels::thread_executor();
  const auto together = all_at_once(stream, executor);
  const auto one_by_one = token_by_token(stream, executor);

  double difference = 0, size = 0;
  for (std::size_t i = 0; i < together.size(); ++i) {
    difference += std::pow(together[i] - one_by_one[i], 2);
    size += std::pow(one_by_one[i], 2);
  }
  const double error = std::sqrt(difference / size);
  std::printf("%d tokens, %d heads of width %d, on %s with %d threads\n", static_cast<int>(kTokens),
              static_cast<int>(kHeads), static_cast<int>(kWidth), kernels::cpu::instruction_set(), executor.threads);
  std::printf("  all at once and token by token differ by %.1e\n", error);
  return error < 1e-4 ? 0 : 1;
}
