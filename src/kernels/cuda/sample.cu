// Sums are in float64, as on the CPU. A running sum over a row would be slow: a row is cut into runs of 128 tokens,
// whose sums the block's warps make, each of a stretch of runs; then one warp finds the stretch, the run and the token,
// adding up in the order of the row at each of the three levels.
#include "kernels/cuda/sample.h"

#include <math.h>

#include "kernels/cuda/vectors.cuh"

namespace gka::kernels::cuda {
namespace sampling {

constexpr int kOwnThreads = 1024, kOwnWarps = kOwnThreads / kLanes;
constexpr int kEach = 4, kRun = kLanes * kEach;  // tokens of a lane; of a run

struct Best {
  float logit;
  int token;
};
struct Shared {
  Best best[kOwnWarps];
  double plain[kOwnWarps], stretch[kOwnWarps], lanes[kLanes], weights[kRun];
  double runs[Sample::kMostTokens / kRun];
};

__device__ __forceinline__ void take_better(Best& best, float logit, int token) {
  if (logit > best.logit || (logit == best.logit && token < best.token)) best = {logit, token};
}

/// The first place at which the running sum is above `target`, or the last one with something in it; takes from the
/// target what lies before it.
__device__ __forceinline__ int find(const double* sums, int count, double& target) {
  int found = 0;
  double running = 0, before = 0;
  for (int i = 0; i < count; ++i) {
    if (!(sums[i] > 0)) continue;
    found = i;
    before = running;
    running += sums[i];
    if (running > target) break;
  }
  target -= before;
  return found;
}

template <DType kType>
__global__ void __launch_bounds__(kOwnThreads) draw(const __grid_constant__ Sample s) {
  auto& shared = *reinterpret_cast<Shared*>(shared_memory());
  const char* row = static_cast<const char*>(s.logits) + block() * s.stride * (kType == DType::float32 ? 4 : 2);
  const int tokens = static_cast<int>(s.tokens), runs = (tokens + kRun - 1) / kRun;
  const int each = (runs + kOwnWarps - 1) / kOwnWarps, first = warp() * each;
  const int end = first + each < runs ? first + each : runs;
  const auto logit = [&](int token) { return read_as<float, kType>(row, token); };

  Best best{-INFINITY, tokens};
#pragma unroll 4
  for (int token = thread(); token < tokens; token += kOwnThreads) take_better(best, logit(token), token);
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    const float other = from_lane(best.logit, apart);
    take_better(best, other, from_lane(best.token, apart));
  }
  if (lane() == 0) shared.best[warp()] = best;
  sync();
  for (int w = 0; w < kOwnWarps; ++w) take_better(best, shared.best[w].logit, shared.best[w].token);

  const double temperature = s.how[2 * block()], slower = temperature > 0 ? 1 / temperature : 0;
  double plain = 0, stretch = 0;
  for (int run = first; run < end; ++run) {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = run * kRun + i * kLanes + lane();
      if (token >= tokens) continue;
      const float apart = logit(token) - best.logit;
      plain += exp_as<DType::float32>(apart);
      if (temperature > 0) sum += exp(static_cast<double>(apart) * slower);
    }
    if (temperature > 0) {
      sum = sum_lanes(sum);
      stretch += sum;
      if (lane() == 0) shared.runs[run] = sum;
    }
  }
  plain = sum_lanes(plain);
  if (lane() == 0) {
    shared.plain[warp()] = plain;
    shared.stretch[warp()] = stretch;
  }
  sync();
  if (warp() != 0) return;

  int token = best.token;
  if (temperature > 0) {
    double target = 0;
    for (int w = 0; w < kOwnWarps; ++w) target += shared.stretch[w];
    target *= s.how[2 * block() + 1];
    const int at = find(shared.stretch, kOwnWarps, target) * each;
    const int run = at + find(shared.runs + at, at + each < runs ? each : runs - at, target);
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int one = run * kRun + lane() * kEach + i;
      const double weight = one < tokens ? exp(static_cast<double>(logit(one) - best.logit) * slower) : 0;
      shared.weights[lane() * kEach + i] = weight;
      sum += weight;
    }
    shared.lanes[lane()] = sum;
    sync_warp();
    const int from = find(shared.lanes, kLanes, target) * kEach;
    token = run * kRun + from + find(shared.weights + from, kEach, target);
  }
  double all = 0;
  for (int w = 0; w < kOwnWarps; ++w) all += shared.plain[w];
  if (lane() != 0) return;
  const bool one = token < tokens;  // not where every logit is −∞ or NaN
  s.drawn[2 * block()] = one ? token : 0;
  s.drawn[2 * block() + 1] = static_cast<double>(logit(one ? token : 0) - best.logit) - log(all);
}

}  // namespace sampling

void sample(const Sample& s, const Device& device) {
  if (s.tokens < 1 || s.tokens > Sample::kMostTokens) {
    throw std::logic_error("gka: sample was called with more tokens than it takes");
  }
  const CurrentDevice current(device.index);
  with_vectors_of(s.dtype, [&]<typename Type>(Type) {
    launch_blocks_of<sampling::kOwnThreads>(sampling::draw<Type::type>, s.rows,
                                            static_cast<int>(sizeof(sampling::Shared)), device.stream, s);
  });
}

}  // namespace gka::kernels::cuda
