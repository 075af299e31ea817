// SPDX-License-Identifier: Apache-2.0
#include "ann/symmetric_eigen.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lode {

Eigen symmetric_eigen(std::vector<double> a, std::int64_t size) {
  const auto n = static_cast<std::size_t>(size);
  std::vector<double> v(n * n, 0.0);  // rows are eigenvectors
  for (std::size_t i = 0; i < n; ++i) v[i * n + i] = 1.0;
  constexpr int kSweeps = 30;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    double off = 0.0, all = 0.0;
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < n; ++j) {
        all += a[i * n + j] * a[i * n + j];
        if (i != j) off += a[i * n + j] * a[i * n + j];
      }
    }
    if (off <= 1e-22 * all) break;
    for (std::size_t p = 0; p < n; ++p) {
      for (std::size_t q = p + 1; q < n; ++q) {
        const double apq = a[p * n + q];
        if (apq == 0.0) continue;
        const double theta = (a[q * n + q] - a[p * n + p]) / (2.0 * apq);
        const double t = (theta < 0 ? -1.0 : 1.0) / (std::abs(theta) + std::sqrt(theta * theta + 1.0));
        const double c = 1.0 / std::sqrt(t * t + 1.0), s = t * c;
        const auto turn = [&](double& x, double& y) {
          const double old = x;
          x = c * old - s * y;
          y = s * old + c * y;
        };
        for (std::size_t k = 0; k < n; ++k) turn(a[k * n + p], a[k * n + q]);
        for (std::size_t k = 0; k < n; ++k) turn(a[p * n + k], a[q * n + k]);
        for (std::size_t k = 0; k < n; ++k) turn(v[p * n + k], v[q * n + k]);
      }
    }
  }
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t x, std::size_t y) { return a[x * n + x] > a[y * n + y]; });
  Eigen sorted;
  for (const std::size_t i : order) {
    sorted.values.push_back(a[i * n + i]);
    sorted.vectors.insert(sorted.vectors.end(), v.begin() + static_cast<std::ptrdiff_t>(i * n),
                          v.begin() + static_cast<std::ptrdiff_t>((i + 1) * n));
  }
  return sorted;
}

}  // namespace lode
