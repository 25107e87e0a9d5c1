// Products with a model's weights. Weights may be wider than what they multiply (master weights): they are cast to it,
// and their gradients come as wide as they are.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <vector>

namespace gka::ops {

/// Whether a weight takes part in a step of training.
bool is_learning(const at::Tensor& weight);

/// The weights' rows, one weight's below the other's, in a type that matrix products like.
at::Tensor stacked(at::TensorList weights, at::ScalarType type);

/// a b in `type`. Where a GPU sums in it anyhow, nothing is rounded to the type of a and b in between.
at::Tensor product_as(at::ScalarType type, const at::Tensor& a, const at::Tensor& b);

/// Whether x has few enough rows, and all suits the GPU's kernel for that: no gradients, one 16-bit type.
bool has_small_products(const at::Tensor& x, at::TensorList weights);
/// SiLU(x gateᵀ) ⊙ x upᵀ where there are small products for it.
at::Tensor small_gated_product(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up);

/// x Wᵀ for each of the weights. What they give back to x is added up inside the products, not by passes over memory of
/// their own.
std::vector<at::Tensor> project_all(const at::Tensor& x, const std::vector<at::Tensor>& weights);

}  // namespace gka::ops
