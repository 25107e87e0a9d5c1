// The rivals' memories token by token. A column of S depends on no other, so columns are lanes: a block of a head's
// columns lies in the first-level cache from a sequence's first token to its last, and a token reads and writes it
// once. What a token writes (k uᵀ) is added when the next one comes by, together with that one's decay.
//
// Backward, a segment of tokens at a time from the last: the states of the segment are made again from the kept one
// (`before` has S after a token's decay and before its write), then walked back; `slope` is the gradient of S after the
// write. The gradients of q, k and decays per channel are sums over columns, which are lanes: a vector for each row of
// S, and the lanes of many rows are summed together.
#include <algorithm>
#include <memory>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/isa/activation.h"
#include "kernels/cpu/isa/chunk.h"
#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/plan.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

inline constexpr int kSegment = static_cast<int>(kRecurrenceSegment);

/// Vectors of a block of columns at the most: forward as many as registers hold; backward fewer, for a segment's states
/// to fit the second-level cache.
inline constexpr int kMostForward = 4, kMostBackward = 2;

template <int kCount>
struct Vectors {
  static constexpr int value = kCount;
};

/// body(Vectors<n>{}) with the fewest that hold all columns, or kMost.
template <typename T, int kMost, typename Body>
void with_vectors(std::int64_t value_dim, Body&& body) {
  if (value_dim <= kLanes<T>) return body(Vectors<1>{});
  if (value_dim <= 2 * kLanes<T> || kMost == 2) return body(Vectors<2>{});
  body(Vectors<kMost>{});
}

/// One head of one sequence.
template <typename T>
struct Place {
  std::int64_t heads, head, sequence, first, tokens, state_size;

  Place(const Recurrence<T>& r, std::int64_t of_sequence, std::int64_t of_head)
      : heads(r.heads),
        head(of_head),
        sequence(of_sequence),
        first(r.bounds != nullptr ? r.bounds[of_sequence] : of_sequence * r.length),
        tokens(r.bounds != nullptr ? r.bounds[of_sequence + 1] - first : r.length),
        state_size(r.key_dim * r.value_dim) {}

  /// Token t among the rows of [tokens, heads].
  std::int64_t row(std::int64_t t) const { return (first + t) * heads + head; }
  /// Where the state of this head lies among those of [sequences, heads, K, V], and the one kept before token t.
  std::int64_t state() const { return (sequence * heads + head) * state_size; }
  std::int64_t kept(std::int64_t t) const {
    return ((first / kSegment + sequence + t / kSegment) * heads + head) * state_size;
  }
};

/// What up to kSegment tokens bring, rows padded with zeros to whole vectors.
template <typename T>
struct Tokens {
  int keys, stride, count = 0;
  Buffer<T> q, k, decay;
  T beta[kSegment], both[kSegment];  // qᵀk

  explicit Tokens(std::int64_t key_dim) : keys(static_cast<int>(key_dim)), stride(padded<T>(key_dim)) {
    for (auto* rows : {&q, &k, &decay}) {
      rows->resize(kSegment * stride);
      std::fill_n(rows->get(), kSegment * stride, T{0});
    }
  }

  const T* row(const Buffer<T>& of, int t) const { return of + t * stride; }

  void read(const Recurrence<T>& r, const Place<T>& place, std::int64_t from) {
    count = static_cast<int>(std::min<std::int64_t>(kSegment, place.tokens - from));
    for (int t = 0; t < count; ++t) {
      const std::int64_t row = place.row(from + t);
      std::copy_n(r.q + row * keys, keys, q + t * stride);
      std::copy_n(r.k + row * keys, keys, k + t * stride);
      beta[t] = r.beta != nullptr ? r.beta[row] : T{1};
      read_decay(r, row, decay + t * stride);
      Vec<T> products = {};
      for (int i = 0; i < stride; i += kLanes<T>) products += load(q + t * stride + i) * load(k + t * stride + i);
      both[t] = sum_lanes<T>(products);
    }
  }

 private:
  /// e^x, and 0 where that is no normal number.
  static Vec<T> faded(Vec<T> x) { return x < ExpConstants<T>::kLeast ? Vec<T>{} : exp<T>(x); }

