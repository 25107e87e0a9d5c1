// What each path on a GPU keeps for the backward pass fits the room that every caller makes for it.
#include "kernels/cuda/saved.h"

#include <gtest/gtest.h>

namespace gka::kernels::cuda {
namespace {

Problem problem_of(std::int64_t dim, std::int64_t heads, std::int64_t tokens, const std::int64_t* cu_seqlens) {
  Problem p{.batch = 1,
            .tokens = tokens,
            .heads = heads,
            .key_dim = dim,
            .value_dim = dim,
            .sequences = cu_seqlens != nullptr ? 5 : 1,
            .cu_seqlens = cu_seqlens};
  p.q.dtype = DType::bfloat16;
  return p;
}

TEST(Saved, StatesAndTilesFitTheRoomAtEverySize) {
  const std::int64_t packed = 0;
  for (const std::int64_t* cu_seqlens : {static_cast<const std::int64_t*>(nullptr), &packed}) {
    for (const std::int64_t heads : {1, 3, 64}) {
      for (std::int64_t tokens = 1; tokens < (std::int64_t{1} << 26); tokens = tokens * 3 + 1) {
        const Problem p = problem_of(128, heads, tokens, cu_seqlens);
        EXPECT_TRUE(plain_saved(p).fits(saved_room(p))) << tokens;
        EXPECT_TRUE(hopper::keeps_tiles(p)) << tokens;
        EXPECT_TRUE(hopper::SavedTiles({hopper::slots_of(p), 128}).bytes().fits(saved_room(p))) << tokens;
      }
    }
  }
}

TEST(Saved, TilesOfSmallHeadsAreKeptWhereTheyFit) {
  for (std::int64_t tokens = 1; tokens < (std::int64_t{1} << 26); tokens = tokens * 3 + 1) {
    const Problem p = problem_of(64, 16, tokens, nullptr);
    EXPECT_EQ(hopper::keeps_tiles(p), hopper::SavedTiles({hopper::slots_of(p), 64}).bytes().fits(saved_room(p)))
        << tokens;
  }
  EXPECT_TRUE(hopper::keeps_tiles(problem_of(64, 16, 262144, nullptr)));
  EXPECT_FALSE(hopper::keeps_tiles(problem_of(64, 16, 1 << 20, nullptr)));
  EXPECT_FALSE(hopper::keeps_tiles(problem_of(32, 16, 4096, nullptr)));
}

TEST(Saved, NothingOfTheTilesOverlaps) {
  const hopper::SavedTiles tiles{.slots = 10, .dim = 128};
  EXPECT_EQ(tiles.h_norm(), 10 * 2 * 128 * 128);
  EXPECT_EQ(tiles.h_trace() - tiles.h_norm(), 40);
  EXPECT_EQ(tiles.bytes().h, tiles.h_trace() + 40);
  EXPECT_EQ(tiles.u_norm(), tiles.h_norm());
  EXPECT_EQ(tiles.ample() - tiles.u_norm(), 40);
  EXPECT_EQ(tiles.bytes().u, tiles.ample() + 40);
}

}  // namespace
}  // namespace gka::kernels::cuda
