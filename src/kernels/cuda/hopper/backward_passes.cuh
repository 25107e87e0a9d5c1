// The passes of the implicit backward around the second solve, one thread block per chunk (or segment) and head:
//
//   answers    U_c do_c, which is the solve's right-hand side, and the chunk's own part of the gradient of U_0
//   keys       dq, dα, and the chunk's own part of the gradient of H_0
//   carry_back what arrives at the end of every chunk from all later ones, along each sequence in reverse
//   gradients  dk, dv, dβ and dg from the chunk itself and from what arrives
//
// With ŷ_c = (H_c + λ_c I)⁻¹ U_c do_c the y_c of docs/mathematics.md is α_c s ŷ_c, and x_c = σ_c x̃_c. All gradients of
// a token are of the form Σ_{c ≥ j} M_jc (…): masked scores between tokens times tokens, plus what arrives, faded. dg
// is the sum without cancellation of that page. Scores and the products that cancel have operands of 16 bits; the
// nested term, which is small, and sums of squares have bfloat16.
#pragma once

#include "kernels/cuda/hopper/backward_chunk.cuh"

namespace gka::kernels::cuda::hopper::passes {

/// H at the start of a chunk as the solve has it: H_0/η as two tiles of float16, hi and lo, in blocks of 64 columns,
/// swizzled, and η.
struct KeyTile {
  const std::uint16_t* hi;
  const std::uint16_t* lo;
  float norm;
  int rows;

  /// The pair of numbers from an even column on, as they lie there.
  struct Words {
    std::uint32_t hi, lo;
  };
  __device__ __forceinline__ std::uint32_t word(int row, int column) const { return read_word(hi + at(row, column)); }
  __device__ __forceinline__ Words words(int row, int column) const {
    return {word(row, column), read_word(lo + at(row, column))};
  }

 private:
  __device__ __forceinline__ int at(int row, int column) const {
    return (column / 64 * rows + row) * 64 + ((column % 64 / 8) ^ (row % 8)) * 8 + column % 8;
  }
};
__device__ __forceinline__ Pair value_of(std::uint32_t word) { return unpack<DType::float16>(word); }
__device__ __forceinline__ Pair value_of(const KeyTile::Words& words) {
  const Pair hi = value_of(words.hi), lo = value_of(words.lo);
  return {hi.x + lo.x, hi.y + lo.y};
}

/// Scratch of one backward call. A slot is half a segment: 2 · segment + half.
struct Scratch {
  float* udo;                  // [batch, tokens, heads, D]: U_c do_c
  float* y;                    // the same: ŷ
  float* state_read;           // [batch, tokens, heads]: ζ_c s m_cᵀ U_0 do_c
  float* weight;               // [batch, tokens, heads]: w_c
  float* reach;                // [batch, tokens, heads]: Q_c = Σ_{l ≥ c} M_cl² w_l
  float* zeta;                 // [slots, heads]: what is left of a state after the slot
  float* u_half;               // [segments, heads, D, V]: U in the middle of each segment
  float* g;                    // [slots, heads, D, D]: own parts, then what arrives
  float* r;                    // [slots, heads, D, V]
  const std::uint16_t* tiles;  // [slots, heads, 2, rows, rows]
  const float* norm;           // [slots, heads]
  int tile_rows;

  __device__ KeyTile key_tile(std::int64_t task) const {
    const std::int64_t size = static_cast<std::int64_t>(tile_rows) * tile_rows;
    const std::uint16_t* hi = tiles + task * 2 * size;
    return {.hi = hi, .lo = hi + size, .norm = norm[task], .rows = tile_rows};
  }
};

template <int kDim>
using Wide = Product<kChunk, kDim, 1>;
template <int kDim>
using Square = Product<kDim, kDim, 2>;
using Scores = Product<kChunk, kChunk, 2>;

/// What a kernel is compiled for. kWhole: D = V = kDim, and all views are of bfloat16 that lie aligned.
template <int kDim_, DType kType_, bool kWhole_>
struct Shape {
  static constexpr int kDim = kDim_;
  static constexpr DType kType = kType_;
  static constexpr bool kWhole = kWhole_, kExact = kType_ == DType::bfloat16;
  static constexpr int kBlocks = kExact ? 2 : 1;  // on a multiprocessor
};

/// m_c = q_c + α_c (x_c − q_c).
template <DType kType, bool kAligned>
struct Mix {
  const Gates& gates;
  Field<const std::uint16_t> q;
  Field<const float> x;

  struct Loaded {
    Packed q;
    Quad x;
  };
  __device__ __forceinline__ Loaded operator()(int c, int i) const {
    return {read_packed<kAligned>(q.at(c, i)), read_quad(x.at(c, i))};
  }
  __device__ __forceinline__ Quad mixed(int c, const Loaded& from, float by) const {
    const Quad query = unpack<kType>(from.q);
    const float alpha = gates.alpha[c], sigma = gates.sigma[c];
    Quad m;
#pragma unroll
    for (int i = 0; i < 4; ++i) m.x[i] = by * (query.x[i] + alpha * (faded(from.x.x[i], sigma) - query.x[i]));
    return m;
  }
};

/// M_jc at a place of a product whose rows are c and whose columns are j, 0 for j > c.
struct Fading {
  Scores::OfRows row;
  Scores::OfColumns column;

