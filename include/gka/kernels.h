// The mathematics on raw pointers, without torch: one plain struct describes a call, and every backend (reference,
// cpu, cuda) takes the same struct, so a test can run one case through all of them and compare.
//
// Per head, with γ_t = exp(log_decay_t):
//
//   H_t = γ_t H_{t-1} + β_t k_t k_tᵀ        λ_t = ridge · ‖H_t‖_F
//   U_t = γ_t U_{t-1} + β_t k_t v_tᵀ        x_t = solve(H_t + λ_t I, q_t)
//                                           o_t = scale · U_tᵀ (q_t + α_t (x_t − q_t))
//
// docs/mathematics.md has the whole story.
//
// Memory: all of it is the caller's, and nothing is kept of it when a call returns (on a GPU: when the stream has done
// the call's work). Arrays need the alignment of their numbers and no more; what is written overlaps nothing else.
// Threads: nothing is kept between calls, so any number of threads may call at once (and a fork may), as long as no two
// write the same memory, states included.
// Errors: `reference` and `cpu` throw std::invalid_argument with one sentence that names the field where a size, an
// option or a null cannot be meant, before anything is written, and std::bad_alloc where memory runs out. That strides
// and pointers are those of arrays so large they cannot see. The numbers are not looked at: a NaN or an infinity makes
// NaN of what depends on it, in its own head and sequence, from its own token on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "gka/types.h"

namespace gka::kernels {

enum class DType : std::uint8_t { float64, float32, bfloat16, float16 };

inline constexpr std::array<NameTable<DType>, 4> kDTypeNames{{
    {"float64", DType::float64},
    {"float32", DType::float32},
    {"bfloat16", DType::bfloat16},
    {"float16", DType::float16},
}};
constexpr const auto& names_of(DType) { return kDTypeNames; }

/// Of one number.
constexpr std::int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return 8;
    case DType::float32: return 4;
    case DType::bfloat16:
    case DType::float16: return 2;
  }
  return 0;
}

