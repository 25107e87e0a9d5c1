// Accuracy and speed of the CUDA kernels on this machine's GPU, without torch: first every case against the float64
// reference on the same rounded inputs, then the rows of docs/benchmarks.md by CUDA events, median of many, with inputs
// in rotation so that the cache does not answer. Prints tables; `--json FILE` writes the numbers.
//
//   gka_bench_gpu [--json FILE] [--quick] [--plain] [--case NAME] [--row NAME] [--no-accuracy]
//                 [--iterations N] [--unrefined] [--backward]
//
// --plain: the plain path instead of the Hopper kernels; --quick: fewer repeats, no backward pass
// unless --backward asks for it; --case, --row: only that one (no row has the name none). Exits with 1 where an error
// is outside its bound.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "gka/kernels.h"
#include "kernels/case.h"
#include "kernels/cuda/choose.h"
#include "kernels/cuda/hopper/hopper.h"
#include "kernels/cuda/plain.h"

namespace {

using namespace gka::kernels;
using gka::kernels::test::Array;
using gka::kernels::test::Case;
using gka::kernels::test::CaseSpec;
using gka::kernels::test::Keys;
using gka::kernels::test::Layout;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "gka_bench_gpu: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

/// One large block of device memory, handed out from the front; a call's scratch is given back all at once.
class Pool {
 public:
  explicit Pool(std::size_t bytes) : size_(bytes) { check(cudaMalloc(&base_, bytes)); }
  ~Pool() { cudaFree(base_); }
  Pool(const Pool&) = delete;

  void* take(std::size_t bytes) {
    const std::size_t at = used_;
    used_ += (bytes + 255) / 256 * 256;
    if (used_ > size_) {
      std::fprintf(stderr, "gka_bench_gpu: out of room\n");
      std::exit(1);
    }
    return static_cast<char*>(base_) + at;
  }
  std::size_t used() const { return used_; }
  void give_back(std::size_t mark) { used_ = mark; }
  void poison() { check(cudaMemset(base_, 0xff, size_)); }
  cuda::Device device() {
    return {.index = 0, .stream = nullptr, .allocate = [this](std::size_t bytes) { return take(bytes); }};
  }

