// What each path on a GPU keeps for the backward pass fits the room that every caller makes for it.
#include "kernels/cuda/saved.h"

#include <gtest/gtest.h>

namespace gka::kernels::cuda {
namespace {

TEST(Saved, StatesAndTilesFitTheRoomAtEverySize) {
  for (const bool packed : {false, true}) {
    for (const std::int64_t heads : {1, 3, 64}) {
      for (std::int64_t tokens = 1; tokens < (std::int64_t{1} << 26); tokens = tokens * 3 + 1) {
        const std::int64_t cu_seqlens = 0;
        Problem p{.batch = 1,
                  .tokens = tokens,
                  .heads = heads,
                  .key_dim = hopper::kDim,
                  .value_dim = hopper::kWidth,
                  .sequences = packed ? 5 : 1,
                  .cu_seqlens = packed ? &cu_seqlens : nullptr};
        p.q.dtype = DType::bfloat16;
        EXPECT_TRUE(plain_saved(p).fits(saved_room(p))) << tokens;
        EXPECT_TRUE(hopper::SavedTiles{hopper::slots_of(p)}.bytes().fits(saved_room(p))) << tokens;
      }
    }
  }
}

TEST(Saved, NothingOfTheTilesOverlaps) {
  const hopper::SavedTiles tiles{10};
  EXPECT_EQ(tiles.h_norm(), 10 * hopper::SavedTiles::kTileBytes);
  EXPECT_EQ(tiles.h_trace() - tiles.h_norm(), 40);
  EXPECT_EQ(tiles.u_norm() - tiles.h_trace(), 40);
  EXPECT_EQ(tiles.ample() - tiles.u_norm(), 40);
  EXPECT_EQ(tiles.bytes().h, tiles.ample() + 40);
}

}  // namespace
}  // namespace gka::kernels::cuda