  void read_decay(const Recurrence<T>& r, std::int64_t row, T* to) const {
    if (r.log_decay == nullptr) {
      std::fill_n(to, keys, T{1});
    } else if (!r.per_channel) {
      std::fill_n(to, keys, faded(broadcast(r.log_decay[row]))[0]);
    } else {
      std::copy_n(r.log_decay + row * keys, keys, to);
      for (int i = 0; i < stride; i += kLanes<T>) store(to + i, faded(load(to + i)));
    }
  }
};

/// Some columns of a head: of so many vectors, the last of them perhaps not whole.
template <typename T, int kVectors>
struct Columns {
  static constexpr int kWidth = kVectors * kLanes<T>;
  std::int64_t first;
  int count;

  Columns(const Recurrence<T>& r, std::int64_t block)
      : first(block * kWidth), count(static_cast<int>(std::min<std::int64_t>(kWidth, r.value_dim - first))) {}

  static std::int64_t blocks(const Recurrence<T>& r) { return (r.value_dim + kWidth - 1) / kWidth; }

  /// Of a row of all columns.
  void read(const T* row, Vec<T> (&to)[kVectors]) const {
    T numbers[kWidth] = {};
    std::copy_n(row + first, count, numbers);
    for (int n = 0; n < kVectors; ++n) to[n] = load(numbers + n * kLanes<T>);
  }
  void write(const Vec<T> (&from)[kVectors], T* row) const {
    T numbers[kWidth];
    for (int n = 0; n < kVectors; ++n) store(numbers + n * kLanes<T>, from[n]);
    std::copy_n(numbers, count, row + first);
  }

  /// S, which lies in memory as [K, V] (nowhere: 0), to rows of kWidth; and back.
  void read_state(const T* state, std::int64_t keys, std::int64_t values, T* to) const {
    for (std::int64_t i = 0; i < keys; ++i) {
      std::fill_n(to + i * kWidth, kWidth, T{0});
      if (state != nullptr) std::copy_n(state + i * values + first, count, to + i * kWidth);
    }
  }
  void write_state(const T* from, std::int64_t keys, std::int64_t values, T* state) const {
    for (std::int64_t i = 0; i < keys; ++i) std::copy_n(from + i * kWidth, count, state + i * values + first);
  }
};

/// S of some columns, and the write that is still to be added to it.
template <typename T, int kVectors>
struct Memory {
  static constexpr int kWidth = Columns<T, kVectors>::kWidth;
  int keys;
  Buffer<T> state, key;  // of the write, as is u
  Vec<T> u[kVectors] = {};

  explicit Memory(std::int64_t key_dim) : keys(static_cast<int>(key_dim)), state(key_dim * kWidth), key(key_dim) {
    forget_write();
  }

  /// S ← diag(γ) (S + the write), from one place to another, which may be the same; with Sᵀk and Sᵀq of it.
  void advance(const T* decay, const T* k, const T* q, const T* from, T* to, Vec<T> (&held)[kVectors],
               Vec<T> (&asked)[kVectors]) const {
    for (int i = 0; i < keys; ++i) {
      for (int n = 0; n < kVectors; ++n) {
        const int at = i * kWidth + n * kLanes<T>;
        const Vec<T> s = (load(from + at) + key[i] * u[n]) * decay[i];
        store(to + at, s);
        held[n] += k[i] * s;
        asked[n] += q[i] * s;
      }
    }
  }

  void write_next(const T* k, const Vec<T> (&next)[kVectors]) {
    std::copy_n(k, keys, key.get());
    std::copy_n(next, kVectors, u);
  }

  /// Adds the write now.
  void settle() {
    for (int i = 0; i < keys; ++i) {
      for (int n = 0; n < kVectors; ++n) {
        T* at = state + i * kWidth + n * kLanes<T>;
        store(at, load(at) + key[i] * u[n]);
      }
    }
    forget_write();
  }
  void forget_write() {
    std::fill_n(key.get(), keys, T{0});
    std::fill_n(u, kVectors, Vec<T>{});
  }
};

