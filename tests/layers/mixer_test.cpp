// What every mixer must do, whatever it remembers: equal its recurrence, and give the same answers however the tokens
// come: in one call, in pieces, packed, padded, or one at a time from a pool.
#include <ATen/TensorOperators.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "layers/cases.h"
#include "layers/reference.h"

namespace gka::layers::test {
namespace {

using at::Tensor;

constexpr double kExact = 1e-10;  // float64, other orders of summation

/// Loops inside a test rather than a test per mixer: each test is a process of its own, which has to load torch.
void for_every_mixer(const std::function<void(const Case&)>& check) {
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    check(c);
  }
}

std::int64_t width(const Case& c) { return c.config.hidden_size; }

void expect_close(const Tensor& got, const Tensor& want, double tolerance = kExact, const std::string& what = "y") {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_LE(relative_error(got, want), tolerance) << what;
}

void expect_close(const State& got, const State& want, double tolerance = kExact) {
  ASSERT_EQ(got.tensors.size(), want.tensors.size());
  for (std::size_t i = 0; i < got.tensors.size(); ++i) {
    expect_close(got.tensors[i], want.tensors[i], tolerance, "state tensor " + std::to_string(i));
  }
}

Tensor indices(const std::vector<std::int64_t>& values) { return at::tensor(values, at::kLong).to(device()); }

/// Slot n of a state as a state of one sequence of so many tokens.
State only(const Mixer& mixer, const State& state, std::int64_t n, std::int64_t tokens) {
  State one = mixer.gather(state, indices({n}));
  const auto fields = mixer.state_fields(at::kDouble);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].max_tokens > 0) one.tensors[i] = one.tensors[i].narrow(1, 0, std::min(tokens, fields[i].max_tokens));
  }
  return one;
}

TEST(EveryMixer, EqualsItsRecurrenceTokenByToken) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const auto x = random({2, 75, width(c)}, 7);
    const auto y = mixer->forward(x, Sequences::rows(2, 75, device())).y;
    const at::NoGradGuard no_grad;
    for (std::int64_t b = 0; b < 2; ++b) {
      const auto want = reference(c.token, c.config, *parameters, x[b].cpu());
      expect_close(y[b].cpu(), want);
    }
  });
}

TEST(EveryMixer, StateHandedOverEqualsOneCall) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const auto x = random({2, 90, width(c)}, 8);
    const auto whole = mixer->forward(x, Sequences::rows(2, 90, device()), nullptr, true);
    std::vector<Tensor> parts;
    State state;
    std::int64_t done = 0;
    for (const std::int64_t size : {3, 66, 1, 20}) {
      const auto sequences = Sequences::rows(2, size, device(), {done, done});
      auto part = mixer->forward(x.narrow(1, done, size), sequences, done == 0 ? nullptr : &state, true);
      parts.push_back(part.y);
      state = std::move(part.state);
      done += size;
    }
    expect_close(at::cat(parts, 1), whole.y);
    expect_close(state, whole.state);
  });
}

TEST(EveryMixer, StepsAfterAPromptEqualOneCall) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const at::NoGradGuard no_grad;
    const auto x = random({2, 21, width(c)}, 9);
    const auto want = mixer->forward(x, Sequences::rows(2, 21, device())).y;

    // Two sequences of different lengths in slots 4 and 1 of a pool, then one token each at a time.
    const std::vector<std::int64_t> lengths{13, 7};
    const auto prompt = mixer->forward(x.narrow(1, 0, 13), Sequences::padded(lengths, 13, device()), nullptr, true);
    State pool = mixer->make_state(5, {.device = device(), .dtype = at::kDouble, .capacity = 13});
    mixer->scatter(prompt.state, pool, indices({4, 1}));
    mixer->reserve(pool, 21);
    for (std::int64_t i = 0; i < 8; ++i) {
      const auto tokens = at::cat({x[0].narrow(0, 13 + i, 1), x[1].narrow(0, 7 + i, 1)});
      const auto y = mixer->step(tokens, pool, indices({4, 1}), indices({13 + i, 7 + i}));
      expect_close(y[0], want[0][13 + i]);
      expect_close(y[1], want[1][7 + i]);
    }
  });
}

TEST(EveryMixer, StepsFromNothingNeedNoSlots) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const at::NoGradGuard no_grad;
    const auto x = random({3, 9, width(c)}, 10);
    const auto want = mixer->forward(x, Sequences::rows(3, 9, device())).y;
    const State pool = mixer->make_state(3, {.device = device(), .dtype = at::kDouble, .capacity = 9});
    for (std::int64_t t = 0; t < 9; ++t) {
      expect_close(mixer->step(x.select(1, t), pool, {}, indices({t, t, t})), want.select(1, t));
    }
  });
}

