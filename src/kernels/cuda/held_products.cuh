// Products of few rows, for weights that fit the registers of all blocks: a block's threads ask for all of
// its weights before they wait for the kernels ahead, and find them where tensor cores take them. What is left when x
// comes is to read it, 16 bytes of each row a lane, to multiply, and to add up what the warps have of their slices of
// the depth: one barrier, two with a norm. Nothing is copied to shared memory and read again.
//
// A lane has eight neighbouring numbers of a row where an instruction wants four pairs: which number of the depth
// stands where is free, as long as weights and x agree. Weights are the 16 rows of a product and x its 8 columns, so a
// row's numbers do not depend on how many rows there are.
#pragma once

#include <algorithm>

#include "kernels/cuda/memory/mma.cuh"
#include "kernels/cuda/small_products.h"
#include "kernels/cuda/vectors.cuh"

namespace gka::kernels::cuda::held {

using memory::Bits;

constexpr auto kType = DType::bfloat16;
constexpr int kOwnWarps = 8, kOwnThreads = kOwnWarps * kLanes;
constexpr int kTogether = 8;                     // numbers that a lane reads at a time
constexpr int kRows = SmallProducts::kMostRows;  // of x
constexpr int kOutputs = 8;                      // of half a tile
constexpr int kStep = 4 * kTogether;             // of the depth, that four lanes have of a row
constexpr int kHalf = kOutputs * kRows;          // numbers that half a tile comes to

/// What the 16 rows of a tile are.
enum class Tile : std::uint8_t {
  narrow,  // eight outputs, and nothing
  wide,    // sixteen outputs
  gated,   // eight outputs of either matrix, the same
};
constexpr int outputs_of(Tile tile) { return tile == Tile::wide ? 2 * kOutputs : kOutputs; }

__device__ __host__ inline std::int64_t tiles_of(const SmallProducts& p, int outputs) {
  std::int64_t tiles = 0;
  for (int i = 0; i < (p.gated ? 1 : p.count); ++i) tiles += (p.of[i].outputs + outputs - 1) / outputs;
  return tiles;
}

/// The outputs of a block's tile: from `output` on in a matrix; no matrix: there is no such tile.
struct Place {
  int matrix;
  std::int64_t output;

  template <Tile kTile>
  __device__ static __forceinline__ Place of(const SmallProducts& p, int tile) {
    constexpr int kWide = outputs_of(kTile);
    Place place{0, (block() + blocks() * tile) * kWide};
    const int matrices = kTile == Tile::gated ? 1 : p.count;
    while (place.matrix < matrices && place.output >= p.of[place.matrix].outputs) {
      place.output -= (p.of[place.matrix++].outputs + kWide - 1) / kWide * kWide;
    }
    if (place.matrix == matrices) place.matrix = -1;
    return place;
  }
};

/// What the warps have of their slices, and the norm's weights as they lie in memory.
template <int kHalves>
struct Room {
  float sums[kHalves][kOwnWarps][kHalf];
  float squares[kOwnWarps][kRows];
  alignas(16) float norm[4];  // and on
};

__device__ __forceinline__ Words<kTogether> read_words(const void* data, std::int64_t at, bool there) {
  return there ? hold_vector<kType, kTogether>(data, at) : Words<kTogether>{};
}

/// A row of x in a warp's slice of the depth: what a lane has of it. All lanes of rows that there are not have zeros.
template <int kSteps>
struct Row {
  Words<kTogether> x[kSteps];

  /// Where a lane's numbers of a step begin.
  __device__ static __forceinline__ int channel(const SmallProducts& p, int step) {
    const int slice = static_cast<int>((p.depth + kOwnWarps * kStep - 1) / (kOwnWarps * kStep));
    return step < slice ? (warp() * slice + step) * kStep + lane() % 4 * kTogether : static_cast<int>(p.depth);
  }

  __device__ __forceinline__ void read(const SmallProducts& p) {
    const int row = lane() / 4;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = channel(p, s);
      x[s] = read_words(p.x, row * p.depth + at, row < p.rows && at < p.depth);
    }
  }

  /// norm ⊙ x / rms(x), as add_norm has it.
  template <int kHalves>
  __device__ __forceinline__ void normalise(const SmallProducts& p, Room<kHalves>& room) {
    float squares = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const auto numbers = unpack<kType>(x[s]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) squares += numbers.x[i] * numbers.x[i];
    }
    squares += from_lane(squares, 1);
    squares += from_lane(squares, 2);
    const int row = lane() / 4;
    if (lane() % 4 == 0) room.squares[warp()][row] = squares;
    wait_for_copies();
    sync();
    float total = 0;
#pragma unroll
    for (int w = 0; w < kOwnWarps; ++w) total += room.squares[w][row];
    const float root = inverse_as<kType>(sqrt_as<kType>(total / static_cast<float>(p.depth) + p.eps));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = channel(p, s);
      if (at >= p.depth) continue;
      auto numbers = unpack<kType>(x[s]);
      const auto weight = read_vector<DType::float32, kTogether>(room.norm, at);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) numbers.x[i] *= root * weight.x[i];
      x[s] = pack<kType>(numbers);
    }
  }
};

/// A number of the answer, which a thread writes: of a tile (of a wide one, of half of it), an output of it, a row.
template <Tile kTile>
struct Answer {
  int half, output, row;
  Place place;
  bool mine;
  std::int64_t at = 0;  // in y

  __device__ explicit Answer(const SmallProducts& p, int tiles)
      : half(thread() / kHalf), output(thread() % kHalf / kRows), row(thread() % kRows) {
    constexpr int kHalves = kTile == Tile::wide ? 2 : 1;
    place = Place::of<kTile>(p, half / kHalves);
    mine = half < tiles * kHalves && place.matrix >= 0 && row < p.rows;
    if (!mine) return;
    const std::int64_t column = place.output + half % kHalves * kOutputs + output;
    mine = column < p.of[place.matrix].outputs;
    at = row * p.of[place.matrix].outputs + column;
  }
};

