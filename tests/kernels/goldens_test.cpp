// Every backend against stored float64 results of the operator, those of tests/goldens.
#include <gtest/gtest.h>

#include <filesystem>

#include "kernels/backends.h"
#include "kernels/safetensors.h"

namespace gka::kernels::test {
namespace {

class Goldens : public OnEveryBackend {
 protected:
  void SetUp() override {
    OnEveryBackend::SetUp();
    if (GetParam().tensor_cores) GTEST_SKIP() << "the stored inputs are float64, and not rounded to bfloat16";
  }

  static std::filesystem::path folder() {
    return std::filesystem::path(__FILE__).parent_path().parent_path() / "goldens" / "ops";
  }

  /// Calls check() with each stored file in turn.
  template <typename Check>
  void for_each_file(Check&& check) {
    for (const char* name : {"small_plain", "gated_beta_state"}) {
      SCOPED_TRACE(name);
      file_ = read_safetensors(folder() / (std::string(name) + ".safetensors"));
      check();
    }
  }

  /// The stored problem as a float64 case.
  Case load(Solver solver, Gradient gradient) const {
    const auto number = [&](const char* name) { return std::stoll(file_.metadata.at(name)); };
    CaseSpec spec{.batch = number("batch"),
                  .tokens = number("tokens"),
                  .heads = number("heads"),
                  .key_dim = number("key_dim"),
                  .value_dim = number("value_dim"),
                  .log_decay = file_.has("log_decay"),
                  .beta = file_.has("beta"),
                  .alpha = file_.has("alpha"),
                  .h0 = file_.has("h0"),
                  .u0 = file_.has("u0"),
                  .d_h = file_.has("dh"),
                  .d_u = file_.has("du")};
    spec.options.ridge = std::stod(file_.metadata.at("ridge"));
    spec.options.iterations = number("iterations");
    spec.options.solver = solver;
    spec.options.gradient = gradient;
    Case loaded(spec);
    const std::pair<const char*, Array*> inputs[] = {
        {"q", &loaded.q},       {"k", &loaded.k},         {"v", &loaded.v},   {"log_decay", &loaded.log_decay},
        {"beta", &loaded.beta}, {"alpha", &loaded.alpha}, {"h0", &loaded.h0}, {"u0", &loaded.u0},
        {"do", &loaded.d_o},    {"dh", &loaded.d_h},      {"du", &loaded.d_u}};
    for (const auto& [name, array] : inputs) {
      if (file_.has(name)) store(file_.tensors.at(name).values, *array);
    }
    return loaded;
  }

  /// Contiguous values into an array, in the order of its indices.
  static void store(const std::vector<double>& values, Array& array) {
    ASSERT_EQ(static_cast<std::int64_t>(values.size()), array.size());
    const auto& shape = array.shape();
    std::size_t next = 0;
    for (std::int64_t i = 0; i < shape[0]; ++i)
      for (std::int64_t j = 0; j < shape[1]; ++j)
        for (std::int64_t k = 0; k < shape[2]; ++k)
          for (std::int64_t l = 0; l < shape[3]; ++l) array.set(i, j, k, l, values[next++]);
  }

  void expect_stored(const Array& got, const std::string& name, double tolerance) const {
    if (!got) return;
    ASSERT_TRUE(file_.has(name)) << name << " is not in the file";
    Array want(DType::float64, got.shape());
    store(file_.tensors.at(name).values, want);
    if (name.ends_with(".dh0")) symmetrise(want);  // the stored one is not symmetric; its symmetric part is meant
    EXPECT_LE(relative_error(got, want), tolerance) << name;
  }

  static void symmetrise(Array& states) {
    const auto& shape = states.shape();
    for (std::int64_t n = 0; n < shape[0]; ++n)
      for (std::int64_t head = 0; head < shape[1]; ++head)
        for (std::int64_t i = 0; i < shape[2]; ++i)
          for (std::int64_t j = 0; j < i; ++j) {
            const double mean = 0.5 * (states.at(n, head, i, j) + states.at(n, head, j, i));
            states.set(n, head, i, j, mean);
            states.set(n, head, j, i, mean);
          }
  }

  void expect_outputs(Solver solver, const std::string& prefix, double tolerance) const {
    const Case loaded = load(solver, Gradient::implicit);
    const OwnedOutputs got = forward(loaded);
    expect_stored(got.o, prefix + ".o", tolerance);
    expect_stored(got.x, prefix + ".x", tolerance);
    expect_stored(got.h, "h", tolerance);
    expect_stored(got.u, "u", tolerance);
  }

  void expect_gradients(Solver solver, Gradient gradient, const std::string& prefix, double tolerance) const {
    const Case loaded = load(solver, gradient);
    const OwnedGradients got = backward(loaded);
    const std::pair<const char*, const Array*> all[] = {
        {".dq", &got.d_q},       {".dk", &got.d_k},         {".dv", &got.d_v},   {".dlog_decay", &got.d_log_decay},
        {".dbeta", &got.d_beta}, {".dalpha", &got.d_alpha}, {".dh0", &got.d_h0}, {".du0", &got.d_u0}};
    for (const auto& [name, array] : all) expect_stored(*array, prefix + name, tolerance);
  }

  StoredFile file_{};
};

TEST_P(Goldens, ChebyshevOutputsAgree) {
  for_each_file([&] { expect_outputs(Solver::chebyshev, "chebyshev", 1e-12); });
}

TEST_P(Goldens, ExactOutputsAgree) {
  for_each_file([&] { expect_outputs(Solver::exact, "exact", 1e-12); });
}

TEST_P(Goldens, UnrolledGradientsAgree) {
  for_each_file([&] { expect_gradients(Solver::chebyshev, Gradient::unrolled, "chebyshev", 1e-10); });
}

TEST_P(Goldens, ImplicitGradientsAgree) {
  for_each_file([&] { expect_gradients(Solver::chebyshev, Gradient::implicit, "implicit", 1e-10); });
}

TEST_P(Goldens, ExactGradientsAgree) {
  for_each_file([&] { expect_gradients(Solver::exact, Gradient::implicit, "exact", 1e-10); });
}

INSTANTIATE_TEST_SUITE_P(, Goldens, testing::ValuesIn(kBackends), backend_name);

}  // namespace
}  // namespace gka::kernels::test
