// Softmax attention as Qwen3 has it: grouped heads, an RMS norm on q and k, rotary positions; full, or over a sliding
// window of the last tokens. Llama's and Qwen2's have no norm. Optionally q, k and v pass a short convolution first.
//
// Its state is a cache of rotated keys and of values. Attention does not ask for their order, so a window's cache is a
// ring: position p lies at p mod window.
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>

#include "layers/functions.h"
#include "layers/mixers.h"
#include "layers/projection.h"
#include "layers/rotary.h"
#include "ops/int8_pages.h"
#include "ops/paged_attention.h"

namespace gka::layers {
namespace {

/// Queries that share one mask where the plain causal form will not do: bounds the mask's size.
constexpr std::int64_t kQueryBlock = 512;

struct Heads {
  at::Tensor q, k, v;  // [B,T,heads,D]
};

at::Tensor softmax_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask) {
  const auto mask_option = mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt;
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask_option,
                                          /*dropout_p=*/0.0, /*is_causal=*/!mask.defined(), /*scale=*/std::nullopt,
                                          /*enable_gqa=*/!mask.defined() && q.size(2) != k.size(2))
      .transpose(1, 2);
}

/// [queries, keys]: key j (at first_key + j) is seen by query i (at first_query + i) if it is not later and not further
/// back than the window.
at::Tensor window_mask(std::int64_t first_query, std::int64_t queries, std::int64_t first_key, std::int64_t keys,
                       std::int64_t window, at::Device device) {
  const auto options = at::TensorOptions(at::kLong).device(device);
  const auto age = at::arange(first_query, first_query + queries, options).unsqueeze(1) -
                   at::arange(first_key, first_key + keys, options);
  return age.ge(0).logical_and(age.lt(window));
}

