#include "kernels/case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>
#include <utility>

#include "kernels/problem.h"

namespace gka::kernels::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr std::array<std::pair<DType, const char*>, 4> kDTypeNames{{{DType::float64, "float64"},
                                                                    {DType::float32, "float32"},
                                                                    {DType::bfloat16, "bfloat16"},
                                                                    {DType::float16, "float16"}}};
constexpr std::array<std::pair<Part, const char*>, 3> kPartNames{
    {{Part::both, "both"}, {Part::solve, "solve"}, {Part::memory, "memory"}}};
constexpr std::array<std::pair<Layout, const char*>, 3> kLayoutNames{
    {{Layout::contiguous, "contiguous"}, {Layout::padded, "padded"}, {Layout::heads_first, "heads_first"}}};
constexpr std::array<std::pair<Keys, const char*>, 3> kKeysNames{
    {{Keys::spread, "spread"}, {Keys::silu, "silu"}, {Keys::shared, "shared"}}};

template <typename Table, typename Enum>
const char* look_up(const Table& table, Enum value) {
  return std::find_if(table.begin(), table.end(), [&](const auto& row) { return row.first == value; })->second;
}

/// splitmix64 and Box–Muller: the same numbers with every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0xd1342543de82ef95ULL) { state_ = bits(); }

  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  double uniform(double low = 0.0, double high = 1.0) {
    return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1.0p-53;
  }
  double log_uniform(double low, double high) { return std::exp(uniform(std::log(low), std::log(high))); }
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * 3.14159265358979323846 * uniform());
  }
  bool chance(double probability) { return uniform() < probability; }
  std::int64_t integer(std::int64_t low, std::int64_t high) {  // both included
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return *(choices.begin() + integer(0, static_cast<std::int64_t>(choices.size()) - 1));
  }

 private:
  std::uint64_t state_;
};

template <typename Body>
void for_each_row(const std::array<std::int64_t, 4>& shape, Body body) {
  for (std::int64_t i = 0; i < shape[0]; ++i)
    for (std::int64_t j = 0; j < shape[1]; ++j)
      for (std::int64_t k = 0; k < shape[2]; ++k) body(i, j, k);
}

template <typename Draw>
void fill(Array& array, Draw draw) {
  for_each_row(array.shape(), [&](auto i, auto j, auto k) {
    for (std::int64_t l = 0; l < array.shape()[3]; ++l) array.set(i, j, k, l, draw());
  });
}

/// Adds 0.7 |vector| of a direction that is always the same; `square` is |vector|², the result what becomes of it.
double share_direction(std::vector<double>& vector, double square) {
  const double by = 0.7 * std::sqrt(square / static_cast<double>(vector.size()));
  double sum = 0.0;
  for (std::size_t l = 0; l < vector.size(); ++l) {
    vector[l] += l % 3 == 0 ? -by : by;
    sum += vector[l] * vector[l];
  }
  return sum;
}

void fill_unit_vectors(Array& array, Keys keys, Random& random) {
  const std::int64_t dim = array.shape()[3];
  std::vector<double> vector(static_cast<std::size_t>(dim));
  for_each_row(array.shape(), [&](auto i, auto j, auto k) {
    double square = 0.0;
    for (double& value : vector) {
      const double normal = random.normal();
      value = keys == Keys::silu ? normal / (1.0 + std::exp(-normal)) : normal;
      square += value * value;
    }
    if (keys == Keys::shared) square = share_direction(vector, square);
    for (std::int64_t l = 0; l < dim; ++l) {
      array.set(i, j, k, l, vector[static_cast<std::size_t>(l)] / std::sqrt(square));
    }
  });
}

/// A few key outer products per head, as a memory that has seen tokens before; with an antisymmetric part if asked.
void fill_key_state(Array& h0, const CaseSpec& spec, Random& random) {
  const std::int64_t dim = spec.key_dim;
  const std::int64_t terms = spec.full_rank_h0 ? 2 * dim : random.integer(1, dim + 1);
  for (std::int64_t n = 0; n < h0.shape()[0]; ++n) {
    for (std::int64_t head = 0; head < h0.shape()[1]; ++head) {
      Array keys(DType::float64, {1, 1, terms, dim});
      fill_unit_vectors(keys, spec.keys, random);
      for (std::int64_t i = 0; i < dim; ++i) {
        for (std::int64_t j = 0; j <= i; ++j) {
          double sum = 0.0;
          for (std::int64_t t = 0; t < terms; ++t) sum += keys.at(0, 0, t, i) * keys.at(0, 0, t, j);
          const double skew = spec.asymmetric_h0 && i != j ? 0.2 * random.normal() : 0.0;
          h0.set(n, head, i, j, sum + skew);
          h0.set(n, head, j, i, sum - skew);
        }
      }
    }
  }
}

