#include "kernels/reference/kalman.h"

namespace gka::kernels::reference {
namespace {

Matrix diagonal(const Vector& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  Matrix m(n, n);
  for (std::int64_t i = 0; i < n; ++i) m(i, i) = values[static_cast<std::size_t>(i)];
  return m;
}

/// Q by layer, for A = diag(decay).
Matrix process_noise(FrozenFilter layer, const Vector& decay) {
  Vector noise(decay.size(), 0.0);
  for (std::size_t i = 0; i < decay.size(); ++i) {
    if (layer == FrozenFilter::gated_delta_net) noise[i] = 1.0;
    if (layer == FrozenFilter::kimi_delta_attention) noise[i] = 1.0 - decay[i] * decay[i];
  }
  return diagonal(noise);
}

}  // namespace

Filter prior(std::int64_t key_dim, std::int64_t value_dim, double sigma) {
  return {.estimate = Matrix(key_dim, value_dim), .covariance = identity(key_dim, sigma)};
}

void predict(Filter& filter, const Dynamics& dynamics) {
  filter.estimate = multiply(dynamics.transition, filter.estimate);
  if (!dynamics.input.data.empty()) add(filter.estimate, 1.0, dynamics.input);
  filter.covariance = multiply(multiply(dynamics.transition, filter.covariance), transposed(dynamics.transition));
  add(filter.covariance, 1.0, dynamics.process_noise);
}

Correction correct(Filter& filter, const Measurement& measurement) {
  const Vector spread = multiply(filter.covariance, measurement.key);  // Σk
  Correction result{.gain = scaled(spread, 1.0 / (dot(measurement.key, spread) + measurement.noise)),
                    .innovation = measurement.value};
  add(result.innovation, -1.0, multiply_transposed(filter.estimate, measurement.key));
  add_outer(filter.estimate, 1.0, result.gain, result.innovation);
  add_outer(filter.covariance, -1.0, result.gain, spread);  // G kᵀΣ
  return result;
}

Correction kalman_step(Filter& filter, const Dynamics& dynamics, const Measurement& measurement) {
  predict(filter, dynamics);
  return correct(filter, measurement);
}

LeastSquares::LeastSquares(std::int64_t key_dim, std::int64_t value_dim, double ridge)
    : filter(prior(key_dim, value_dim, 1.0 / ridge)) {}

void LeastSquares::step(const Vector& key, const Vector& value, double weight, double decay) {
  scale(filter.covariance, 1.0 / decay);
  if (weight == 0.0) return;
  correct(filter, {.key = key, .value = value, .noise = 1.0 / weight});
}

double noise_of(FrozenFilter layer, const Vector& decay, double beta) {
  const double spread = layer == FrozenFilter::gated_delta_net ? decay[0] * decay[0] + 1.0 : 1.0;
  return (1.0 / beta - 1.0) * spread;
}

Correction frozen_step(FrozenFilter layer, Matrix& memory, const Vector& decay, const Measurement& measurement) {
  Filter filter{.estimate = memory, .covariance = identity(memory.rows)};
  const Dynamics dynamics{.transition = diagonal(decay), .process_noise = process_noise(layer, decay)};
  const Correction result = kalman_step(filter, dynamics, measurement);
  memory = filter.estimate;
  return result;
}

}  // namespace gka::kernels::reference