  __device__ explicit Fading(const Gates& gates)
      : row(Scores::of_rows(gates.reach)), column(Scores::of_columns(gates.reach)) {}
  __device__ __forceinline__ float operator()(const At& at, int second) const {
    return at.column + second > at.row ? 0 : power_of_two(row.x[at.r] - column.x[at.c + second]);
  }
};

template <typename Wide>
__device__ __forceinline__ void fade_rows(Wide& product, const float* by) {
  const auto factor = Wide::of_rows(by);
  product.each([&](const At& at, float& x, float& y) {
    x = faded(x, factor.x[at.r]);
    y = faded(y, factor.x[at.r]);
  });
}

// ---- answers ----------------------------------------------------------------------------------------------------

template <typename Shape>
constexpr int answers_bytes() {
  using S = Shelf<Shape::kDim>;
  return static_cast<int>(sizeof(Gates)) + 2 * (S::plane() * (Shape::kExact ? 5 : 8) + S::score_plane() * 2);
}

/// One half of a segment. `u` is U before it; `u_next`, if given, gets U behind it.
template <typename Shape>
__device__ __forceinline__ void answer_half(const Problem& p, const Saved& saved, const Gradients& out,
                                            const Scratch& scratch, const Place& place, std::int64_t task,
                                            const float* u, float* u_next) {
  constexpr int kDim = Shape::kDim;
  constexpr bool kExact = Shape::kExact;
  auto& gates = *reinterpret_cast<Gates*>(tile_memory());
  Shelf<kDim> shelf{reinterpret_cast<std::uint16_t*>(tile_memory() + sizeof(Gates))};
  const Rows k = shelf.rows(kExact), v = shelf.rows(kExact), d_o = shelf.rows(kExact);
  const Rows scores = shelf.scores(), mixed = shelf.rows(false);
  const int dim = Shape::kWhole ? kDim : static_cast<int>(p.key_dim);
  const int values = Shape::kWhole ? kDim : static_cast<int>(p.value_dim);
  const auto inside = [&](int d, int i) { return Shape::kWhole || (d < dim && i < values); };
  const float scale = static_cast<float>(p.options.scale);
  const Mix<Shape::kType, Shape::kWhole> mix{gates, place.field(p.q),
                                             place.field(p, static_cast<const float*>(saved.x), dim)};

  load_rows<kDim, Shape::kType, Shape::kWhole>(k, p.k, place, dim);
  load_rows<kDim, Shape::kType, Shape::kWhole>(v, p.v, place, values);
  load_rows<kDim, Shape::kType, Shape::kWhole>(d_o, out.d_o, place, values);
  gates.load(p, saved.norm, place);
  fill_rows<kDim>(mixed, place.len, dim, mix, [&](int c, int, const auto& from) {
    return gates.zeta[c] == 0 ? Quad{} : mix.mixed(c, from, gates.zeta[c] * scale);
  });
  wait_for_copies();
  sync();

  Wide<kDim> answer;
  answer.clear();
  answer.template add_from<kDim, 4, true>(
      d_o, [&](int d, int i) { return inside(d, i) ? *reinterpret_cast<const Pair*>(u + d * values + i) : Pair{0, 0}; },
      [](const Pair& pair) { return split_pair(pair); });
  answer.row_sums(gates.parts, gates.alpha, [&](const At& at, float x, float y) {
    const Pair m = load_pair(mixed, at.row, at.column);
    return m.x * x + m.y * y;
  });
  const Field<float> state_read = place.field(p, scratch.state_read, 1);
  for (int c = tile_thread(); c < place.len; c += kTileThreads) *state_read.at(c, 0) = gates.alpha[c];
  fade_rows(answer, gates.zeta);
  {
    const Fading fading(gates);
    const auto beta = Scores::of_columns(gates.beta);
    Scores read;
    read.clear();
    read.template add_lower<Lies::as_is, Lies::transposed, kDim>(d_o, v);
    read.each([&](const At& at, float x, float y) {
      store_pair(scores, at.row, at.column, faded(x, fading(at, 0) * beta.x[at.c]),
                 faded(y, fading(at, 1) * beta.x[at.c + 1]));
    });
  }
  sync();
  answer.template add<Lies::as_is, Lies::as_is, kChunk, Zero::above>(scores, k);
  const Field<float> udo = place.field(p, scratch.udo, dim);
  answer.each([&](const At& at, float x, float y) {
    if (at.row < place.len && (Shape::kWhole || at.column < dim)) {
      *reinterpret_cast<Pair*>(udo.at(at.row, at.column)) = {x, y};
    }
  });
  if (tile_thread() == 0) scratch.zeta[task] = gates.zeta[kChunk - 1];

  // States half of their columns at a time, which leaves registers for more loads under way.
  using Half = Product<kDim, kDim / 2, 2>;
  const auto each_half = [&](const Rows& left, const Rows& right, auto&& use) {
#pragma unroll 1
    for (int from = 0; from < kDim; from += kDim / 2) {
      Half half;
      half.clear();
      half.template add<Lies::transposed, Lies::as_is, kChunk>(left, right.from_column(from));
      half.each([&](const At& at, float x, float y) {
        if (inside(at.row, from + at.column)) use(at.row * values + from + at.column, x, y);
      });
    }
  };
  if (u_next != nullptr) {
    sync();
    // Values times their weight, in place; for bfloat16 what that loses goes where the scores were.
    const Rows weighted{v.hi, kExact ? scores.hi : v.lo, v.ld};
    for (int i = tile_thread(); i < kChunk * kDim / 2; i += kTileThreads) {
      const int c = i / (kDim / 2), column = i % (kDim / 2) * 2;
      const Pair value = load_pair(v, c, column);
      const float by = gates.end[c] * gates.beta[c];
      store_pair(weighted, c, column, faded(value.x, by), faded(value.y, by));
    }
    sync();
    const float zeta = gates.zeta[kChunk - 1];
    each_half(k, weighted, [&](int at, float x, float y) {
      const Pair before = read_pair(u + at);
      *reinterpret_cast<Pair*>(u_next + at) = {x + faded(before.x, zeta), y + faded(before.y, zeta)};
    });
  }
  float* r = scratch.r + task * dim * values;
  each_half(mixed, d_o, [&](int at, float x, float y) { *reinterpret_cast<Pair*>(r + at) = {x, y}; });
}

template <typename Shape>
__global__ void __launch_bounds__(kTileThreads, Shape::kBlocks)
    answers(const __grid_constant__ Problem p, const __grid_constant__ Saved saved,
            const __grid_constant__ Gradients out, Plan plan, const __grid_constant__ Scratch scratch) {
  const std::int64_t index = block() / p.heads, head = block() % p.heads;
  if (index >= plan.count(p)) return;
  const Segment segment = plan.segments[index];
  const std::int64_t size = p.key_dim * p.value_dim;
  const float* u = static_cast<const float*>(saved.u) + block() * size;
  announce(u, static_cast<int>(size) * 4);
  float* middle = scratch.u_half + block() * size;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const Place place = place_of(segment, half, head);
    if (place.len == 0) return;
    const bool more = half == 0 && segment.length > kChunk;
    answer_half<Shape>(p, saved, out, scratch, place, (2 * index + half) * p.heads + head, u, more ? middle : nullptr);
    u = middle;
    sync();
  }
}