DType gate_dtype(const CaseSpec& spec) {
  return spec.float32_gates && spec.dtype != DType::float64 ? DType::float32 : spec.dtype;
}

}  // namespace

std::string describe(const CaseSpec& spec) {
  std::ostringstream text;
  text.precision(17);
  const auto flag = [&](const char* name, bool value) { text << ", ." << name << " = " << (value ? "true" : "false"); };
  text << "CaseSpec{.dtype = DType::" << look_up(kDTypeNames, spec.dtype) << ", .batch = " << spec.batch
       << ", .tokens = " << spec.tokens << ", .heads = " << spec.heads << ", .key_dim = " << spec.key_dim
       << ", .value_dim = " << spec.value_dim << ", .key_group = " << spec.key_group
       << ", .value_group = " << spec.value_group;
  if (!spec.lengths.empty()) {
    text << ", .lengths = {";
    for (std::size_t n = 0; n < spec.lengths.size(); ++n) text << (n ? ", " : "") << spec.lengths[n];
    text << "}";
  }
  flag("log_decay", spec.log_decay);
  flag("beta", spec.beta);
  flag("alpha", spec.alpha);
  flag("h0", spec.h0);
  flag("u0", spec.u0);
  flag("d_h", spec.d_h);
  flag("d_u", spec.d_u);
  text << ", .weakest_decay = " << spec.weakest_decay << ", .strongest_decay = " << spec.strongest_decay
       << ", .forget = " << spec.forget << ", .keep = " << spec.keep << ", .skip = " << spec.skip;
  flag("float32_gates", spec.float32_gates);
  flag("asymmetric_h0", spec.asymmetric_h0);
  flag("full_rank_h0", spec.full_rank_h0);
  flag("ridge_diagonal", spec.ridge_diagonal);
  const Options& options = spec.options;
  text << ", .keys = Keys::" << look_up(kKeysNames, spec.keys)
       << ", .layout = Layout::" << look_up(kLayoutNames, spec.layout)
       << ", .options = {.part = Part::" << look_up(kPartNames, options.part) << ", .scale = " << options.scale
       << ", .ridge = " << options.ridge << ", .iterations = " << options.iterations
       << ", .solver = Solver::" << name_of(options.solver) << ", .gradient = Gradient::" << name_of(options.gradient)
       << ", .ridge_mode = RidgeMode::" << name_of(options.ridge_mode);
  flag("ridge_gradient", options.ridge_gradient);
  flag("decay_keys", options.decay_keys);
  flag("refine", options.refine);
  text << ", .chunk = " << options.chunk << "}, .seed = " << spec.seed << "}";
  return text.str();
}

