#include "layers/mixers.h"

#include <array>
#include <stdexcept>
#include <string>

namespace gka::layers {
namespace {

constexpr std::array kKinds{
    MixerKind{"*", "softmax attention", "self_attn", false, make_attention},
    MixerKind{"SWA", "sliding-window attention", "self_attn", false, make_sliding_window_attention},
    MixerKind{"GKA", "Gated KalmaNet", "gka", false, make_gka},
    MixerKind{"GDN", "Gated DeltaNet", "gdn", false, make_gated_deltanet},
    MixerKind{"M2", "Mamba2", "mamba2", true, make_mamba2},
    MixerKind{"DN", "DeltaNet", "deltanet", false, make_deltanet},
    MixerKind{"KDA", "Kimi Delta Attention", "kda", false, make_kda},
    MixerKind{"MESA", "MesaNet", "mesa", false, make_mesanet},
    MixerKind{"GLA", "gated linear attention", "gla", false, make_gla},
    MixerKind{"RET", "RetNet", "retnet", false, make_retnet},
    MixerKind{"LA", "linear attention", "linear_attn", false, make_linear_attention},
};

}  // namespace

std::span<const MixerKind> mixer_kinds() { return kKinds; }

const MixerKind& mixer_kind(std::string_view token) {
  std::string known;
  for (const auto& kind : kKinds) {
    if (kind.token == token) return kind;
    known += (known.empty() ? "" : ", ") + std::string(kind.token);
  }
  throw std::invalid_argument("There is no mixer '" + std::string(token) + "'; a pattern takes " + known + ".");
}

double mixing_flops(std::string_view token, const MixerConfig& config, std::int64_t tokens) {
  Parameters nothing({.device = at::kMeta});
  return mixer_kind(token).make(config, Scope(nothing))->flops(tokens);
}

}  // namespace gka::layers
