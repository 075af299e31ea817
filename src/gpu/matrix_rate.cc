// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/linear/matrix_rate.h"

#include "gpu/backend.h"

namespace lode {

double gpu_matrix_rate(std::int64_t n) {
  return cuda::matrix_rate(n);
}

}  // namespace lode
