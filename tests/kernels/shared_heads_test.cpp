// Keys and values that heads share: every backend answers as if each head had a copy, and their gradients are the sums
// of those of the copies.
#include <gtest/gtest.h>

#include <utility>

#include "kernels/backends.h"

namespace gka::kernels::test {
namespace {

/// What groups of `from` share, for each head of `to`; with groups of one a plain copy.
void copy_heads(const Array& from, std::int64_t group, Array& to) {
  const auto& shape = to.shape();
  for (std::int64_t i = 0; i < shape[0]; ++i)
    for (std::int64_t j = 0; j < shape[1]; ++j)
      for (std::int64_t k = 0; k < shape[2]; ++k)
        for (std::int64_t l = 0; l < shape[3]; ++l) to.set(i, j, k, l, from.at(i, j, k / group, l));
}

/// The same numbers with a key and a value for every head.
Case with_copies(const Case& shared) {
  CaseSpec spec = shared.spec();
  spec.key_group = spec.value_group = 1;
  Case copies(spec);
  const auto group_of = [&](Array Case::* member) {
    return member == &Case::k ? shared.spec().key_group : member == &Case::v ? shared.spec().value_group : 1;
  };
  for (const auto member : Case::kByToken) {
    if (shared.*member) copy_heads(shared.*member, group_of(member), copies.*member);
  }
  for (const auto member : Case::kByState) {
    if (shared.*member) copy_heads(shared.*member, 1, copies.*member);
  }
  std::copy(shared.ridge_diagonal.begin(), shared.ridge_diagonal.end(), copies.ridge_diagonal.begin());
  return copies;
}

/// Added up over the heads of each group, in float64.
Array summed(const Array& by_head, std::int64_t group) {
  const auto& shape = by_head.shape();
  Array sums(DType::float64, {shape[0], shape[1], shape[2] / group, shape[3]});
  for (std::int64_t i = 0; i < shape[0]; ++i)
    for (std::int64_t j = 0; j < shape[1]; ++j)
      for (std::int64_t k = 0; k < shape[2] / group; ++k)
        for (std::int64_t l = 0; l < shape[3]; ++l) {
          double sum = 0;
          for (std::int64_t member = 0; member < group; ++member) sum += by_head.at(i, j, k * group + member, l);
          sums.set(i, j, k, l, sum);
        }
  return sums;
}

class SharedHeads : public OnEveryBackend {
 protected:
  void expect_as_copies(const CaseSpec& asked) const {
    const CaseSpec spec = suited(asked);
    if (!carries(spec.options)) return;
    const Case shared(spec), copies = with_copies(shared);
    expect_close(forward(shared), forward(copies), 0.0, shared.describe());

    const OwnedGradients got = backward(shared);
    OwnedGradients want = backward(copies);
    want.d_k = summed(want.d_k, spec.key_group);
    if (want.d_v) want.d_v = summed(want.d_v, spec.value_group);
    // Copies round each head's share to the result's type, so there only the sum's own rounding may differ.
    const double rounding = spec.dtype == DType::float64 ? 1e-14 : spec.dtype == DType::float32 ? 1e-6 : 5e-3;
    for (const auto& [name, error] : compare(got.named(), want.named())) {
      const bool sum = std::string_view(name) == "d_k" || std::string_view(name) == "d_v";
      EXPECT_LE(error, sum ? rounding : 0.0) << name << " of " << shared.describe();
    }
    for (const auto& [name, array] : got.named()) {
      EXPECT_TRUE(array->gaps_intact()) << name << " was written outside its elements, in " << shared.describe();
    }
  }
};

INSTANTIATE_TEST_SUITE_P(, SharedHeads, testing::ValuesIn(kBackends), backend_name);

CaseSpec shared_spec(std::int64_t key_group, std::int64_t value_group) {
  CaseSpec spec{.tokens = 20, .heads = 6, .key_dim = 8, .value_dim = 4};
  spec.key_group = key_group;
  spec.value_group = value_group;
  spec.h0 = spec.u0 = spec.d_h = spec.d_u = true;
  return spec;
}

TEST_P(SharedHeads, AnswerAsCopiesWould) {
  for (const auto& [keys, values] :
       {std::pair{2, 2}, std::pair{6, 6}, std::pair{3, 1}, std::pair{1, 2}, std::pair{2, 3}, std::pair{6, 2}}) {
    CaseSpec spec = shared_spec(keys, values);
    spec.layout = keys == 3 ? Layout::heads_first : Layout::padded;
    expect_as_copies(spec);
  }
}

TEST_P(SharedHeads, AnswerAsCopiesWouldOverManySegments) {
  CaseSpec spec = shared_spec(3, 2);
  spec.tokens = 300;
  spec.options.iterations = 5;
  expect_as_copies(spec);
  spec.batch = 4;  // enough to walk
  spec.tokens = 140;
  expect_as_copies(spec);
}

TEST_P(SharedHeads, AnswerAsCopiesWouldInPackedSequencesAndEveryType) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16}) {
    CaseSpec spec = shared_spec(2, 6);
    spec.dtype = dtype;
    spec.lengths = {5, 0, 33, 1};
    expect_as_copies(spec);
  }
}

TEST_P(SharedHeads, AnswerAsCopiesWouldInEveryPartAndSolver) {
  for (const Part part : {Part::solve, Part::memory}) {
    CaseSpec spec = shared_spec(3, 2);
    spec.options.part = part;
    expect_as_copies(spec);
  }
  for (const Solver solver : {Solver::conjugate_gradient, Solver::exact, Solver::nesterov}) {
    CaseSpec spec = shared_spec(3, 2);
    spec.options.solver = solver;
    spec.options.ridge_mode = RidgeMode::constant;
    spec.ridge_diagonal = solver != Solver::nesterov;
    expect_as_copies(spec);
  }
}

TEST_P(SharedHeads, StepAsCopiesWould) {
  if (GetParam().tensor_cores) GTEST_SKIP() << "a step has no tensor cores";
  for (const Solver solver : {Solver::chebyshev, Solver::conjugate_gradient}) {
    CaseSpec spec = shared_spec(3, 2);
    spec.batch = 2;
    spec.tokens = 1;
    spec.options.solver = solver;
    const Case shared(spec), copies = with_copies(shared);
    const OwnedOutputs got = shared.outputs(), want = shared.outputs();
    const auto run = [&](const Case& c, const OwnedOutputs& out, Array h, Array u) {
      copy_slice(c.h0, 0, 0, 2, h, 0);
      copy_slice(c.u0, 0, 0, 2, u, 0);
      take_step(step_at(c.problem(), 0, out.o.view(), h.data(), u.data()));
      return std::pair{std::move(h), std::move(u)};
    };
    const auto [h, u] = run(shared, got, got.h, got.u);
    const auto [h_want, u_want] = run(copies, want, want.h, want.u);
    expect_close(got.o, want.o, 0.0, "o");
    expect_close(h, h_want, 0.0, "h");
    expect_close(u, u_want, 0.0, "u");
  }
}

}  // namespace
}  // namespace gka::kernels::test