template <typename T, int kVectors>
struct ForwardRoom {
  Tokens<T> tokens;
  Memory<T, kVectors> memory;
  explicit ForwardRoom(const Recurrence<T>& r) : tokens(r.key_dim), memory(r.key_dim) {}
};

/// A block of columns of a head along its sequence, from one state to another; either may be nowhere.
template <typename T, int kVectors>
void walk(const Recurrence<T>& r, const RecurrenceOutputs<T>& out, const Place<T>& place, std::int64_t block,
          const T* from_state, T* to_state, ForwardRoom<T, kVectors>& room) {
  const Columns<T, kVectors> columns(r, block);
  auto& [tokens, memory] = room;
  columns.read_state(from_state, r.key_dim, r.value_dim, memory.state);
  for (std::int64_t from = 0; from < place.tokens; from += kSegment) {
    tokens.read(r, place, from);
    if (out.states != nullptr) columns.write_state(memory.state, r.key_dim, r.value_dim, out.states + place.kept(from));
    for (int t = 0; t < tokens.count; ++t) {
      const T* k = tokens.row(tokens.k, t);
      Vec<T> held[kVectors] = {}, asked[kVectors] = {}, v[kVectors];
      memory.advance(tokens.row(tokens.decay, t), k, tokens.row(tokens.q, t), memory.state, memory.state, held, asked);
      columns.read(r.v + place.row(from + t) * r.value_dim, v);
      for (int n = 0; n < kVectors; ++n) {
        v[n] = tokens.beta[t] * (r.delta ? v[n] - held[n] : v[n]);
        asked[n] = r.scale * (asked[n] + tokens.both[t] * v[n]);
      }
      memory.write_next(k, v);
      columns.write(asked, out.o + place.row(from + t) * r.value_dim);
    }
    memory.settle();
  }
  if (to_state != nullptr) columns.write_state(memory.state, r.key_dim, r.value_dim, to_state);
}

/// The sum of the lanes of each of kLanes vectors: halves of two are added, and their lanes alternate from then on.
template <typename T>
Vec<T> sums_of_lanes(Vec<T> (&rows)[kLanes<T>]) {
  const std::make_integer_sequence<int, kLanes<T>> every{};
#pragma GCC unroll 4
  for (int count = kLanes<T> / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      rows[i] = interleave<T, 0>(rows[i], rows[i + count], every) + interleave<T, 1>(rows[i], rows[i + count], every);
    }
  }
  return rows[0];
}

/// to[i] += factor · the sum of the lanes of vector i.
template <typename T>
void add_sums(const T* vectors, int count, T factor, T* to) {
  for (int i = 0; i < count; i += kLanes<T>) {
    Vec<T> rows[kLanes<T>];
    for (int n = 0; n < kLanes<T>; ++n) rows[n] = load(vectors + (i + n) * kLanes<T>);
    store(to + i, load(to + i) + factor * sums_of_lanes<T>(rows));
  }
}

/// Numbers of a token for some columns.
template <typename T, int kVectors>
struct AtToken {
  Vec<T> d_o[kVectors], write[kVectors], d_write[kVectors];  // scale · do; u / β, and du
};

template <typename T, int kVectors>
struct BackwardRoom {
  static constexpr int kWidth = kVectors * kLanes<T>;
  Tokens<T> tokens;
  Memory<T, kVectors> memory;
  std::int64_t blocks;
  Buffer<T> slope;                      // [blocks, K, kWidth], from a segment to the one before it
  Buffer<T> before;                     // [kSegment, K, kWidth]
  Buffer<T> along_q, along_k, along_g;  // of each row of S the products of its lanes
  Buffer<T> d_q, d_k, d_decay;          // [kSegment, K padded]
  T d_beta[kSegment], d_one_decay[kSegment];
  AtToken<T, kVectors> at[kSegment];

  explicit BackwardRoom(const Recurrence<T>& r)
      : tokens(r.key_dim), memory(r.key_dim), blocks(Columns<T, kVectors>::blocks(r)) {
    slope.resize(blocks * r.key_dim * kWidth);
    before.resize(kSegment * r.key_dim * kWidth);
    for (auto* along : {&along_q, &along_k, &along_g}) zeros(*along, tokens.stride * kLanes<T>);
    for (auto* sums : {&d_q, &d_k, &d_decay}) zeros(*sums, kSegment * tokens.stride);
  }

