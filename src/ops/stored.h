// A model's matrices as they are stored: of another type than the activations they multiply. On the CPU float32
// activations are multiplied with bfloat16 or int8 weights as they lie there (kernels/products.h).
//
// An int8 matrix [out, in] is a tensor of bytes [out, int8_row_bytes(in)], its scales at the end of each row, so that
// taking rows of it (an embedding) or laying several below each other keeps them together. What `in` is, x knows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gka::ops {

inline bool is_int8(const at::Tensor& weight) { return weight.scalar_type() == at::kChar; }

/// Bytes [out, int8_row_bytes(in)] of a matrix [out, in].
std::vector<std::int64_t> int8_shape(std::int64_t out, std::int64_t in);
/// Fills `stored`, of whatever type, with a matrix.
void store(const at::Tensor& matrix, at::Tensor stored);
/// The matrix [out, in] in `type`; the same tensor where it is of that type already. And several at once.
at::Tensor dense(const at::Tensor& weight, std::int64_t in, at::ScalarType type);
std::vector<at::Tensor> dense_all(at::TensorList weights, std::int64_t in, at::ScalarType type);

/// Whether an int8 matrix is one: none of its scales NaN or infinite.
bool scales_are_finite(const at::Tensor& stored);

/// Whether `stored_products` takes the call: float32 x on the CPU, weights of another type, and nothing that learns.
bool takes_stored(const at::Tensor& x, const std::vector<at::Tensor>& weights);
/// x Wᵀ for each of the weights. A row has the same bits whatever other rows there are.
std::vector<at::Tensor> stored_products(const at::Tensor& x, const std::vector<at::Tensor>& weights);

}  // namespace gka::ops