template <int kHalves>
__device__ __forceinline__ float sum_of(const Room<kHalves>& room, int half, int at) {
  float total = 0;
#pragma unroll
  for (int w = 0; w < kOwnWarps; ++w) total += room.sums[half][w][at];
  return rounded<kType>(Numbers<2>{{total, 0}}).x[0];  // as a product by itself would be
}

template <Tile kTile, int kTiles, int kSteps>
__global__ void __launch_bounds__(kOwnThreads, 2) multiply_held(const __grid_constant__ SmallProducts p) {
  constexpr int kParts = kTile == Tile::narrow ? 1 : 2, kHalves = kTiles * kParts;
  static_assert((kTile == Tile::gated ? kTiles : kHalves) * kHalf <= kOwnThreads);
  let_next_start();
  auto& room = *reinterpret_cast<Room<kHalves>*>(shared_memory());
  Words<kTogether> weights[kTiles][kSteps][kParts];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const Place place = Place::of<kTile>(p, t);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int matrix = place.matrix < 0 ? 0 : place.matrix + (kTile == Tile::gated ? part : 0);
      const std::int64_t output = place.output + lane() / 4 + (kTile == Tile::wide ? part * kOutputs : 0);
      const bool there = place.matrix >= 0 && output < p.of[matrix].outputs;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int at = Row<kSteps>::channel(p, s);
        weights[t][s][part] = read_words(p.of[matrix].weight, output * p.depth + at, there && at < p.depth);
      }
    }
  }
  if (p.norm != nullptr) {
    for (int at = thread() * 4; at < p.depth; at += kOwnThreads * 4) copy_async(room.norm + at, p.norm + at);
  }
  const Answer<kTile> answer(p, kTiles);

  wait_for_earlier();
  Row<kSteps> row;
  row.read(p);
  const float before = answer.mine && p.onto != nullptr ? read_as<float, kType>(p.onto, answer.at) : 0;
  if (p.norm != nullptr) row.normalise(p, room);

  // By steps in turn, so that no product waits for the one before it.
  float sums[kTiles][2][4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const auto& low = weights[t][s][0].x;
        const auto& high = weights[t][s][kParts - 1].x;
        const std::uint32_t a[4] = {low[pair], kParts == 2 ? high[pair] : 0, low[pair + 1],
                                    kParts == 2 ? high[pair + 1] : 0};
        memory::multiply_add(sums[t][pair / 2], a, row.x[s].x[pair], row.x[s].x[pair + 1]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) {
      room.sums[t * kParts + i / 2][warp()][lane() / 4 * kRows + lane() % 4 * 2 + i % 2] =
          sums[t][0][i] + sums[t][1][i];
    }
  }
  sync();
  if (!answer.mine) return;
  const int at = thread() % kHalf;
  float y;
  if constexpr (kTile == Tile::gated) {
    const float gate = sum_of(room, 2 * answer.half, at), up = sum_of(room, 2 * answer.half + 1, at);
    y = gate * sigmoid_as<kType>(gate) * up;
  } else {
    y = before + sum_of(room, answer.half, at);
  }
  static_cast<Bits*>(p.of[answer.place.matrix].y)[answer.at] = static_cast<Bits>(two_bfloat16(y, 0));
}

/// A kernel for products of up to so many tiles to a block, and so many steps to a warp.
struct Form {
  Tile tile;
  int tiles, steps;
  void (*kernel)(SmallProducts);
  int room_bytes;
};
template <Tile kTile, int kTiles, int kSteps>
constexpr Form form() {
  return {kTile, kTiles, kSteps, multiply_held<kTile, kTiles, kSteps>,
          static_cast<int>(sizeof(Room<kTiles*(kTile == Tile::narrow ? 1 : 2)>))};
}
/// The first that is enough is taken. Sixteen outputs at a time only where every block has some.
inline constexpr Form kForms[] = {form<Tile::wide, 2, 4>(), form<Tile::narrow, 1, 4>(), form<Tile::narrow, 1, 12>(),
                                  form<Tile::gated, 3, 4>()};

/// What multiplies; nullptr: they are more than registers hold. Rows play no part in it.
inline const Form* find_form(const SmallProducts& p, std::int64_t blocks) {
  if (p.int8) return nullptr;
  const std::int64_t steps = (p.depth + kOwnWarps * kStep - 1) / (kOwnWarps * kStep);
  for (const Form& form : kForms) {
    const std::int64_t tiles = tiles_of(p, outputs_of(form.tile));
    const bool fits = steps <= form.steps && tiles <= form.tiles * blocks;
    const bool busy = form.tile != Tile::wide || tiles >= blocks;
    if (p.gated == (form.tile == Tile::gated) && fits && busy) return &form;
  }
  return nullptr;
}

inline bool start(const SmallProducts& p, const Device& device) {
  const std::int64_t blocks = multiprocessors(device.index);
  const Form* form = find_form(p, blocks);
  if (form == nullptr) return false;
  // No more blocks than have as many tiles as the fullest: the others' multiprocessors may be a step's.
  const std::int64_t tiles = tiles_of(p, outputs_of(form->tile)), fullest = (tiles + blocks - 1) / blocks;
  const std::int64_t grid = (tiles + fullest - 1) / fullest;
  const int bytes = form->room_bytes + (p.norm != nullptr ? static_cast<int>(p.depth) * 4 : 0);
  launch_early<kOwnThreads>(form->kernel, grid, bytes, device.index, device.stream, p);
  return true;
}

}  // namespace gka::kernels::cuda::held
