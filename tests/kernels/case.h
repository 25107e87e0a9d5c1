// Random problems for the kernels, owning their storage: one CaseSpec says everything about a case, and the same spec
// gives the same numbers on every machine, so a failure is reproduced by pasting what `describe` printed.
//
// Outputs start out as NaN, and padded arrays have NaN in their gaps: what a backend forgets to write, or writes where
// it should not, is seen.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gka/kernels.h"

namespace gka::kernels::test {

/// How a [batch, tokens, heads, channels] array lies in memory; the channels are always contiguous.
enum class Layout : std::uint8_t {
  contiguous,   // nothing between
  padded,       // a view into a larger buffer: gaps after each head, each token and each row
  heads_first,  // [batch, heads, tokens, channels], as attention code often has it
};

/// Where the unit keys (and queries) point.
enum class Keys : std::uint8_t {
  spread,  // anywhere on the sphere
  silu,    // SiLU of a Gaussian, normalised: mostly positive, so all share a direction and H is badly conditioned
  shared,  // anywhere plus 0.7 of one unit vector, normalised: as keys are in trained models
};

struct CaseSpec {
  DType dtype = DType::float64;
  std::int64_t batch = 1;
  std::int64_t tokens = 16;
  std::int64_t heads = 2;
  std::int64_t key_dim = 8;
  std::int64_t value_dim = 6;
  std::int64_t key_group = 1;  // heads that share a key, and a value
  std::int64_t value_group = 1;
  std::vector<std::int64_t> lengths{};  // if any: packed sequences of these lengths (0 allowed); set batch and tokens

  bool log_decay = true;  // which optional arrays exist
  bool beta = true;
  bool alpha = true;
  bool h0 = false;
  bool u0 = false;
  bool d_h = false;
  bool d_u = false;

  double weakest_decay = 0.001;  // −log γ is drawn between these two, evenly in its own logarithm
  double strongest_decay = 0.5;
  double forget = 0.0;          // the share of tokens with γ = 0 (log_decay = −inf)
  double keep = 0.0;            // and with γ = 1
  double skip = 0.0;            // the share of tokens with β = 0
  bool float32_gates = false;   // gates in float32 beside 16-bit q, k, v
  bool asymmetric_h0 = false;   // h0 with an antisymmetric part, which counts for nothing
  bool full_rank_h0 = false;    // else the sum of a few keys' outer products
  bool ridge_diagonal = false;  // λ per head and channel (RidgeMode::constant with conjugate_gradient or exact)
  Keys keys = Keys::spread;
  Layout layout = Layout::contiguous;

  Options options{};  // ridge_diagonal in it is set by Case
  std::uint64_t seed = 1;
};

/// The spec as a C++ initialiser.
std::string describe(const CaseSpec& spec);

/// A spec drawn over everything a backend has to take, small enough (a few 10⁷ operations) to run by the hundred.
CaseSpec random_spec(std::uint64_t seed);

/// A four-dimensional array of any dtype and layout, read and written as double.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::array<std::int64_t, 4> shape, Layout layout = Layout::contiguous);

  std::int64_t size() const { return shape_[0] * shape_[1] * shape_[2] * shape_[3]; }
  const std::array<std::int64_t, 4>& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  explicit operator bool() const { return !bytes_.empty(); }

  View view() const;   // {} for an array that was left out
  void* data() const;  // nullptr for one that was left out

  double at(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) const;
  void set(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l, double value);
  /// All elements in the order of the indices, whatever the layout.
  std::vector<double> values() const;
  /// Whether everything between the elements is still the NaN it was made with.
  bool gaps_intact() const;

 private:
  std::int64_t position(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) const;

  DType dtype_ = DType::float32;
  std::array<std::int64_t, 4> shape_{};
  std::array<std::int64_t, 3> stride_{};
  std::int64_t start_ = 0;
  std::int64_t capacity_ = 0;
  mutable std::vector<std::byte> bytes_;
};

struct NamedArray {
  const char* name;
  const Array* array;
};

// Both structs below hand out pointers into themselves, so never from a temporary.

/// What one backend's forward pass writes. Arrays that the problem does not have are left out.
struct OwnedOutputs {
  Array o, h, u;
  Array norm, ridge, residual, true_residual, variance, certainty, x;  // Report
  Array saved_x, saved_norm, saved_h, saved_u;

  Outputs pointers() const&;
  std::vector<NamedArray> named() const&;  // o, h, u and the report; Saved belongs to its backend
  std::vector<NamedArray> named() && = delete;
  Outputs pointers() && = delete;
};

/// What one backend's backward pass writes.
struct OwnedGradients {
  Array d_q, d_k, d_v, d_log_decay, d_beta, d_alpha, d_h0, d_u0, d_ridge_diagonal;
  Gradients incoming;  // d_o, d_h, d_u, pointing into the Case

  Gradients pointers() const&;
  Gradients pointers() && = delete;
  std::vector<NamedArray> named() const&;
  std::vector<NamedArray> named() && = delete;
};

class Case {
 public:
  explicit Case(CaseSpec spec);
  Case(Case&&) = default;
  Case(const Case&) = delete;

  const CaseSpec& spec() const { return spec_; }
  const Problem& problem() const { return problem_; }
  std::string describe() const { return test::describe(spec_); }

  /// Fresh room for results. `dtype` is that of o and of the gradients by token: by default as the inputs have it;
  /// float64 lets the reference answer unrounded.
  OwnedOutputs outputs() const { return outputs(spec_.dtype); }
  OwnedOutputs outputs(DType dtype) const;
  OwnedGradients gradients() const;             // each of its input's type
  OwnedGradients gradients(DType dtype) const;  // all of this type

  // Inputs, to read or to change before a run. Left out: those that the spec leaves out.
  Array q, k, v, log_decay, beta, alpha, h0, u0, d_o, d_h, d_u;
  static constexpr std::array kByToken{&Case::q,    &Case::k,     &Case::v,  &Case::log_decay,
                                       &Case::beta, &Case::alpha, &Case::d_o};
  static constexpr std::array kByState{&Case::h0, &Case::u0, &Case::d_h, &Case::d_u};
  std::vector<std::int64_t> cu_seqlens;
  std::vector<double> ridge_diagonal;

 private:
  OwnedGradients gradients(DType tokens, DType gates) const;

  CaseSpec spec_;
  Problem problem_;
};

/// `count` entries of dimension `axis` (0 or 1) of `from`, from `begin` on, into `to` from `at` on; the rest matches.
void copy_slice(const Array& from, int axis, std::int64_t begin, std::int64_t count, Array& to, std::int64_t at);

/// Tokens begin … begin + length − 1 of sequence n as a case of its own, with that sequence's states.
Case slice(const Case& whole, std::int64_t n, std::int64_t begin, std::int64_t length);

/// Token `token` of every batch row as a one-token step on the states `h` and `u` (as the problem's states lie).
Step step_at(const Problem& problem, std::int64_t token, const View& o, void* h, void* u);

/// ‖a − b‖_F / ‖b‖_F; ‖a‖_F where b is zero; infinite where either has a NaN or an infinity.
double relative_error(const std::vector<double>& a, const std::vector<double>& b);
double relative_error(const Array& a, const Array& b);

struct TensorError {
  std::string name;
  double error = 0.0;
};

/// The error of each tensor of `got` (arrays that one of the two lacks are passed over; x is compared as `x`).
std::vector<TensorError> compare(const std::vector<NamedArray>& got, const std::vector<NamedArray>& want);

}  // namespace gka::kernels::test
