// The table of mixers. A new one is a header with its choices and its make function, a file with its class, a line in
// either half of the table (kinds.h, mixers.cpp), and, if it has choices, its place in MixerConfig.
#pragma once

#include <cstdint>
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
  MakeMixer* make;
};

std::span<const MixerKind> mixer_kinds();

/// The kind with this token; throws std::invalid_argument that lists them where there is none.
const MixerKind& mixer_kind(std::string_view token);

/// Mixer::flops of a mixer of that kind.
double mixing_flops(std::string_view token, const MixerConfig& config, std::int64_t tokens);

}  // namespace gka::layers
