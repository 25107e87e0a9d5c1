#include "layers/reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/IListRef.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace gka::layers::test {
namespace {

using at::Tensor;
using Int = std::int64_t;

// ---- pieces ---------------------------------------------------------------------------------------------------------

Tensor logistic(const Tensor& x) { return 1.0 / (1.0 + (-x).exp()); }
Tensor swish(const Tensor& x) { return x * logistic(x); }
Tensor softened(const Tensor& x) { return x.exp().log1p(); }
Tensor rms(const Tensor& x, double eps) { return x / (x.square().mean(-1, true) + eps).sqrt(); }
Tensor unit_divide(const Tensor& x) { return x / (x.square().sum(-1, true).sqrt() + 1e-6); }
Tensor unit_rsqrt(const Tensor& x) { return x / (x.square().sum(-1, true) + 1e-6).sqrt(); }

struct Weights {
  const Parameters& all;
  const Parameter* find(const std::string& name) const { return all.find(name); }
  Tensor operator()(const std::string& name) const {
    const auto* found = all.find(name);
    if (found == nullptr) throw std::invalid_argument("no parameter " + name);
    return found->value.detach().cpu();
  }
};

/// y = W x + b, b where there is one.
Tensor apply(const Weights& w, const std::string& name, const Tensor& x) {
  const Tensor y = x.matmul(w(name + ".weight").t());
  return w.find(name + ".bias") ? y + w(name + ".bias") : y;
}

/// SiLU(Σ_j w_j x_{t−W+1+j}), token by token.
Tensor conv(const Weights& w, const std::string& name, const Tensor& x) {
  const Tensor weight = w(name + ".weight").squeeze(1);  // [C,W]
  const Int width = weight.size(1);
  std::vector<Tensor> out;
  for (Int t = 0; t < x.size(0); ++t) {
    Tensor sum = at::zeros({x.size(1)}, x.options());
    for (Int j = 0; j < width; ++j) {
      const Int from = t - width + 1 + j;
      if (from >= 0) sum = sum + weight.select(1, j) * x[from];
    }
    if (w.find(name + ".bias")) sum = sum + w(name + ".bias");
    out.push_back(swish(sum));
  }
  return at::stack(out);
}

/// [T,heads,D]: projected, and convolved where there is a convolution; else `otherwise`.
Tensor head_projection(const Weights& w, const std::string& name, const Tensor& x, Int heads,
                       const std::function<Tensor(const Tensor&)>& otherwise) {
  const Tensor projected = apply(w, name + "_proj", x);
  const Tensor mixed = w.find(name + "_conv1d.weight") ? conv(w, name + "_conv1d", projected) : otherwise(projected);
  return mixed.view({x.size(0), heads, -1});
}
Tensor as_it_is(const Tensor& x) { return x; }

/// [T,H,D] to [T,heads,D]: head h is a copy of head h / (heads / H).
Tensor copies(const Tensor& x, Int heads) {
  std::vector<Tensor> out;
  for (Int h = 0; h < heads; ++h) out.push_back(x.select(1, h / (heads / x.size(1))));
  return at::stack(out, 1);
}

Tensor expanded(const Weights& w, const std::string& name, const Tensor& x, Int heads) {
  Tensor base = copies(x, heads);
  if (w.find(name + "_rep")) {
    const Tensor mixture = w(name + "_rep");
    std::vector<Tensor> out;
    for (Int e = 0; e < heads; ++e) out.push_back((mixture[e].view({1, -1, 1}) * x).sum(1));
    base = at::stack(out, 1);
  }
  if (!w.find("proj_" + name + ".linearA.weight")) return base;
  const Tensor low = swish(apply(w, "proj_" + name + ".linearA", x.flatten(1)));
  return base + apply(w, "proj_" + name + ".linearB", low).view(base.sizes());
}

Tensor rotated(const Tensor& x, double theta) {
  const Int half = x.size(2) / 2;
  Tensor out = x.clone();
  for (Int t = 0; t < x.size(0); ++t) {
    for (Int i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(t) * std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
      const Tensor a = x[t].select(1, i), b = x[t].select(1, half + i);
      out[t].select(1, i).copy_(a * std::cos(angle) - b * std::sin(angle));
      out[t].select(1, half + i).copy_(b * std::cos(angle) + a * std::sin(angle));
    }
  }
  return out;
}

/// γ = exp(−exp(A_log) softened(projection + dt_bias)).
Tensor decay(const Weights& w, const Tensor& projected) {
  return (-w("A_log").exp() * softened(projected + w("dt_bias"))).exp();
}

Tensor head_output(const Weights& w, const Tensor& o, const Tensor& x, const std::string& norm, double eps,
                   const std::function<Tensor(const Tensor&)>& activation) {
  Tensor y = rms(o, eps) * w(norm + ".weight");
  if (w.find("g_proj.weight")) y = y * activation(apply(w, "g_proj", x)).view(y.sizes());
  if (w.find("g_proj.0.weight")) y = y * activation(apply(w, "g_proj.1", apply(w, "g_proj.0", x))).view(y.sizes());
  return apply(w, "o_proj", y.flatten(1));
}

// ---- recurrences, per head ------------------------------------------------------------------------------------------

/// For each head the answers to its tokens: out[t][h] = f(t, h), heads outside so that f may keep a state.
Tensor per_head(Int tokens, Int heads, const std::function<std::vector<Tensor>(Int)>& sequence) {
  std::vector<Tensor> out;
  for (Int h = 0; h < heads; ++h) {
    const auto answers = sequence(h);
    if (static_cast<Int>(answers.size()) != tokens) throw std::logic_error("an answer is missing");
    out.push_back(at::stack(answers));
  }
  return at::stack(out, 1);
}

struct Inputs {
  Tensor q, k, v;  // [T,H,D]
  Tensor decay{};  // γ: [T,H], or [T,H,K]
  Tensor beta{};   // [T,H]
  double scale = 1.0;
};

double beta_at(const Inputs& in, Int t, Int h) { return in.beta.defined() ? in.beta[t][h].item<double>() : 1.0; }
/// γ as a column, to multiply rows of S.
Tensor decay_at(const Inputs& in, Int t, Int h) {
  if (!in.decay.defined()) return at::ones({1, 1}, at::kDouble);
  return in.decay[t][h].reshape({-1, 1});
}

/// S ← diag(γ) S + β k vᵀ, or the delta rule S ← (I − β k kᵀ) diag(γ) S + β k vᵀ; o = s Sᵀ q.
Tensor memory(const Inputs& in, bool delta) {
  return per_head(in.q.size(0), in.q.size(1), [&](Int h) {
    Tensor s = at::zeros({in.k.size(2), in.v.size(2)}, at::kDouble);
    std::vector<Tensor> out;
    for (Int t = 0; t < in.q.size(0); ++t) {
      const Tensor k = in.k[t][h], v = in.v[t][h];
      const double beta = beta_at(in, t, h);
      s = decay_at(in, t, h) * s;
      if (delta) s = s - beta * at::outer(k, k).matmul(s);
      s = s + beta * at::outer(k, v);
      out.push_back(in.scale * s.t().matmul(in.q[t][h]));
    }
    return out;
  });
}

/// Chebyshev on (H/f + aI) x̃ = q, x = x̃/f.
Tensor chebyshev(const Tensor& h, const Tensor& q, double a, Int iterations) {
  const double f = h.norm().item<double>();
  if (f == 0) return at::zeros_like(q);
  const double rho = 1.0 / (1.0 + 2.0 * a), bounds = 1.0 + 2.0 * a;
  double omega = 2.0;
  Tensor before = at::zeros_like(q), x = 2.0 / bounds * q;
  for (Int i = 1; i <= iterations; ++i) {
    omega = 4.0 / (4.0 - rho * rho * omega);
    const Tensor residual = h.matmul(x) / f + a * x - q;
    const Tensor next = x - 2.0 * omega / bounds * residual + (omega - 1.0) * (x - before);
    before = x;
    x = next;
  }
  return x / f;
}

Tensor solve(const GkaConfig& c, const Tensor& h, const Tensor& q) {
  if (c.solver_type == Solver::chebyshev && c.ridge_mode == RidgeMode::adaptive) {
    return chebyshev(h, q, c.ridge_strength, c.num_iter);
  }
  const double ridge = c.ridge_strength * (c.ridge_mode == RidgeMode::adaptive ? h.norm().item<double>() : 1.0);
  return at::linalg_solve(h + ridge * at::eye(h.size(0), h.options()), q);
}

// ---- mixers ---------------------------------------------------------------------------------------------------------

Tensor attention(const Weights& w, const MixerConfig& config, const Tensor& x, Int window) {
  const Int tokens = x.size(0), heads = config.num_attention_heads;
  const auto project = [&](const std::string& name, Int count) { return head_projection(w, name, x, count, as_it_is); };
  const auto normed = [&](const std::string& name, Int count) {
    return rotated(rms(project(name, count), config.rms_norm_eps) * w(name + "_norm.weight"), config.rope_theta);
  };
  const Int few = config.num_key_value_heads;
  const Tensor q = normed("q", heads), k = copies(normed("k", few), heads), v = copies(project("v", few), heads);
  const Tensor o = per_head(tokens, heads, [&](Int h) {
    std::vector<Tensor> out;
    for (Int t = 0; t < tokens; ++t) {
      Tensor sum = at::zeros({config.head_dim}, at::kDouble), total = at::zeros({}, at::kDouble);
      for (Int i = std::max<Int>(0, t - window + 1); i <= t; ++i) {
        const Tensor weight = (q[t][h].dot(k[i][h]) / std::sqrt(static_cast<double>(config.head_dim))).exp();
        sum = sum + weight * v[i][h];
        total = total + weight;
      }
      out.push_back(sum / total);
    }
    return out;
  });
  return apply(w, "o_proj", o.flatten(1));
}

Tensor gka_block(const Weights& w, const MixerConfig& config, const Tensor& x) {
  const auto& c = config.gka;
  const Int heads = config.num_attention_heads, kv_heads = config.num_key_value_heads;
  const Tensor q = unit_divide(head_projection(w, "q", x, heads, as_it_is));
  const Tensor k = unit_divide(expanded(w, "k", head_projection(w, "k", x, kv_heads, as_it_is), heads));
  const Tensor v = expanded(w, "v", head_projection(w, "v", x, kv_heads, as_it_is), heads);

  const Tensor ones = at::ones({x.size(0), heads}, at::kDouble);
  const Tensor gamma = c.use_forgetting_gate ? decay(w, apply(w, "a_proj", x)) : ones;
  const Tensor alpha = c.use_alpha_connection ? logistic(apply(w, "alpha_proj", x)) : ones;
  Tensor beta = ones;
  if (c.use_beta_gate) beta = logistic(apply(w, "b_proj", x));
  if (c.use_beta_gate && c.beta_weight == BetaWeight::published) beta = (beta + 1e-6).square();
  const double scale = c.gla_rescale ? 1.0 / std::sqrt(static_cast<double>(k.size(2))) : 1.0;

  const Tensor o = per_head(x.size(0), heads, [&](Int head) {
    const Tensor p = c.sketch_dim > 0 ? w("sketch")[head] : at::eye(k.size(2), at::kDouble);
    Tensor h = at::zeros({p.size(0), p.size(0)}, at::kDouble), u = at::zeros({k.size(2), v.size(2)}, at::kDouble);
    std::vector<Tensor> out;
    for (Int t = 0; t < x.size(0); ++t) {
      const Tensor key = k[t][head], query = q[t][head], small = p.matmul(key);
      const Tensor fade = gamma[t][head], write = beta[t][head];
      h = (c.use_forgetting_gate_kk ? fade * h : h) + write * at::outer(small, small);
      u = fade * u + write * at::outer(key, v[t][head]);
      Tensor asked = query;
      if (c.num_iter > 0) {
        const Tensor solution = p.t().matmul(solve(c, h, p.matmul(query)));
        asked = query + alpha[t][head] * (solution - query);
      }
      out.push_back(scale * u.t().matmul(asked));
    }
    return out;
  });
  return head_output(w, o, x, "o_norm", c.norm_eps, swish);
}

Tensor mesanet(const Weights& w, const MixerConfig& config, const Tensor& x) {
  const Int heads = config.num_attention_heads;
  const Tensor q = unit_rsqrt(head_projection(w, "q", x, heads, swish));
  const Tensor k = unit_rsqrt(head_projection(w, "k", x, heads, swish));
  const Tensor v = head_projection(w, "v", x, heads, as_it_is);
  const Tensor gamma = logistic(apply(w, "a_proj", x)), beta = logistic(apply(w, "b_proj", x));
  const Tensor ridge = (softened(w("lambda_params")) + config.mesa.lambda_lower_bound).view({heads, -1});
  const Tensor o = per_head(x.size(0), heads, [&](Int head) {
    Tensor h = at::zeros({k.size(2), k.size(2)}, at::kDouble), u = at::zeros({k.size(2), v.size(2)}, at::kDouble);
    std::vector<Tensor> out;
    for (Int t = 0; t < x.size(0); ++t) {
      h = gamma[t][head] * h + beta[t][head] * at::outer(k[t][head], k[t][head]);
      u = gamma[t][head] * u + beta[t][head] * at::outer(k[t][head], v[t][head]);
      out.push_back(u.t().matmul(at::linalg_solve(h + ridge[head].diag(), q[t][head])));
    }
    return out;
  });
  return head_output(w, o, x, "o_norm", config.mesa.norm_eps, swish);
}

double key_scale(const Tensor& k) { return 1.0 / std::sqrt(static_cast<double>(k.size(2))); }

/// The delta rules share all but their decay.
Tensor delta_rule(const Weights& w, const Tensor& x, Int q_heads, Int kv_heads, const Tensor& gamma, double beta_factor,
                  double eps, const std::function<Tensor(const Tensor&)>& gate) {
  const Tensor q = unit_rsqrt(head_projection(w, "q", x, q_heads, swish));
  const Tensor k = unit_rsqrt(expanded(w, "k", head_projection(w, "k", x, kv_heads, swish), q_heads));
  const Tensor v = expanded(w, "v", head_projection(w, "v", x, kv_heads, swish), q_heads);
  const Tensor beta = beta_factor * logistic(apply(w, "b_proj", x));
  const Tensor o = memory({.q = q, .k = k, .v = v, .decay = gamma, .beta = beta, .scale = key_scale(k)}, true);
  return head_output(w, o, x, "o_norm", eps, gate);
}

Tensor deltanet(const Weights& w, const MixerConfig& config, const Tensor& x) {
  const Int heads = config.num_attention_heads;
  return delta_rule(w, x, heads, heads, {}, config.deltanet.allow_neg_eigval ? 2.0 : 1.0, config.deltanet.norm_eps,
                    swish);
}

Tensor gated_deltanet(const Weights& w, const MixerConfig& config, const Tensor& x) {
  return delta_rule(w, x, config.num_attention_heads, config.num_key_value_heads, decay(w, apply(w, "gk_proj", x)),
                    config.gdn.allow_neg_eigval ? 2.0 : 1.0, config.gdn.norm_eps, swish);
}

Tensor kimi(const Weights& w, const MixerConfig& config, const Tensor& x) {
  const Int heads = config.num_attention_heads;
  const Tensor projected = apply(w, "f_proj.1", apply(w, "f_proj.0", x)) + w("dt_bias");
  const Tensor gamma = (-w("A_log").exp().view({1, heads, 1}) * softened(projected).view({x.size(0), heads, -1})).exp();
  return delta_rule(w, x, heads, heads, gamma, 1.0, config.kda.norm_eps, logistic);
}

Tensor gla(const Weights& w, const MixerConfig& config, const Tensor& x) {
  const Int heads = config.gla.num_heads;
  const Tensor q = head_projection(w, "q", x, heads, as_it_is), k = head_projection(w, "k", x, heads, as_it_is);
  const Tensor v = head_projection(w, "v", x, heads, as_it_is);
  const Tensor gate = logistic(apply(w, "gk_proj.1", apply(w, "gk_proj.0", x))).view(k.sizes());
  const Tensor gamma = gate.pow(1.0 / config.gla.gate_logit_normalizer);
  const Tensor o = memory({.q = q, .k = k, .v = v, .decay = gamma, .scale = key_scale(k)}, false);
  return head_output(w, o, x, config.gla.use_gate ? "g_norm_swish_gate" : "g_norm", config.gla.norm_eps, swish);
}

Tensor retnet(const Weights& w, const MixerConfig& config, const Tensor& x) {
  const auto& c = config.retnet;
  const Int heads = config.num_attention_heads;
  const Tensor q = rotated(head_projection(w, "q", x, heads, as_it_is), c.rope_theta);
  const Tensor k = rotated(head_projection(w, "k", x, heads, as_it_is), c.rope_theta);
  const Tensor v = head_projection(w, "v", x, heads, as_it_is);
  Tensor gamma = at::zeros({x.size(0), heads}, at::kDouble);
  for (Int h = 0; h < heads; ++h) gamma.select(1, h).fill_(1.0 - std::pow(2.0, -5.0 - static_cast<double>(h)));
  const Tensor o = memory({.q = q, .k = k, .v = v, .decay = gamma, .scale = key_scale(k)}, false);
  return head_output(w, o, x, c.use_gate ? "g_norm_swish_gate" : "g_norm", c.norm_eps, swish);
}

Tensor linear_attention(const Weights& w, const MixerConfig& config, const Tensor& x) {
  const auto& c = config.linear_attention;
  const Int heads = config.num_attention_heads;
  const auto map = [&](const std::string& name) {
    const Tensor z = head_projection(w, name, x, heads, as_it_is);
    const std::string maps = "feature_map_" + name;
    switch (c.feature_map) {
      case FeatureMap::elementwise_product: return apply(w, maps + ".layer1", z) * apply(w, maps + ".layer2", z);
      case FeatureMap::elu: return at::where(z > 0, z + 1, z.exp());
      case FeatureMap::relu: return at::where(z > 0, z, at::zeros_like(z));
      case FeatureMap::identity: break;
    }
    return z;
  };
  const Tensor q = map("q"), k = map("k"), v = head_projection(w, "v", x, heads, as_it_is);
  const Tensor o = memory({.q = q, .k = k, .v = v, .scale = key_scale(k)}, false);
  return head_output(w, o, x, "norm", c.norm_eps, swish);
}

Tensor mamba2(const Weights& w, const MixerConfig& config, const Tensor& x) {
  const auto& c = config.mamba2;
  const Int inner = static_cast<Int>(c.expand * static_cast<double>(config.hidden_size)), heads = inner / c.head_dim;
  const Int states = c.n_groups * c.state_size, tokens = x.size(0);
  const Tensor all = apply(w, "in_proj", x);
  const Tensor z = all.narrow(1, 0, inner), dt = all.narrow(1, 2 * inner + 2 * states, heads);
  const Tensor mixed = conv(w, "conv1d", all.narrow(1, inner, inner + 2 * states));
  const Tensor values = mixed.narrow(1, 0, inner).reshape({tokens, heads, -1});
  const auto group = [&](Int from) {
    return copies(mixed.narrow(1, from, states).reshape({tokens, c.n_groups, -1}), heads);
  };
  const Tensor delta = softened(dt + w("dt_bias"));
  const Tensor gamma = (-w("A_log").exp() * delta).exp();
  Tensor y = memory({.q = group(inner + states), .k = group(inner), .v = values, .decay = gamma, .beta = delta}, false);
  y = (y + w("D").view({1, heads, 1}) * values).flatten(1) * swish(z);
  const Tensor normed = rms(y.view({tokens, c.n_groups, -1}), c.norm_eps).flatten(1) * w("norm.weight");
  return apply(w, "out_proj", normed);
}

}  // namespace

Tensor reference(std::string_view token, const MixerConfig& config, const Parameters& parameters, const Tensor& x) {
  const Weights w{parameters};
  if (token == "*") return attention(w, config, x, x.size(0));
  if (token == "SWA") return attention(w, config, x, config.sliding_window);
  if (token == "GKA") return gka_block(w, config, x);
  if (token == "GDN") return gated_deltanet(w, config, x);
  if (token == "M2") return mamba2(w, config, x);
  if (token == "DN") return deltanet(w, config, x);
  if (token == "KDA") return kimi(w, config, x);
  if (token == "MESA") return mesanet(w, config, x);
  if (token == "GLA") return gla(w, config, x);
  if (token == "RET") return retnet(w, config, x);
  if (token == "LA") return linear_attention(w, config, x);
  throw std::invalid_argument("no reference for " + std::string(token));
}

}  // namespace gka::layers::test