  void clear_sums() {
    for (auto* sums : {&d_q, &d_k, &d_decay}) std::fill_n(sums->get(), kSegment * tokens.stride, T{0});
    std::fill_n(d_beta, kSegment, T{0});
    std::fill_n(d_one_decay, kSegment, T{0});
  }

 private:
  static void zeros(Buffer<T>& buffer, std::int64_t size) {
    buffer.resize(size);
    std::fill_n(buffer.get(), size, T{0});
  }
};

/// Fills `before` and what tokens write.
template <typename T, int kVectors>
void make_states(const Recurrence<T>& r, const T* d_o, const Place<T>& place, std::int64_t from, const T* kept,
                 const Columns<T, kVectors>& columns, BackwardRoom<T, kVectors>& room) {
  const auto& tokens = room.tokens;
  auto& memory = room.memory;
  const T* state = memory.state;
  columns.read_state(kept, r.key_dim, r.value_dim, memory.state);
  for (int t = 0; t < tokens.count; ++t) {
    const T* k = tokens.row(tokens.k, t);
    auto& at = room.at[t];
    Vec<T> held[kVectors] = {}, unused[kVectors] = {}, u[kVectors];
    T* before = room.before + t * r.key_dim * room.kWidth;
    memory.advance(tokens.row(tokens.decay, t), k, k, state, before, held, unused);
    state = before;
    columns.read(r.v + place.row(from + t) * r.value_dim, at.write);
    columns.read(d_o + place.row(from + t) * r.value_dim, at.d_o);
    for (int n = 0; n < kVectors; ++n) {
      if (r.delta) at.write[n] -= held[n];
      at.d_o[n] *= r.scale;
      u[n] = tokens.beta[t] * at.write[n];
    }
    memory.write_next(k, u);
  }
  memory.forget_write();
}

/// A row of S behind a token: what its answer adds to the slope, and the slope's part of the gradient of its write.
template <typename T>
[[gnu::always_inline]] inline Vec<T> opened(Vec<T> slope, T q, T k, Vec<T> d_o, Vec<T>& d_write) {
  slope += q * d_o;
  d_write += k * slope;
  return slope;
}

/// From the slope behind token t, which `opened` has been through, to the one behind the token before it.
template <typename T, int kVectors>
void walk_token_back(const Recurrence<T>& r, int t, T* slope, BackwardRoom<T, kVectors>& room) {
  constexpr int kLane = kLanes<T>, kWidth = BackwardRoom<T, kVectors>::kWidth;
  const auto& tokens = room.tokens;
  const T *k = tokens.row(tokens.k, t), *decay = tokens.row(tokens.decay, t);
  const T *q_next = tokens.row(tokens.q, t > 0 ? t - 1 : 0), *k_next = tokens.row(tokens.k, t > 0 ? t - 1 : 0);
  const T* before = room.before + t * r.key_dim * kWidth;
  const auto at = room.at[t];
  const bool first = t == 0;
  Vec<T> d_write[kVectors] = {}, d_o[kVectors] = {}, held[kVectors] = {}, one_decay = {};
  for (int n = 0; n < kVectors; ++n) {
    if (!first) d_o[n] = room.at[t - 1].d_o[n];
    if (r.delta) held[n] = at.d_write[n];
  }
  for (int i = 0; i < tokens.keys; ++i) {
    Vec<T> along_q = {}, along_k = {}, along_g = {};
    const T erased = tokens.beta[t] * k[i];
    for (int n = 0; n < kVectors; ++n) {
      T* place = slope + i * kWidth + n * kLane;
      const Vec<T> s = load(before + i * kWidth + n * kLane), d_s = load(place);
      along_q += s * at.d_o[n];
      along_k += d_s * at.write[n] - s * held[n];
      Vec<T> earlier = d_s - erased * held[n];
      along_g += earlier * s;
      earlier *= decay[i];
      store(place, first ? earlier : opened(earlier, q_next[i], k_next[i], d_o[n], d_write[n]));
    }
    store(room.along_q + i * kLane, along_q);
    store(room.along_k + i * kLane, along_k);
    one_decay += along_g;
    if (r.per_channel) store(room.along_g + i * kLane, along_g);
  }
  if (!first) std::copy_n(d_write, kVectors, room.at[t - 1].d_write);
  add_sums<T>(room.along_q, tokens.stride, 1, room.d_q + t * tokens.stride);
  add_sums<T>(room.along_k, tokens.stride, tokens.beta[t], room.d_k + t * tokens.stride);
  if (r.per_channel) add_sums<T>(room.along_g, tokens.stride, 1, room.d_decay + t * tokens.stride);
  room.d_one_decay[t] += sum_lanes<T>(one_decay);
}