CaseSpec random_spec(std::uint64_t seed) {
  Random random(seed ^ 0x5eed5eedULL);
  CaseSpec spec{.seed = seed};
  spec.dtype = random.pick({DType::float64, DType::float32, DType::bfloat16, DType::float16});
  spec.heads = random.integer(1, 3);
  const auto dimension = [&] {
    return random.chance(0.08)  ? random.integer(65, 256)
           : random.chance(0.5) ? 16 * random.integer(1, 4)
                                : random.integer(1, 48);
  };
  spec.key_dim = dimension();
  spec.value_dim = dimension();

  // About 30 D² operations per token and head, several times over: keep the whole below a few 10⁷.
  const std::int64_t per_token = 40 * spec.heads * spec.key_dim * (spec.key_dim + spec.value_dim);
  const std::int64_t most = std::clamp<std::int64_t>(30'000'000 / per_token, 4, 300);
  if (random.chance(0.4)) {
    spec.lengths.resize(static_cast<std::size_t>(random.integer(1, 6)));
    for (auto& length : spec.lengths) {
      const auto share = most / static_cast<std::int64_t>(spec.lengths.size());
      length = random.chance(0.2) ? 0 : random.integer(0, std::max<std::int64_t>(share, 1));
    }
    spec.batch = 1;
    spec.tokens = std::accumulate(spec.lengths.begin(), spec.lengths.end(), std::int64_t{0});
  } else {
    spec.batch = random.integer(1, 3);
    spec.tokens = random.chance(0.05) ? 0 : random.integer(1, std::max<std::int64_t>(most / spec.batch, 1));
  }

  spec.log_decay = random.chance(0.8);
  spec.beta = random.chance(0.7);
  spec.alpha = random.chance(0.7);
  spec.h0 = random.chance(0.5);
  spec.u0 = random.chance(0.5);
  spec.d_h = random.chance(0.5);
  spec.d_u = random.chance(0.5);
  spec.strongest_decay = random.pick({0.01, 0.5, 6.0});
  spec.forget = random.pick({0.0, 0.0, 0.05});
  spec.keep = random.pick({0.0, 0.0, 0.2});
  spec.skip = random.pick({0.0, 0.0, 0.2});
  spec.float32_gates = random.chance(0.5);
  spec.asymmetric_h0 = random.chance(0.3);
  spec.keys = random.pick({Keys::spread, Keys::silu});
  spec.layout = random.pick({Layout::contiguous, Layout::padded, Layout::heads_first});

  Options& options = spec.options;
  options.part = random.pick({Part::both, Part::both, Part::both, Part::both, Part::solve, Part::memory});
  options.scale = random.pick({1.0, 0.35});
  options.solver = random.pick({Solver::chebyshev, Solver::chebyshev, Solver::chebyshev, Solver::conjugate_gradient,
                                Solver::gradient_descent, Solver::nesterov, Solver::exact});
  options.gradient = random.pick({Gradient::implicit, Gradient::unrolled});
  spec.full_rank_h0 = random.chance(0.3);
  if (options.solver == Solver::conjugate_gradient && options.gradient == Gradient::unrolled) {
    // On a low rank conjugate gradients end early, at a point where their answer has no derivative in the directions
    // that raise the rank: the d_h0 of two backends, and d_beta where β is 0, would be a comparison of roundings.
    spec.full_rank_h0 = true;
    spec.skip = 0.0;
  }
  options.ridge_mode = random.pick({RidgeMode::adaptive, RidgeMode::adaptive, RidgeMode::constant});
  options.ridge =
      options.ridge_mode == RidgeMode::constant ? random.log_uniform(0.05, 2.0) : random.log_uniform(0.01, 0.3);
  options.iterations = random.chance(0.1) ? random.integer(0, 2) : random.integer(3, 30);
  options.ridge_gradient = random.chance(0.7);
  options.decay_keys = random.chance(0.8);
  options.refine = random.chance(0.5);
  options.chunk = random.pick<std::int64_t>({0, 0, 1, 7, 16, 64});
  spec.ridge_diagonal = options.ridge_mode == RidgeMode::constant && random.chance(0.5) &&
                        (options.solver == Solver::conjugate_gradient || options.solver == Solver::exact);
  if (random.chance(0.25)) spec.key_group = spec.heads;
  if (random.chance(0.25)) spec.value_group = spec.heads;
  return spec;
}

Array::Array(DType dtype, std::array<std::int64_t, 4> shape, Layout layout) : dtype_(dtype), shape_(shape) {
  const std::int64_t gap = layout == Layout::padded ? 1 : 0;
  const std::int64_t row = shape[3] + 3 * gap;
  if (layout == Layout::heads_first) {
    stride_ = {shape[1] * shape[2] * row, row, shape[1] * row};
  } else {
    const std::int64_t token = shape[2] * row + 5 * gap;
    stride_ = {shape[1] * token + 7 * gap, token, row};
  }
  start_ = gap;
  capacity_ = start_ + shape[0] * stride_[0] + 1;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T nan = convert<T>(kNaN);
    bytes_.resize(static_cast<std::size_t>(capacity_) * sizeof(T));
    for (std::int64_t i = 0; i < capacity_; ++i) std::memcpy(bytes_.data() + i * sizeof(T), &nan, sizeof(T));
  });
}

std::int64_t Array::position(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) const {
  return start_ + i * stride_[0] + j * stride_[1] + k * stride_[2] + l;
}

void* Array::data() const {
  if (bytes_.empty()) return nullptr;
  return bytes_.data() + start_ * static_cast<std::int64_t>(bytes_.size()) / capacity_;
}

View Array::view() const {
  return {.data = data(),
          .dtype = dtype_,
          .batch_stride = stride_[0],
          .token_stride = stride_[1],
          .head_stride = stride_[2]};
}

