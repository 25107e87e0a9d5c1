// The reference as a backend: reads a Problem of any type into float64, runs it head by head and token by token, and
// writes the results in the types their views name.
#include <vector>

#include "gka/kernels.h"
#include "kernels/checks.h"
#include "kernels/problem.h"
#include "kernels/reference/element.h"
#include "kernels/reference/gradients.h"
#include "kernels/system_scale.h"

namespace gka::kernels::reference {
namespace {

/// A position in a [batch, tokens, heads, …] view.
struct Position {
  std::int64_t batch = 0;
  std::int64_t token = 0;
  std::int64_t head = 0;
};

Vector read(const View& view, const Position& at, std::int64_t channels) {
  Vector result(static_cast<std::size_t>(channels));
  const std::int64_t start = offset(view, at.batch, at.token, at.head);
  for (std::int64_t i = 0; i < channels; ++i)
    result[static_cast<std::size_t>(i)] = read_element(view.data, view.dtype, start + i);
  return result;
}

double read_gate(const View& view, const Position& at, double absent) {
  return view ? read_element(view.data, view.dtype, offset(view, at.batch, at.token, at.head)) : absent;
}

void write(const View& view, const Position& at, const Vector& values) {
  if (!view) return;
  const std::int64_t start = offset(view, at.batch, at.token, at.head);
  for (std::size_t i = 0; i < values.size(); ++i) {
    write_element(view.data, view.dtype, start + static_cast<std::int64_t>(i), values[i]);
  }
}

/// State `index` of a contiguous row of rows×columns matrices; zero where there is none.
Matrix read_state(const void* data, DType dtype, std::int64_t index, std::int64_t rows, std::int64_t columns) {
  Matrix result(rows, columns);
  if (data == nullptr) return result;
  const std::int64_t size = rows * columns;
  for (std::int64_t i = 0; i < size; ++i) {
    result.data[static_cast<std::size_t>(i)] = read_element(data, dtype, index * size + i);
  }
  return result;
}

void write_state(void* data, DType dtype, std::int64_t index, const Matrix& state) {
  if (data == nullptr) return;
  const std::int64_t size = state.rows * state.columns;
  for (std::int64_t i = 0; i < size; ++i) {
    write_element(data, dtype, index * size + i, state.data[static_cast<std::size_t>(i)]);
  }
}

/// The inputs of a call, whether it is a Problem or a Step.
template <typename Call>
Token read_token(const Call& call, const Position& at) {
  Position of_key = at, of_value = at;
  of_key.head = key_head(call, at.head);
  of_value.head = value_head(call, at.head);
  Token token{.q = read(call.q, at, call.key_dim), .k = read(call.k, of_key, call.key_dim)};
  if (call.options.part != Part::solve) token.v = read(call.v, of_value, call.value_dim);
  token.decay = std::exp(read_gate(call.log_decay, at, 0.0));
  token.beta = read_gate(call.beta, at, 1.0);
  if (call.options.part == Part::both) token.alpha = read_gate(call.alpha, at, 1.0);
  return token;
}

template <typename Call>
Memory read_memory(const Call& call, const void* h, const void* u, DType dtype, std::int64_t index) {
  Memory memory;
  if (call.options.part != Part::memory) {
    memory.h = symmetric_part(read_state(h, dtype, index, call.key_dim, call.key_dim));
  }
  if (call.options.part != Part::solve) memory.u = read_state(u, dtype, index, call.key_dim, call.value_dim);
  return memory;
}

Settings settings_of(const Options& options, std::int64_t head, std::int64_t key_dim) {
  Settings settings{.options = options};
  if (options.ridge_mode == RidgeMode::constant && options.ridge_diagonal != nullptr) {
    const double* row = options.ridge_diagonal + head * key_dim;
    settings.ridge_diagonal.assign(row, row + key_dim);
  }
  return settings;
}

void write_number(double* array, std::int64_t index, double value) {
  if (array != nullptr) array[index] = value;
}

void report_token(const Report& report, std::int64_t index, const Matrix& h, const Settings& settings,
                  const Regression& solved, const Vector& q, const Vector& x) {
  Vector miss = multiply_transposed(h, x);
  add(miss, -1.0, q);
  write_number(report.norm, index, solved.norm);
  write_number(report.ridge, index, solved.ridge);
  write_number(report.true_residual, index, norm(miss));
  double unexplained = 0;  // q · Λx
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double ridge = settings.ridge_diagonal.empty() ? solved.ridge : settings.ridge_diagonal[i];
    miss[i] += ridge * x[i];
    unexplained += q[i] * ridge * x[i];
  }
  write_number(report.residual, index, norm(miss));
  write_number(report.variance, index, dot(q, x));
  write_number(report.certainty, index, certainty_of(solved.norm, unexplained, dot(q, q)));
  if (report.x != nullptr) {
    std::copy(x.begin(), x.end(), report.x + index * static_cast<std::int64_t>(x.size()));
  }
}

/// o_t from the state that has already taken in token t.
Vector output(const Token& token, const Memory& memory, const Settings& settings, const Report& report,
              std::int64_t report_index) {
  const Options& options = settings.options;
  Vector x;
  if (options.part != Part::memory) {
    const Regression ridge_regression = regression(memory.h, settings);
    x = answer(ridge_regression, token.q, options);
    report_token(report, report_index, memory.h, settings, ridge_regression, token.q, x);
    if (options.part == Part::solve) return x;
  }
  return scaled(multiply_transposed(memory.u, mixed_query(token, x, options)), options.scale);
}

template <typename Body>
void for_each_sequence_and_head(const Problem& p, Body body) {
  for (std::int64_t n = 0; n < p.sequences; ++n)
    for (std::int64_t head = 0; head < p.heads; ++head) body(sequence(p, n), head, n * p.heads + head);
}

/// The gradient, by token, of keys or values that `group` heads share, which come one after another.
class SharedGradient {
 public:
  SharedGradient(const View& view, std::int64_t group, Vector TokenGradient::* member)
      : view_(view), group_(group), member_(member) {}

