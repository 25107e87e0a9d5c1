// What the mixers are called: the half of their table that needs no torch, so that a configuration can be read without
// it. mixers.cpp has the other half, what makes one of each.
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <string_view>

namespace gka::layers {

struct KindName {
  std::string_view token;   // in pattern strings: "*", "GKA", …
  std::string_view name;    // for people: "Gated KalmaNet"
  std::string_view prefix;  // of its tensors, below "model.layers.N."
  bool stands_alone;        // published without an MLP beside it
};

inline constexpr std::array<KindName, 11> kKindNames{{
    {"*", "softmax attention", "self_attn", false},
    {"SWA", "sliding-window attention", "self_attn", false},
    {"GKA", "Gated KalmaNet", "gka", false},
    {"GDN", "Gated DeltaNet", "gdn", false},
    {"M2", "Mamba2", "mamba2", true},
    {"DN", "DeltaNet", "deltanet", false},
    {"KDA", "Kimi Delta Attention", "kda", false},
    {"MESA", "MesaNet", "mesa", false},
    {"GLA", "gated linear attention", "gla", false},
    {"RET", "RetNet", "retnet", false},
    {"LA", "linear attention", "linear_attn", false},
}};

/// By its token; throws std::invalid_argument that lists them where there is none (in a constant, it does not compile).
constexpr const KindName& kind_name(std::string_view token) {
  for (const auto& kind : kKindNames) {
    if (kind.token == token) return kind;
  }
  std::string known;
  for (const auto& kind : kKindNames) known += (known.empty() ? "" : ", ") + std::string(kind.token);
  throw std::invalid_argument("There is no mixer '" + std::string(token) + "'; a pattern takes " + known + ".");
}

}  // namespace gka::layers
