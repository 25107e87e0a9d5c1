#include "layers/mixers.h"

#include <algorithm>
#include <array>

#include "layers/kinds.h"

namespace gka::layers {
namespace {

constexpr MixerKind kind(std::string_view token, decltype(MixerKind::make) make) {
  const auto& names = kind_name(token);
  return {names.token, names.name, names.prefix, names.stands_alone, make};
}

constexpr std::array kKinds{
    kind("*", make_attention),
    kind("SWA", make_sliding_window_attention),
    kind("GKA", make_gka),
    kind("GDN", make_gated_deltanet),
    kind("M2", make_mamba2),
    kind("DN", make_deltanet),
    kind("KDA", make_kda),
    kind("MESA", make_mesanet),
    kind("GLA", make_gla),
    kind("RET", make_retnet),
    kind("LA", make_linear_attention),
};

}  // namespace

std::span<const MixerKind> mixer_kinds() { return kKinds; }

const MixerKind& mixer_kind(std::string_view token) {
  const auto found = std::ranges::find(kKinds, kind_name(token).token, &MixerKind::token);
  return *found;
}

double mixing_flops(std::string_view token, const MixerConfig& config, std::int64_t tokens) {
  Parameters nothing({.device = at::kMeta});
  return mixer_kind(token).make(config, Scope(nothing))->flops(tokens);
}

static_assert(kKinds.size() == kKindNames.size());

}  // namespace gka::layers
