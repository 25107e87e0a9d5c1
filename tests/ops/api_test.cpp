// The functions of <gka/gka.h>, as a C++ program calls them. What they compute is tested in Python, through the same
// operators; here: that arguments and options arrive, that autograd works, and that complaints are the same sentences.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gka/block.h>
#include <gka/errors.h>
#include <gka/gka.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "ops/backends.h"

namespace {

struct Inputs {
  at::Tensor q, k, v, log_decay, beta, alpha;
};

Inputs inputs(std::int64_t batch = 2, std::int64_t tokens = 9) {
  const auto unit = [&] {
    const auto x = at::randn({batch, tokens, 2, 8}, at::kDouble);
    return x / x.norm(2, -1, /*keepdim=*/true);
  };
  const auto gate = [&] { return at::rand({batch, tokens, 2}, at::kDouble); };
  return {.q = unit(),
          .k = unit(),
          .v = at::randn({batch, tokens, 2, 6}, at::kDouble),
          .log_decay = -gate(),
          .beta = gate(),
          .alpha = gate()};
}

void expect_close(const at::Tensor& got, const at::Tensor& want) {
  ASSERT_EQ(got.sizes(), want.sizes());
  EXPECT_TRUE(at::allclose(got, want, 1e-10, 1e-12)) << got << "\n" << want;
}

TEST(Api, ResultsUnpackAndStatesComeOnRequest) {
  const auto i = inputs();
  const auto [o, none] = gka::gated_kalmanet(i.q, i.k, i.v);
  EXPECT_EQ(o.sizes(), at::IntArrayRef({2, 9, 2, 6}));
  EXPECT_FALSE(none.h.defined());
  EXPECT_FALSE(none.u.defined());

  const auto [same, state] = gka::gated_kalmanet(i.q, i.k, i.v, {}, {}, {}, {.output_final_state = true});
  expect_close(same, o);
  EXPECT_EQ(state.h.sizes(), at::IntArrayRef({2, 2, 8, 8}));
  EXPECT_EQ(state.u.sizes(), at::IntArrayRef({2, 2, 8, 6}));
}

TEST(Api, OneCallEqualsTwoJoinedByTheState) {
  const auto i = inputs();
  const gka::Options options = {.scale = 0.5,
                                .ridge = 0.1,
                                .iterations = 7,
                                .solver = gka::Solver::nesterov,
                                .decay_keys = false,
                                .output_final_state = true};
  const auto part = [&](std::int64_t from, std::int64_t to, const gka::State& before) {
    const auto cut = [&](const at::Tensor& t) { return t.slice(1, from, to); };
    auto own = options;
    own.initial_state = before;
    return gka::gated_kalmanet(cut(i.q), cut(i.k), cut(i.v), cut(i.log_decay), cut(i.beta), cut(i.alpha), own);
  };
  const auto whole = part(0, 9, {});
  const auto first = part(0, 4, {});
  const auto second = part(4, 9, first.final_state);
  expect_close(at::cat({first.o, second.o}, 1), whole.o);
  expect_close(second.final_state.h, whole.final_state.h);
  expect_close(second.final_state.u, whole.final_state.u);
}

TEST(Api, StepsEqualOneCall) {
  const auto i = inputs();
  const auto ridge = at::full({2, 8}, 0.3, at::kDouble);
  const auto want = gka::gated_kalmanet(i.q, i.k, i.v, i.log_decay, i.beta, i.alpha,
                                        {.ridge = ridge,
                                         .solver = gka::Solver::exact,
                                         .ridge_mode = gka::RidgeMode::constant,
                                         .output_final_state = true});
  const gka::State pool = {.h = at::zeros({3, 2, 8, 8}, at::kDouble), .u = at::zeros({3, 2, 8, 6}, at::kDouble)};
  const auto slots = at::tensor({2, 0}, at::kInt);
  for (std::int64_t t = 0; t < 9; ++t) {
    const auto at_t = [&](const at::Tensor& tensor) { return tensor.select(1, t); };
    const auto o =
        gka::gated_kalmanet_step(at_t(i.q), at_t(i.k), at_t(i.v), at_t(i.log_decay), at_t(i.beta), at_t(i.alpha),
                                 {.state = pool,
                                  .state_indices = slots,
                                  .ridge = ridge,
                                  .iterations = at::full({2}, 5, at::kInt),
                                  .solver = gka::Solver::exact,
                                  .ridge_mode = gka::RidgeMode::constant});
    expect_close(o, want.o.select(1, t));
  }
  expect_close(pool.h.select(0, 2), want.final_state.h.select(0, 0));
  expect_close(pool.u.select(0, 0), want.final_state.u.select(0, 1));
}

TEST(Api, TheHalvesMakeTheWhole) {
  const auto i = inputs();
  const auto want = gka::gated_kalmanet(i.q, i.k, i.v, i.log_decay, i.beta, {}, {.output_final_state = true});
  const auto [x, h] = gka::ridge_solve(i.q, i.k, i.log_decay, i.beta, {.output_final_state = true});
  const auto [o, u] = gka::linear_memory(x, i.k, i.v, i.log_decay, i.beta, {.output_final_state = true});
  expect_close(o, want.o);
  expect_close(h, want.final_state.h);
  expect_close(u, want.final_state.u);
  expect_close(gka::gated_kalmanet_report(i.q, i.k, i.v, i.log_decay, i.beta).x, x);
}

TEST(Api, PackedSequencesAreSeparate) {
  const auto i = inputs(1, 9);
  const auto cu_seqlens = at::tensor({0, 4, 9}, at::kLong);
  const auto packed = gka::gated_kalmanet(i.q, i.k, i.v, i.log_decay, i.beta, i.alpha, {.cu_seqlens = cu_seqlens});
  const auto cut = [](const at::Tensor& t) { return t.slice(1, 4, 9); };
  const auto alone = gka::gated_kalmanet(cut(i.q), cut(i.k), cut(i.v), cut(i.log_decay), cut(i.beta), cut(i.alpha));
  expect_close(cut(packed.o), alone.o);
}

TEST(Api, GradientsFlow) {
  auto i = inputs();
  for (auto* tensor : {&i.q, &i.k, &i.v, &i.log_decay, &i.beta, &i.alpha}) tensor->requires_grad_();
  const auto result = gka::gated_kalmanet(i.q, i.k, i.v, i.log_decay, i.beta, i.alpha,
                                          {.gradient = gka::Gradient::unrolled, .output_final_state = true});
  (result.o.sum() + result.final_state.h.sum()).backward();
  for (const auto* tensor : {&i.q, &i.k, &i.v, &i.log_decay, &i.beta, &i.alpha}) {
    ASSERT_TRUE(tensor->grad().defined());
    EXPECT_GT(tensor->grad().norm().item<double>(), 0.0);
  }
}

/// What a C++ program that prints what() shows.
template <typename Error, typename Call>
std::string complaint(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no complaint of that kind";
}

TEST(Api, BadInputThrowsTheSentenceAndNothingElse) {
  const auto i = inputs();
  EXPECT_EQ(complaint<c10::ValueError>([&] { gka::gated_kalmanet(i.q, i.k.slice(3, 0, 7), i.v); }),
            "gated_kalmanet: k takes shape [B, T, H, D] = [2, 9, 2, 8], got [2, 9, 2, 7]");
  EXPECT_EQ(complaint<c10::TypeError>([&] { gka::gated_kalmanet(i.q, i.k.to(at::kFloat), i.v); }),
            "gated_kalmanet: k takes float64 beside q in float64, got float32");
  EXPECT_EQ(complaint<c10::ValueError>([&] { gka::gated_kalmanet(i.q, i.k, i.v, {}, -i.beta); }).substr(0, 53),
            "gated_kalmanet: beta takes numbers of at least 0, got");
  EXPECT_EQ(complaint<c10::ValueError>([&] { gka::ridge_solve(i.q, i.k, {}, {}, {.ridge = 0.0}); }),
            "ridge_solve: ridge takes a finite number above 0, got 0");
}

TEST(Api, AnUndefinedTensorIsNamed) {
  const auto i = inputs();
  const at::Tensor none;
  EXPECT_EQ(complaint<c10::TypeError>([&] { gka::gated_kalmanet(none, i.k, i.v); }),
            "gated_kalmanet: q takes a tensor, got none");
  EXPECT_EQ(complaint<c10::TypeError>([&] { gka::linear_memory(i.q, i.k, none); }),
            "linear_memory: v takes a tensor, got none");
  EXPECT_EQ(complaint<c10::TypeError>([&] {
              gka::gated_kalmanet_step(i.q.select(1, 0), i.k.select(1, 0), i.v.select(1, 0), {}, {}, {}, {});
            }),
            "gated_kalmanet_step: h takes a tensor, got none");
}

TEST(Api, TheBlocksSmallOperationsTakeTheirOptions) {
  const auto x = at::randn({2, 7, 8}, at::kDouble), weight = at::randn({8, 1, 4}, at::kDouble);
  const gka::ShortConvOptions options = {.bias = at::randn({8}, at::kDouble),
                                         .l2_norm = gka::L2Norm::divide,
                                         .head_dim = 4,
                                         .eps = 0,
                                         .output_final_state = true};
  const auto whole = gka::short_conv(x, weight, options);
  expect_close(whole.y.view({2, 7, 2, 4}).norm(2, -1), at::ones({2, 7, 2}, at::kDouble));
  expect_close(whole.final_state, x.slice(1, 4).transpose(1, 2));

  auto state = at::zeros({2, 8, 3}, at::kDouble);
  for (std::int64_t t = 0; t < 7; ++t) {
    const auto y = gka::short_conv_step(
        x.select(1, t), weight,
        {.bias = options.bias, .l2_norm = options.l2_norm, .head_dim = 4, .eps = options.eps, .state = state});
    expect_close(y, whole.y.select(1, t));
  }
  EXPECT_FALSE(gka::short_conv(x, weight).final_state.defined());

  const auto gate = at::randn({2, 7, 8}, at::kDouble);
  const auto root = (x.square().mean(-1, /*keepdim=*/true) + 0.5).rsqrt();
  expect_close(gka::gated_rms_norm(x, gate, {}, {.activation = gka::Activation::sigmoid, .eps = 0.5}),
               x * root * gate.sigmoid());
  EXPECT_EQ(complaint<c10::ValueError>([&] { gka::short_conv(x, weight, {.l2_norm = gka::L2Norm::rsqrt}); }),
            "short_conv: head_dim takes a divisor of the 8 channels from 1 to 256 beside l2_norm, got 0");
}

TEST(Info, ADeviceWithoutKernelsIsRefusedWithWhatWasBuilt) {
  const auto refusal = complaint<c10::NotImplementedError>(
      [] { gka::ops::backend_for("ridge_solve", c10::Device(c10::DeviceType::XPU)); });
  EXPECT_TRUE(
      refusal.starts_with("ridge_solve: q takes a device this build has kernels for, got xpu (no kernels for the "
                          "device xpu; built: cpu"))
      << refusal;
}

TEST(Info, TheCpuTakesACallOnTheCpu) {
  EXPECT_EQ(gka::choose_kernel({}).kernel, "cpu");
  EXPECT_EQ(gka::choose_kernel({.device = "abacus"}).kernel, "");
  EXPECT_FALSE(std::string(gka::version()).empty());
  bool listed = false;
  for (const auto& backend : gka::backends()) listed = listed || (backend.name == "cpu" && backend.available);
  EXPECT_TRUE(listed);
}

TEST(Complaints, AboutANumberThatIsNotFiniteHaveATypeOfTheirOwn) {
  auto in = inputs();
  const auto call = [&] { return gka::gated_kalmanet(in.q, in.k, in.v, in.log_decay, in.beta, in.alpha); };
  in.log_decay[1][3][0] = std::nan("");
  EXPECT_THROW(call(), gka::NotFiniteError);
  in.log_decay[1][3][0] = 0.5;
  try {
    call();
    FAIL() << "a decay above 1 was taken";
  } catch (const gka::NotFiniteError&) {
    FAIL() << "0.5 is finite";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("log_decay takes numbers of at most 0, got 0.5"), std::string::npos);
  }
}

}  // namespace
