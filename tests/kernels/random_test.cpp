// Every backend against the float64 reference over random problems: every dtype, size, gate, packing, layout and
// option. A failure prints the case as code.
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "kernels/backends.h"
#include "kernels/expect.h"

namespace gka::kernels::test {
namespace {

/// How far apart two backends may be: rounding of the result's own type, and of float32 arithmetic amplified by the
/// solve (κ ≤ 100 in these cases) for everything but float64. Conjugate gradients amplify rounding without bound until
/// they have converged.
double tolerance(const CaseSpec& spec) {
  const bool loose = spec.options.solver == Solver::conjugate_gradient && spec.options.part != Part::memory;
  switch (spec.dtype) {
    case DType::float64: return loose ? 1e-5 : 1e-11;
    case DType::float32: return loose ? 2e-2 : 2e-4;
    case DType::float16:
    case DType::bfloat16: return loose ? 2e-2 : 1e-3;
  }
  return 0;
}

/// Below float64 the gradient through the steps of conjugate gradients is that of other steps than the reference's.
bool comparable_gradients(const CaseSpec& spec) {
  return spec.dtype == DType::float64 || spec.options.solver != Solver::conjugate_gradient ||
         spec.options.gradient == Gradient::implicit || spec.options.part == Part::memory;
}

/// Bounds on tensor cores are on norms over many tokens. The first one or two of a sequence have a memory of as many
/// keys, and what the solve finds across those is up to a hundred times what it finds along them and what counts: of
/// one token whose query happens to be at a right angle to its key, next to nothing is left to compare with.
constexpr std::int64_t kManyTokens = 32;

/// Of all rows and heads.
std::int64_t tokens_of(const CaseSpec& spec) {
  return spec.heads * (spec.lengths.empty()
                           ? spec.batch * spec.tokens
                           : std::accumulate(spec.lengths.begin(), spec.lengths.end(), std::int64_t{0}));
}

/// Each tensor's error in the case in which it was furthest beyond what is allowed, or nearest to it.
class Worst {
 public:
  void add(const TensorError& got, double allowed, const Case& c) {
    Entry& entry = of_[got.name];
    beyond_ += got.error > allowed;
    if (const double ratio = got.error / allowed; !(ratio <= entry.ratio)) entry = {ratio, got.error, c.describe()};
  }
  void expect_allowed() const {
    for (const auto& [name, worst] : of_) {
      EXPECT_LE(worst.ratio, 1) << name << " has an error of " << worst.error << " in " << worst.description;
    }
    EXPECT_EQ(beyond_, 0) << "tensors of all cases are beyond what is allowed";
  }

 private:
  struct Entry {
    double ratio = 0, error = 0;
    std::string description{};
  };
  std::map<std::string, Entry> of_;
  int beyond_ = 0;
};

class Random : public OnEveryBackend {
 protected:
  /// A random problem that the backend carries; every third has widths of which it carries the forward pass alone.
  CaseSpec draw(std::uint64_t seed) const {
    CaseSpec spec = random_spec(seed);
    if (!carries(spec.options)) {
      spec.options = {.scale = spec.options.scale, .ridge_gradient = spec.options.ridge_gradient};
      spec.ridge_diagonal = false;
    }
    if (GetParam().tensor_cores && spec.key_dim > 128) spec.key_dim -= 128;
    return seed % 3 == 0 ? suited_forward(spec) : suited(spec);
  }

