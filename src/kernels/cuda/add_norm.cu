// The residual sum and the norm of it in one pass: a row lies in the registers of a warp, or of a block where it is too
// long for one.
#include "kernels/cuda/fused.cuh"

namespace gka::kernels::cuda {
namespace {

/// A row in the registers of a team, kVectors vectors of each member.
template <typename TeamOf>
struct Row {
  static constexpr int kVectors = (TeamOf::kSize + TeamOf::kMembers * kN - 1) / (TeamOf::kMembers * kN);
  Eight part[kVectors];

  __device__ static int channel(int v) { return (v * TeamOf::kMembers + TeamOf::member()) * kN; }

  /// 0 behind the end.
  template <DType kType>
  __device__ __forceinline__ void read(const void* data, std::int64_t row, int width) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      part[v] = channel(v) < width ? read_vector<kType, kN>(data, row * width + channel(v)) : Eight{};
    }
  }
};

/// body(v, i) for each of a member's numbers.
template <typename TeamOf, typename Body>
__device__ __forceinline__ void each_number(Body&& body) {
#pragma unroll
  for (int v = 0; v < Row<TeamOf>::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kN; ++i) body(v, i);
  }
}

template <DType kType>
__device__ __forceinline__ float root_of(const AddNorm& a, float squares) {
  return inverse_as<kType>(sqrt_as<kType>(squares / static_cast<float>(a.width) + a.eps));
}

template <DType kType, typename TeamOf>
__global__ void __launch_bounds__(kThreads) add_norm_rows(const __grid_constant__ AddNorm a, void* sum, void* normed) {
  using Own = Row<TeamOf>;
  const std::int64_t row = TeamOf::index();
  if (row >= a.rows) return;
  wait_for_earlier();
  const int width = static_cast<int>(a.width);
  Own x;
  x.template read<kType>(a.x, row, width);
  if (a.y != nullptr) {
    Own y;
    y.template read<kType>(a.y, row, width);
    each_number<TeamOf>([&](int v, int i) { x.part[v].x[i] += y.part[v].x[i]; });
#pragma unroll
    for (int v = 0; v < Own::kVectors; ++v) {
      x.part[v] = rounded<kType>(x.part[v]);  // the norm of what the backward pass will see
      if (Own::channel(v) < width) write_vector<kType, kN>(sum, row * width + Own::channel(v), x.part[v]);
    }
  }
  float squares = 0;
  each_number<TeamOf>([&](int v, int i) { squares += x.part[v].x[i] * x.part[v].x[i]; });
  const float root = root_of<kType>(a, TeamOf::sum(squares));
#pragma unroll
  for (int v = 0; v < Own::kVectors; ++v) {
    if (Own::channel(v) >= width) continue;
    const Eight weight = read_vector<DType::float32, kN>(a.weight, Own::channel(v));
#pragma unroll
    for (int i = 0; i < kN; ++i) x.part[v].x[i] *= root * weight.x[i];
    write_vector<kType, kN>(normed, row * width + Own::channel(v), x.part[v]);
  }
}