/// What a segment's tokens do to the slope of some columns, and the gradients that are sums over columns.
template <typename T, int kVectors>
void walk_segment_back(const Recurrence<T>& r, const RecurrenceGradients<T>& to, const Place<T>& place,
                       std::int64_t from, std::int64_t block, BackwardRoom<T, kVectors>& room) {
  constexpr int kWidth = BackwardRoom<T, kVectors>::kWidth;
  const Columns<T, kVectors> columns(r, block);
  const auto& tokens = room.tokens;
  T* slope = room.slope + block * r.key_dim * kWidth;
  make_states(r, to.d_o, place, from, to.states + place.kept(from), columns, room);

  auto& last = room.at[tokens.count - 1];
  const T *q = tokens.row(tokens.q, tokens.count - 1), *k = tokens.row(tokens.k, tokens.count - 1);
  std::fill_n(last.d_write, kVectors, Vec<T>{});
  for (int i = 0; i < tokens.keys; ++i) {
    for (int n = 0; n < kVectors; ++n) {
      T* at = slope + i * kWidth + n * kLanes<T>;
      store(at, opened(load(at), q[i], k[i], last.d_o[n], last.d_write[n]));
    }
  }
  for (int t = tokens.count - 1; t >= 0; --t) {
    walk_token_back(r, t, slope, room);
    const auto& at = room.at[t];
    Vec<T> write_out = {}, write_write = {}, d_v[kVectors];
    for (int n = 0; n < kVectors; ++n) {
      write_out += at.write[n] * at.d_o[n];
      write_write += at.write[n] * at.d_write[n];
      d_v[n] = tokens.beta[t] * at.d_write[n];
    }
    columns.write(d_v, to.d_v + place.row(from + t) * r.value_dim);
    room.d_beta[t] += sum_lanes<T>(write_write);
    const T own = tokens.beta[t] * sum_lanes<T>(write_out);  // a token is asked for what it has written itself
    for (int i = 0; i < tokens.keys; ++i) room.d_q[t * tokens.stride + i] += own * tokens.k[t * tokens.stride + i];
  }
}

template <typename T, int kVectors>
void write_sums(const Recurrence<T>& r, const RecurrenceGradients<T>& to, const Place<T>& place, std::int64_t from,
                const BackwardRoom<T, kVectors>& room) {
  const auto& tokens = room.tokens;
  for (int t = 0; t < tokens.count; ++t) {
    const std::int64_t row = place.row(from + t);
    std::copy_n(room.d_q + t * tokens.stride, tokens.keys, to.d_q + row * tokens.keys);
    std::copy_n(room.d_k + t * tokens.stride, tokens.keys, to.d_k + row * tokens.keys);
    if (to.d_beta != nullptr) to.d_beta[row] = room.d_beta[t];
    if (to.d_log_decay == nullptr) continue;
    if (r.per_channel) {
      std::copy_n(room.d_decay + t * tokens.stride, tokens.keys, to.d_log_decay + row * tokens.keys);
    } else {
      to.d_log_decay[row] = room.d_one_decay[t];
    }
  }
}

