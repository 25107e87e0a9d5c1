// The iterations of Chebyshev and of gradient descent where their operands are cut into float16 parts once
// (split_tiles.cuh): H and the keys per chunk, scores and iterates where they are written. Tokens are rows here,
// channels columns, and a warp has the same 16 channels of the same tokens from the first iteration to the last, in
// float32.
//
// float16 has a narrow range, so everything is scaled by powers of two: H by one that its norm bounds, the key of token
// j by κ_j, everything that belongs to the system of token c by ξ_c: iterates stay below 2 ‖b‖/ρ. Scores are divided by
// κ_j, because the keys they are multiplied with have it, and kScores times as large.
#pragma once

#include "kernels/cuda/operator.cuh"
#include "kernels/cuda/split_tiles.cuh"

namespace gka::kernels::cuda {

/// The power of two at or below x, a normal number.
__device__ __forceinline__ float power_below(float x) { return bits_to_float(float_to_bits(x) & 0x7f800000u); }

struct SplitSolver {
  static constexpr float kScores = 0x1p+6f;

  SplitArray h, k, x, scores;
  int out_of_range;
  alignas(16) float key_scale[kMaxChunk];  // κ
  alignas(16) float scale[kMaxChunk];      // ξ
  alignas(16) float state_factor[kMaxChunk];
  alignas(16) float largest[kMaxChunk];

  __host__ __device__ static bool suits(int dim) { return dim == 64 || dim == 128 || dim == 256; }

  __host__ __device__ void allocate_hot(Arena& arena, int dim) {
    x = take(arena, kMaxChunk, dim);
    k = take(arena, kMaxChunk, dim);
    scores = take(arena, kMaxChunk, kMaxChunk);
    h = take(arena, dim, dim);
  }

  /// x̃ into `room`, as lanes; false, and nothing done, where numbers are too large or too small for float16 parts, or
  /// shared memory is.
  template <typename Solver>
  __device__ bool solve(Operator<float>& op, const float* b, const Solver& schedule, float* room) {
    if (!near(x) || !near(k) || !near(scores)) return false;
    prepare(op, b);
    if (out_of_range != 0) return false;
    switch (op.chunk->size.dim / 64) {
      case 1: iterate<1, false>(op, b, schedule, room); break;
      case 2: near(h) ? iterate<2, false>(op, b, schedule, room) : iterate<2, true>(op, b, schedule, room); break;
      default: iterate<4, true>(op, b, schedule, room);
    }
    return true;
  }

 private:
  __host__ __device__ static SplitArray take(Arena& arena, int rows, int columns) {
    const int ld = columns + kApart;
    std::uint16_t* both = arena.take<std::uint16_t>(2 * rows * ld);
    return {both, both + rows * ld, ld};
  }

  __device__ __noinline__ void prepare(const Operator<float>& op, const float* b) {
    const Chunk<float>& t = *op.chunk;
    const int dim = t.size.dim;
    alone([&] { out_of_range = 0; });
    lane_largest(t.kt, dim, t.lanes, largest);
    each(kMaxChunk, [&](int j) {
      const float top = j < t.len ? largest[j] : 0;
      if (top != 0 && !(top > 0x1p-50f && top < 0x1p+50f)) raise(&out_of_range);
      key_scale[j] = top != 0 ? 0x1p+7f / power_below(top) : 1;
    });
    lane_largest(b, dim, t.lanes, largest);
    const float h_top = power_below(static_cast<float>(op.start)), h_scale = 0x1p+13f / h_top;
    const bool none = !(op.start > 0) || !finite(op.start);
    each(kMaxChunk, [&](int c) {
      const bool live = c < t.len && op.live(c) && largest[c] > 0;
      const float rho = op.ridge_lane[c], top = 32 * largest[c] / rho;  // ‖b‖ ≤ 16 max |b|
      // What is not finite stays with its token.
      if (live && finite(top) && !(rho >= 0x1p-12f && top > 0x1p-80f && top < 0x1p+80f)) raise(&out_of_range);
      scale[c] = live && finite(top) ? 0x1p+14f / power_below(top) : 1;
      state_factor[c] = none ? 0 : static_cast<float>(static_cast<double>(op.state_scale[c]) / h_scale * kScores);
    });
    if (thread() == 0 && !none && !(op.start > 0x1p-100 && op.start < 0x1p+100)) raise(&out_of_range);
    sync();
    each_run(kMaxChunk, dim, [&](int c, int i, int count) {
      float values[kRun];
      get_run(t.kt + i * kStride + c, c < t.len ? count : 0, values);
      for (float& value : values) value *= key_scale[c];
      put_parts(k, c, i, values);
    });
    for (int at = thread(); at < dim * dim / kRun; at += kThreads) {
      const int row = at / (dim / kRun), i = at % (dim / kRun) * kRun;
      const float* from = op.h + row * t.size.ldh() + i;
      float values[kRun];
      for (int r = 0; r < kRun; ++r) values[r] = none ? 0 : from[r] * h_scale;
      put_parts(h, row, i, values);
    }
    sync();
  }

  template <int kCount>
  __device__ __forceinline__ static void put_parts(const SplitArray& to, int row, int column,
                                                   const float (&values)[kCount]) {
    Vec<std::uint16_t, kCount> high, low;
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      high.x[r] = float_to_half(values[r]);
      low.x[r] = float_to_half(values[r] - half_to_float(high.x[r]));
    }
    store(to.high + row * to.ld + column, high);
    store(to.low + row * to.ld + column, low);
  }