  /// On tensor cores certainty, a difference of numbers of order 1, has twice the error of an answer.
  double bound_of(const std::string& name, double allowed) const {
    if (name == "certainty") return gradients_within(allowed);
    return name == "h" || name == "u" ? states_within(allowed) : within(allowed);
  }
};

TEST_P(Random, ForwardAndBackwardMatchTheReference) {
  Worst worst;
  for (std::uint64_t seed = 1; seed <= case_count(); ++seed) {
    const CaseSpec spec = draw(seed);
    if (GetParam().tensor_cores && tokens_of(spec) < kManyTokens) continue;
    const Case c(spec);
    const double allowed = tolerance(spec);
    const OwnedOutputs got = outputs(c), want = c.outputs();
    const OwnedGradients got_gradients = c.gradients(), want_gradients = c.gradients();
    reference::forward(c.problem(), want.pointers());
    reference::backward(c.problem(), want_gradients.pointers());
    forward(c.problem(), got.pointers());
    backward(c.problem(), got.pointers().saved, got_gradients.pointers());
    // Residuals at convergence are rounding errors; they are compared with the reference in a test of their own.
    for (const TensorError& error : compare(got.named(), want.named())) {
      if (error.name == "residual" || error.name == "true_residual") continue;
      worst.add(error, bound_of(error.name, allowed), c);
    }
    for (const auto& named : {got.named(), got_gradients.named()}) {
      for (const auto& [name, array] : named) {
        EXPECT_TRUE(array->gaps_intact()) << name << " was written outside its elements, in " << c.describe();
      }
    }
    if (!comparable_gradients(spec)) continue;
    for (const TensorError& error : compare(got_gradients.named(), want_gradients.named())) {
      worst.add(error, gradients_within(3 * allowed), c);
    }
  }
  worst.expect_allowed();
}

TEST_P(Random, ManySequencesOfOneToThreeTokensMatchTheReference) {
  for (const Keys keys : {Keys::spread, Keys::silu}) {
    CaseSpec spec{.dtype = DType::float32, .heads = 2, .key_dim = 16, .value_dim = 16, .keys = keys};
    for (int n = 0; n < 32; ++n) spec.lengths.push_back(n % 4 == 0 ? 1 : n % 4);
    spec = suited(spec);
    const Case c(spec);
    const OwnedOutputs got = forward(c), want = c.outputs(DType::float64);
    const OwnedGradients got_gradients = backward(c), want_gradients = c.gradients(DType::float64);
    reference::forward(c.problem(), want.pointers());
    reference::backward(c.problem(), want_gradients.pointers());
    expect_close(got.o, want.o, within(2e-4), "o, " + c.describe());
    expect_close(got_gradients, want_gradients, gradients_within(6e-4), c.describe());
  }
}

TEST_P(Random, Float32InputsHaveFloat32ResultsAtEveryWidth) {
  if (GetParam().tensor_cores) GTEST_SKIP() << "16-bit types only";
  for (const std::int64_t width : {64, 128, 256}) {
    CaseSpec spec{.dtype = DType::float32, .tokens = 40, .heads = 1, .key_dim = width, .value_dim = 16};
    spec.options.iterations = 8;
    const Case c(spec);
    const OwnedOutputs got = forward(c), want = c.outputs(DType::float64);
    const OwnedGradients got_gradients = backward(c), want_gradients = c.gradients(DType::float64);
    reference::forward(c.problem(), want.pointers());
    reference::backward(c.problem(), want_gradients.pointers());
    expect_close(got.o, want.o, 1e-5, "o, " + c.describe());
    expect_close(got_gradients, want_gradients, 1e-4, c.describe());
  }
}

/// The random problems of more than 128 key channels have few tokens.
TEST_P(Random, WideHeadsMatchTheReference) {
  if (!GetParam().tensor_cores) GTEST_SKIP() << "for kernels that are cut in another way for them";
  CaseSpec usual{.dtype = DType::bfloat16, .tokens = 200, .heads = 2, .key_dim = 256, .value_dim = 256};
  usual.h0 = usual.u0 = usual.d_h = usual.d_u = usual.float32_gates = true;
  usual.keys = Keys::silu;
  usual.strongest_decay = 0.05;
  CaseSpec fading = usual, packed = usual;
  fading.weakest_decay = 0.5;
  fading.strongest_decay = 1.5;
  packed.dtype = DType::float16;
  packed.layout = Layout::padded;
  packed.lengths = {70, 0, 128, 1, 40};
  packed.key_dim = 200;
  packed.value_dim = 136;
  packed.forget = 0.05;
  packed.skip = 0.1;
  for (const CaseSpec& of : {usual, fading, packed}) {
    const Case c(suited(of));
    const OwnedOutputs got = forward(c), want = c.outputs(DType::float64);
    const OwnedGradients got_gradients = backward(c), want_gradients = c.gradients(DType::float64);
    reference::forward(c.problem(), want.pointers());
    reference::backward(c.problem(), want_gradients.pointers());
    expect_close(got.o, want.o, within(1e-3), "o, " + c.describe());
    expect_close(got_gradients, want_gradients, gradients_within(3e-3), c.describe());
    EXPECT_TRUE(got.o.gaps_intact());
  }
}

INSTANTIATE_TEST_SUITE_P(, Random, fast_backends(), backend_name);

}  // namespace
}  // namespace gka::kernels::test