/// dx = d_sum + r e − r³ mean(x ⊙ e) x with e = d_normed ⊙ w. A block leaves its rows' sum for the weight in `kept`.
template <DType kType, typename TeamOf>
__global__ void __launch_bounds__(kThreads)
    differentiate_add_norm(const __grid_constant__ AddNorm a, const __grid_constant__ AddNormGradients g, float* kept) {
  using Own = Row<TeamOf>;
  const int width = static_cast<int>(a.width);
  Own d_weight{};
  for (std::int64_t row = TeamOf::index(); row < a.rows; row += blocks() * TeamOf::kTeams) {
    // All of a row is under way before the first of it is needed, in as few registers as it will lie in.
    Held<kType, kN> x[Own::kVectors], d_normed[Own::kVectors], d_sum[Own::kVectors];
#pragma unroll
    for (int v = 0; v < Own::kVectors; ++v) {
      const bool mine = Own::channel(v) < width;
      const std::int64_t at = row * width + Own::channel(v);
      x[v] = mine ? hold_vector<kType, kN>(a.x, at) : Held<kType, kN>{};
      d_normed[v] = mine ? hold_vector<kType, kN>(g.d_normed, at) : Held<kType, kN>{};
      d_sum[v] = mine && g.d_sum != nullptr ? hold_vector<kType, kN>(g.d_sum, at) : Held<kType, kN>{};
    }
    float squares = 0, along = 0;
#pragma unroll
    for (int v = 0; v < Own::kVectors; ++v) {
      if (Own::channel(v) >= width) continue;
      const Eight at = let_go<kType, kN>(x[v]), slope = let_go<kType, kN>(d_normed[v]);
      const Eight weight = read_vector<DType::float32, kN>(a.weight, Own::channel(v));
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        squares += at.x[i] * at.x[i];
        along += at.x[i] * slope.x[i] * weight.x[i];
      }
    }
    const float root = root_of<kType>(a, TeamOf::sum(squares));
    const float bend = root * root * root * TeamOf::sum(along) / static_cast<float>(a.width);
#pragma unroll
    for (int v = 0; v < Own::kVectors; ++v) {
      if (Own::channel(v) >= width) continue;
      const Eight at = let_go<kType, kN>(x[v]), slope = let_go<kType, kN>(d_normed[v]);
      const Eight weight = read_vector<DType::float32, kN>(a.weight, Own::channel(v));
      Eight d_x = let_go<kType, kN>(d_sum[v]);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const float normed = root * slope.x[i];
        d_weight.part[v].x[i] += normed * at.x[i];
        d_x.x[i] += normed * weight.x[i] - bend * at.x[i];
      }
      write_vector<kType, kN>(g.d_x, row * width + Own::channel(v), d_x);
    }
  }
  // The teams of a block in their order, one at a time: a row of sums is all that shared memory holds.
  float* sums = reinterpret_cast<float*>(shared_memory());
  for (int team = 0; team < TeamOf::kTeams; ++team) {
    sync();
    if (TeamOf::kTeams > 1 && warp() != team) continue;
    each_number<TeamOf>([&](int v, int i) {
      const int c = Own::channel(v) + i;
      if (c < width) sums[c] = d_weight.part[v].x[i] + (team > 0 ? sums[c] : 0);
    });
  }
  sync();
  each(width, [&](int c) { kept[block() * width + c] = sums[c]; });
}

/// What a team of more than a warp adds up in.
constexpr int kSums = kWarps * static_cast<int>(sizeof(float));

/// body(Storage, Team): the narrowest team that holds a row.
template <typename Body>
void with_rows_of(const AddNorm& a, const Device& device, Body&& body) {
  with_type_of(a.dtype, device, [&](auto type) {
    if (a.width <= 256) return body(type, Team<false, 256>{});
    if (a.width <= 1024) return body(type, Team<false, 1024>{});
    body(type, Team<true, kMaxAddNorm>{});
  });
}

}  // namespace

void add_norm(const AddNorm& a, void* sum, void* normed, const Device& device) {
  with_rows_of(a, device, [&]<typename Type, typename TeamOf>(Type, TeamOf) {
    launch_early<kThreads>(add_norm_rows<Type::type, TeamOf>, (a.rows + TeamOf::kTeams - 1) / TeamOf::kTeams, kSums,
                           device.index, device.stream, a, sum, normed);
  });
}

void add_norm_backward(const AddNorm& a, const AddNormGradients& g, const Device& device) {
  with_rows_of(a, device, [&]<typename Type, typename TeamOf>(Type, TeamOf) {
    const std::int64_t grid = min((a.rows + TeamOf::kTeams - 1) / TeamOf::kTeams,
                                  static_cast<std::int64_t>(2 * multiprocessors(device.index)));
    const auto numbers = static_cast<std::size_t>(grid * a.width);
    float* kept = static_cast<float*>(device.allocate(numbers * sizeof(float) + 1));
    const int shared = max(kSums, static_cast<int>(a.width * sizeof(float)));
    launch(differentiate_add_norm<Type::type, TeamOf>, grid, shared, device.stream, a, g, kept);
    sum_blocks(static_cast<const float*>(kept), grid, a.width, {.data = g.d_weight, .dtype = DType::float32}, device);
  });
}

}  // namespace gka::kernels::cuda
