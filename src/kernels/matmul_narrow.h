// SPDX-License-Identifier: Apache-2.0
// Products for generated tokens, which step together with tokens of other sequences.
#pragma once

#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// matmul (kernels.h) by the kernel for few rows, however many there are: the bits of a row of y depend on that
/// row of x alone. Weights are read from memory once; at full speed up to 16 rows.
void matmul_narrow(Matrix<const float> x, const void* w, DType w_type, std::int64_t n, Matrix<float> y,
                   ThreadPool& pool);

}  // namespace lode
