// The memories of the delta rule and of linear attention, in chunks on tensor cores:
//
//   S ← γ ∘ S + k uᵀ,   u = β (v − (γ ∘ S)ᵀ k) with the delta rule, else β v,   o = scale · Sᵀ q
//
// with one decay γ per head and token (Gated DeltaNet, DeltaNet; Mamba2, RetNet, linear attention) or one for each
// channel of the keys, a row of S (Kimi Delta Attention; gated linear attention). In a chunk of 64 tokens with the
// state S before it, G_t = Σ_{j≤t} log γ_j and M_ti = exp(G_t − G_i) for i ≤ t:
//
//   P = scale · tril(M ∘ q kᵀ),   T = (I + tril(β M ∘ k kᵀ, −1))⁻¹,   w = T (β e^G ∘ k)        chunk_wy.cu
//   u = T β v − w S,   o = scale · e^G ∘ (q S) + P u,   S ← e^{G_C} S + (e^{G_C − G} ∘ k)ᵀ u   chunk_states.cu
//
// The first line knows nothing of S: all chunks at once. The second walks along a sequence, a block for a few columns
// of S, which depend on no others. The backward pass is cut the same way: a walk from the end leaves du and the
// gradient of each chunk's last state (bwd_states.cu), then every chunk has all it needs for dq, dk, dv, dβ and dg
// (bwd_inputs.cu).
//
// With decays per channel M stands inside the sum over channels, M ∘ q kᵀ is Σ_c q_tc M_tic k_ic, and is no product of
// matrices any more. chunk_wy_channels.cu and bwd_inputs_channels.cu cut the chunk into blocks of 16 tokens. Between
// two blocks M is a factor for the later token, back to a border between them, times one for the earlier, up to it:
// both at most 1, and a product of matrices again. Inside a block each pair and channel has its own exponential. The
// walks are the same: there the decays are in the tiles.
//
// q, k, v are bfloat16; sums and states in float32, rounded where they enter a product.
#pragma once

#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels::cuda {

/// A [tokens, heads, channels] array of bfloat16; strides count elements and are multiples of 8, a row begins at a
/// multiple of 16 bytes.
struct MemoryRows {
  const void* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
};

/// A number as the sum of two float32, with twice the digits of one.
struct TwoFloats {
  float high, low;
};

struct ChunkedMemory {
  static constexpr int kChunk = 64;
  static constexpr std::int64_t kMaxKeys = 128;    // the widest key; keys and values come in multiples of 8
  static constexpr int kSharedBytes = 227 * 1024;  // of a block's shared memory, at most

  std::int64_t sequences = 0, heads = 0, key_dim = 0, value_dim = 0;
  std::int64_t length = 0;               // of every sequence, unless `bounds` says otherwise
  std::int64_t tokens = 0;               // of all sequences together
  const std::int64_t* bounds = nullptr;  // sequence n is the tokens bounds[n] … bounds[n+1] − 1
  bool delta = false;
  bool per_channel = false;  // log_decay is there, and is [tokens, heads, K], its rows at multiples of 16 bytes
  float scale = 1;
  MemoryRows q{}, k{}, v{};
  const float* log_decay = nullptr;  // [tokens, heads]; absent: 0
  const float* beta = nullptr;       // [tokens, heads]; absent: 1
  const float* initial = nullptr;    // [sequences, heads, K, V]; absent: 0

  /// For how many chunks there is room in what is kept per chunk.
  constexpr std::int64_t slots() const {
    return bounds != nullptr ? tokens / kChunk + sequences : sequences * ((length + kChunk - 1) / kChunk);
  }
  /// Bytes of a head's tiles of a chunk (ChunkTiles in tile.cuh): q, k, w, P and G, or with decays per channel e^{G_C}.
  constexpr std::int64_t tile_bytes() const {
    const std::int64_t keys = key_dim <= 64 ? 64 : 128, row = 2 * (keys + 8);
    return (2 * kChunk + (delta ? kChunk : 1)) * row + kChunk * 2 * (kChunk + 8) +
           (per_channel ? 4 * keys : kChunk * 8);
  }
  /// Whether u is an array of its own; else it is v.
  constexpr bool has_own_u() const { return delta || beta != nullptr; }
};

/// Whether a device has that much shared memory: Hopper has, Ampere has not.
bool has_room_for_chunks(int device);

/// What the passes hand on; u, t and the states are bfloat16. The caller provides the room: of `forward` alone for one
/// call, in training until the backward pass.
struct ChunkedMemorySaved {
  void* tiles = nullptr;   // [slots, heads, tile_bytes()]
  void* t = nullptr;       // [slots, heads, kChunk, kChunk]; with the delta rule, and where a backward pass follows
  void* u = nullptr;       // [tokens, heads, V]; where has_own_u
  void* states = nullptr;  // [slots, heads, K, V]: S before each chunk; where a backward pass follows
};

struct ChunkedMemoryOutputs {
  void* o = nullptr;       // bfloat16 [tokens, heads, V]
  float* final = nullptr;  // [sequences, heads, K, V]; may be left out
};
void chunked_memory(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const ChunkedMemoryOutputs& out,
                    const Device& device);

/// `d_o` and `d_final` come in; the rest goes out. Arrays are contiguous.
struct ChunkedMemoryGradients {
  MemoryRows d_o{};
  const float* d_final = nullptr;  // absent: 0
  void* d_u = nullptr;             // scratch, bfloat16 [tokens, heads, V]
  void* d_states = nullptr;        // scratch, bfloat16 [slots, heads, K, V]

  void* d_q = nullptr;  // bfloat16, as are d_k and d_v
  void* d_k = nullptr;
  void* d_v = nullptr;
  float* d_log_decay = nullptr;  // as log_decay; may be left out
  float* d_beta = nullptr;       // likewise
  float* d_initial = nullptr;    // likewise
};
void chunked_memory_backward(const ChunkedMemory& m, const ChunkedMemorySaved& saved,
                             const ChunkedMemoryGradients& gradients, const Device& device);

/// One token for each of `batch` sequences whose states lie in a pool, in place; also with one decay per key channel.
struct MemoryStep {
  static constexpr std::int64_t kMaxKeys = 256;  // values come in multiples of 4

  std::int64_t batch = 0, heads = 0, key_dim = 0, value_dim = 0;
  bool delta = false;
  bool per_channel = false;  // log_decay is [batch, heads, K], not [batch, heads]
  float scale = 1;
  DType dtype = DType::bfloat16;  // of q, k, v [batch, heads, channels] and o, contiguous: not float64
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const float* log_decay = nullptr;     // absent: 0
  const float* beta = nullptr;          // [batch, heads]; absent: 1
  const std::int64_t* slots = nullptr;  // [batch], distinct; absent: sequence b has slot b
  float* pool = nullptr;                // [slots, heads, K, V]
  void* o = nullptr;
};
void memory_step(const MemoryStep& step, const Device& device);

}  // namespace gka::kernels::cuda