  /// What a warp keeps of its part of the iterates, and of the mask of its scores.
  template <int kDown>
  struct Kept {
    Vec<float, 2> now[SplitTile<kDown>::kVectors], before[SplitTile<kDown>::kVectors];
    Vec<float, 2> right[SplitTile<kDown>::kVectors], mask[SplitTile<1>::kVectors];
  };

  /// D = 64 kDown: as many tiles as a block on a GPU has warps. kFar: H is in global memory.
  /// In one function, because what a warp keeps has to stay in registers from the first iteration to the last.
  template <int kDown, bool kFar, typename Solver>
  __device__ __noinline__ void iterate(Operator<float>& op, const float* b, const Solver& schedule, float* room) {
    using Tile = SplitTile<kDown>;
    using ScoreTile = SplitTile<1>;
    constexpr int kDim = 64 * kDown, kAcross = kDim / Tile::kColumns, kOwn = 16 / kWarps;
    const Chunk<float>& t = *op.chunk;
    Kept<kDown> kept[kOwn];
    const auto place = [&](int own) { return warp() + own * kWarps; };
    const auto first_token = [&](int own) { return place(own) / kAcross * Tile::kRows; };
    const auto first_channel = [&](int own) { return place(own) % kAcross * Tile::kColumns; };
    // Scores of 16 tokens c from 16 tokens j ≤ c: six of the sixteen tiles are empty, shifted so that each quarter of a
    // multiprocessor has its share.
    const auto score_token = [&](int own) { return place(own) / 4 * 16; };
    const auto score_from = [&](int own) { return (place(own) + 4 - place(own) / 4) % 4 * 16; };

    for (int own = 0; own < kOwn; ++own) {
#pragma unroll
      for (int v = 0; v < Tile::kVectors; ++v) {
        const int c = first_token(own) + Tile::row(v), i = first_channel(own) + Tile::column(v);
        Vec<float, 2> right{};
        if (c < t.lanes) right = {b[i * kStride + c] * scale[c], b[(i + 1) * kStride + c] * scale[c]};
        kept[own].right[v] = right;
        kept[own].now[v] = broadcast<2>(schedule.s[c]) * right;
        kept[own].before[v] = {};
        put_parts(x, c, i, kept[own].now[v].x);
      }
#pragma unroll
      for (int v = 0; v < ScoreTile::kVectors; ++v) {
        const int c = score_token(own) + ScoreTile::row(v), j = score_from(own) + ScoreTile::column(v);
        for (int n = 0; n < 2; ++n) {
          const float by = kScores / (key_scale[j + n] * key_scale[j + n]);
          kept[own].mask[v].x[n] = c < t.len && j + n <= c ? op.mask[(j + n) * kStride + c] * by : 0;
        }
      }
    }
    sync();
    for (std::int64_t iteration = 1; iteration <= schedule.iterations; ++iteration) {
      const float* si = schedule.s + iteration * kMaxChunk;
      const float* mi = schedule.m + iteration * kMaxChunk;
      Tile tiles[kOwn];
      for (int own = 0; own < kOwn; ++own) {
        Tile& tile = tiles[own];
        tile.clear();
        tile.template multiply<kFar>(x.from(first_token(own), 0), h.from(first_channel(own), 0), kDim);
        tile.fold();
#pragma unroll
        for (int v = 0; v < Tile::kVectors; ++v) {
          const float factor = state_factor[first_token(own) + Tile::row(v)];
#pragma unroll
          for (int n = 0; n < 2; ++n) tile.vector(v)[n] = factor == 0 ? 0 : tile.vector(v)[n] * factor;
        }
        ScoreTile score;
        score.clear();
        const int c = score_token(own), j = score_from(own);
        if (j <= c) score.template multiply<false>(x.from(c, 0), k.from(j, 0), kDim);
        score.fold();
#pragma unroll
        for (int v = 0; v < ScoreTile::kVectors; ++v) {
          put_parts(scores, c + ScoreTile::row(v), j + ScoreTile::column(v),
                    masked(values_of(score, v), kept[own].mask[v]).x);
        }
      }
      sync();
      for (int own = 0; own < kOwn; ++own) {
        Tile& tile = tiles[own];
        tile.multiply_rows(scores.from(first_token(own), 0), k.from(0, first_channel(own)),
                           min(kMaxChunk, first_token(own) + Tile::kRows));
        tile.fold();
#pragma unroll
        for (int v = 0; v < Tile::kVectors; ++v) {
          const int c = first_token(own) + Tile::row(v), i = first_channel(own) + Tile::column(v);
          const Vec<float, 2> now = kept[own].now[v], hx = values_of(tile, v) * broadcast<2>(1 / kScores);
          const Vec<float, 2> y = now + broadcast<2>(mi[c]) * (now - kept[own].before[v]);
          const Vec<float, 2> gradient = hx + broadcast<2>(op.ridge_lane[c]) * now - kept[own].right[v];
          kept[own].before[v] = now;
          kept[own].now[v] = y - broadcast<2>(si[c]) * gradient;
          put_parts(x, c, i, kept[own].now[v].x);
        }
      }
      sync();
    }
    for (int own = 0; own < kOwn; ++own) {
#pragma unroll
      for (int v = 0; v < Tile::kVectors; ++v) {
        const int c = first_token(own) + Tile::row(v), i = first_channel(own) + Tile::column(v);
        for (int n = 0; c < t.lanes && n < 2; ++n) room[(i + n) * kStride + c] = kept[own].now[v].x[n] / scale[c];
      }
    }
    sync();
  }
};

}  // namespace gka::kernels::cuda