double Array::at(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) const {
  return with_type(dtype_, [&](auto value) {
    std::memcpy(&value, bytes_.data() + position(i, j, k, l) * sizeof(value), sizeof(value));
    return convert<double>(value);
  });
}

void Array::set(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l, double value) {
  with_type(dtype_, [&](auto zero) {
    const auto stored = convert<decltype(zero)>(value);
    std::memcpy(bytes_.data() + position(i, j, k, l) * sizeof(stored), &stored, sizeof(stored));
  });
}

std::vector<double> Array::values() const {
  std::vector<double> all;
  all.reserve(static_cast<std::size_t>(size()));
  for_each_row(shape_, [&](auto i, auto j, auto k) {
    for (std::int64_t l = 0; l < shape_[3]; ++l) all.push_back(at(i, j, k, l));
  });
  return all;
}

bool Array::gaps_intact() const {
  std::vector<bool> element(static_cast<std::size_t>(capacity_), false);
  for_each_row(shape_, [&](auto i, auto j, auto k) {
    for (std::int64_t l = 0; l < shape_[3]; ++l) element[static_cast<std::size_t>(position(i, j, k, l))] = true;
  });
  return with_type(dtype_, [&](auto value) {
    for (std::int64_t i = 0; i < capacity_; ++i) {
      if (element[static_cast<std::size_t>(i)]) continue;
      std::memcpy(&value, bytes_.data() + i * sizeof(value), sizeof(value));
      if (!std::isnan(convert<double>(value))) return false;
    }
    return true;
  });
}

Outputs OwnedOutputs::pointers() const& {
  const auto numbers = [](const Array& array) { return static_cast<double*>(array.data()); };
  return {.o = o.view(),
          .h = h.data(),
          .u = u.data(),
          .saved = {.x = saved_x.data(), .norm = numbers(saved_norm), .h = saved_h.data(), .u = saved_u.data()},
          .report = {.norm = numbers(norm),
                     .ridge = numbers(ridge),
                     .residual = numbers(residual),
                     .true_residual = numbers(true_residual),
                     .variance = numbers(variance),
                     .certainty = numbers(certainty),
                     .x = numbers(x)}};
}

std::vector<NamedArray> OwnedOutputs::named() const& {
  std::vector<NamedArray> all{{"o", &o},
                              {"h", &h},
                              {"u", &u},
                              {"norm", &norm},
                              {"ridge", &ridge},
                              {"residual", &residual},
                              {"true_residual", &true_residual},
                              {"variance", &variance},
                              {"certainty", &certainty},
                              {"x", &x}};
  std::erase_if(all, [](const NamedArray& entry) { return !*entry.array; });
  return all;
}

Gradients OwnedGradients::pointers() const& {
  Gradients all = incoming;
  all.d_q = d_q.view();
  all.d_k = d_k.view();
  all.d_v = d_v.view();
  all.d_log_decay = d_log_decay.view();
  all.d_beta = d_beta.view();
  all.d_alpha = d_alpha.view();
  all.d_h0 = d_h0.data();
  all.d_u0 = d_u0.data();
  all.d_ridge_diagonal = static_cast<double*>(d_ridge_diagonal.data());
  return all;
}

std::vector<NamedArray> OwnedGradients::named() const& {
  std::vector<NamedArray> all{{"d_q", &d_q},
                              {"d_k", &d_k},
                              {"d_v", &d_v},
                              {"d_log_decay", &d_log_decay},
                              {"d_beta", &d_beta},
                              {"d_alpha", &d_alpha},
                              {"d_h0", &d_h0},
                              {"d_u0", &d_u0},
                              {"d_ridge_diagonal", &d_ridge_diagonal}};
  std::erase_if(all, [](const NamedArray& entry) { return !*entry.array; });
  return all;
}

