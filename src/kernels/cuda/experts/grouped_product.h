// SPDX-License-Identifier: Apache-2.0
// Products of sorted rows with the matrices of their experts, each expert's rows together: in float32, and on the
// matrix unit for many rows.
#pragma once

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/experts/routing.h"
#include "kernels/cuda/linear/linear.h"

namespace lode::cuda {

/// y[slot, :] = x[row, :] w[expert of the slot]^T for all slots of some experts.
struct GroupedProduct {
  Routing routing;
  std::int64_t slots = 0;   ///< n * used
  const void* x = nullptr;  // [n, cols], or [slots, cols] where rows are those of slots
  DType x_type = DType::f32;
  bool by_slot = false;
  const void* w = nullptr;  // [experts, rows, cols] of the experts from first_expert on
  DType w_type = DType::f32;
  std::int64_t rows = 0, cols = 0;
  int first_expert = 0, experts = 0;
  float* y = nullptr;  // [slots, rows]
};

/// On the matrix unit where x and w are both bf16 or both f16 and columns are a multiple of 8; else in float32, every
/// output one chain in ascending order of the columns. The bits of a row do not depend on the others. The routing
/// lists all experts.
void multiply_grouped(const GroupedProduct& product, StreamHandle stream);

/// The same for few rows in float32, w of any type, x of float32: w is read once for all rows of an expert. The routing
/// lists the experts that somebody chose, of which there are at most `most_groups`; `experts` counts all.
void multiply_few_grouped(const GroupedProduct& product, int most_groups, StreamHandle stream);

}  // namespace lode::cuda