  void add(const std::vector<TokenGradient>& tokens, const Sequence& run, std::int64_t head) {
    if (head % group_ == 0) sums_.assign(tokens.size(), {});
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const Vector& own = tokens[t].*member_;
      if (head % group_ == 0) {
        sums_[t] = own;
      } else {
        reference::add(sums_[t], 1.0, own);
      }
    }
    if (head % group_ != group_ - 1) return;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      write(view_, {.batch = run.batch, .token = run.begin + static_cast<std::int64_t>(t), .head = head / group_},
            sums_[t]);
    }
  }

 private:
  View view_;
  std::int64_t group_;
  Vector TokenGradient::* member_;
  std::vector<Vector> sums_;
};

}  // namespace

void forward(const Problem& p, const Outputs& outputs) {
  check(p, outputs);
  for_each_sequence_and_head(p, [&](const Sequence& tokens, std::int64_t head, std::int64_t state) {
    const Settings settings = settings_of(p.options, head, p.key_dim);
    Memory memory = read_memory(p, p.h0, p.u0, state_dtype(p), state);
    for (std::int64_t t = tokens.begin; t < tokens.begin + tokens.length; ++t) {
      const Position at{.batch = tokens.batch, .token = t, .head = head};
      const Token token = read_token(p, at);
      remember(memory, token, p.options);
      const std::int64_t row = (tokens.batch * p.tokens + t) * p.heads + head;
      write(outputs.o, at, output(token, memory, settings, outputs.report, row));
    }
    if (solves(p)) write_state(outputs.h, state_dtype(p), state, memory.h);
    if (remembers_values(p)) write_state(outputs.u, state_dtype(p), state, memory.u);
  });
}

void backward(const Problem& p, const Gradients& gradients) {
  check(p, gradients);
  const std::int64_t output_dim = remembers_values(p) ? p.value_dim : p.key_dim;
  if (gradients.d_ridge_diagonal != nullptr) {
    std::fill_n(gradients.d_ridge_diagonal, p.heads * p.key_dim, 0.0);
  }
  SharedGradient d_k(gradients.d_k, p.key_group, &TokenGradient::d_k);
  SharedGradient d_v(gradients.d_v, p.value_group, &TokenGradient::d_v);
  for_each_sequence_and_head(p, [&](const Sequence& run, std::int64_t head, std::int64_t state) {
    std::vector<Token> tokens;
    std::vector<Vector> d_o;
    for (std::int64_t t = run.begin; t < run.begin + run.length; ++t) {
      const Position at{.batch = run.batch, .token = t, .head = head};
      tokens.push_back(read_token(p, at));
      d_o.push_back(read(gradients.d_o, at, output_dim));
    }
    const Settings settings = settings_of(p.options, head, p.key_dim);
    const SequenceGradient result =
        sequence_gradient(tokens, read_memory(p, p.h0, p.u0, state_dtype(p), state), settings, d_o,
                          read_memory(p, gradients.d_h, gradients.d_u, state_dtype(p), state));

    for (std::int64_t t = run.begin; t < run.begin + run.length; ++t) {
      const Position at{.batch = run.batch, .token = t, .head = head};
      const TokenGradient& d_token = result.tokens[static_cast<std::size_t>(t - run.begin)];
      write(gradients.d_q, at, d_token.d_q);
      write(gradients.d_log_decay, at, {d_token.d_log_decay});
      write(gradients.d_beta, at, {d_token.d_beta});
      write(gradients.d_alpha, at, {d_token.d_alpha});
    }
    d_k.add(result.tokens, run, head);
    d_v.add(result.tokens, run, head);
    if (solves(p)) write_state(gradients.d_h0, state_dtype(p), state, result.d_initial.h);
    if (remembers_values(p)) write_state(gradients.d_u0, state_dtype(p), state, result.d_initial.u);
    if (solves(p) && gradients.d_ridge_diagonal != nullptr) {
      for (std::int64_t i = 0; i < p.key_dim; ++i) {
        gradients.d_ridge_diagonal[head * p.key_dim + i] += result.d_ridge[static_cast<std::size_t>(i)];
      }
    }
  });
}

void step(const Step& s) {
  check(s);
  const DType dtype = accumulation_dtype(s.q.dtype);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const std::int64_t slot = s.state_indices != nullptr ? s.state_indices[b] : b;
      const std::int64_t state = slot * s.heads + head;
      Settings settings = settings_of(s.options, head, s.key_dim);
      if (s.iterations != nullptr) settings.options.iterations = s.iterations[b];

      const Position at{.batch = b, .token = 0, .head = head};
      const Token token = read_token(s, at);
      Memory memory = read_memory(s, s.h, s.u, dtype, state);
      remember(memory, token, s.options);
      write(s.o, at, output(token, memory, settings, {.certainty = s.certainty}, b * s.heads + head));
      if (s.options.part != Part::memory) write_state(s.h, dtype, state, memory.h);
      if (s.options.part != Part::solve) write_state(s.u, dtype, state, memory.u);
    }
  }
}

}  // namespace gka::kernels::reference