 private:
  void* base_ = nullptr;
  std::size_t size_ = 0, used_ = 0;
};

/// The functions under test.
struct Path {
  const char* name;
  void (*forward)(const Problem&, const Outputs&, const cuda::Device&);
  void (*backward)(const Problem&, const Saved&, const Gradients&, const cuda::Device&);
};
constexpr Path kPlain{"plain", cuda::plain::forward, cuda::plain::backward};
/// The Hopper kernels, where they take a call, as the library chooses them; the forward pass is only asked for what
/// they take.
bool hopper_takes_backward(const Problem& p, const Gradients& out) {
  return *cuda::hopper::why_not_carried(p, out) == 0;
}
void hopper_backward(const Problem& p, const Saved& saved, const Gradients& out, const cuda::Device& device) {
  (hopper_takes_backward(p, out) ? cuda::hopper::backward : cuda::plain::backward)(p, saved, out, device);
}
constexpr Path kHopper{"hopper", cuda::hopper::forward, hopper_backward};

// ---- Accuracy -----------------------------------------------------------------------------------------------------

struct NamedCase {
  const char* name;
  CaseSpec spec;
};

std::vector<NamedCase> accuracy_cases() {
  const CaseSpec base{.dtype = DType::bfloat16,
                      .batch = 1,
                      .tokens = 512,
                      .heads = 2,
                      .key_dim = 128,
                      .value_dim = 128,
                      .weakest_decay = 1e-3,
                      .strongest_decay = 0.05,
                      .keys = Keys::silu,
                      .seed = 7};
  const auto with = [&](const char* name, auto&& change) {
    CaseSpec spec = base;
    change(spec);
    return NamedCase{name, spec};
  };
  return {
      {"SiLU keys", base},
      with("keys anywhere", [](auto& s) { s.keys = Keys::spread; }),
      with("shared direction", [](auto& s) { s.keys = Keys::shared; }),
      with("shared, few tokens", [](auto& s) { s.keys = Keys::shared, s.tokens = 100; }),
      with("shared, fast decay",
           [](auto& s) { s.keys = Keys::shared, s.weakest_decay = 0.05, s.strongest_decay = 0.5; }),
      with("no gates", [](auto& s) { s.log_decay = s.beta = s.alpha = false; }),
      with("strong decay", [](auto& s) { s.weakest_decay = 0.1, s.strongest_decay = 6; }),
      with("forgets and skips", [](auto& s) { s.forget = 0.02, s.skip = 0.2, s.keep = 0.2, s.strongest_decay = 0.5; }),
      with("with states", [](auto& s) { s.h0 = s.u0 = s.d_h = s.d_u = true, s.full_rank_h0 = true; }),
      with("packed, strided",
           [](auto& s) {
             s.lengths = {130, 0, 64, 1, 200, 65};
             s.tokens = 460, s.layout = Layout::padded, s.h0 = s.u0 = s.d_h = s.d_u = true, s.float32_gates = true;
           }),
      with("D 256, V 256", [](auto& s) { s.key_dim = s.value_dim = 256, s.tokens = 200, s.heads = 1; }),
      with("D 256, strong decay",
           [](auto& s) {
             s.key_dim = s.value_dim = 256, s.tokens = 300, s.heads = 1;
             s.weakest_decay = 0.1, s.strongest_decay = 6;
           }),
      with("D 256, with states",
           [](auto& s) {
             s.key_dim = s.value_dim = 256, s.tokens = 300, s.heads = 1;
             s.h0 = s.u0 = s.d_h = s.d_u = true, s.full_rank_h0 = true;
           }),
      with("D 200, V 136, packed",
           [](auto& s) {
             s.key_dim = 200, s.value_dim = 136, s.lengths = {130, 0, 64, 1, 65};
             s.tokens = 260, s.layout = Layout::padded, s.h0 = s.u0 = s.d_h = s.d_u = true, s.float32_gates = true;
           }),
      with("D 256, float16",
           [](auto& s) { s.key_dim = s.value_dim = 256, s.tokens = 200, s.heads = 1, s.dtype = DType::float16; }),
      with("odd sizes", [](auto& s) { s.batch = 2, s.tokens = 77, s.key_dim = 45, s.value_dim = 37; }),
      with("D 64, V 64", [](auto& s) { s.key_dim = s.value_dim = 64; }),
      with("D 64, strong decay",
           [](auto& s) { s.key_dim = s.value_dim = 64, s.weakest_decay = 0.1, s.strongest_decay = 6; }),
      with("D 64, forgets",
           [](auto& s) {
             s.key_dim = s.value_dim = 64;
             s.forget = 0.02, s.skip = 0.2, s.keep = 0.2, s.strongest_decay = 0.5;
           }),
      with("D 64, with states",
           [](auto& s) {
             s.key_dim = s.value_dim = 64;
             s.h0 = s.u0 = s.d_h = s.d_u = true, s.full_rank_h0 = true;
           }),
      with("D 64, packed",
           [](auto& s) {
             s.key_dim = s.value_dim = 64, s.lengths = {130, 0, 64, 1, 200, 65};
             s.tokens = 460, s.layout = Layout::padded, s.h0 = s.u0 = s.d_h = s.d_u = true, s.float32_gates = true;
           }),
      with("D 64, float16", [](auto& s) { s.key_dim = s.value_dim = 64, s.dtype = DType::float16; }),
      with("D 32, V 32", [](auto& s) { s.key_dim = s.value_dim = 32; }),
      with("D 64, V 192", [](auto& s) { s.key_dim = 64, s.value_dim = 192, s.tokens = 300; }),
      with("5 iterations", [](auto& s) { s.options.iterations = 5; }),
      with("12 iterations", [](auto& s) { s.options.iterations = 12; }),
      with("12, strong decay",
           [](auto& s) { s.options.iterations = 12, s.weakest_decay = 0.1, s.strongest_decay = 6; }),
      with("13, unrefined", [](auto& s) { s.options.iterations = 13, s.options.refine = false; }),
      with("float16", [](auto& s) { s.dtype = DType::float16; }),
      with("ridge 0.1", [](auto& s) { s.options.ridge = 0.1; }),
      with("ridge 0.012", [](auto& s) { s.options.ridge = 0.012; }),
      with("ridge 0.005", [](auto& s) { s.options.ridge = 0.005; }),
      with("0.005, strong decay",
           [](auto& s) { s.options.ridge = 0.005, s.weakest_decay = 0.1, s.strongest_decay = 6; }),
  };
}

/// A problem on the device, from one on the host.
class OnDevice {
 public:
  OnDevice(Pool& pool, const Case& c) : pool_(pool), p(c.problem()) {
    const std::int64_t n = p.sequences * p.heads * p.key_dim * 4;
    p.q = in(p.q, p.key_dim), p.k = in(p.k, p.key_dim), p.v = in(p.v, p.value_dim);
    p.log_decay = in(p.log_decay, 1), p.beta = in(p.beta, 1), p.alpha = in(p.alpha, 1);
    p.h0 = in(p.h0, n * p.key_dim), p.u0 = in(p.u0, n * p.value_dim);
    p.cu_seqlens = static_cast<const std::int64_t*>(in(p.cu_seqlens, (p.sequences + 1) * 8));
  }
  void* in(const void* host, std::int64_t bytes) {
    if (host == nullptr) return nullptr;
    void* device = pool_.take(static_cast<std::size_t>(bytes));
    check(cudaMemcpy(device, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice));
    return device;
  }
  void* both(void* host, std::int64_t bytes) {
    void* device = in(host, bytes);
    if (device != nullptr) back_.push_back({host, device, static_cast<std::size_t>(bytes)});
    return device;
  }
  View in(View v, std::int64_t channels) { return v.data = in(v.data, extent(v, channels)), v; }
  View both(View v, std::int64_t channels) { return v.data = both(v.data, extent(v, channels)), v; }
  void finish() {
    check(cudaDeviceSynchronize());
    for (const auto& b : back_) check(cudaMemcpy(b.host, b.device, b.bytes, cudaMemcpyDeviceToHost));
  }

