// Dense vectors and matrices in float64, as much as the reference needs. Not fast, on purpose: each function is the
// formula.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace gka::kernels::reference {

using Vector = std::vector<double>;

struct Matrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  Vector data{};  // row by row

  Matrix() = default;
  Matrix(std::int64_t rows, std::int64_t columns)
      : rows(rows), columns(columns), data(static_cast<std::size_t>(rows * columns), 0.0) {}

  double* row(std::int64_t i) { return data.data() + i * columns; }
  const double* row(std::int64_t i) const { return data.data() + i * columns; }
  double& operator()(std::int64_t i, std::int64_t j) { return row(i)[j]; }
  double operator()(std::int64_t i, std::int64_t j) const { return row(i)[j]; }
};

inline Matrix identity(std::int64_t n, double scale = 1.0) {
  Matrix m(n, n);
  for (std::int64_t i = 0; i < n; ++i) m(i, i) = scale;
  return m;
}

inline double dot(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Σ a_ij b_ij
inline double inner(const Matrix& a, const Matrix& b) { return dot(a.data, b.data); }

/// ‖a‖ with the largest entry factored out, so that squares neither overflow nor underflow.
inline double norm(const Vector& a) {
  double largest = 0.0;
  for (const double value : a) {
    if (std::isnan(value)) return value;
    largest = std::max(largest, std::abs(value));
  }
  if (largest == 0.0 || std::isinf(largest)) return largest;
  double sum = 0.0;
  for (const double value : a) sum += (value / largest) * (value / largest);
  return largest * std::sqrt(sum);
}
inline double norm(const Matrix& a) { return norm(a.data); }

/// a += c b
inline void add(Vector& a, double c, const Vector& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += c * b[i];
}
inline void add(Matrix& a, double c, const Matrix& b) { add(a.data, c, b.data); }

/// m += c a bᵀ
inline void add_outer(Matrix& m, double c, const Vector& a, const Vector& b) {
  for (std::int64_t i = 0; i < m.rows; ++i) {
    const double factor = c * a[static_cast<std::size_t>(i)];
    for (std::int64_t j = 0; j < m.columns; ++j) m(i, j) += factor * b[static_cast<std::size_t>(j)];
  }
}

/// a ← c a, and exactly zero for c = 0 whatever a holds: forgetting everything forgets a NaN too.
inline void scale(Vector& a, double c) {
  for (double& value : a) value = c == 0.0 ? 0.0 : c * value;
}
inline void scale(Matrix& a, double c) { scale(a.data, c); }

inline Vector scaled(Vector a, double c) {
  scale(a, c);
  return a;
}

/// m a
inline Vector multiply(const Matrix& m, const Vector& a) {
  Vector result(static_cast<std::size_t>(m.rows), 0.0);
  for (std::int64_t i = 0; i < m.rows; ++i) {
    double sum = 0.0;
    for (std::int64_t j = 0; j < m.columns; ++j) sum += m(i, j) * a[static_cast<std::size_t>(j)];
    result[static_cast<std::size_t>(i)] = sum;
  }
  return result;
}

/// mᵀ a; for a symmetric m the quicker way to m a, since it walks along the rows
inline Vector multiply_transposed(const Matrix& m, const Vector& a) {
  Vector result(static_cast<std::size_t>(m.columns), 0.0);
  for (std::int64_t i = 0; i < m.rows; ++i) {
    const double factor = a[static_cast<std::size_t>(i)];
    for (std::int64_t j = 0; j < m.columns; ++j) result[static_cast<std::size_t>(j)] += factor * m(i, j);
  }
  return result;
}

inline Matrix multiply(const Matrix& a, const Matrix& b) {
  Matrix result(a.rows, b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t k = 0; k < a.columns; ++k)
      for (std::int64_t j = 0; j < b.columns; ++j) result(i, j) += a(i, k) * b(k, j);
  return result;
}

inline Matrix transposed(const Matrix& a) {
  Matrix result(a.columns, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t j = 0; j < a.columns; ++j) result(j, i) = a(i, j);
  return result;
}

/// ½(m + mᵀ)
inline Matrix symmetric_part(const Matrix& m) {
  Matrix result(m.rows, m.columns);
  for (std::int64_t i = 0; i < m.rows; ++i)
    for (std::int64_t j = 0; j < m.columns; ++j) result(i, j) = 0.5 * (m(i, j) + m(j, i));
  return result;
}

/// Solves m x = b for a symmetric positive definite m by m = L diag(d) Lᵀ, with ones on the diagonal of L.
inline Vector factor_and_solve(Matrix m, Vector b) {
  const std::int64_t n = m.rows;
  for (std::int64_t j = 0; j < n; ++j) {  // the lower triangle of m becomes L, its diagonal d
    for (std::int64_t k = 0; k < j; ++k) m(j, j) -= m(j, k) * m(j, k) * m(k, k);
    for (std::int64_t i = j + 1; i < n; ++i) {
      for (std::int64_t k = 0; k < j; ++k) m(i, j) -= m(i, k) * m(j, k) * m(k, k);
      m(i, j) /= m(j, j);
    }
  }
  const auto at = [&](std::int64_t i) -> double& { return b[static_cast<std::size_t>(i)]; };
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t k = 0; k < i; ++k) at(i) -= m(i, k) * at(k);
  for (std::int64_t i = 0; i < n; ++i) at(i) /= m(i, i);
  for (std::int64_t i = n - 1; i >= 0; --i)
    for (std::int64_t k = i + 1; k < n; ++k) at(i) -= m(k, i) * at(k);
  return b;
}

}  // namespace gka::kernels::reference