// ---- keys -------------------------------------------------------------------------------------------------------

template <typename Shape>
constexpr int keys_bytes() {
  return static_cast<int>(sizeof(Gates)) + 2 * Shelf<Shape::kDim>::plane() * 4;
}

template <typename Shape>
__global__ void __launch_bounds__(kTileThreads, 2)
    keys(const __grid_constant__ Problem p, const __grid_constant__ Saved saved, const __grid_constant__ Gradients out,
         Plan plan, const __grid_constant__ Scratch scratch) {
  constexpr int kDim = Shape::kDim, kLd = kDim + 4;
  const std::int64_t slot = block() / p.heads, head = block() % p.heads;
  if (slot / 2 >= plan.count(p)) return;
  const Place place = place_of(plan.segments[slot / 2], static_cast<int>(slot % 2), head);
  if (place.len == 0) return;
  auto& gates = *reinterpret_cast<Gates*>(tile_memory());
  Shelf<kDim> shelf{reinterpret_cast<std::uint16_t*>(tile_memory() + sizeof(Gates))};
  auto* const turned = reinterpret_cast<float*>(shelf.next);  // kDim rows of kLd numbers, over the tokens
  const Rows first = shelf.rows(false), second = shelf.rows(false);
  const int dim = Shape::kWhole ? kDim : static_cast<int>(p.key_dim);
  const auto inside = [&](int d, int i) { return Shape::kWhole || (d < dim && i < dim); };
  const float scale = static_cast<float>(p.options.scale);
  const auto x = place.field(p, static_cast<const float*>(saved.x), dim);
  const auto y = place.field(p, static_cast<const float*>(scratch.y), dim);
  const auto udo = place.field(p, static_cast<const float*>(scratch.udo), dim);
  const auto q = place.field(p.q);
  const KeyTile state = scratch.key_tile(block());
  announce(state.hi, static_cast<int>(sizeof(std::uint16_t)) * state.rows * state.rows);
  gates.load(p, saved.norm, place);

  struct Loaded {
    Quad x, y, udo;
    Packed q;
  };
  const Out<Shape::kWhole> d_q(out.d_q, place);
  float* const weight = gates.parts;
  float* const reach = gates.parts + kChunk;
  const float ridge = p.options.ridge_gradient ? static_cast<float>(p.options.ridge) : 0;
  sum_rows<2>(
      kChunk, kDim,
      [&](int c, int i) {
        if (c >= place.len || i >= dim) return Loaded{};
        return Loaded{read_quad(x.at(c, i)), read_quad(y.at(c, i)), read_quad(udo.at(c, i)),
                      read_packed<Shape::kWhole>(q.at(c, i))};
      },
      [&](int c, int i, const Loaded& from, float (&sums)[2]) {
        const float sigma = gates.sigma[c], solved = gates.alpha[c] * scale, direct = (1 - gates.alpha[c]) * scale;
        const Quad x_c = faded(from.x, sigma), q_c = unpack<Shape::kType>(from.q);
        store_quad(first, c, i, faded(x_c, -0.5f * gates.zeta[c] * solved));
        store_quad(second, c, i, from.y);
        float d[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[0] += x_c.x[e] * from.y.x[e];
          sums[1] += (x_c.x[e] - q_c.x[e]) * from.udo.x[e];
          d[e] = solved * from.y.x[e] + direct * from.udo.x[e];
        }
        if (d_q.data == nullptr || c >= place.len || i >= dim) return;
        d_q.put(c, i, d[0], d[1]);
        d_q.put(c, i + 2, d[2], d[3]);
      },
      [&](int c, const float (&sums)[2]) {
        const float sigma = gates.sigma[c];
        weight[c] = ridge == 0 || sigma == 0 ? 0 : 2 * ridge * gates.alpha[c] * scale * sums[0] * sigma;
        if (c >= place.len) return;
        *place.field(p, scratch.weight, 1).at(c, 0) = weight[c];
        if (out.d_alpha.data != nullptr) write(out.d_alpha, place.at(out.d_alpha, c), scale * sums[1]);
      });
  sync();
  each_of(kChunk, [&](int j) {
    float total = 0;
#pragma unroll 8
    for (int c = 0; c < kChunk; ++c) {
      const float m = c < j ? 0 : power_of_two(gates.reach[c] - gates.reach[j]);
      total += m * m * weight[c];
    }
    reach[j] = total;
    if (j < place.len) *place.field(p, scratch.reach, 1).at(j, 0) = total;
  });

  Square<kDim> own;
  own.clear();
  own.template add<Lies::transposed, Lies::as_is, kChunk>(first, second);
  sync();
  own.each(
      [&](const At& at, float a, float b) { *reinterpret_cast<Pair*>(turned + at.row * kLd + at.column) = {a, b}; });
  sync();
  own.each([&](const At& at, float& a, float& b) {
    a += turned[at.column * kLd + at.row];
    b += turned[(at.column + 1) * kLd + at.row];
  });
  sync();
  const Rows k{second.hi, Shape::kExact ? nullptr : second.lo, second.ld};
  load_rows<kDim, Shape::kType, Shape::kWhole>(k, p.k, place, dim);
  wait_for_copies();
  sync();
  for (int i = tile_thread(); i < kChunk * kDim / 2; i += kTileThreads) {
    const int c = i / (kDim / 2), column = i % (kDim / 2) * 2;
    const Pair key = load_pair(k, c, column);
    const float by = -0.5f * gates.beta[c] * gates.zeta[c] * reach[c];
    store_pair(first.top(), c, column, faded(key.x, by), faded(key.y, by));
  }
  sync();
  own.template add<Lies::transposed, Lies::as_is, kChunk>(first.top(), k.top());
  const float by = faded(-0.5f * reach[0] * state.norm, gates.zeta[0] * gates.zeta[0]);
  float* g = scratch.g + block() * dim * dim;
  own.each([&](const At& at, float a, float b) {
    if (!inside(at.row, at.column)) return;
    const Pair h = value_of(by == 0 ? 0 : state.word(at.row, at.column));
    *reinterpret_cast<Pair*>(g + at.row * dim + at.column) = {a + by * h.x, b + by * h.y};
  });
}