 private:
  std::int64_t extent(const View& v, std::int64_t channels) const {
    const std::int64_t last =
        (p.batch - 1) * v.batch_stride + (p.tokens - 1) * v.token_stride + (p.heads - 1) * v.head_stride;
    return (last + channels) * bytes_of(v.dtype);
  }
  struct Back {
    void *host, *device;
    std::size_t bytes;
  };
  Pool& pool_;
  std::vector<Back> back_;

 public:
  Problem p;
};

/// What is promised on bfloat16 inputs and outputs; states and norms, which are float32, are held to less than 1e-3.
struct Bound {
  const char* name;
  double most;
};
constexpr Bound kBounds[] = {{"o", 5e-3},      {"x", 5e-3},   {"f", 1e-4},  {"h", 1e-3},  {"u", 1e-3},
                             {"dq", 1e-2},     {"dk", 1e-2},  {"dv", 1e-2}, {"dg", 1e-2}, {"dbeta", 1e-2},
                             {"dalpha", 1e-2}, {"dh0", 1e-2}, {"du0", 1e-2}};
bool within_bound(const std::string& name, double error) {
  const auto* bound =
      std::find_if(std::begin(kBounds), std::end(kBounds), [&](const Bound& b) { return name == b.name; });
  return bound != std::end(kBounds) && error <= bound->most;  // a NaN is not
}

struct Errors {
  std::string name;
  std::vector<std::pair<std::string, double>> of;
};

Errors measure_accuracy(Pool& pool, const Path& path, const NamedCase& named) {
  const Case c(named.spec);
  const auto want = c.outputs(DType::float64);
  const auto want_gradients = c.gradients(DType::float64);
  reference::forward(c.problem(), want.pointers());
  reference::backward(c.problem(), want_gradients.pointers());
  const auto got = c.outputs();
  const auto gradients = c.gradients();
  const std::size_t mark = pool.used();
  pool.poison();
  OnDevice d(pool, c);
  const Outputs host = got.pointers();
  const Problem& p = d.p;
  const std::int64_t tokens = p.batch * p.tokens * p.heads, states = p.sequences * p.heads * p.key_dim * 4;
  const std::int64_t segments =
      saved_segments(p.cu_seqlens != nullptr, p.batch, p.tokens, p.sequences) * p.heads * p.key_dim * 4;
  const Outputs out{.o = d.both(host.o, p.value_dim),
                    .h = d.both(host.h, states * p.key_dim),
                    .u = d.both(host.u, states * p.value_dim),
                    .saved = {.x = d.both(host.saved.x, tokens * p.key_dim * 4),
                              .norm = static_cast<double*>(d.both(host.saved.norm, tokens * 8)),
                              .h = d.both(host.saved.h, segments * p.key_dim),
                              .u = d.both(host.saved.u, segments * p.value_dim)},
                    .report = {}};
  path.forward(p, out, pool.device());
  const Gradients g = gradients.pointers();
  const Gradients on{.d_o = d.in(g.d_o, p.value_dim),
                     .d_h = d.in(g.d_h, states * p.key_dim),
                     .d_u = d.in(g.d_u, states * p.value_dim),
                     .d_q = d.both(g.d_q, p.key_dim),
                     .d_k = d.both(g.d_k, p.key_dim),
                     .d_v = d.both(g.d_v, p.value_dim),
                     .d_log_decay = d.both(g.d_log_decay, 1),
                     .d_beta = d.both(g.d_beta, 1),
                     .d_alpha = d.both(g.d_alpha, 1),
                     .d_h0 = d.both(g.d_h0, states * p.key_dim),
                     .d_u0 = d.both(g.d_u0, states * p.value_dim)};
  path.backward(p, out.saved, on, pool.device());
  d.finish();
  pool.give_back(mark);
  Errors errors{named.name, {}};
  const auto add = [&](const char* name, const Array& a, const Array& b) {
    if (a && b) errors.of.emplace_back(name, test::relative_error(a.values(), b.values()));
  };
  add("o", got.o, want.o);
  std::vector<double> x = got.saved_x.values();  // ‖H‖_F x
  const std::vector<double> norm = got.saved_norm.values();
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double f = norm[i / static_cast<std::size_t>(p.key_dim)];
    x[i] = f > 0 ? x[i] / f : 0;
  }
  errors.of.emplace_back("x", test::relative_error(x, want.x.values()));
  add("f", got.saved_norm, want.norm);
  add("h", got.h, want.h);
  add("u", got.u, want.u);
  add("dq", gradients.d_q, want_gradients.d_q);
  add("dk", gradients.d_k, want_gradients.d_k);
  add("dv", gradients.d_v, want_gradients.d_v);
  add("dg", gradients.d_log_decay, want_gradients.d_log_decay);
  add("dbeta", gradients.d_beta, want_gradients.d_beta);
  add("dalpha", gradients.d_alpha, want_gradients.d_alpha);
  add("dh0", gradients.d_h0, want_gradients.d_h0);
  add("du0", gradients.d_u0, want_gradients.d_u0);
  return errors;
}