/// On a GPU all of it is one kernel, and in parts where values are checked.
TEST(GkaSteps, OfOneKernelAreThoseOfItsPartsAndTheTokensOfASequence) {
  Case c{.name = "GKA with heads of 64", .token = "GKA", .config = {}};
  c.config.hidden_size = 128;
  c.config.num_attention_heads = c.config.num_key_value_heads = 2;
  c.config.head_dim = 64;
  const auto [parameters, mixer] = build(c, at::kFloat);
  const at::NoGradGuard no_grad;
  const auto x = random({2, 5, 128}, 21, at::kFloat);
  std::vector<Tensor> sure;
  const auto want = mixer->forward(x, Sequences::rows(2, 5, device()), nullptr, false, {.certainty = &sure}).y;
  const auto run = [&](std::vector<Tensor>& certainty) {
    const State pool = mixer->make_state(4, {.device = device(), .dtype = at::kFloat, .capacity = 5});
    std::vector<Tensor> tokens;
    for (std::int64_t t = 0; t < 5; ++t) {
      const Inference inference{
          .iterations_each = at::full({2}, c.config.gka.num_iter, indices({0}).options().dtype(at::kInt)),
          .certainty = &certainty};
      tokens.push_back(mixer->step(x.select(1, t), pool, indices({3, 1}), indices({t, t}), inference));
    }
    return at::stack(tokens, 1);
  };
  std::vector<Tensor> certainty, certainty_of_parts;
  const auto got = run(certainty);
  ::setenv("GKA_CHECK", "1", 1);
  const auto in_parts = run(certainty_of_parts);
  ::unsetenv("GKA_CHECK");
  expect_close(got, want, 1e-4);
  expect_close(got, in_parts, 1e-5);
  for (std::int64_t t = 0; t < 5; ++t) {
    const auto at = static_cast<std::size_t>(t);
    expect_close(certainty[at], sure[0].select(1, t), 1e-4, "certainty");
    expect_close(certainty[at], certainty_of_parts[at], 1e-5, "certainty");
  }
}

TEST(EveryMixer, PackedEqualsOneByOne) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const std::vector<std::int64_t> bounds{0, 3, 3, 73, 74, 138};
    const auto x = random({1, 138, width(c)}, 11);
    const auto packed = mixer->forward(x, Sequences::packed(bounds, device()), nullptr, true);
    ASSERT_EQ(packed.y.sizes(), x.sizes());
    for (std::size_t n = 0; n + 1 < bounds.size(); ++n) {
      const auto begin = bounds[n], size = bounds[n + 1] - begin;
      if (size == 0) continue;
      const auto one = mixer->forward(x.narrow(1, begin, size), Sequences::rows(1, size, device()), nullptr, true);
      expect_close(packed.y.narrow(1, begin, size), one.y);
      expect_close(only(*mixer, packed.state, static_cast<std::int64_t>(n), size), one.state);
    }
  });
}

TEST(EveryMixer, AnEmptySequenceKeepsItsState) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const auto first = mixer->forward(random({2, 6, width(c)}, 12), Sequences::rows(2, 6, device()), nullptr, true);
    const auto x = random({1, 5, width(c)}, 13);
    const auto next = mixer->forward(x, Sequences::packed({0, 0, 5}, device(), {6, 6}), &first.state, true);
    expect_close(only(*mixer, next.state, 0, 6), only(*mixer, first.state, 0, 6));
  });
}

TEST(EveryMixer, NoTokensGiveNoAnswersAndHandTheStateThrough) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const auto first = mixer->forward(random({2, 6, width(c)}, 12), Sequences::rows(2, 6, device()), nullptr, true);
    const auto none =
        mixer->forward(random({2, 0, width(c)}, 13), Sequences::rows(2, 0, device(), {6, 6}), &first.state, true);
    EXPECT_EQ(none.y.sizes(), at::IntArrayRef({2, 0, width(c)}));
    expect_close(none.state, first.state);
  });
}

