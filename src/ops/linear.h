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

/// Whether x has few enough rows, and all suits the GPU's kernel for that: no gradients, bfloat16.
bool has_small_products(const at::Tensor& x, at::TensorList weights);
/// What such products take along: the norm of x, x / rms(x) ⊙ weight.
struct InputNorm {
  at::Tensor weight{};  // float32; undefined: none
  double eps = 0;
};
/// Whether small products take this norm along.
bool has_small_norm(const InputNorm& norm);
/// x Wᵀ for each of the weights, SiLU(x gateᵀ) ⊙ x upᵀ, and onto + x Wᵀ, each in one launch, where there are small
/// products for them.
std::vector<at::Tensor> small_products(const at::Tensor& x, at::TensorList weights, const InputNorm& norm = {});
at::Tensor small_gated_product(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up,
                               const InputNorm& norm = {});
at::Tensor small_product_onto(const at::Tensor& onto, const at::Tensor& x, const at::Tensor& weight);

/// Whether x has some tens to hundreds of rows and the weights are bytes, all suiting the GPU's kernel for that.
bool has_many_products(const at::Tensor& x, at::TensorList weights);

/// x Wᵀ for each of the weights. What they give back to x is added up inside the products, not by passes over memory of
/// their own.
std::vector<at::Tensor> project_all(const at::Tensor& x, const std::vector<at::Tensor>& weights);

/// The matrices as one, where they are rows of the same memory, one below the other; else undefined.
at::Tensor as_one(at::TensorList matrices);

}  // namespace gka::ops
