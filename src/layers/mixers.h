// The table of mixers. A new one is a file that defines its make function, and a line in mixers.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "layers/config.h"
#include "layers/mixer.h"
#include "layers/parameters.h"

namespace gka::layers {

struct MixerKind {
  std::string_view token;   // in pattern strings: "*", "GKA", …
  std::string_view name;    // for people: "Gated KalmaNet"
  std::string_view prefix;  // of its tensors, below "model.layers.N."
  bool stands_alone;        // published without an MLP beside it
  /// Adds the parameters to `scope`. Throws std::invalid_argument where the configuration makes no sense.
  std::unique_ptr<Mixer> (*make)(const MixerConfig& config, const Scope& scope);
};

std::span<const MixerKind> mixer_kinds();

/// The kind with this token; throws std::invalid_argument that lists them where there is none.
const MixerKind& mixer_kind(std::string_view token);

/// Mixer::flops of a mixer of that kind.
double mixing_flops(std::string_view token, const MixerConfig& config, std::int64_t tokens);

std::unique_ptr<Mixer> make_attention(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_sliding_window_attention(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_gka(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_gated_deltanet(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_deltanet(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_kda(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_mesanet(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_gla(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_retnet(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_linear_attention(const MixerConfig& config, const Scope& scope);
std::unique_ptr<Mixer> make_mamba2(const MixerConfig& config, const Scope& scope);

}  // namespace gka::layers