// ---- carry_back -------------------------------------------------------------------------------------------------

/// arriving_{s-1} = ζ_s arriving_s + part_s, in place, for G and R; four numbers a thread.
static __global__ void __launch_bounds__(kTileThreads)
    carry_back(const __grid_constant__ Problem p, Plan plan, const __grid_constant__ Scratch scratch,
               const __grid_constant__ Gradients out) {
  constexpr int kAhead = 8;
  const std::int64_t of_g = p.key_dim * p.key_dim, of_r = p.key_dim * p.value_dim;
  const std::int64_t pieces = (of_g + of_r) / 4, tiles = (pieces + kTileThreads - 1) / kTileThreads;
  const std::int64_t head = block() / tiles % p.heads, n = block() / tiles / p.heads;
  std::int64_t e = (block() % tiles * kTileThreads + tile_thread()) * 4;
  if (e >= of_g + of_r) return;
  const bool keys = e < of_g;
  if (!keys) e -= of_g;
  const std::int64_t size = keys ? of_g : of_r, columns = keys ? p.key_dim : p.value_dim;
  const auto* start = static_cast<const float*>(keys ? out.d_h : out.d_u);
  auto* last = static_cast<float*>(keys ? out.d_h0 : out.d_u0);
  const std::int64_t state_at = (n * p.heads + head) * size;

  Quad state{};
  if (start != nullptr) {
    state = read_quad(start + state_at + e);
    for (int i = 0; keys && i < 4; ++i) {
      state.x[i] = (state.x[i] + start[state_at + (e + i) % columns * columns + (e + i) / columns]) / 2;
    }
  }
  const std::int64_t segments = plan.begin[n + 1] - plan.begin[n];
  const std::int64_t count =
      segments == 0 ? 0 : 2 * segments - (plan.segments[plan.begin[n + 1] - 1].length > kChunk ? 0 : 1);
  const std::int64_t final_task = (2 * plan.begin[n] + count - 1) * p.heads + head;
  float* part = (keys ? scratch.g : scratch.r) + final_task * size + e;
  const float* zeta = scratch.zeta + final_task;
  const std::int64_t step = p.heads * size;
  Quad ahead[kAhead];
  float zetas[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (a >= count) continue;
    ahead[a] = *reinterpret_cast<const Quad*>(part - a * step);
    zetas[a] = zeta[-a * p.heads];
  }
  for (std::int64_t base = 0; base < count; base += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (base + a >= count) continue;
      *reinterpret_cast<Quad*>(part - a * step) = state;
#pragma unroll
      for (int i = 0; i < 4; ++i) state.x[i] = faded(state.x[i], zetas[a]) + ahead[a].x[i];
      if (base + a + kAhead >= count) continue;
      ahead[a] = *reinterpret_cast<const Quad*>(part - (a + kAhead) * step);
      zetas[a] = zeta[-(a + kAhead) * p.heads];
    }
    part -= kAhead * step;
    zeta -= kAhead * p.heads;
  }
  if (last != nullptr) *reinterpret_cast<Quad*>(last + state_at + e) = state;
}

