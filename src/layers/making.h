// How a mixer is made, for the header that each kind has: its choices, as a plain struct with the published defaults,
// and its make function.
//
// `fields` of such a struct names every choice once: reading and writing JSON, --help and error messages go through it.
// A visitor takes (name, field), where a field is bool, int64, double or an enum with a table of names (gka::name_of,
// gka::parse_name).
#pragma once

#include <memory>

namespace gka::layers {

class Mixer;
class Scope;
struct MixerConfig;

/// Adds the parameters to `scope`. Throws std::invalid_argument where the configuration makes no sense.
using MakeMixer = std::unique_ptr<Mixer>(const MixerConfig& config, const Scope& scope);

}  // namespace gka::layers