/// B sequences of equal geometry: T queries after `past` tokens, whose keys are all there (past + T of them).
at::Tensor attend(const Heads& h, std::int64_t past, std::int64_t window) {
  const auto tokens = h.q.size(1), keys = h.k.size(1);
  if (past == 0 && tokens <= window) return softmax_attention(h.q, h.k, h.v, {});
  const auto k = repeat_heads(h.k, h.q.size(2)), v = repeat_heads(h.v, h.q.size(2));
  std::vector<at::Tensor> parts;
  for (std::int64_t begin = 0; begin < tokens; begin += kQueryBlock) {
    const auto size = std::min(kQueryBlock, tokens - begin);
    const auto position = past + begin;
    const auto first = window >= keys ? 0 : std::max<std::int64_t>(0, position - window + 1);
    const auto span = position + size - first;
    const auto mask = window_mask(position, size, first, span, window, h.q.device());
    parts.push_back(
        softmax_attention(h.q.narrow(1, begin, size), k.narrow(1, first, span), v.narrow(1, first, span), mask));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
}

/// Whether CUDA's attention for packed sequences and windows takes the call.
bool has_packed_kernel(const Heads& h) {
  const auto type = h.q.scalar_type();
  return h.q.is_cuda() && (type == at::kBFloat16 || type == at::kHalf) && h.q.size(3) <= 256 && h.q.size(3) % 8 == 0;
}

at::Tensor attend_packed_kernel(const Heads& h, const Sequences& sequences, std::int64_t window) {
  const auto bounded = window < sequences.longest();
  const auto left = bounded ? std::optional<c10::SymInt>(window - 1) : std::nullopt;
  const auto right = bounded ? std::optional<c10::SymInt>(0) : std::nullopt;
  if (!sequences.is_packed()) {
    return std::get<0>(at::_flash_attention_forward_symint(h.q, h.k, h.v, {}, {}, h.q.size(1), h.k.size(1), 0.0, true,
                                                           false, std::nullopt, left, right));
  }
  const auto bounds = sequences.cu_seqlens().to(at::kInt);
  return std::get<0>(at::_flash_attention_forward_symint(h.q.squeeze(0), h.k.squeeze(0), h.v.squeeze(0), bounds, bounds,
                                                         sequences.longest(), sequences.longest(), 0.0, true, false,
                                                         std::nullopt, left, right))
      .unsqueeze(0);
}

class Attention final : public Mixer {
 public:
  Attention(std::int64_t window, const MixerConfig& config, const Scope& scope)
      : window_(window),
        heads_(config.num_attention_heads),
        kv_heads_(config.num_key_value_heads),
        size_(config.head_dim),
        eps_(config.rms_norm_eps) {
    divided(heads_, kv_heads_, "query heads per key head");
    divided(size_, 2, "head_dim of a rotary embedding");
    const auto add = [&](std::string_view name, std::int64_t out, std::int64_t in, bool biased, at::Tensor& weight,
                         at::Tensor& bias) {
      weight = projection_weight(name, out, in, config, scope);
      if (biased) bias = projection_bias(name, out, scope);
    };
    const bool in_bias = config.attention_bias || config.attention.qkv_bias;
    add("q_proj", heads_ * size_, config.hidden_size, in_bias, q_, q_bias_);
    add("k_proj", kv_heads_ * size_, config.hidden_size, in_bias, k_, k_bias_);
    add("v_proj", kv_heads_ * size_, config.hidden_size, in_bias, v_, v_bias_);
    add("o_proj", config.hidden_size, heads_ * size_, config.attention_bias, o_, o_bias_);
    if (config.attention.qk_norm) {
      q_norm_ = norm_weight("q_norm", size_, scope);
      k_norm_ = norm_weight("k_norm", size_, scope);
    }
    frequencies_ = rotary_frequencies(size_, config.rope_theta, config.rope);
    turns_ = at::tensor(frequencies_.turns, at::kDouble).to(scope.device());
    const auto add_conv = [&](std::string_view name, std::int64_t heads, ShortConv& conv) {
      if (config.attention.conv_size > 0) {
        conv = ShortConv(name, heads * size_, config.attention.conv_size, /*bias=*/false, config, scope);
      }
    };
    add_conv("q_conv1d", heads_, q_conv_);
    add_conv("k_conv1d", kv_heads_, k_conv_);
    add_conv("v_conv1d", kv_heads_, v_conv_);
  }

  std::vector<StateField> state_fields(at::ScalarType dtype) const override {
    std::vector<StateField> fields;
    for (const auto* conv : {&q_conv_, &k_conv_, &v_conv_}) conv->add_fields(fields, dtype);
    fields.push_back({.name = "keys", .shape = {kv_heads_, size_}, .dtype = dtype, .max_tokens = window_});
    fields.push_back({.name = "values", .shape = {kv_heads_, size_}, .dtype = dtype, .max_tokens = window_});
    return fields;
  }

  bool takes_stream() const override { return true; }

  /// Each token that a token sees is a product with q and one with its value.
  double flops(std::int64_t tokens) const override {
    const auto length = static_cast<double>(tokens), reach = std::min(static_cast<double>(window_), length);
    const double seen = reach * (1 - (reach - 1) / (2 * length));  // on average, of a causal sequence
    return kWithBackward * 2 * kMultiplyAdd * seen * static_cast<double>(heads_ * size_);
  }

 protected:
  at::Tensor mix(const at::Tensor& x, Call& call) const override {
    const auto turn = shared_rotation(call.inference().rotations.get(), call.positions(), frequencies_.turns, turns_,
                                      frequencies_.factor, x.scalar_type());
    const auto normed = [&](const at::Tensor& projected, const at::Tensor& norm) {
      return rotate(norm.defined() ? rms_norm(heads(projected), norm, eps_) : heads(projected).contiguous(), turn);
    };
    const auto parts = project_all(x, {q_, k_, v_}, call.inference().norm);
    const auto finished = [&](const at::Tensor& projected, const at::Tensor& bias, const ShortConv& conv) {
      const auto biased = bias.defined() ? projected + bias.to(projected.scalar_type()) : projected;
      return conv ? conv.forward(biased, call) : biased;
    };
    const auto q = finished(parts[0], q_bias_, q_conv_), k = finished(parts[1], k_bias_, k_conv_);
    const Heads h{.q = normed(q, q_norm_), .k = normed(k, k_norm_), .v = heads(finished(parts[2], v_bias_, v_conv_))};
    const auto o = call.is_step() ? one_token(h, call) : whole_sequences(h, call);
    const auto stream = call.stream(x);
    return stream.defined() ? project_onto(stream, o.flatten(-2), o_, o_bias_) : project(o.flatten(-2), o_, o_bias_);
  }

 private:
  at::Tensor heads(const at::Tensor& x) const { return x.unflatten(-1, {-1, size_}); }

  /// Caches in pages (layers::Inference); a window's is a ring of its own.
  bool in_pages(const Call& call) const { return window_ == kUnbounded && call.inference().pages.defined(); }

  at::Tensor whole_sequences(const Heads& h, Call& call) const {
    if (in_pages(call)) return from_pages(h, call);
    const auto& sequences = call.sequences();
    const at::Tensor keys = call.take(), values = call.take();
    const bool fresh = !keys.defined();
    if (fresh && !call.wants_state()) {
      if (has_packed_kernel(h) && (sequences.is_packed() || window_ < sequences.longest())) {
        return attend_packed_kernel(h, sequences, window_);
      }
      if (!sequences.is_packed()) return attend(h, 0, window_);
    }
    return one_by_one(h, keys, values, call);
  }

  /// Each sequence for itself, with its cache before it and after.
  at::Tensor one_by_one(const Heads& h, const at::Tensor& keys, const at::Tensor& values, Call& call) const {
    const auto& sequences = call.sequences();
    const auto& bounds = sequences.bounds();
    const auto flat = Heads{.q = h.q.flatten(0, 1), .k = h.k.flatten(0, 1), .v = h.v.flatten(0, 1)};
    std::vector<at::Tensor> answers, all_keys, all_values;
    for (std::int64_t n = 0; n < sequences.count(); ++n) {
      const auto begin = bounds[n], tokens = bounds[n + 1] - begin, past = sequences.past()[n];
      // Of a window only the last tokens are still there: the positions from `held` on.
      const auto held = past - std::min(past, window_);
      const auto with_past = [&](const at::Tensor& cache, const at::Tensor& fresh) {
        const auto now = fresh.narrow(0, begin, tokens);
        return past == 0 ? now : at::cat({unroll(cache[n], held, past), now});
      };
      const auto k = with_past(keys, flat.k), v = with_past(values, flat.v);
      const auto q = flat.q.narrow(0, begin, tokens);
      answers.push_back(
          tokens == 0 ? q
                      : attend({.q = q.unsqueeze(0), .k = k.unsqueeze(0), .v = v.unsqueeze(0)}, past - held, window_)
                            .squeeze(0));
      all_keys.push_back(k);
      all_values.push_back(v);
    }
    call.give(cache_of(all_keys, h.k, sequences));
    call.give(cache_of(all_values, h.v, sequences));
    return at::cat(answers).view(h.q.sizes());
  }

  /// Each sequence for itself: its keys and values go to its pages, and come from there where it has a past. Pages of
  /// bytes round them, so there all are seen as their page has them, and it does not matter how a prompt is cut.
  at::Tensor from_pages(const Heads& h, Call& call) const {
    const auto& sequences = call.sequences();
    const auto& bounds = sequences.bounds();
    const auto& pages = call.inference().pages;
    const auto& dropped = call.inference().dropped;
    const at::Tensor keys = call.take(), values = call.take();
    const auto flat = Heads{.q = h.q.flatten(0, 1), .k = h.k.flatten(0, 1), .v = h.v.flatten(0, 1)};
    const auto positions = sequences.positions().flatten();
    std::vector<at::Tensor> answers;
    for (std::int64_t n = 0; n < sequences.count(); ++n) {
      const auto begin = bounds[n], tokens = bounds[n + 1] - begin, gone = dropped.empty() ? 0 : dropped[n];
      const auto past = sequences.past()[n] - gone;
      if (tokens == 0) continue;
      auto places = positions.narrow(0, begin, tokens);
      if (gone > 0) places = places - gone;
      const auto in_page = places.remainder(kPageTokens);
      const auto page = pages[n].index_select(0, places.div(kPageTokens, "floor"));
      const auto held = pages[n].narrow(0, 0, (past + tokens + kPageTokens - 1) / kPageTokens);
      const auto all = [&](const at::Tensor& pool, const at::Tensor& every) {
        const auto fresh = every.narrow(0, begin, tokens);
        if (ops::is_int8_pages(pool)) {
          ops::write_int8_pages(pool, page, in_page, fresh);
          return ops::read_int8_pages(pool, held, fresh.scalar_type()).narrow(0, 0, past + tokens);
        }
        pool.flatten(0, 1).index_copy_(0, page * kPageTokens + in_page, fresh.to(pool.scalar_type()));
        if (past == 0) return fresh;
        return pool.index_select(0, held).flatten(0, 1).narrow(0, 0, past + tokens);
      };
      const auto k = all(keys, flat.k), v = all(values, flat.v);
      const auto q = flat.q.narrow(0, begin, tokens);
      answers.push_back(
          attend({.q = q.unsqueeze(0), .k = k.unsqueeze(0), .v = v.unsqueeze(0)}, past, window_).squeeze(0));
    }
    call.give({});
    call.give({});
    return answers.empty() ? h.q : at::cat(answers).view(h.q.sizes());
  }

  /// The positions from … to − 1 of one sequence's cache in order.
  at::Tensor unroll(const at::Tensor& cache, std::int64_t from, std::int64_t to) const {
    if (to <= window_) return cache.narrow(0, from, to - from);
    const auto places = at::arange(from, to, at::TensorOptions(at::kLong).device(cache.device())).remainder(window_);
    return cache.index_select(0, places);
  }

  /// The caches of all sequences as one tensor, from each one's last tokens in order.
  at::Tensor cache_of(const std::vector<at::Tensor>& parts, const at::Tensor& like, const Sequences& sequences) const {
    std::int64_t capacity = 0;
    for (std::int64_t n = 0; n < sequences.count(); ++n) capacity = std::max(capacity, total(sequences, n));
    capacity = std::min(capacity, window_);
    at::Tensor cache = at::zeros({sequences.count(), capacity, kv_heads_, size_}, like.options());
    for (std::int64_t n = 0; n < sequences.count(); ++n) {
      const auto end = total(sequences, n), kept = std::min(end, window_);
      const auto last = parts[n].narrow(0, parts[n].size(0) - kept, kept);
      const auto places = at::arange(end - kept, end, at::TensorOptions(at::kLong).device(like.device()));
      cache[n].index_copy_(0, places.remainder(window_), last);
    }
    return cache;
  }

  static std::int64_t total(const Sequences& sequences, std::int64_t n) {
    return sequences.past()[n] + sequences.bounds()[n + 1] - sequences.bounds()[n];
  }

  at::Tensor one_token(const Heads& h, Call& call) const {
    const at::Tensor keys = call.take(), values = call.take();
    if (in_pages(call)) return one_token_in_pages(h, keys, values, call);
    const auto batch = h.q.size(0), room = keys.size(1);
    const auto slots = call.slots().defined() ? call.slots().to(at::kLong)
                                              : at::arange(batch, at::TensorOptions(at::kLong).device(keys.device()));
    const auto& positions = call.positions();
    const auto places = window_ == kUnbounded ? positions : positions.remainder(window_);
    at::Tensor(keys).index_put_({slots, places}, h.k.to(keys.scalar_type()));
    at::Tensor(values).index_put_({slots, places}, h.v.to(values.scalar_type()));

    // On the CPU looking is cheap, so only what is filled is read; a GPU would have to be waited for.
    const auto longest = positions.is_cpu() ? std::min(room, positions.max().item<std::int64_t>() + 1) : room;
    return answer_one(h.q, call.read(keys.narrow(1, 0, longest), batch), call.read(values.narrow(1, 0, longest), batch),
                      positions);
  }

  /// The caller gives no more pages than the longest sequence needs, so all of them are read.
  at::Tensor one_token_in_pages(const Heads& h, const at::Tensor& keys, const at::Tensor& values,
                                const Call& call) const {
    const auto& pages = call.inference().pages;
    const auto& places = call.inference().places.defined() ? call.inference().places : call.positions();
    if (ops::has_paged_attention(h.q, keys)) {
      return ops::paged_attention(h.q, h.k, h.v, keys, values, pages, places);
    }
    const auto page = pages.gather(1, places.div(kPageTokens, "floor").unsqueeze(1)).squeeze(1);
    const auto in_page = places.remainder(kPageTokens);
    const auto used = [&](const at::Tensor& pool, const at::Tensor& fresh) {
      if (ops::is_int8_pages(pool)) {
        ops::write_int8_pages(pool, page, in_page, fresh);
        return ops::read_int8_pages(pool, pages.flatten(), fresh.scalar_type())
            .view({h.q.size(0), -1, kv_heads_, size_});
      }
      pool.flatten(0, 1).index_copy_(0, page * kPageTokens + in_page, fresh.to(pool.scalar_type()));
      return pool.index_select(0, pages.flatten()).view({h.q.size(0), -1, kv_heads_, size_});
    };
    const auto k = used(keys, h.k), v = used(values, h.v);
    return answer_one(h.q, k, v, places);
  }

  /// q [B,heads,D] against cached keys and values [B,room,kv heads,D], of which places + 1 are filled.
  at::Tensor answer_one(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& places) const {
    const auto batch = query.size(0), room = keys.size(1);
    const auto seen = at::arange(room, places.options()).le(places.unsqueeze(1)).view({batch, 1, 1, room});
    // The query heads of one key head are the rows of one small attention.
    const auto q = query.reshape({batch, kv_heads_, -1, size_}).transpose(1, 2);
    const auto o = softmax_attention(q, keys.to(q.scalar_type()), values.to(q.scalar_type()), seen);
    return o.transpose(1, 2).reshape({batch, heads_, size_});
  }

  std::int64_t window_, heads_, kv_heads_, size_;
  double eps_;
  RotaryFrequencies frequencies_;
  at::Tensor turns_;  // of frequencies_
  at::Tensor q_, k_, v_, o_, q_bias_, k_bias_, v_bias_, o_bias_, q_norm_, k_norm_;
  ShortConv q_conv_, k_conv_, v_conv_;
};

}  // namespace

std::unique_ptr<Mixer> make_attention(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<Attention>(kUnbounded, config, scope);
}

std::unique_ptr<Mixer> make_sliding_window_attention(const MixerConfig& config, const Scope& scope) {
  if (config.sliding_window < 1) {
    throw std::invalid_argument("The pattern has SWA, but sliding_window is " + std::to_string(config.sliding_window) +
                                "; give the number of tokens a token sees.");
  }
  return std::make_unique<Attention>(config.sliding_window, config, scope);
}

}  // namespace gka::layers