// ---- Speed --------------------------------------------------------------------------------------------------------

__device__ float uniform(std::uint64_t n, std::uint64_t seed) {
  std::uint64_t z = (n + 1) * 0x9e3779b97f4a7c15ULL + seed * 0xd1342543de82ef95ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return (static_cast<float>((z ^ (z >> 31)) >> 40) + 0.5f) * 0x1p-24f;
}
__device__ float normal(std::uint64_t n, std::uint64_t seed) {
  return sqrtf(-2 * logf(uniform(2 * n, seed))) * cospif(2 * uniform(2 * n + 1, seed));
}

/// What the numbers of a row are: Gaussians; the same as a unit vector; SiLU of them as a unit vector, as the block
/// makes keys and queries; a unit vector plus 0.7 of one that all share, normalised.
enum class Numbers { gaussian, sphere, silu, shared };

/// One warp per row.
__global__ void fill_rows(void* out, bool float32, std::int64_t rows, int width, std::uint64_t seed, Numbers kind) {
  const std::int64_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  float sum = 0;
  const bool unit = kind != Numbers::gaussian;
  const auto value = [&](int c) {
    const float n = normal(static_cast<std::uint64_t>(row * width + c), seed);
    return kind == Numbers::silu ? n / (1 + expf(-n)) : kind == Numbers::shared ? n + (c % 3 == 0 ? -0.7f : 0.7f) : n;
  };
  for (int c = lane; c < width; c += 32) sum += value(c) * value(c);
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  for (int c = lane; c < width; c += 32) {
    const float v = unit ? value(c) * rsqrtf(sum) : value(c);
    const std::uint32_t bits = __float_as_uint(v);
    if (float32) {
      static_cast<float*>(out)[row * width + c] = v;
    } else {
      static_cast<std::uint16_t*>(out)[row * width + c] =
          static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
  }
}
/// kind 0: log decay between −0.05 and −0.001; 1: gates between 0 and 1.
__global__ void fill_gates(float* out, std::int64_t n, std::uint64_t seed, int kind) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i >= n) return;
  const float u = uniform(static_cast<std::uint64_t>(i), seed);
  out[i] = kind == 0 ? -0.001f * expf(3.9f * u) : u;
}