/// d_h0 is symmetric: rounding made it so only nearly.
static __global__ void __launch_bounds__(kTileThreads) make_symmetric(std::int64_t matrices, int dim, float* h) {
  const std::int64_t pairs = static_cast<std::int64_t>(dim) * dim;
  for (std::int64_t i = block() * kTileThreads + tile_thread(); i < matrices * pairs; i += blocks() * kTileThreads) {
    const std::int64_t row = i % pairs / dim, column = i % dim;
    if (row >= column) continue;
    float* m = h + i / pairs * pairs;
    m[row * dim + column] = m[column * dim + row] = (m[row * dim + column] + m[column * dim + row]) / 2;
  }
}

// ---- gradients --------------------------------------------------------------------------------------------------

/// What `gradients` keeps beside the tokens.
struct GradientSums {
  float weight[kChunk], reach[kChunk], state_read[kChunk];
  float share[kChunk];            // α_c s σ_c: y_c x_cᵀ = share ŷ_c x̃_cᵀ
  float state_solved[kChunk];     // x̃_cᵀ H_0 ŷ_c / η
  float key_inner[kChunk];        // k_jᵀ H_0 k_j / η
  float arriving[kChunk];         // k_jᵀ Ḡ' k_j
  float values_arriving[kChunk];  // k_jᵀ R̄' v_j
  float d_beta[kChunk];
};

template <typename Shape>
constexpr int gradients_bytes() {
  using S = Shelf<Shape::kDim>;
  return static_cast<int>(sizeof(Gates) + sizeof(GradientSums)) +
         2 * (S::plane() * (Shape::kExact ? 5 : 8) + S::score_plane() * 2);
}

/// dg_t = Σ_{j<t} Σ_{c≥t} P_jc. `pairs` holds P_jc / (M_jc β_j) at (c, j) without the norm's part, `products` k_j ·
/// k_c; the state before the chunk and what arrives at its end (`arriving` = ζ_C (⟨Ḡ', H_0⟩ + ⟨R̄', U_0⟩)) are the row
/// and the column that P has besides.
__device__ __forceinline__ void sum_decay_gradients(const Gradients& out, const Place& place, Gates& gates,
                                                    GradientSums& sums, float norm, float arriving, const Rows& scores,
                                                    const Rows& ones, Scores& pairs, Scores& products) {
  const Fading fading(gates);
  const auto beta = Scores::of_columns(gates.beta);
  const Rows squares{scores.lo, nullptr, scores.ld};
  // k_jᵀ H_c k_j = ζ_c k_jᵀ H_0 k_j + Σ_i M_ic β_i (k_i · k_j)²
  products.each([&](const At& at, float x, float y) {
    store_pair(scores.top(), at.row, at.column, fading(at, 0) * beta.x[at.c], fading(at, 1) * beta.x[at.c + 1]);
    store_pair(squares, at.row, at.column, x * x, y * y);
    store_pair(ones, at.row, at.column, at.row < at.column ? 1 : 0, at.row < at.column + 1 ? 1 : 0);
  });
  sync();
  products.clear();
  products.template add_lower<Lies::as_is, Lies::as_is, kChunk>(scores.top(), squares);
  sync();
  {
    const auto inner = Scores::of_columns(sums.key_inner);
    const auto zeta = Scores::of_rows(gates.zeta), weight = Scores::of_rows(sums.weight);
    pairs.each_with(products, [&](const At& at, float x, float y, float seen_x, float seen_y) {
      const float by = -0.5f * weight.x[at.r], left = zeta.x[at.r] * norm;
      store_pair(scores, at.row, at.column,
                 faded(x + by * (left * inner.x[at.c] + seen_x), fading(at, 0) * beta.x[at.c]),
                 faded(y + by * (left * inner.x[at.c + 1] + seen_y), fading(at, 1) * beta.x[at.c + 1]));
    });
  }
  // The state's row, and the arriving column.
  each_of(kChunk, [&](int c) {
    const float zeta = gates.zeta[c];
    float seen = zeta * norm;
#pragma unroll 8
    for (int i = 0; i < kChunk; ++i) {
      const float m = i > c ? 0 : power_of_two(gates.reach[c] - gates.reach[i]);
      seen += m * gates.beta[i] * sums.key_inner[i];
    }
    const float solved = sums.share[c] * sums.state_solved[c] + 0.5f * sums.weight[c] * seen;
    sums.state_read[c] -= faded(norm * solved, zeta);
    sums.arriving[c] = faded(sums.arriving[c] + sums.values_arriving[c], gates.end[c] * gates.beta[c]);
  });
  products.clear();
  products.template add<Lies::as_is, Lies::as_is, kChunk>(scores, ones);
  products.lower_column_sums(gates.parts, sums.share);
  each_of(place.len, [&](int t) {
    float before = 0, later = arriving;
#pragma unroll 8
    for (int c = 0; c < kChunk; ++c) {
      before += c < t ? sums.arriving[c] : 0;
      later += c < t ? 0 : sums.state_read[c];
    }
    write(out.d_log_decay, place.at(out.d_log_decay, t), sums.share[t] + before + later);
  });
}

