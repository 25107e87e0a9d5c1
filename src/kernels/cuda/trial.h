// Kernels on trial: they agree with the reference on the host, thread by thread, and no card has run them as they are.
// Each is off until GKA_TRIAL names it (`GKA_TRIAL=int8_products,…`, or `all`); docs/kernels.md says what each is for,
// and one that a card has run and timed loses its line here.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace gka::kernels::cuda {

enum class Trial : std::uint8_t {
  crowd_step,      // step_registers.cu: one token for three heads and more to a multiprocessor
  early_steps,     // step_registers.cu: no more iterations than are proven to be enough
  lone_step,       // step_registers.cu: one token for up to a head to a multiprocessor
  states_ahead,    // step_registers.cu: asks for the states of the head that will follow
  held_products,   // held_products.cuh: weights of products of few rows wait in registers
  grouped_step,    // step_registers.cu: a GKA block's token with fewer key heads than heads
  int8_products,   // many_products.cu and int8_rows.cu: int8 weights times more than eight rows
  grouped_heads,   // keys and values that heads share are read where they are, not copied for each head
  constant_ridge,  // hopper/: RidgeMode::constant with one λ
  keys_part,       // hopper/: Part::solve
  narrow_heads,    // hopper/: heads of 32 channels without padding
  wide_heads,      // hopper/: more than 128 key channels, forward
};

inline constexpr std::pair<std::string_view, Trial> kTrials[] = {
    {"crowd_step", Trial::crowd_step},         {"early_steps", Trial::early_steps},
    {"lone_step", Trial::lone_step},           {"held_products", Trial::held_products},
    {"states_ahead", Trial::states_ahead},     {"grouped_step", Trial::grouped_step},
    {"int8_products", Trial::int8_products},   {"grouped_heads", Trial::grouped_heads},
    {"constant_ridge", Trial::constant_ridge}, {"keys_part", Trial::keys_part},
    {"narrow_heads", Trial::narrow_heads},     {"wide_heads", Trial::wide_heads},
};

/// Whether `asked`, a list of names with commas between them, has this one.
inline bool names_trial(std::string_view asked, Trial trial) {
  bool named = false;
  while (!asked.empty()) {
    const auto comma = asked.find(',');
    const auto name = asked.substr(0, comma);
    asked = comma == std::string_view::npos ? std::string_view() : asked.substr(comma + 1);
    bool known = name == "all";
    named |= known;
    for (const auto& [known_name, entry] : kTrials) {
      known |= name == known_name;
      named |= name == known_name && entry == trial;
    }
    if (!known) {
      std::string names;
      for (const auto& entry : kTrials) names += ", " + std::string(entry.first);
      throw std::invalid_argument("GKA_TRIAL: '" + std::string(name) + "' is not known; it takes all" + names);
    }
  }
  return named;
}

/// Read at each call, as GKA_GPU is, so that a test can compare a trial with what it would replace in one process.
inline bool on_trial(Trial trial) {
  const char* asked = std::getenv("GKA_TRIAL");
  return asked != nullptr && names_trial(asked, trial);
}

}  // namespace gka::kernels::cuda
