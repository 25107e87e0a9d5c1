// Host arrays mirrored on the GPU for the length of one call. Views are copied with the gaps between their elements, so
// that a kernel that writes there is found out.
#include "kernels/cuda_support.h"

#include "gka/block_kernels.h"

#ifdef GKA_HAS_CUDA
#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <vector>
#endif

namespace gka::kernels::test {

#ifdef GKA_HAS_CUDA

namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class Mirror {
 public:
  explicit Mirror(const Problem& p) : Mirror(p.batch, p.tokens, p.heads) {
    problem_ = p;
    state_bytes_ = bytes_of(state_dtype(p));
    problem_.q = in(p.q, p.key_dim);
    problem_.k = in(p.k, p.key_dim, p.key_group);
    problem_.v = in(p.v, p.value_dim, p.value_group);
    problem_.log_decay = in(p.log_decay, 1);
    problem_.beta = in(p.beta, 1);
    problem_.alpha = in(p.alpha, 1);
    problem_.h0 = in(p.h0, h_bytes());
    problem_.u0 = in(p.u0, u_bytes());
    problem_.cu_seqlens = in(p.cu_seqlens, (p.sequences + 1) * 8);
    problem_.options.ridge_diagonal = in(p.options.ridge_diagonal, p.heads * p.key_dim * 8);
  }
  Mirror(std::int64_t batch, std::int64_t tokens, std::int64_t heads) : batch_(batch), tokens_(tokens), heads_(heads) {}
  Mirror(const Mirror&) = delete;
  ~Mirror() {
    for (void* p : memory_) cudaFree(p);
  }

  const Problem& problem() const { return problem_; }
  std::int64_t per_token() const { return batch_ * tokens_ * heads_; }
  std::int64_t h_bytes() const {
    return problem_.sequences * heads_ * problem_.key_dim * problem_.key_dim * state_bytes_;
  }
  std::int64_t u_bytes() const {
    return problem_.sequences * heads_ * problem_.key_dim * problem_.value_dim * state_bytes_;
  }

  Saved saved(const Saved& host) {
    const auto segments =
        saved_segments(problem_.cu_seqlens != nullptr, problem_.batch, problem_.tokens, problem_.sequences);
    const std::int64_t rows = segments * heads_ * problem_.key_dim * state_bytes_;
    return {.x = both(host.x, per_token() * problem_.key_dim * state_bytes_),
            .norm = both(host.norm, per_token() * 8),
            .h = both(host.h, rows * problem_.key_dim),
            .u = both(host.u, rows * problem_.value_dim)};
  }

  /// A copy that is only read.
  template <typename T>
  T* in(T* host, std::int64_t bytes) {
    if (host == nullptr) return nullptr;
    void* device = allocate(static_cast<std::size_t>(bytes));
    check(cudaMemcpy(device, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice));
    return static_cast<T*>(device);
  }
  /// A copy that `finish` brings back.
  template <typename T>
  T* both(T* host, std::int64_t bytes) {
    T* device = in(host, bytes);
    if (device != nullptr) results_.push_back({host, device, static_cast<std::size_t>(bytes)});
    return device;
  }
  View in(View view, std::int64_t channels, std::int64_t group = 1) {
    view.data = in(view.data, extent(view, channels, group));
    return view;
  }
  View both(View view, std::int64_t channels, std::int64_t group = 1) {
    view.data = both(view.data, extent(view, channels, group));
    return view;
  }

  cuda::Device device() {
    return {.index = 0, .stream = nullptr, .allocate = [this](std::size_t bytes) { return allocate(bytes); }};
  }

  void finish() {
    check(cudaDeviceSynchronize());
    for (const auto& r : results_) check(cudaMemcpy(r.host, r.device, r.bytes, cudaMemcpyDeviceToHost));
  }

 private:
  struct Result {
    void* host;
    void* device;
    std::size_t bytes;
  };

  std::int64_t extent(const View& v, std::int64_t channels, std::int64_t group) const {
    if (per_token() == 0) return 0;
    const std::int64_t last =
        (batch_ - 1) * v.batch_stride + (tokens_ - 1) * v.token_stride + (heads_ / group - 1) * v.head_stride;
    return (last + channels) * bytes_of(v.dtype);
  }

  /// Filled with NaN.
  void* allocate(std::size_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, std::max<std::size_t>(bytes, 1)));
    memory_.push_back(p);
    check(cudaMemset(p, 0xff, bytes));
    return p;
  }

  std::int64_t batch_, tokens_, heads_, state_bytes_ = 4;
  Problem problem_;
  std::vector<void*> memory_;
  std::vector<Result> results_;
};

}  // namespace