struct Shape {
  std::int64_t batch, tokens, heads, dim;
  DType dtype = DType::bfloat16;
  Numbers keys = Numbers::silu;
};

struct Buffers {
  Problem problem;
  Outputs train, infer;
  Gradients gradients;
};

Buffers make_buffers(Pool& pool, const Shape& s, std::uint64_t seed) {
  const std::int64_t n = s.batch * s.tokens * s.heads;
  const auto rows = [&](Numbers kind, std::uint64_t which) {
    const bool float32 = s.dtype == DType::float32;
    void* data = pool.take(static_cast<std::size_t>(n * s.dim * (float32 ? 4 : 2)));
    fill_rows<<<static_cast<unsigned>((n + 7) / 8), 256>>>(data, float32, n, static_cast<int>(s.dim), seed * 16 + which,
                                                           kind);
    return View{data, s.dtype, s.tokens * s.heads * s.dim, s.heads * s.dim, s.dim};
  };
  const auto gate = [&](int kind, std::uint64_t which) {
    auto* data = static_cast<float*>(pool.take(static_cast<std::size_t>(n * 4)));
    fill_gates<<<static_cast<unsigned>((n + 255) / 256), 256>>>(data, n, seed * 16 + which, kind);
    return View{data, DType::float32, s.tokens * s.heads, s.heads, 1};
  };
  Buffers b;
  b.problem = {.batch = s.batch,
               .tokens = s.tokens,
               .heads = s.heads,
               .key_dim = s.dim,
               .value_dim = s.dim,
               .sequences = s.batch,
               .q = rows(Numbers::silu, 0),
               .k = rows(s.keys, 1),
               .v = rows(Numbers::gaussian, 2),
               .log_decay = gate(0, 3),
               .beta = gate(1, 4),
               .alpha = gate(1, 5)};
  const std::int64_t segments = saved_segments(false, s.batch, s.tokens, s.batch) * s.heads * s.dim * s.dim * 4;
  b.infer.o = rows(Numbers::gaussian, 6);
  b.train.o = b.infer.o;
  b.train.saved = {.x = pool.take(static_cast<std::size_t>(n * s.dim * 4)),
                   .norm = static_cast<double*>(pool.take(static_cast<std::size_t>(n * 8))),
                   .h = pool.take(static_cast<std::size_t>(segments)),
                   .u = pool.take(static_cast<std::size_t>(segments))};
  b.gradients = {.d_o = rows(Numbers::gaussian, 7),
                 .d_q = rows(Numbers::gaussian, 8),
                 .d_k = rows(Numbers::gaussian, 9),
                 .d_v = rows(Numbers::gaussian, 10),
                 .d_log_decay = gate(1, 11),
                 .d_beta = gate(1, 12),
                 .d_alpha = gate(1, 13)};
  return b;
}

