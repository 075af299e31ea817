// SPDX-License-Identifier: Apache-2.0
// Eigenvalues and eigenvectors of small symmetric matrices.
#pragma once

#include <cstdint>
#include <vector>

namespace lode {

/// Eigenvalues, falling, and eigenvectors as rows of a symmetric matrix.
struct Eigen {
  std::vector<double> values;   // [n]
  std::vector<double> vectors;  // [n, n]
};
Eigen symmetric_eigen(std::vector<double> matrix /*[n, n]*/, std::int64_t n);

}  // namespace lode
