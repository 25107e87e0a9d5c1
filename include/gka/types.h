// The choices a caller makes by name, and the tables of those names. Shared by the kernels (which know nothing of
// torch), the torch operators, the command line and Python: a name is spelled once, here.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace gka {

/// How (H + λI) x = q is solved.
enum class Solver : std::uint8_t { chebyshev, conjugate_gradient, gradient_descent, nesterov, exact };

/// How the backward pass goes through the solve: by the implicit function theorem (one more solve), or through every
/// iteration.
enum class Gradient : std::uint8_t { implicit, unrolled };

/// λ_t = ridge · ‖H_t‖_F, or λ = ridge.
enum class RidgeMode : std::uint8_t { adaptive, constant };

/// What the block's small operations put between: nothing, z·sigmoid(z), or sigmoid(z).
enum class Activation : std::uint8_t { none, silu, sigmoid };

/// How a head's vector is brought to unit length: not at all, z/(‖z‖ + eps), or z/√(‖z‖² + eps). Published
/// checkpoints have been trained with either.
enum class L2Norm : std::uint8_t { none, divide, rsqrt };

template <typename Enum>
using NameTable = std::pair<std::string_view, Enum>;

inline constexpr std::array<NameTable<Solver>, 5> kSolverNames{{
    {"chebyshev", Solver::chebyshev},
    {"conjugate_gradient", Solver::conjugate_gradient},
    {"gradient_descent", Solver::gradient_descent},
    {"nesterov", Solver::nesterov},
    {"exact", Solver::exact},
}};
inline constexpr std::array<NameTable<Gradient>, 2> kGradientNames{{
    {"implicit", Gradient::implicit},
    {"unrolled", Gradient::unrolled},
}};
inline constexpr std::array<NameTable<RidgeMode>, 2> kRidgeModeNames{{
    {"adaptive", RidgeMode::adaptive},
    {"constant", RidgeMode::constant},
}};

inline constexpr std::array<NameTable<Activation>, 3> kActivationNames{{
    {"none", Activation::none},
    {"silu", Activation::silu},
    {"sigmoid", Activation::sigmoid},
}};
inline constexpr std::array<NameTable<L2Norm>, 3> kL2NormNames{{
    {"none", L2Norm::none},
    {"divide", L2Norm::divide},
    {"rsqrt", L2Norm::rsqrt},
}};

constexpr const auto& names_of(Solver) { return kSolverNames; }
constexpr const auto& names_of(Gradient) { return kGradientNames; }
constexpr const auto& names_of(RidgeMode) { return kRidgeModeNames; }
constexpr const auto& names_of(Activation) { return kActivationNames; }
constexpr const auto& names_of(L2Norm) { return kL2NormNames; }

template <typename Enum>
constexpr std::string_view name_of(Enum value) {
  for (const auto& [name, entry] : names_of(value)) {
    if (entry == value) return name;
  }
  return "?";
}

template <typename Enum>
constexpr std::optional<Enum> parse_name(std::string_view text) {
  for (const auto& [name, entry] : names_of(Enum{})) {
    if (name == text) return entry;
  }
  return std::nullopt;
}

/// "chebyshev, conjugate_gradient, …": for error messages and --help.
template <typename Enum>
std::string list_names() {
  std::string list;
  for (const auto& [name, entry] : names_of(Enum{})) {
    if (!list.empty()) list += ", ";
    list += name;
  }
  return list;
}

}  // namespace gka