TEST(EveryMixer, PaddingChangesNothing) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    auto x = random({3, 70, width(c)}, 14);
    const std::vector<std::int64_t> lengths{70, 5, 0};
    const auto got = mixer->forward(x, Sequences::padded(lengths, 70, device()), nullptr, true);
    x[1].narrow(0, 5, 65).fill_(std::nan(""));
    const auto again = mixer->forward(x, Sequences::padded(lengths, 70, device()), nullptr, true);
    EXPECT_TRUE(at::equal(again.y, got.y));
    EXPECT_EQ(got.y[1].narrow(0, 5, 65).abs().max().item<double>(), 0);
    const auto one = mixer->forward(x.narrow(0, 1, 1).narrow(1, 0, 5), Sequences::rows(1, 5, device()));
    expect_close(got.y[1].narrow(0, 0, 5), one.y[0]);
  });
}

/// Sum of everything a call gives, each weighted at random.
Tensor loss(const MixerOutput& out) {
  Tensor sum = (out.y * random(out.y.sizes(), 100)).sum();
  std::uint64_t seed = 101;
  for (const auto& tensor : out.state.tensors) sum = sum + (tensor * random(tensor.sizes(), seed++)).sum();
  return sum;
}

TEST(EveryMixer, GradientsMatchFiniteDifferences) {
  for_every_mixer([](const Case& c) {
    Case exact = c;
    exact.config.gka.gradient = Gradient::unrolled;  // the implicit one is that of a solve that has converged
    exact.config.gka.num_iter = std::min<std::int64_t>(exact.config.gka.num_iter, 8);
    const auto [parameters, mixer] = build(exact);
    const auto sequences = Sequences::packed({0, 70, 82}, device(), {6, 6});
    const auto before = mixer->forward(random({2, 6, width(c)}, 15), Sequences::rows(2, 6, device()), nullptr, true);

    std::vector<Tensor> variables{random({1, 82, width(c)}, 16)};
    State state;
    for (const auto& tensor : before.state.tensors) {
      state.tensors.push_back(tensor.detach().clone());
      variables.push_back(state.tensors.back());
    }
    for (const auto& parameter : parameters->all()) variables.push_back(parameter.value);
    for (auto& variable : variables) variable.set_requires_grad(true);

    const auto run = [&] { return loss(mixer->forward(variables[0], sequences, &state, true)); };
    run().backward();

    const at::NoGradGuard no_grad;
    constexpr double kStep = 1e-6;
    std::uint64_t seed = 200;
    for (std::size_t i = 0; i < variables.size(); ++i) {
      auto& variable = variables[i];
      // Where a choice leaves a parameter unused, it has no gradient and no effect.
      const auto grad = variable.grad().defined() ? variable.grad() : at::zeros_like(variable);
      auto direction = random(variable.sizes(), seed++);
      // A memory of keys is symmetric by contract.
      if (direction.dim() == 4 && i > 0 && direction.size(-1) == direction.size(-2))
        direction = direction + direction.transpose(-1, -2);
      const double slope = (grad * direction).sum().item<double>();
      variable.add_(direction, kStep);
      const double above = run().item<double>();
      variable.sub_(direction, 2 * kStep);
      const double below = run().item<double>();
      variable.add_(direction, kStep);
      const double measured = (above - below) / (2 * kStep);
      EXPECT_NEAR(slope, measured, 2e-6 * (1 + std::abs(measured) + grad.norm().item<double>())) << "variable " << i;
    }
  });
}

TEST(EveryMixer, StateBytesAreThoseOfTheTensors) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      for (const std::int64_t tokens : {0, 3, 100}) {
        const auto state = mixer->make_state(3, {.device = device(), .dtype = dtype, .capacity = tokens});
        std::int64_t bytes = 0;
        for (const auto& tensor : state.tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
        EXPECT_EQ(3 * mixer->state_bytes(tokens, dtype), bytes);
      }
    }
  });
}

TEST(EveryMixer, ForwardGivesStatesOfTheDeclaredShapeAndType) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c, at::kFloat);
    const auto x = random({2, 8, width(c)}, 17, at::kFloat);
    const auto out = mixer->forward(x, Sequences::rows(2, 8, device()), nullptr, true);
    const auto made = mixer->make_state(2, {.device = device(), .dtype = at::kFloat, .capacity = 8});
    ASSERT_EQ(out.state.tensors.size(), made.tensors.size());
    for (std::size_t i = 0; i < made.tensors.size(); ++i) {
      EXPECT_EQ(out.state.tensors[i].sizes(), made.tensors[i].sizes()) << i;
      EXPECT_EQ(out.state.tensors[i].scalar_type(), made.tensors[i].scalar_type()) << i;
    }
    EXPECT_TRUE(mixer->forward(x, Sequences::rows(2, 8, device())).state.tensors.empty());
  });
}