template <typename Shape>
__global__ void __launch_bounds__(kTileThreads, Shape::kBlocks)
    gradients(const __grid_constant__ Problem p, const __grid_constant__ Saved saved,
              const __grid_constant__ Gradients out, Plan plan, const __grid_constant__ Scratch scratch) {
  constexpr int kDim = Shape::kDim;
  constexpr bool kExact = Shape::kExact;
  const std::int64_t slot = block() / p.heads, head = block() % p.heads;
  if (slot / 2 >= plan.count(p)) return;
  const Place place = place_of(plan.segments[slot / 2], static_cast<int>(slot % 2), head);
  if (place.len == 0) return;
  auto& gates = *reinterpret_cast<Gates*>(tile_memory());
  auto& sums = *reinterpret_cast<GradientSums*>(tile_memory() + sizeof(Gates));
  Shelf<kDim> shelf{reinterpret_cast<std::uint16_t*>(tile_memory() + sizeof(Gates) + sizeof(GradientSums))};
  const Rows k = shelf.rows(kExact), scores = shelf.scores();
  Shelf<kDim> again = shelf;
  const Rows v = shelf.rows(kExact), d_o = shelf.rows(kExact), mixed = shelf.rows(false);
  const Rows x = again.rows(false), y = again.rows(false);
  const int dim = Shape::kWhole ? kDim : static_cast<int>(p.key_dim);
  const int values = Shape::kWhole ? kDim : static_cast<int>(p.value_dim);
  const auto inside = [&](int d, int i, int columns) { return Shape::kWhole || (d < dim && i < columns); };
  const float scale = static_cast<float>(p.options.scale);
  const auto x_tilde = place.field(p, static_cast<const float*>(saved.x), dim);
  const float* r = scratch.r + block() * dim * values;
  const float* g = scratch.g + block() * dim * dim;
  const std::int64_t segment_task = slot / 2 * p.heads + head;
  const float* u = (slot % 2 == 0 ? static_cast<const float*>(saved.u) : scratch.u_half) + segment_task * dim * values;
  const KeyTile state = scratch.key_tile(block());
  announce(r, dim * values * 4);
  announce(u, dim * values * 4);
  announce(g, dim * dim * 4);
  announce(state.hi, 4 * state.rows * state.rows);
  announce_rows(place.field(p, static_cast<const float*>(scratch.y), dim), place.len, dim);

  load_rows<kDim, Shape::kType, Shape::kWhole>(k, p.k, place, dim);
  load_rows<kDim, Shape::kType, Shape::kWhole>(v, p.v, place, values);
  load_rows<kDim, Shape::kType, Shape::kWhole>(d_o, out.d_o, place, values);
  gates.load(p, saved.norm, place);
  {
    const Mix<Shape::kType, Shape::kWhole> mix{gates, place.field(p.q), x_tilde};
    fill_rows<kDim>(mixed, place.len, dim, mix,
                    [&](int c, int, const auto& from) { return mix.mixed(c, from, scale); });
  }
  wait_for_copies();
  each_of(kChunk, [&](int c) {
    const bool there = c < place.len;
    sums.weight[c] = there ? *place.field(p, scratch.weight, 1).at(c, 0) : 0;
    sums.reach[c] = there ? *place.field(p, scratch.reach, 1).at(c, 0) : 0;
    sums.state_read[c] = there ? *place.field(p, scratch.state_read, 1).at(c, 0) : 0;
    sums.share[c] = gates.alpha[c] * scale * gates.sigma[c];
  });
  const auto along_key = [&](const At& at, float a, float b) {
    const Pair key = load_pair(k, at.row, at.column);
    return key.x * a + key.y * b;
  };

  // Of the values' memory: R̄_j v_j into `sum`, R̄_jᵀ k_j into d_v.
  float inner = 0;  // ⟨R̄', U_0⟩ + ⟨Ḡ', H_0⟩, this thread's share
  struct PairOfBoth {
    Pair arriving, state;
  };
  Wide<kDim> sum;
  sum.clear();
  sum.template add_from<kDim, 2, true>(
      v,
      [&](int d, int i) {
        if (!inside(d, i, values)) return PairOfBoth{};
        return PairOfBoth{read_pair(r + d * values + i), read_pair(u + d * values + i)};
      },
      [&](const PairOfBoth& both) {
        inner += both.arriving.x * both.state.x + both.arriving.y * both.state.y;
        return split_pair(both.arriving);
      });
  sum.row_sums(gates.parts, sums.values_arriving, along_key);
  fade_rows(sum, gates.end);
  Scores pairs;
  {
    const Fading fading(gates);
    Scores first;
    first.clear();
    first.template add_lower<Lies::as_is, Lies::transposed, kDim>(d_o, v);
    first.each([&](const At& at, float a, float b) {
      store_pair(scores, at.row, at.column, faded(a, fading(at, 0)), faded(b, fading(at, 1)));
    });
    sync();
    sum.template add<Lies::transposed, Lies::as_is, kChunk, Zero::below>(scores, mixed);
    pairs.clear();
    pairs.template add_lower<Lies::as_is, Lies::transposed, kDim>(mixed, k);
    sync();
    pairs.each_with(first, [&](const At& at, float& a, float& b, float before_a, float before_b) {
      store_pair(scores, at.row, at.column, faded(a, fading(at, 0)), faded(b, fading(at, 1)));
      a *= before_a;
      b *= before_b;
    });
  }
  sum.row_sums(gates.parts, sums.d_beta, along_key);
  sum.each([](const At&, float& a, float& b) {
    a *= 0.5f;
    b *= 0.5f;
  });
  {
    Wide<kDim> d_v;
    d_v.clear();
    d_v.template add_from<kDim, 2, true>(
        k,
        [&](int i, int d) {
          return inside(d, i, values) ? Pair{r[d * values + i], r[(d + 1) * values + i]} : Pair{0, 0};
        },
        [](const Pair& pair) { return split_pair(pair); });
    fade_rows(d_v, gates.end);
    d_v.template add<Lies::transposed, Lies::as_is, kChunk, Zero::below>(scores, d_o);
    const Out<Shape::kWhole> to(out.d_v, place);
    const auto beta = Wide<kDim>::of_rows(gates.beta);
    d_v.each([&](const At& at, float a, float b) {
      if (to.data == nullptr || at.row >= place.len || !(Shape::kWhole || at.column < values)) return;
      to.put(at.row, at.column, beta.x[at.r] * a, beta.x[at.r] * b);
    });
  }
  sync();

  // Of the keys' memory: Ḡ_j k_j on top of half of that.
  fill_rows<kDim>(
      x, place.len, dim, [&](int c, int i) { return read_quad(x_tilde.at(c, i)); },
      [&](int c, int, const Quad& from) { return gates.sigma[c] == 0 ? Quad{} : from; });
  {
    const auto solved = place.field(p, static_cast<const float*>(scratch.y), dim);
    fill_rows<kDim>(
        y, place.len, dim, [&](int c, int i) { return read_quad(solved.at(c, i)); },
        [](int, int, const Quad& from) { return from; });
  }
  const auto add_faded = [&](const Wide<kDim>& product, const auto& factor) {
    sum.each_with(product, [&](const At& at, float& a, float& b, float more_a, float more_b) {
      a += faded(more_a, factor.x[at.r]);
      b += faded(more_b, factor.x[at.r]);
    });
  };
  {
    struct WithState {
      Pair arriving;
      std::uint32_t state;
    };
    Wide<kDim> part;
    part.clear();
    float inner_keys = 0;
    part.template add_from<kDim, 2, true>(
        k,
        [&](int d, int i) {
          if (!inside(d, i, dim)) return WithState{};
          return WithState{read_pair(g + d * dim + i), state.word(d, i)};
        },
        [&](const WithState& both) {
          const Pair h = value_of(both.state);
          inner_keys += both.arriving.x * h.x + both.arriving.y * h.y;
          return split_pair(both.arriving);
        });
    inner += inner_keys * state.norm;
    part.row_sums(gates.parts, sums.arriving, along_key);
    add_faded(part, Wide<kDim>::of_rows(gates.end));
    part.clear();
    part.template add_from<kDim, 4, false>(
        k, [&](int d, int i) { return inside(d, i, dim) ? state.word(d, i) : 0u; },
        [](std::uint32_t word) { return split_pair(value_of(word)); });
    part.row_sums(gates.parts, sums.key_inner, along_key);
    auto nested = Wide<kDim>::of_rows(gates.zeta);
    const auto reach = Wide<kDim>::of_rows(sums.reach);
    for (int i = 0; i < static_cast<int>(sizeof(nested.x) / sizeof(float)); ++i) {
      nested.x[i] *= -0.5f * state.norm * reach.x[i];
    }
    add_faded(part, nested);
    part.clear();
    part.template add_from<kDim, 2, true>(
        x, [&](int d, int i) { return inside(d, i, dim) ? state.words(d, i) : KeyTile::Words{}; },
        [](const KeyTile::Words& words) { return split_pair(value_of(words)); });
    part.row_sums(gates.parts, sums.state_solved, [&](const At& at, float a, float b) {
      const Pair other = load_pair(y, at.row, at.column);
      return other.x * a + other.y * b;
    });
  }
  Scores first;
  {
    const Fading fading(gates);
    const auto share = Scores::of_rows(sums.share);
    const auto store_scores = [&](const At& at, float a, float b) {
      const float by = -0.5f * share.x[at.r];
      store_pair(scores, at.row, at.column, faded(a, by * fading(at, 0)), faded(b, by * fading(at, 1)));
    };
    first.clear();
    first.template add_lower<Lies::as_is, Lies::transposed, kDim>(x, k);
    first.each(store_scores);  // the last product that read `scores` lies before several barriers
    sync();
    sum.template add<Lies::transposed, Lies::as_is, kChunk, Zero::below>(scores, y);
    Scores second;
    second.clear();
    second.template add_lower<Lies::as_is, Lies::transposed, kDim>(y, k);
    sync();
    first.each_with(second, [&](const At& at, float& a, float& b, float more_a, float more_b) {
      store_scores(at, more_a, more_b);
      a *= more_a * share.x[at.r];
      b *= more_b * share.x[at.r];
    });
  }
  pairs.each_with(first, [](const At&, float& a, float& b, float both_a, float both_b) {
    a -= both_a;
    b -= both_b;
  });
  sync();
  sum.template add<Lies::transposed, Lies::as_is, kChunk, Zero::below>(scores, x);
  first.clear();
  first.template add<Lies::as_is, Lies::transposed, kDim>(k, k);
  sync();
  {
    const auto row_reach = Scores::of_rows(gates.reach), row_weight = Scores::of_rows(sums.reach);
    const auto column_reach = Scores::of_columns(gates.reach), column_weight = Scores::of_columns(sums.reach);
    const auto beta = Scores::of_columns(gates.beta);
    first.each([&](const At& at, float a, float b) {
      const auto nested = [&](int e) {
        const float between = row_reach.x[at.r] - column_reach.x[at.c + e];
        const bool later = at.row > at.column + e;
        const float weight = later ? row_weight.x[at.r] : column_weight.x[at.c + e];
        return -0.5f * power_of_two(later ? between : -between) * weight * beta.x[at.c + e];
      };
      store_pair(scores.top(), at.row, at.column, a * nested(0), b * nested(1));
    });
  }
  sync();
  sum.template add<Lies::as_is, Lies::as_is, kChunk>(scores.top(), k.top());
  {
    const Out<Shape::kWhole> to(out.d_k, place);
    const auto beta = Wide<kDim>::of_rows(gates.beta);
    sum.each([&](const At& at, float a, float b) {
      if (to.data == nullptr || at.row >= place.len || !(Shape::kWhole || at.column < dim)) return;
      to.put(at.row, at.column, 2 * beta.x[at.r] * a, 2 * beta.x[at.r] * b);
    });
  }
  sum.row_sums(gates.parts, gates.alpha, along_key);
  if (out.d_beta.data != nullptr) {
    for (int j = tile_thread(); j < place.len; j += kTileThreads) {
      write(out.d_beta, place.at(out.d_beta, j), gates.alpha[j] + 0.5f * sums.d_beta[j]);
    }
  }
  if (out.d_log_decay.data == nullptr) return;
  const float arriving = faded(sum_of_threads(inner, gates.parts), gates.zeta[kChunk - 1]);
  const Rows ones{y.hi, nullptr, kChunk + 8};
  sum_decay_gradients(out, place, gates, sums, state.norm, arriving, scores, ones, pairs, first);
}