std::string CudaDevice::missing() {
  try {
    cuda::describe();
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

namespace {

/// Why the Hopper kernels do not run a problem's forward pass; empty if they do.
std::string why_not_hopper(const Problem& problem) {
  const cuda::Choice choice = cuda::choose(problem, Outputs{});
  return choice.path == cuda::Path::hopper ? "" : choice.why;
}
std::string why_not_hopper(DType dtype) {
  Problem problem;
  problem.q.dtype = dtype;
  return why_not_hopper(problem);
}

}  // namespace

std::string CudaDevice::missing_hopper() {
  if (const std::string none = missing(); !none.empty()) return none;
  try {
    return why_not_hopper(DType::bfloat16);
  } catch (const std::invalid_argument& error) {  // GKA_GPU asks for them on another card
    return error.what();
  }
}

bool CudaDevice::hopper_takes(DType dtype) { return why_not_hopper(dtype).empty(); }

void CudaDevice::hopper_forward(const Problem& p, const Outputs& out) {
  if (const std::string reason = why_not_hopper(p); !reason.empty()) throw std::runtime_error(reason);
  forward(p, out);
}

void CudaDevice::forward(const Problem& p, const Outputs& host) {
  Mirror m(p);
  const std::int64_t numbers = m.per_token() * 8;
  const Report& r = host.report;
  const Outputs out{.o = m.both(host.o, p.options.part == Part::solve ? p.key_dim : p.value_dim),
                    .h = m.both(host.h, m.h_bytes()),
                    .u = m.both(host.u, m.u_bytes()),
                    .saved = m.saved(host.saved),
                    .report = {.norm = m.both(r.norm, numbers),
                               .ridge = m.both(r.ridge, numbers),
                               .residual = m.both(r.residual, numbers),
                               .true_residual = m.both(r.true_residual, numbers),
                               .variance = m.both(r.variance, numbers),
                               .certainty = m.both(r.certainty, numbers),
                               .x = m.both(r.x, numbers * p.key_dim)}};
  cuda::forward(m.problem(), out, m.device());
  m.finish();
}

void CudaDevice::backward(const Problem& p, const Saved& saved, const Gradients& host) {
  Mirror m(p);
  const Gradients out{.d_o = m.in(host.d_o, p.options.part == Part::solve ? p.key_dim : p.value_dim),
                      .d_h = m.in(host.d_h, m.h_bytes()),
                      .d_u = m.in(host.d_u, m.u_bytes()),
                      .d_q = m.both(host.d_q, p.key_dim),
                      .d_k = m.both(host.d_k, p.key_dim, p.key_group),
                      .d_v = m.both(host.d_v, p.value_dim, p.value_group),
                      .d_log_decay = m.both(host.d_log_decay, 1),
                      .d_beta = m.both(host.d_beta, 1),
                      .d_alpha = m.both(host.d_alpha, 1),
                      .d_h0 = m.both(host.d_h0, m.h_bytes()),
                      .d_u0 = m.both(host.d_u0, m.u_bytes()),
                      .d_ridge_diagonal = m.both(host.d_ridge_diagonal, p.heads * p.key_dim * 8)};
  cuda::backward(m.problem(), m.saved(saved), out, m.device());
  m.finish();
}

void CudaDevice::step(const Step& s) {
  Mirror m(s.batch, 1, s.heads);
  std::int64_t slots = s.batch;
  for (std::int64_t b = 0; s.state_indices != nullptr && b < s.batch; ++b) {
    slots = std::max(slots, s.state_indices[b] + 1);
  }
  const std::int64_t state_bytes = bytes_of(accumulation_dtype(s.q.dtype)),
                     rows = slots * s.heads * s.key_dim * state_bytes;
  Step on_device = s;
  on_device.q = m.in(s.q, s.key_dim);
  on_device.k = m.in(s.k, s.key_dim, s.key_group);
  on_device.v = m.in(s.v, s.value_dim, s.value_group);
  on_device.log_decay = m.in(s.log_decay, 1);
  on_device.beta = m.in(s.beta, 1);
  on_device.alpha = m.in(s.alpha, 1);
  on_device.o = m.both(s.o, s.value_dim);
  on_device.h = m.both(s.h, rows * s.key_dim);
  on_device.u = m.both(s.u, rows * s.value_dim);
  on_device.state_indices = m.in(s.state_indices, s.batch * 8);
  on_device.iterations = m.in(s.iterations, s.batch * 4);
  on_device.certainty = m.both(s.certainty, s.batch * s.heads * 8);
  on_device.options.ridge_diagonal = m.in(s.options.ridge_diagonal, s.heads * s.key_dim * 8);
  cuda::step(on_device, m.device());
  m.finish();
}

namespace {

/// A view of `count` numbers without gaps; of `both`, one that comes back.
View packed(Mirror& m, View view, std::int64_t count, bool both = false) {
  const std::int64_t bytes = count * bytes_of(view.dtype);
  view.data = both ? m.both(view.data, bytes) : m.in(view.data, bytes);
  return view;
}

ShortConv on_device(Mirror& m, const ShortConv& k) {
  ShortConv moved = k;
  moved.x = m.in(k.x, k.channels);
  moved.weight = packed(m, k.weight, k.channels * k.width);
  moved.bias = packed(m, k.bias, k.channels);
  moved.initial_state = packed(m, k.initial_state, k.sequences * k.channels * (k.width - 1));
  moved.cu_seqlens = m.in(k.cu_seqlens, (k.sequences + 1) * 8);
  return moved;
}

GatedRmsNorm on_device(Mirror& m, const GatedRmsNorm& n) {
  GatedRmsNorm moved = n;
  moved.x = m.in(n.x, n.dim);
  moved.gate = m.in(n.gate, n.dim);
  moved.weight = packed(m, n.weight, n.dim);
  return moved;
}

}  // namespace

void CudaDevice::short_conv(const ShortConv& k, const ShortConvOutputs& host) {
  Mirror m(k.batch, k.tokens, 1);
  const ShortConvOutputs out{
      .y = m.both(host.y, k.channels),
      .final_state = packed(m, host.final_state, k.sequences * k.channels * (k.width - 1), true)};
  cuda::short_conv(on_device(m, k), out, m.device());
  m.finish();
}

void CudaDevice::short_conv_backward(const ShortConv& k, const ShortConvGradients& host) {
  Mirror m(k.batch, k.tokens, 1);
  const std::int64_t states = k.sequences * k.channels * (k.width - 1);
  const ShortConvGradients out{.d_y = m.in(host.d_y, k.channels),
                               .d_final_state = packed(m, host.d_final_state, states),
                               .d_x = m.both(host.d_x, k.channels),
                               .d_weight = packed(m, host.d_weight, k.channels * k.width, true),
                               .d_bias = packed(m, host.d_bias, k.channels, true),
                               .d_initial_state = packed(m, host.d_initial_state, states, true)};
  cuda::short_conv_backward(on_device(m, k), out, m.device());
  m.finish();
}

void CudaDevice::short_conv_step(const ShortConvStep& step) {
  const ShortConv& k = step.conv;
  Mirror m(k.batch, 1, 1);
  std::int64_t slots = k.batch;
  for (std::int64_t b = 0; step.state_indices != nullptr && b < k.batch; ++b) {
    slots = std::max(slots, step.state_indices[b] + 1);
  }
  ShortConvStep moved = step;
  moved.conv = on_device(m, k);
  moved.y = m.both(step.y, k.channels);
  moved.state = packed(m, step.state, slots * k.channels * (k.width - 1), true);
  moved.state_indices = m.in(step.state_indices, k.batch * 8);
  cuda::short_conv_step(moved, m.device());
  m.finish();
}

void CudaDevice::gated_rms_norm(const GatedRmsNorm& n, const View& y) {
  Mirror m(n.batch, n.tokens, n.heads);
  cuda::gated_rms_norm(on_device(m, n), m.both(y, n.dim), m.device());
  m.finish();
}

void CudaDevice::gated_rms_norm_backward(const GatedRmsNorm& n, const GatedRmsNormGradients& host) {
  Mirror m(n.batch, n.tokens, n.heads);
  const GatedRmsNormGradients out{.d_y = m.in(host.d_y, n.dim),
                                  .d_x = m.both(host.d_x, n.dim),
                                  .d_gate = m.both(host.d_gate, n.dim),
                                  .d_weight = packed(m, host.d_weight, n.dim, true)};
  cuda::gated_rms_norm_backward(on_device(m, n), out, m.device());
  m.finish();
}

#else

std::string CudaDevice::missing() { return "this build has no CUDA kernels"; }
std::string CudaDevice::missing_hopper() { return missing(); }
bool CudaDevice::hopper_takes(DType) { return false; }
void CudaDevice::hopper_forward(const Problem&, const Outputs&) {}
void CudaDevice::forward(const Problem&, const Outputs&) {}
void CudaDevice::backward(const Problem&, const Saved&, const Gradients&) {}
void CudaDevice::step(const Step&) {}
void CudaDevice::short_conv(const ShortConv&, const ShortConvOutputs&) {}
void CudaDevice::short_conv_backward(const ShortConv&, const ShortConvGradients&) {}
void CudaDevice::short_conv_step(const ShortConvStep&) {}
void CudaDevice::gated_rms_norm(const GatedRmsNorm&, const View&) {}
void CudaDevice::gated_rms_norm_backward(const GatedRmsNorm&, const GatedRmsNormGradients&) {}

#endif

}  // namespace gka::kernels::test
