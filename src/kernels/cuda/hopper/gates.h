// What the passes agree on about decays and about which chunks are refined.
//
// A γ of 0 has no logarithm: it counts as one so small that every product across it is exactly 0, and sums stay
// numbers. The forward pass adds natural logarithms in float64; the backward pass has logarithms to base 2 in float32,
// whose exponents end sooner.
#pragma once

namespace gka::kernels::cuda::hopper {

inline constexpr double kLn2 = 0.693147180559945309;

inline constexpr double kForgets = -745.2;  // below this γ is 0 in float64, and counts as
inline constexpr double kForget = -1e6;     // log γ
inline constexpr double kLogZero = -1e30;   // log 0, with which one can still subtract
inline constexpr double kVanished = -85;    // log ‖H‖_F below which 1/‖H‖_F leaves float32: nothing is remembered

// The same to base 2.
inline constexpr float kForgetsNarrow = -100;  // log γ below which γ is 0 in float32, and counts as
inline constexpr double kForgetLog2 = -160;    // log₂ γ
inline constexpr float kLog2Zero = -1e30f;     // log₂ 0
inline constexpr float kVanishedLog2 = -122;   // log₂ ‖H‖_F

/// Whether a chunk needs refining is asked of kAsked of its tokens, between which only three keys are written: of token
/// asked_token(i), i < kAsked, or of the tokens for which is_asked holds.
inline constexpr int kAsked = 16;
constexpr int asked_token(int i, int length) {
  const int token = (i + 1) * length / kAsked - 1;
  return token < 0 ? 0 : token;
}
constexpr bool is_asked(int token, int length) {
  return ((token + 1) * kAsked + length - 1) / length * length / kAsked == token + 1;
}

}  // namespace gka::kernels::cuda::hopper