Case::Case(CaseSpec spec) : spec_(std::move(spec)) {
  if (!spec_.lengths.empty()) {
    spec_.batch = 1;
    spec_.tokens = std::accumulate(spec_.lengths.begin(), spec_.lengths.end(), std::int64_t{0});
    cu_seqlens.push_back(0);
    for (const auto length : spec_.lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  }
  const CaseSpec& s = spec_;
  const std::int64_t sequences = s.lengths.empty() ? s.batch : static_cast<std::int64_t>(s.lengths.size());
  const bool solves = s.options.part != Part::memory;
  const bool values = s.options.part != Part::solve;
  const DType state = accumulation_dtype(s.dtype);

  Random random(s.seed);
  const auto normal = [&] { return random.normal(); };
  const auto tokens = [&](std::int64_t channels, std::int64_t group = 1) {
    return Array(s.dtype, {s.batch, s.tokens, s.heads / group, channels}, s.layout);
  };
  const auto gate = [&](bool present, auto draw) {
    if (!present) return Array();
    Array array(gate_dtype(s), {s.batch, s.tokens, s.heads, 1}, s.layout);
    fill(array, draw);
    return array;
  };

  fill_unit_vectors(q = tokens(s.key_dim), s.keys, random);
  fill_unit_vectors(k = tokens(s.key_dim, s.key_group), s.keys, random);
  if (values) fill(v = tokens(s.value_dim, s.value_group), normal);
  log_decay = gate(s.log_decay, [&] {
    if (random.chance(s.forget)) return -kInfinity;
    return random.chance(s.keep) ? 0.0 : -random.log_uniform(s.weakest_decay, s.strongest_decay);
  });
  beta = gate(s.beta, [&] { return random.chance(s.skip) ? 0.0 : random.uniform(0.1, 1.0); });
  alpha = gate(s.alpha && s.options.part == Part::both, [&] { return random.uniform(0.0, 1.0); });
  fill(d_o = tokens(values ? s.value_dim : s.key_dim), normal);

  const auto key_state = [&] { return Array(state, {sequences, s.heads, s.key_dim, s.key_dim}); };
  const auto value_state = [&] { return Array(state, {sequences, s.heads, s.key_dim, s.value_dim}); };
  if (s.h0 && solves) fill_key_state(h0 = key_state(), s, random);
  if (s.u0 && values) fill(u0 = value_state(), normal);
  if (s.d_h && solves) fill(d_h = key_state(), normal);
  if (s.d_u && values) fill(d_u = value_state(), normal);
  if (s.ridge_diagonal) {
    ridge_diagonal.resize(static_cast<std::size_t>(s.heads * s.key_dim));
    for (double& value : ridge_diagonal) value = random.log_uniform(0.1, 2.0);
    spec_.options.ridge_diagonal = ridge_diagonal.data();
  }

  problem_ = {.batch = s.batch,
              .tokens = s.tokens,
              .heads = s.heads,
              .key_dim = s.key_dim,
              .value_dim = values ? s.value_dim : 0,
              .sequences = sequences,
              .key_group = s.key_group,
              .value_group = s.value_group,
              .cu_seqlens = cu_seqlens.empty() ? nullptr : cu_seqlens.data(),
              .q = q.view(),
              .k = k.view(),
              .v = v.view(),
              .log_decay = log_decay.view(),
              .beta = beta.view(),
              .alpha = alpha.view(),
              .h0 = h0.data(),
              .u0 = u0.data(),
              .options = s.options};
}

OwnedOutputs Case::outputs(DType dtype) const {
  const CaseSpec& s = spec_;
  const Problem& p = problem_;
  const DType state = state_dtype(p);
  const auto segments = saved_segments(p.cu_seqlens != nullptr, p.batch, p.tokens, p.sequences);
  const auto per_token = [&](std::int64_t channels) {
    return Array(DType::float64, {s.batch, s.tokens, s.heads, channels});
  };

  OwnedOutputs out;
  out.o = Array(dtype, {s.batch, s.tokens, s.heads, remembers_values(p) ? s.value_dim : s.key_dim}, s.layout);
  if (remembers_values(p)) {
    out.u = Array(state, {p.sequences, s.heads, s.key_dim, s.value_dim});
    out.saved_u = Array(state, {segments, s.heads, s.key_dim, s.value_dim});
  }
  if (solves(p)) {
    out.h = Array(state, {p.sequences, s.heads, s.key_dim, s.key_dim});
    out.saved_h = Array(state, {segments, s.heads, s.key_dim, s.key_dim});
    out.saved_x = Array(state, {s.batch, s.tokens, s.heads, s.key_dim});
    out.saved_norm = per_token(1);
    for (Array* array : {&out.norm, &out.ridge, &out.residual, &out.true_residual, &out.variance, &out.certainty}) {
      *array = per_token(1);
    }
    out.x = per_token(s.key_dim);
  }
  return out;
}

OwnedGradients Case::gradients() const { return gradients(spec_.dtype, gate_dtype(spec_)); }
OwnedGradients Case::gradients(DType dtype) const { return gradients(dtype, dtype); }

OwnedGradients Case::gradients(DType tokens, DType gates) const {
  const auto like = [&](const Array& input, DType dtype) {
    return input ? Array(dtype, input.shape(), spec_.layout) : Array();
  };
  const auto state_like = [](const Array& input) { return input ? Array(input.dtype(), input.shape()) : Array(); };
  OwnedGradients out;
  out.d_q = like(q, tokens);
  out.d_k = like(k, tokens);
  out.d_v = like(v, tokens);
  out.d_log_decay = like(log_decay, gates);
  out.d_beta = like(beta, gates);
  out.d_alpha = like(alpha, gates);
  out.d_h0 = state_like(h0);
  out.d_u0 = state_like(u0);
  if (!ridge_diagonal.empty()) out.d_ridge_diagonal = Array(DType::float64, {1, 1, spec_.heads, spec_.key_dim});
  out.incoming.d_o = d_o.view();
  out.incoming.d_h = d_h.data();
  out.incoming.d_u = d_u.data();
  return out;
}

void copy_slice(const Array& from, int axis, std::int64_t begin, std::int64_t count, Array& to, std::int64_t at) {
  auto shape = from.shape();
  shape[static_cast<std::size_t>(axis)] = count;
  for_each_row(shape, [&](auto i, auto j, auto k) {
    for (std::int64_t l = 0; l < shape[3]; ++l) {
      const double value = axis == 0 ? from.at(begin + i, j, k, l) : from.at(i, begin + j, k, l);
      axis == 0 ? to.set(at + i, j, k, l, value) : to.set(i, at + j, k, l, value);
    }
  });
}

Case slice(const Case& whole, std::int64_t n, std::int64_t begin, std::int64_t length) {
  CaseSpec spec = whole.spec();
  spec.batch = 1;
  spec.tokens = length;
  spec.lengths.clear();
  Case part(spec);
  const Sequence run = sequence(whole.problem(), n);
  for (const auto member : Case::kByToken) {
    const Array& from = whole.*member;
    if (!from) continue;
    Array row(from.dtype(), {1, from.shape()[1], from.shape()[2], from.shape()[3]});
    copy_slice(from, 0, run.batch, 1, row, 0);
    copy_slice(row, 1, run.begin + begin, length, part.*member, 0);
  }
  for (const auto member : Case::kByState) {
    if (whole.*member) copy_slice(whole.*member, 0, n, 1, part.*member, 0);
  }
  std::copy(whole.ridge_diagonal.begin(), whole.ridge_diagonal.end(), part.ridge_diagonal.begin());
  return part;
}

Step step_at(const Problem& problem, std::int64_t token, const View& o, void* h, void* u) {
  const auto at_token = [&](View view) {
    with_type(view.dtype, [&](auto zero) {
      if (view) view.data = static_cast<decltype(zero)*>(view.data) + token * view.token_stride;
    });
    return view;
  };
  return {.batch = problem.batch,
          .heads = problem.heads,
          .key_dim = problem.key_dim,
          .value_dim = problem.value_dim,
          .key_group = problem.key_group,
          .value_group = problem.value_group,
          .q = at_token(problem.q),
          .k = at_token(problem.k),
          .v = at_token(problem.v),
          .log_decay = at_token(problem.log_decay),
          .beta = at_token(problem.beta),
          .alpha = at_token(problem.alpha),
          .o = at_token(o),
          .h = h,
          .u = u,
          .options = problem.options};
}

double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return kInfinity;
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return kInfinity;
    largest = std::max(largest, std::abs(b[i]));
  }
  const double unit = largest > 0.0 ? largest : 1.0;  // so that tiny tensors do not underflow in the squares
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow((a[i] - b[i]) / unit, 2);
    norm += std::pow(b[i] / unit, 2);
  }
  return norm > 0.0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

double relative_error(const Array& a, const Array& b) { return relative_error(a.values(), b.values()); }

std::vector<TensorError> compare(const std::vector<NamedArray>& got, const std::vector<NamedArray>& want) {
  std::vector<TensorError> errors;
  for (const auto& [name, array] : got) {
    for (const auto& [other_name, other] : want) {
      if (std::strcmp(name, other_name) == 0) errors.push_back({name, relative_error(*array, *other)});
    }
  }
  return errors;
}

}  // namespace gka::kernels::test