/// The median time of `run(i)` in milliseconds.
double median_time(int repeats, const std::function<void(int)>& run) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < repeats + 3; ++i) {
    check(cudaEventRecord(begin));
    run(i);
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms);
  }
  check(cudaGetLastError());
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Row {
  const char* name;
  Shape shape;
  double published_forward, published_both, target_forward, target_both;
};
constexpr Row kRows[] = {
    {"B4 T2048", {4, 2048, 8, 128}, 0.83, 2.88, 0.35, 0.95},
    {"B4 T4096", {4, 4096, 8, 128}, 1.43, 4.28, 0.60, 1.5},
    {"B4 T8192", {4, 8192, 8, 128}, 2.38, 7.49, 1.10, 2.8},
    {"B4 T16384", {4, 16384, 8, 128}, 4.34, 14.29, 2.0, 5.0},
    {"B1 T65536", {1, 65536, 8, 128}, 5.36, 20.13, 2.4, 6.0},
    // As many channels in smaller heads: 0.8 and 1.0 of B4 T4096.
    {"H16 D64", {4, 4096, 16, 64}, 0, 0, 0.48, 1.2},
    {"H32 D32", {4, 4096, 32, 32}, 0, 0, 0.60, 1.5},
    {"H4 D256", {4, 4096, 4, 256}, 0, 0, 4, 11},
    {"unit keys", {4, 4096, 8, 128, DType::bfloat16, Numbers::sphere}, 0, 0, 0, 0},
    {"shared", {4, 4096, 8, 128, DType::bfloat16, Numbers::shared}, 0, 0, 0, 0},
    {"unit 16K", {4, 16384, 8, 128, DType::bfloat16, Numbers::sphere}, 0, 0, 0, 0},
    {"shared 16K", {4, 16384, 8, 128, DType::bfloat16, Numbers::shared}, 0, 0, 0, 0},
};
/// What only the plain path takes: nothing is published, and the targets are our own.
constexpr Row kPlainRows[] = {
    {"float32", {4, 4096, 8, 128, DType::float32}, 0, 0, 5, 15},
};

}  // namespace

