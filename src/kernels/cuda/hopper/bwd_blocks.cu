// The backward pass for more value channels than widest_values. It is linear in do: blocks of so many run one after
// another, each as a problem of its own with its columns of v, do and U, and what belongs to all of them (dq, dk,
// the gradients of the gates and of H_0) is added up in float32. The second solve is repeated for every block.
#include <array>
#include <utility>
#include <vector>

#include "kernels/cuda/hopper/hopper.h"
#include "kernels/cuda/segments.cuh"

namespace gka::kernels::cuda::hopper {
namespace {

View from_channel(View view, std::int64_t first) {
  if (view) view.data = static_cast<char*>(view.data) + first * bytes_of(view.dtype);
  return view;
}

/// Gives every block of values the memory that the first one had: they run one after another on one stream.
class Reused {
 public:
  explicit Reused(const Device& device) : device_(device) {}

  Device again() {
    next_ = 0;
    Device device = device_;
    device.allocate = [this](std::size_t bytes) {
      if (next_ == taken_.size()) taken_.emplace_back(nullptr, 0);
      auto& [data, size] = taken_[next_++];
      if (size < bytes) data = device_.allocate(bytes), size = bytes;
      return data;
    };
    return device;
  }

 private:
  const Device& device_;
  std::vector<std::pair<void*, std::size_t>> taken_;
  std::size_t next_ = 0;
};

/// A gradient to which every block of values adds, as [batch, tokens, heads, channels].
struct Sum {
  View out;
  std::int64_t batch, tokens, heads, channels;
  float *sum, *more;  // of the blocks so far, of one block

  __host__ __device__ std::int64_t size() const { return batch * tokens * heads * channels; }
  View contiguous(float* data) const {
    return {.data = data,
            .dtype = DType::float32,
            .batch_stride = tokens * heads * channels,
            .token_stride = heads * channels,
            .head_stride = channels};
  }
};

/// sum + more into sum, or behind the last block to where it belongs.
__global__ void add_up(const __grid_constant__ Sum s, bool last) {
  for (std::int64_t i = block() * blockDim.x + thread(); i < s.size(); i += blocks() * blockDim.x) {
    const float value = s.sum[i] + s.more[i];
    if (last) {
      const std::int64_t row = i / s.channels, token = row / s.heads;
      write(s.out, offset(s.out, token / s.tokens, token % s.tokens, row % s.heads) + i % s.channels, value);
    } else {
      s.sum[i] = value;
    }
  }
}

/// Some columns of the rows of a matrix, as a matrix of their own or back from there.
void copy_columns(void* to, std::int64_t to_width, const void* from, std::int64_t from_width, std::int64_t columns,
                  std::int64_t rows, const Device& device) {
  const auto bytes = [](std::int64_t n) { return static_cast<std::size_t>(n) * sizeof(float); };
  check(cudaMemcpy2DAsync(to, bytes(to_width), from, bytes(from_width), bytes(columns), static_cast<std::size_t>(rows),
                          cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(device.stream)),
        "copying a state's columns");
}

Problem block_of(Problem p, std::int64_t first) {
  p.v = from_channel(p.v, first);
  p.u0 = nullptr;  // the backward pass starts from what was saved
  p.value_dim = min(widest_values(p), p.value_dim - first);
  return p;
}

}  // namespace

void backward_in_blocks(const Problem& p, const Saved& saved, const Gradients& out, const Device& device) {
  const CurrentDevice current(device.index);
  const std::int64_t dim = p.key_dim, width = p.value_dim, states = p.sequences * p.heads;
  const std::int64_t widest = widest_values(p);
  std::vector<Sum> sums;
  std::vector<View Gradients::*> fields;
  const auto add = [&](const View& view, std::int64_t batch, std::int64_t tokens, std::int64_t channels) {
    Sum sum{view, batch, tokens, p.heads, channels, nullptr, nullptr};
    sum.sum = allocate<float>(device, sum.size());
    sum.more = allocate<float>(device, sum.size());
    sums.push_back(sum);
  };
  for (const auto& [field, channels] :
       std::array<std::pair<View Gradients::*, std::int64_t>, 5>{{{&Gradients::d_q, dim},
                                                                  {&Gradients::d_k, dim},
                                                                  {&Gradients::d_log_decay, 1},
                                                                  {&Gradients::d_beta, 1},
                                                                  {&Gradients::d_alpha, 1}}}) {
    if (!(out.*field)) continue;
    fields.push_back(field);
    add(out.*field, p.batch, p.tokens, channels);
  }
  if (out.d_h0 != nullptr) {
    add({.data = out.d_h0, .dtype = DType::float32, .batch_stride = p.heads * dim * dim, .head_stride = dim * dim},
        p.sequences, 1, dim * dim);
  }
  const auto columns = [&](std::int64_t rows) { return allocate<float>(device, rows * dim * widest); };
  float* const u = columns(segments_of(p) * p.heads);
  float* const d_u = out.d_u != nullptr ? columns(states) : nullptr;
  float* const d_u0 = out.d_u0 != nullptr ? columns(states) : nullptr;
  Reused scratch(device);
  for (std::int64_t first = 0; first < width; first += widest) {
    const Problem block = block_of(p, first);
    const auto at = [&](const void* state) { return static_cast<const float*>(state) + first; };
    copy_columns(u, block.value_dim, at(saved.u), width, block.value_dim, segments_of(p) * p.heads * dim, device);
    Saved saved_here = saved;
    saved_here.u = u;
    Gradients here = out;
    here.d_o = from_channel(out.d_o, first);
    here.d_v = from_channel(out.d_v, first);
    if (first > 0) here.d_h = nullptr;
    if (d_u != nullptr) copy_columns(d_u, block.value_dim, at(out.d_u), width, block.value_dim, states * dim, device);
    here.d_u = d_u;
    here.d_u0 = d_u0;
    const auto room = [&](const Sum& s) { return first > 0 ? s.more : s.sum; };
    for (std::size_t i = 0; i < fields.size(); ++i) here.*fields[i] = sums[i].contiguous(room(sums[i]));
    if (out.d_h0 != nullptr) here.d_h0 = room(sums.back());
    hopper::backward_from_states(block, saved_here, here, scratch.again());
    if (d_u0 != nullptr) {
      float* const to = static_cast<float*>(out.d_u0) + first;
      copy_columns(to, width, d_u0, block.value_dim, block.value_dim, states * dim, device);
    }
    if (first == 0) continue;
    for (const Sum& s : sums) {
      const std::int64_t tiles = (s.size() + 255) / 256;
      launch_blocks_of<256>(add_up, min<std::int64_t>(tiles, 1 << 16), 0, device.stream, s, first + widest >= width);
    }
  }
}

}  // namespace gka::kernels::cuda::hopper
