// SPDX-License-Identifier: Apache-2.0
// Products of activations with block-quantised weights as they lie in GGUF files, in float32.
#pragma once

#include <cstddef>

#include "kernels/weight_type.h"
#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// y[m, n] = sum_k x[m, k] w[n, k] with w [y.cols, x.cols] of any type; x.cols are whole blocks. Weights are
/// dequantised some rows at a time into scratch of each thread; a row of y has the same bits however many rows
/// of x there are.
void matmul_blocks(Matrix<const float> x, const std::byte* w, WeightType type, Matrix<float> y,
                   ThreadPool& pool);

}  // namespace lode