int main(int argc, char** argv) {
  bool quick = false, plain = false, accuracy = true, with_backward = false;
  std::string json, only, only_case;
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--plain") == 0) plain = true;
    if (std::strcmp(argv[i], "--backward") == 0) with_backward = true;
    if (std::strcmp(argv[i], "--no-accuracy") == 0) accuracy = false;
    if (std::strcmp(argv[i], "--iterations") == 0 && i + 1 < argc) options.iterations = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--unrefined") == 0) options.refine = false;
    if (std::strcmp(argv[i], "--case") == 0 && i + 1 < argc) only_case = argv[++i];
    if (std::strcmp(argv[i], "--row") == 0 && i + 1 < argc) only = argv[++i];
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) json = argv[++i];
  }
  const Path& path = plain ? kPlain : kHopper;
  std::printf("%s, path %s\n", cuda::describe().c_str(), path.name);
  std::string accuracy_json, speed_json;
  int outside = 0;
  if (accuracy) {
    Pool pool(std::size_t{1} << 30);
    for (NamedCase named : accuracy_cases()) {
      if (!only_case.empty() && only_case != named.name) continue;
      if (!options.refine) named.spec.options.refine = false;
      Problem probe{.key_dim = named.spec.key_dim, .value_dim = named.spec.value_dim, .options = named.spec.options};
      probe.q.dtype = named.spec.dtype;
      Gradients wanted;
      wanted.d_o.dtype = named.spec.dtype;
      if (!plain) {
        if (const char* why = cuda::hopper::why_not_carried(probe); *why != 0) {
          std::printf("%-18s not taken: %s\n", named.name, why);
          continue;
        }
      }
      const Errors errors = measure_accuracy(pool, path, named);
      std::printf("%-18s", named.name);
      accuracy_json += std::string(accuracy_json.empty() ? "" : ",\n") + "    \"" + named.name + "\": {";
      bool first = true;
      for (const auto& [name, error] : errors.of) {
        const bool within = within_bound(name, error);
        outside += within ? 0 : 1;
        std::printf(" %s %.1e%s", name.c_str(), error, within ? "" : "!");
        char text[64];
        std::snprintf(text, sizeof text, "%s\"%s\": %.3g", first ? "" : ", ", name.c_str(),
                      std::isfinite(error) ? error : 1e9);
        accuracy_json += text;
        first = false;
      }
      accuracy_json += "}";
      const bool taken = plain || hopper_takes_backward(probe, wanted);
      std::printf("%s\n", taken ? "" : " (gradients by the plain path)");
      std::fflush(stdout);
    }
  }
  std::printf("\n%-10s %8s %8s %8s | %8s %8s %8s   (ms; target, published)\n", "", "forward", "target", "publ.",
              "fwd+bwd", "target", "publ.");
  std::vector<Row> rows(std::begin(kRows), std::end(kRows));
  if (plain) rows.insert(rows.end(), std::begin(kPlainRows), std::end(kPlainRows));
  for (const Row& row : rows) {
    if (!only.empty() && only != row.name) continue;
    Pool pool(std::size_t{24} << 30);
    std::vector<Buffers> sets;
    for (std::uint64_t i = 0; i < (row.shape.tokens >= 8192 ? 2 : 3); ++i)
      sets.push_back(make_buffers(pool, row.shape, i + 1));
    for (Buffers& b : sets) b.problem.options = options;
    check(cudaDeviceSynchronize());
    const std::size_t mark = pool.used();
    const int repeats = quick ? 10 : plain ? 5 : 30;
    const auto set = [&](int i) -> const Buffers& { return sets[static_cast<std::size_t>(i) % sets.size()]; };
    const double forward = median_time(repeats, [&](int i) {
      pool.give_back(mark);
      path.forward(set(i).problem, set(i).infer, pool.device());
    });
    double both = 0;
    if (!quick || with_backward) {
      both = median_time(plain ? 2 : repeats, [&](int i) {
        pool.give_back(mark);
        path.forward(set(i).problem, set(i).train, pool.device());
        path.backward(set(i).problem, set(i).train.saved, set(i).gradients, pool.device());
      });
    }
    std::printf("%-10s %8.3f %8.2f %8.2f | %8.3f %8.2f %8.2f\n", row.name, forward, row.target_forward,
                row.published_forward, both, row.target_both, row.published_both);
    std::fflush(stdout);
    char text[160];
    std::snprintf(text, sizeof text, "%s    \"%s\": {\"forward_ms\": %.4f, \"forward_backward_ms\": %.4f}",
                  speed_json.empty() ? "" : ",\n", row.name, forward, both);
    speed_json += text;
  }
  if (!json.empty()) {
    std::ofstream file(json);
    file << "{\n  \"device\": \"" << cuda::describe() << "\",\n  \"path\": \"" << path.name
         << "\",\n  \"accuracy\": {\n"
         << accuracy_json << "\n  },\n  \"speed\": {\n"
         << speed_json << "\n  }\n}\n";
  }
  if (outside > 0) std::fprintf(stderr, "gka_bench_gpu: %d errors are outside their bounds (marked with !)\n", outside);
  return outside > 0 ? 1 : 0;
}