/// In what such numbers are added up and states are kept.
constexpr DType accumulation_dtype(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

/// Which half of the operator to run: all of it, x alone (H, no values), or scale · U_tᵀ q_t alone (U, no solve).
enum class Part : std::uint8_t { both, solve, memory };

inline constexpr std::array<NameTable<Part>, 3> kPartNames{{
    {"both", Part::both},
    {"solve", Part::solve},
    {"memory", Part::memory},
}};
constexpr const auto& names_of(Part) { return kPartNames; }

/// A [batch, tokens, heads, channels] array with contiguous channels; strides count elements, and may be negative (or,
/// of an input, 0). Gates have one channel. `data == nullptr` means left out. Inputs are only read.
struct View {
  void* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

struct Options {
  Part part = Part::both;
  double scale = 1.0;
  double ridge = 0.02;  // a in λ_t = a ‖H_t‖_F; with RidgeMode::constant λ itself
  /// λ per head and key channel, [heads, key_dim]; only with RidgeMode::constant and the solvers conjugate_gradient
  /// and exact. Replaces `ridge`.
  const double* ridge_diagonal = nullptr;
  std::int64_t iterations = 30;  // 0 to 10000
  Solver solver = Solver::chebyshev;
  Gradient gradient = Gradient::implicit;
  RidgeMode ridge_mode = RidgeMode::adaptive;
  /// false: the backward pass takes λ_t (and with it the solver's bounds on the spectrum) as constants.
  bool ridge_gradient = true;
  /// false: log_decay fades U alone.
  bool decay_keys = true;
  /// Low-precision backends may spend the iterations in two cycles around one accurate residual. The reference and
  /// the CPU compute in float32 or better and have no use for it.
  bool refine = true;
  /// Tokens per chunk, 0 for the backend's own choice. Results do not depend on it beyond rounding.
  std::int64_t chunk = 0;
};

/// One call. All arrays are [batch, tokens, heads, …]. With `cu_seqlens` (sequences + 1 entries from 0 to tokens,
/// never decreasing) batch is 1 and sequence n is the tokens cu_seqlens[n] … cu_seqlens[n+1] − 1; without it sequence
/// n is batch row n and `sequences == batch`.
///
/// Neighbouring heads may share keys or values: head i reads head i / key_group of k and i / value_group of v. Gates,
/// and with them states, are each head's own. The gradients of k and v lie as k and v do, summed over who shares them.
///
/// States are contiguous [sequences, heads, key_dim, key_dim or value_dim] in the accumulation type: float64 for
/// float64 inputs, float32 otherwise. h0 counts as its symmetric part.
struct Problem {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t key_dim = 0;    // 1 to 256
  std::int64_t value_dim = 0;  // 1 to 256
  std::int64_t sequences = 0;
  std::int64_t key_group = 1;    // divides heads
  std::int64_t value_group = 1;  // divides heads
  const std::int64_t* cu_seqlens = nullptr;

  View q{};
  View k{};
  View v{};                  // absent with Part::solve; q, k and v are of one type
  View log_decay{};          // at most 0; absent: 0. Gates may be of any type
  View beta{};               // at least 0; absent: 1
  View alpha{};              // absent: 1; ignored unless Part::both
  const void* h0 = nullptr;  // absent: zero
  const void* u0 = nullptr;  // absent: zero

  Options options{};
};

/// The accumulation type of a problem, which is also that of its states.
constexpr DType state_dtype(const Problem& p) { return accumulation_dtype(p.q.dtype); }

/// What a forward pass keeps for the backward pass. The contents belong to the backend that wrote them; the caller
/// only provides the room, all of it or none.
struct Saved {
  void* x = nullptr;       // [batch, tokens, heads, key_dim], accumulation type; not for Part::memory
  double* norm = nullptr;  // [batch, tokens, heads]; not for Part::memory
  void* h = nullptr;       // [saved_segments(problem), heads, key_dim, key_dim]; not for Part::memory
  void* u = nullptr;       // [saved_segments(problem), heads, key_dim, value_dim]; not for Part::solve
};

/// Per-token diagnostics, each contiguous float64 [batch, tokens, heads] (x: [batch, tokens, heads, key_dim]), each
/// optional. Parts both and solve.
struct Report {
  double* norm = nullptr;           // ‖H_t‖_F
  double* ridge = nullptr;          // λ_t (with a diagonal: its mean)
  double* residual = nullptr;       // ‖(H_t + λ_t I) x_t − q_t‖
  double* true_residual = nullptr;  // ‖H_t x_t − q_t‖
  double* variance = nullptr;       // q_t · x_t
  double* certainty = nullptr;      // 1 − λ_t q_t · x_t/‖q_t‖², the share of q_t that lies in what was written
  double* x = nullptr;

  /// Whether anything is asked for that takes more than the solve itself has at hand.
  constexpr bool examines() const {
    return norm != nullptr || ridge != nullptr || residual != nullptr || true_residual != nullptr ||
           variance != nullptr || x != nullptr;
  }
  /// Whether anything of it is asked for.
  constexpr bool wanted() const { return examines() || certainty != nullptr; }
};

struct Outputs {
  View o{};  // [batch, tokens, heads, value_dim]; with Part::solve x, [batch, tokens, heads, key_dim]; optional
  void* h = nullptr;  // final states, each optional
  void* u = nullptr;
  Saved saved{};
  Report report{};
};

/// The backward pass: `d_o`, `d_h`, `d_u` come in (the latter two optional), the rest goes out, each optional, each in
/// the type its View names. d_h0 is symmetric.
struct Gradients {
  View d_o{};
  const void* d_h = nullptr;
  const void* d_u = nullptr;

  View d_q{}, d_k{}, d_v{}, d_log_decay{}, d_beta{}, d_alpha{};
  void* d_h0 = nullptr;
  void* d_u0 = nullptr;
  double* d_ridge_diagonal = nullptr;  // [heads, key_dim]
};

/// One token for each of `batch` sequences; their states are read and written in place. View::token_stride is unused.
/// Sequence b uses slot state_indices[b] of the pool (b without indices; indices are distinct). Heads share keys and
/// values as in a Problem.
struct Step {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t key_group = 1;
  std::int64_t value_group = 1;

  View q{}, k{}, v{}, log_decay{}, beta{}, alpha{};
  View o{};
  void* h = nullptr;  // [slots, heads, key_dim, key_dim]
  void* u = nullptr;  // [slots, heads, key_dim, value_dim]
  const std::int64_t* state_indices = nullptr;
  const std::int32_t* iterations = nullptr;  // per sequence; absent: options.iterations
  double* certainty = nullptr;               // as Report has it, [batch, heads]; optional

  Options options{};
};

/// States are kept at the start of every segment of this many tokens of a sequence; inside one they are recomputed.
inline constexpr std::int64_t kSegment = 128;

/// How many segments a problem can have at most, from its sizes alone (not from the values of cu_seqlens). Int: of any
/// type that counts, torch's symbolic one among them.
template <typename Int>
constexpr Int max_segments(bool packed, Int batch, Int tokens, Int sequences) {
  const Int segment(kSegment);
  return packed ? tokens / segment + sequences : batch * ((tokens + (segment - Int(1))) / segment);
}
/// For how many of them Saved has room: that many, and a few in which a backend keeps what it has to know of the
/// others. Each backend checks that what it keeps fits (kernels/cuda/saved.h).
template <typename Int>
constexpr Int saved_segments(bool packed, Int batch, Int tokens, Int sequences) {
  const Int segments = max_segments(packed, batch, tokens, sequences);
  return segments + Int(1) + segments / Int(2048);
}

/// Where a backend's parallel work runs. `run(n, body)` calls body(0) … body(n − 1), each once, possibly at the same
/// time, and returns when all are done; what a body throws it throws again. With one thread it is not called and may be
/// empty. Results do not depend on the number of threads.
struct Executor {
  int threads = 1;
  std::function<void(int n, const std::function<void(int)>& body)> run{};
};

/// An executor on `threads` threads of its own (0: as many as the machine has), for programs without torch. They are
/// started for each call and joined at its end, so that copies and calls at the same time have nothing in common.
Executor thread_executor(int threads = 0);

namespace reference {
// float64, one token at a time, in the paper's order. The definition every other backend is tested against. Ignores
// Saved (the backward pass recomputes), chunk and refine.
void forward(const Problem& problem, const Outputs& outputs);
void backward(const Problem& problem, const Gradients& gradients);
void step(const Step& step);
}  // namespace reference

namespace cpu {
// Chunked, vectorised, threaded. `backward` needs what `forward` left in `saved`.
void forward(const Problem& problem, const Outputs& outputs, const Executor& executor);
void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Executor& executor);
void step(const Step& step, const Executor& executor);

/// The instruction set in use: "avx512", "avx2" or "portable". The environment variable GKA_CPU forces one, and is read
/// at each call; asking for one this machine lacks, or an unknown one, throws std::invalid_argument.
const char* instruction_set();
}  // namespace cpu

namespace cuda {
// On NVIDIA cards from compute capability 8.0 on. Every pointer of the structs is device memory, cu_seqlens,
// state_indices, iterations and ridge_diagonal included; those of Saved are aligned to 16 bytes. Calls only queue work
// on the stream: they wait for nothing and allocate nothing themselves, so they can be captured in a graph; the same
// input gives the same bits. They trust the structs; std::runtime_error says what a card refused.
// Declared always, defined where the library was built with GKA_CUDA.

/// Where a call runs.
struct Device {
  int index = 0;
  void* stream = nullptr;  // a cudaStream_t
  /// Device memory, aligned to 16 bytes, that stays this call's until the stream has done the call's work.
  std::function<void*(std::size_t bytes)> allocate;
};

void forward(const Problem& problem, const Outputs& outputs, const Device& device);
void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);
void step(const Step& step, const Device& device);

/// A set of kernels. `plain` takes every call on every card; the others, faster, some calls on some cards.
enum class Path : std::uint8_t { none, plain, hopper };

inline constexpr std::array<NameTable<Path>, 3> kPathNames{{
    {"", Path::none},
    {"cuda", Path::plain},
    {"hopper", Path::hopper},
}};
constexpr const auto& names_of(Path) { return kPathNames; }

/// Which path takes a call, and why not a faster one (or none at all); empty where there is none faster.
struct Choice {
  Path path = Path::none;
  const char* why = "";
};

/// What `forward` and `backward` run: sizes, types, options, the device and what is asked for decide, never the
/// numbers. The environment variable GKA_GPU=plain switches faster paths off; GKA_GPU=hopper throws
/// std::invalid_argument on a card without them, as an unknown name does.
Choice choose(const Problem& problem, const Outputs& outputs, int device = 0);
Choice choose(const Problem& problem, const Gradients& gradients, int device = 0);

/// "NVIDIA H200, 132 multiprocessors". Throws std::runtime_error where this machine has no such device.
std::string describe(int device = 0);
}  // namespace cuda

}  // namespace gka::kernels
