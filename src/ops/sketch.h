// Queries and keys in fewer dimensions and back, for a solve there (layers/gka.cpp). P of every head [S,D] makes P x of
// a row x of D numbers, and Pᵀ z of what was found for it.
//
// Every array of D numbers a row is read and written as seldom as can be: by products on strided views, and on a GPU by
// kernels that take sum and product in one pass (docs/kernels.md counts them).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace gka::ops {

/// P q, P k [...,H,S], and q and k [...,H,D] as they are: whoever reads them from here on sends their gradients through
/// here as well, where each joins what comes by way of P without a pass of its own. P is [H,S,D], of any type.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> to_sketch(const at::Tensor& q, const at::Tensor& k,
                                                                     const at::Tensor& sketch);

/// q + α (Pᵀ z − q), α [...,H]; without α Pᵀ z, and q is not read.
at::Tensor from_sketch(const at::Tensor& q, const at::Tensor& z, const at::Tensor& sketch,
                       const std::optional<at::Tensor>& alpha);

}  // namespace gka::ops
