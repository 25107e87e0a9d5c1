// The short convolution, one token and one head at a time.
//
// The inputs of a sequence are one line of numbers per channel: position p ≥ 0 is the sequence's own token p, positions
// −(W−1) … −1 are the initial state, and the final state is the last W − 1 positions, whichever of the two they are.
#include <vector>

#include "gka/block_kernels.h"
#include "kernels/checks.h"
#include "kernels/reference/activation.h"
#include "kernels/reference/element.h"
#include "kernels/reference/matrix.h"

namespace gka::kernels::reference {
namespace {

/// A view with a place for every position of sequence n, half of it by token and half of it a state.
struct Line {
  const ShortConv& conv;
  std::int64_t n;
  Sequence tokens = sequence(conv, n);

  std::int64_t by_token(const View& view, std::int64_t p, std::int64_t c) const {
    return offset(view, tokens.batch, tokens.begin + p, 0) + c;
  }
  std::int64_t in_state(std::int64_t j, std::int64_t c) const { return (n * conv.channels + c) * (conv.width - 1) + j; }
  /// Where the final state starts.
  std::int64_t last() const { return tokens.length - (conv.width - 1); }

  double input(std::int64_t p, std::int64_t c) const {
    if (p >= 0) return read_element(conv.x, by_token(conv.x, p, c), 0);
    return read_element(conv.initial_state, in_state(conv.width - 1 + p, c), 0);
  }
};

double convolve(const Line& line, std::int64_t p, std::int64_t c) {
  const ShortConv& k = line.conv;
  double z = read_element(k.bias, c, 0);
  for (std::int64_t j = 0; j < k.width; ++j) {
    z += read_element(k.weight, c * k.width + j, 0) * line.input(p - k.width + 1 + j, c);
  }
  return z;
}

/// y = by · s over one head, with the derivative ds = by · dy − bend (s · dy) s.
struct Norm {
  double by = 1;
  double bend = 0;
};

Norm norm_of(const ShortConv& k, const Vector& s) {
  if (k.l2_norm == L2Norm::none) return {};
  if (k.l2_norm == L2Norm::rsqrt) {
    const double by = 1 / std::sqrt(dot(s, s) + k.eps);
    return {.by = by, .bend = by * by * by};
  }
  const double length = norm(s), by = 1 / (length + k.eps);
  return {.by = by, .bend = length > 0 ? by * by / length : 0};
}

std::int64_t head_size(const ShortConv& k) { return k.l2_norm == L2Norm::none ? k.channels : k.head_dim; }

template <typename Body>
void for_each_head(const ShortConv& k, Body body) {
  for (std::int64_t first = 0; first < k.channels; first += head_size(k)) body(first);
}

/// Position p of one head, whose channels begin at `first`.
void forward_token(const Line& line, std::int64_t p, std::int64_t first, const View& y) {
  const ShortConv& k = line.conv;
  Vector s;
  for (std::int64_t i = 0; i < head_size(k); ++i) {
    s.push_back(activate(k.activation, convolve(line, p, first + i)).value);
  }
  const Norm norm = norm_of(k, s);
  for (std::int64_t i = 0; i < head_size(k); ++i) {
    write_element(y, line.by_token(y, p, first + i), norm.by * s[static_cast<std::size_t>(i)]);
  }
}

/// dL/dz at position p.
Vector d_convolved(const Line& line, std::int64_t p, std::int64_t first, const View& d_y) {
  const ShortConv& k = line.conv;
  Vector s, slope, result;
  double along = 0;
  for (std::int64_t i = 0; i < head_size(k); ++i) {
    const Activated a = activate(k.activation, convolve(line, p, first + i));
    s.push_back(a.value);
    slope.push_back(a.slope);
    along += a.value * read_element(d_y, line.by_token(d_y, p, first + i), 0);
  }
  const Norm norm = norm_of(k, s);
  for (std::int64_t i = 0; i < head_size(k); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const double d_s = norm.by * read_element(d_y, line.by_token(d_y, p, first + i), 0) - norm.bend * along * s[at];
    result.push_back(d_s * slope[at]);
  }
  return result;
}

void backward_head(const Line& line, std::int64_t first, const ShortConvGradients& g, Matrix& d_weight,
                   Vector& d_bias) {
  const ShortConv& k = line.conv;
  const std::int64_t before = k.width - 1, heads = head_size(k);
  Matrix d_input(before + line.tokens.length, heads);  // row p + W − 1 is position p
  for (std::int64_t j = 0; j < before; ++j) {
    for (std::int64_t i = 0; i < heads; ++i) {
      d_input(line.last() + j + before, i) = read_element(g.d_final_state, line.in_state(j, first + i), 0);
    }
  }
  for (std::int64_t p = 0; p < line.tokens.length; ++p) {
    const Vector d_z = d_convolved(line, p, first, g.d_y);
    for (std::int64_t i = 0; i < heads; ++i) {
      const std::int64_t c = first + i;
      const double d = d_z[static_cast<std::size_t>(i)];
      d_bias[static_cast<std::size_t>(c)] += d;
      for (std::int64_t j = 0; j < k.width; ++j) {
        d_weight(c, j) += d * line.input(p - before + j, c);
        d_input(p + j, i) += d * read_element(k.weight, c * k.width + j, 0);
      }
    }
  }
  for (std::int64_t i = 0; i < heads; ++i) {
    for (std::int64_t j = 0; j < before; ++j)
      write_element(g.d_initial_state, line.in_state(j, first + i), d_input(j, i));
    for (std::int64_t p = 0; p < line.tokens.length; ++p) {
      write_element(g.d_x, line.by_token(g.d_x, p, first + i), d_input(p + before, i));
    }
  }
}

}  // namespace

void short_conv(const ShortConv& k, const ShortConvOutputs& outputs) {
  check(k, outputs);
  for (std::int64_t n = 0; n < k.sequences; ++n) {
    const Line line{.conv = k, .n = n};
    for_each_head(k, [&](std::int64_t first) {
      for (std::int64_t p = 0; p < line.tokens.length; ++p) forward_token(line, p, first, outputs.y);
    });
    for (std::int64_t c = 0; c < k.channels; ++c) {
      for (std::int64_t j = 0; j < k.width - 1; ++j) {
        write_element(outputs.final_state, line.in_state(j, c), line.input(line.last() + j, c));
      }
    }
  }
}

void short_conv_backward(const ShortConv& k, const ShortConvGradients& g) {
  check(k, g);
  Matrix d_weight(k.channels, k.width);
  Vector d_bias(static_cast<std::size_t>(k.channels), 0.0);
  for (std::int64_t n = 0; n < k.sequences; ++n) {
    for_each_head(k, [&](std::int64_t first) { backward_head({.conv = k, .n = n}, first, g, d_weight, d_bias); });
  }
  for (std::int64_t c = 0; c < k.channels; ++c) {
    write_element(g.d_bias, c, d_bias[static_cast<std::size_t>(c)]);
    for (std::int64_t j = 0; j < k.width; ++j) write_element(g.d_weight, c * k.width + j, d_weight(c, j));
  }
}

void short_conv_step(const ShortConvStep& step) {
  check(step);
  for (std::int64_t b = 0; b < step.conv.batch; ++b) {
    const std::int64_t slot = step.state_indices != nullptr ? step.state_indices[b] : b;
    const std::int64_t slot_size = step.conv.channels * (step.conv.width - 1);
    const auto of = [&](const View& view, std::int64_t elements) {
      View moved = view;
      const std::int64_t bytes = with_type(view.dtype, [](auto zero) { return std::int64_t{sizeof zero}; });
      moved.data = static_cast<char*>(view.data) + elements * bytes;
      return moved;
    };
    ShortConv one = step.conv;  // a sequence of one token, from and to its slot
    one.batch = one.tokens = one.sequences = 1;
    one.cu_seqlens = nullptr;
    one.x = of(step.conv.x, b * step.conv.x.batch_stride);
    one.initial_state = step.conv.width > 1 ? of(step.state, slot * slot_size) : View{};
    short_conv(one, {.y = of(step.y, b * step.y.batch_stride), .final_state = one.initial_state});
  }
}

}  // namespace gka::kernels::reference
