// Picks the instruction set: the widest this machine has, or the one GKA_CPU names. The environment is read at each
// call (it is one getenv), so a test can compare all of them in one process.
#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/checks.h"
#include "kernels/cpu/backend.h"

namespace gka::kernels::cpu {
namespace {

struct Candidate {
  const InstructionSet* set;
  bool (*available)();
};

#if GKA_X86
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

/// Widest first.
constexpr std::array kCandidates{
#if GKA_X86
    Candidate{&avx512::kInstructionSet, has_avx512},
    Candidate{&avx2::kInstructionSet, has_avx2},
#endif
    Candidate{&portable::kInstructionSet, [] { return true; }},
};

const InstructionSet& widest() {
  for (const Candidate& c : kCandidates) {
    if (c.available()) return *c.set;
  }
  return *kCandidates.back().set;
}

const InstructionSet& by_name(std::string_view name) {
  std::string known;
  for (const Candidate& c : kCandidates) {
    if (name == c.set->name) {
      if (c.available()) return *c.set;
      throw std::invalid_argument("GKA_CPU=" + std::string(name) +
                                  ": this machine lacks that instruction set; unset GKA_CPU or choose another");
    }
    known += (known.empty() ? "" : ", ") + std::string(c.set->name);
  }
  throw std::invalid_argument("GKA_CPU=" + std::string(name) + " is not known; it takes one of " + known);
}

const InstructionSet& chosen() {
  static const InstructionSet& best = widest();
  const char* forced = std::getenv("GKA_CPU");
  return forced == nullptr || *forced == '\0' ? best : by_name(forced);
}

}  // namespace

const char* instruction_set() { return chosen().name; }

void forward(const Problem& problem, const Outputs& outputs, const Executor& executor) {
  check(problem, outputs);
  check(executor);
  chosen().forward(problem, outputs, executor);
}

void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Executor& executor) {
  check(problem, saved, gradients);
  check(executor);
  chosen().backward(problem, saved, gradients, executor);
}

void step(const Step& step, const Executor& executor) {
  check(step);
  check(executor);
  chosen().step(step, executor);
}

void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs, const Executor& executor) {
  check(conv, outputs);
  check(executor);
  chosen().short_conv(conv, outputs, executor);
}

void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients, const Executor& executor) {
  check(conv, gradients);
  check(executor);
  chosen().short_conv_backward(conv, gradients, executor);
}

void short_conv_step(const ShortConvStep& step, const Executor& executor) {
  check(step);
  check(executor);
  chosen().short_conv_step(step, executor);
}

void gated_rms_norm(const GatedRmsNorm& norm, const View& y, const Executor& executor) {
  check(norm, y);
  check(executor);
  chosen().gated_rms_norm(norm, y, executor);
}

void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients,
                             const Executor& executor) {
  check(norm, gradients);
  check(executor);
  chosen().gated_rms_norm_backward(norm, gradients, executor);
}

void products(const Products& products, const Executor& executor) { chosen().products(products, executor); }

namespace {

const RecurrenceKernels<float>& recurrence_of(const InstructionSet& set, float /*type*/) { return set.recurrence; }
const RecurrenceKernels<double>& recurrence_of(const InstructionSet& set, double /*type*/) {
  return set.recurrence_in_float64;
}

}  // namespace

template <typename T>
void recurrence(const Recurrence<T>& r, const RecurrenceOutputs<T>& out, const Executor& executor) {
  recurrence_of(chosen(), T{}).forward(r, out, executor);
}

template <typename T>
void recurrence_backward(const Recurrence<T>& r, const RecurrenceGradients<T>& gradients, const Executor& executor) {
  recurrence_of(chosen(), T{}).backward(r, gradients, executor);
}

template <typename T>
void recurrence_step(const RecurrenceStep<T>& step, const Executor& executor) {
  recurrence_of(chosen(), T{}).step(step, executor);
}

template void recurrence(const Recurrence<float>&, const RecurrenceOutputs<float>&, const Executor&);
template void recurrence(const Recurrence<double>&, const RecurrenceOutputs<double>&, const Executor&);
template void recurrence_backward(const Recurrence<float>&, const RecurrenceGradients<float>&, const Executor&);
template void recurrence_backward(const Recurrence<double>&, const RecurrenceGradients<double>&, const Executor&);
template void recurrence_step(const RecurrenceStep<float>&, const Executor&);
template void recurrence_step(const RecurrenceStep<double>&, const Executor&);

}  // namespace gka::kernels::cpu