// ---- On the host ------------------------------------------------------------------------------------------------

/// Queues a backward pass. `scratch` has the tiles and norms of H already; solve(right, y) queues the solve of
/// (H_c + λ_c I) ŷ_c = right_c for all tokens.
template <typename Shape, typename Solve>
void run(const Problem& p, const Saved& saved, const Gradients& out, const Plan& plan, const Device& device,
         Scratch scratch, Solve&& solve) {
  const std::int64_t segments = segments_of(p), slots = 2 * segments, tokens = p.batch * p.tokens * p.heads;
  const std::int64_t of_g = p.key_dim * p.key_dim, of_r = p.key_dim * p.value_dim;
  scratch.udo = allocate<float>(device, tokens * p.key_dim);
  scratch.y = allocate<float>(device, tokens * p.key_dim);
  scratch.state_read = allocate<float>(device, tokens);
  scratch.weight = allocate<float>(device, tokens);
  scratch.reach = allocate<float>(device, tokens);
  scratch.zeta = allocate<float>(device, slots * p.heads);
  scratch.u_half = allocate<float>(device, segments * p.heads * of_r);
  scratch.g = allocate<float>(device, slots * p.heads * of_g);
  scratch.r = allocate<float>(device, slots * p.heads * of_r);

  launch_tiles(answers<Shape>, segments * p.heads, answers_bytes<Shape>(), device.stream, p, saved, out, plan, scratch);
  solve(scratch.udo, scratch.y);
  launch_tiles(keys<Shape>, slots * p.heads, keys_bytes<Shape>(), device.stream, p, saved, out, plan, scratch);
  const std::int64_t tiles = ((of_g + of_r) / 4 + kTileThreads - 1) / kTileThreads;
  launch_tiles(carry_back, p.sequences * p.heads * tiles, 0, device.stream, p, plan, scratch, out);
  if (out.d_h0 != nullptr) {
    const std::int64_t numbers = p.sequences * p.heads * of_g;
    launch_tiles(make_symmetric, least<std::int64_t>((numbers + kTileThreads - 1) / kTileThreads, 1 << 16), 0,
                 device.stream, p.sequences * p.heads, static_cast<int>(p.key_dim), static_cast<float*>(out.d_h0));
  }
  launch_tiles(gradients<Shape>, slots * p.heads, gradients_bytes<Shape>(), device.stream, p, saved, out, plan,
               scratch);
}

}  // namespace gka::kernels::cuda::hopper::passes