TEST(EveryMixer, ResetForgetsTheGivenSlotsAlone) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const at::NoGradGuard no_grad;
    const auto x = random({2, 6, width(c)}, 18);
    const auto state = mixer->forward(x, Sequences::rows(2, 6, device()), nullptr, true).state;
    const auto kept = mixer->gather(state, indices({0}));
    mixer->reset(state, indices({1}));
    expect_close(mixer->gather(state, indices({0})), kept, 0);
    for (const auto& tensor : state.tensors) EXPECT_EQ(tensor[1].abs().sum().item<double>(), 0);
    const auto token = random({1, width(c)}, 19);
    const auto fresh = mixer->make_state(1, {.device = device(), .dtype = at::kDouble, .capacity = 6});
    const auto want = mixer->step(token, fresh, {}, indices({0}));
    expect_close(mixer->step(token, state, indices({1}), indices({0})), want);
  });
}

TEST(EveryMixer, SinglePrecisionIsCloseToDoubleAndSoAreItsGradients) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c);
    const auto [single_parameters, single] = build(c, at::kFloat);
    for (const auto& parameter : single_parameters->all()) {
      parameter.value.detach().copy_(parameters->find(parameter.name)->value.detach());
    }
    const auto x = random({1, 150, width(c)}, 20), slope = random({1, 150, width(c)}, 21);
    const auto sequences = Sequences::packed({0, 40, 40, 110, 150}, device());
    const auto want = mixer->forward(x, sequences, nullptr, true);
    const auto got = single->forward(x.to(at::kFloat), sequences, nullptr, true);
    expect_close(got.y, want.y, 1e-4);
    expect_close(got.state, want.state, 1e-4);
    (want.y * slope).sum().backward();
    (got.y * slope.to(at::kFloat)).sum().backward();
    for (const auto& parameter : single_parameters->all()) {
      const auto grad = parameter.value.grad(), exact = parameters->find(parameter.name)->value.grad();
      ASSERT_EQ(grad.defined(), exact.defined()) << parameter.name;
      if (grad.defined()) expect_close(grad, exact, 1e-3, parameter.name);
    }
  });
}

TEST(EveryMixer, HalfPrecisionStreamsUseFloatParameters) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c, at::kFloat);
    const auto x = random({2, 75, width(c)}, 21, at::kBFloat16);
    const auto sequences = Sequences::rows(2, 75, device());
    const auto want = mixer->forward(x.to(at::kFloat), sequences).y;
    const auto got = mixer->forward(x, sequences, nullptr, true);
    EXPECT_EQ(got.y.scalar_type(), at::kBFloat16);
    expect_close(got.y, want, 0.2);
    got.y.sum().backward();
    for (const auto& parameter : parameters->all()) {
      const auto grad = parameter.value.grad();
      if (parameter.name.starts_with("alpha_proj") && c.config.gka.num_iter == 0) continue;  // mixes nothing
      ASSERT_TRUE(grad.defined()) << parameter.name;
      EXPECT_EQ(grad.scalar_type(), at::kFloat) << parameter.name;
    }
  });
}

TEST(EveryMixer, HalfPrecisionStepsFollowHalfPrecisionSequences) {
  for_every_mixer([](const Case& c) {
    const auto [parameters, mixer] = build(c, at::kFloat);
    const at::NoGradGuard no_grad;
    const auto x = random({2, 9, width(c)}, 22, at::kBFloat16);
    const auto whole = mixer->forward(x, Sequences::rows(2, 9, device()), nullptr, true);
    const auto pool = mixer->make_state(2, {.device = device(), .dtype = at::kBFloat16, .capacity = 9});
    std::vector<Tensor> steps;
    for (std::int64_t t = 0; t < 9; ++t) steps.push_back(mixer->step(x.select(1, t), pool, {}, indices({t, t})));
    EXPECT_EQ(steps[0].scalar_type(), at::kBFloat16);
    expect_close(at::stack(steps, 1), whole.y, 0.1);
  });
}

TEST(EveryMixer, CountsParametersWithoutAllocating) {
  for_every_mixer([](const Case& c) {
    const auto real = build(c);
    Parameters counted({.device = at::kMeta});
    mixer_kind(c.token).make(c.config, counted);
    EXPECT_EQ(counted.count(), real.parameters->count());
    ASSERT_EQ(counted.all().size(), real.parameters->all().size());
    for (std::size_t i = 0; i < counted.all().size(); ++i) {
      EXPECT_EQ(counted.all()[i].name, real.parameters->all()[i].name);
      EXPECT_TRUE(counted.all()[i].value.is_meta());
    }
  });
}

}  // namespace
}  // namespace gka::layers::test