template <typename T, int kVectors>
void walk_back(const Recurrence<T>& r, const RecurrenceGradients<T>& to, const Place<T>& place,
               BackwardRoom<T, kVectors>& room) {
  const auto slope_of = [&](std::int64_t block) { return room.slope + block * r.key_dim * room.kWidth; };
  for (std::int64_t block = 0; block < room.blocks; ++block) {
    const T* from = to.d_final != nullptr ? to.d_final + place.state() : nullptr;
    Columns<T, kVectors>(r, block).read_state(from, r.key_dim, r.value_dim, slope_of(block));
  }
  for (std::int64_t from = (place.tokens - 1) / kSegment * kSegment; from >= 0 && place.tokens > 0; from -= kSegment) {
    room.tokens.read(r, place, from);
    room.clear_sums();
    for (std::int64_t block = 0; block < room.blocks; ++block) walk_segment_back(r, to, place, from, block, room);
    write_sums(r, to, place, from, room);
  }
  if (to.d_initial == nullptr) return;
  for (std::int64_t block = 0; block < room.blocks; ++block) {
    Columns<T, kVectors>(r, block).write_state(slope_of(block), r.key_dim, r.value_dim, to.d_initial + place.state());
  }
}

template <typename T>
Executor workers_for(const Recurrence<T>& r, const Executor& executor) {
  return for_elements(executor, r.tokens * r.heads * r.key_dim * r.value_dim / 4);
}

/// walk's arguments for every block of columns of every head: body(place, block, room).
template <typename T, typename Body>
void each_block(const Recurrence<T>& r, const Executor& executor, Body&& body) {
  with_vectors<T, kMostForward>(r.value_dim, [&](auto vectors) {
    using Room = ForwardRoom<T, decltype(vectors)::value>;
    const std::int64_t blocks = Columns<T, decltype(vectors)::value>::blocks(r);
    parallel_tasks(
        workers_for(r, executor), r.sequences * r.heads * blocks, [&] { return std::make_unique<Room>(r); },
        [&](std::int64_t task, Room& room) {
          body(Place<T>(r, task / blocks / r.heads, task / blocks % r.heads), task % blocks, room);
        });
  });
}

template <typename T>
void forward_as(const Recurrence<T>& r, const RecurrenceOutputs<T>& out, const Executor& executor) {
  each_block(r, executor, [&](const Place<T>& place, std::int64_t block, auto& room) {
    walk(r, out, place, block, r.initial != nullptr ? r.initial + place.state() : nullptr,
         out.final != nullptr ? out.final + place.state() : nullptr, room);
  });
}

template <typename T>
void step_as(const RecurrenceStep<T>& step, const Executor& executor) {
  const auto& r = step.call;
  each_block(r, executor, [&](const Place<T>& place, std::int64_t block, auto& room) {
    const std::int64_t slot = step.slots != nullptr ? step.slots[place.sequence] : place.sequence;
    T* state = step.pool + (slot * r.heads + place.head) * place.state_size;
    walk(r, {.o = step.o, .states = nullptr, .final = nullptr}, place, block, state, state, room);
  });
}

template <typename T>
void backward_as(const Recurrence<T>& r, const RecurrenceGradients<T>& gradients, const Executor& executor) {
  with_vectors<T, kMostBackward>(r.value_dim, [&](auto vectors) {
    using Room = BackwardRoom<T, decltype(vectors)::value>;
    parallel_tasks(
        workers_for(r, executor), r.sequences * r.heads, [&] { return std::make_unique<Room>(r); },
        [&](std::int64_t task, Room& room) {
          walk_back(r, gradients, Place<T>(r, task / r.heads, task % r.heads), room);
        });
  });
}

}  // namespace

void recurrence(const Recurrence<float>& r, const RecurrenceOutputs<float>& out, const Executor& executor) {
  forward_as(r, out, executor);
}
void recurrence(const Recurrence<double>& r, const RecurrenceOutputs<double>& out, const Executor& executor) {
  forward_as(r, out, executor);
}
void recurrence_backward(const Recurrence<float>& r, const RecurrenceGradients<float>& gradients,
                         const Executor& executor) {
  backward_as(r, gradients, executor);
}
void recurrence_backward(const Recurrence<double>& r, const RecurrenceGradients<double>& gradients,
                         const Executor& executor) {
  backward_as(r, gradients, executor);
}
void recurrence_step(const RecurrenceStep<float>& step, const Executor& executor) { step_as(step, executor); }
void recurrence_step(const RecurrenceStep<double>& step, const Executor& executor) { step_as(step, executor); }

}  // namespace gka::kernels::cpu::GKA_ISA
