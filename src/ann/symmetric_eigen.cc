// SPDX-License-Identifier: Apache-2.0
// Householder reflections to tridiagonal form, then implicit QR steps with Wilkinson's shift (Golub and Van
// Loan, Matrix Computations, 8.3). Vectors are held as rows, so that all inner loops run along memory.
#include "ann/symmetric_eigen.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace lode {

namespace {

constexpr std::size_t kStepsPerValue = 40;  // two or three do; what is not a number ends here

class Solver {
 public:
  Solver(std::vector<double> a, std::size_t n)
      : n_(n), a_(std::move(a)), rows_(n * n), diagonal_(n), beside_(n) {
    for (std::size_t i = 0; i < n; ++i) rows_[i * n + i] = 1.0;
  }

  Eigen solve() {
    for (std::size_t k = 0; k + 2 < n_; ++k) reflect(k);
    for (std::size_t i = 0; i < n_; ++i) {
      diagonal_[i] = a_[i * n_ + i];
      if (i + 1 < n_) beside_[i] = a_[(i + 1) * n_ + i];
    }
    diagonalise();
    return sorted();
  }

 private:
  /// Clears column k below the subdiagonal: a = H a H, rows = H rows with H = 1 - 2 v v^T.
  void reflect(std::size_t k) {
    std::vector<double> v(n_, 0.0), p(n_, 0.0);
    double norm = 0.0;
    for (std::size_t i = k + 1; i < n_; ++i) norm = std::hypot(norm, v[i] = a_[i * n_ + k]);
    v[k + 1] += v[k + 1] < 0.0 ? -norm : norm;
    double length = 0.0;
    for (std::size_t i = k + 1; i < n_; ++i) length = std::hypot(length, v[i]);
    if (!(length > 0.0)) return;
    for (std::size_t i = k + 1; i < n_; ++i) v[i] /= length;
    for (std::size_t i = k; i < n_; ++i)
      p[i] = std::inner_product(v.begin() + static_cast<std::ptrdiff_t>(k), v.end(), &a_[i * n_ + k], 0.0);
    const double own = std::inner_product(v.begin(), v.end(), p.begin(), 0.0);
    for (std::size_t i = k; i < n_; ++i) p[i] -= own * v[i];
    for (std::size_t i = k; i < n_; ++i)
      for (std::size_t j = k; j < n_; ++j) a_[i * n_ + j] -= 2.0 * (v[i] * p[j] + p[i] * v[j]);
    std::fill(p.begin(), p.end(), 0.0);
    for (std::size_t i = k + 1; i < n_; ++i)
      for (std::size_t j = 0; j < n_; ++j) p[j] += v[i] * rows_[i * n_ + j];
    for (std::size_t i = k + 1; i < n_; ++i)
      for (std::size_t j = 0; j < n_; ++j) rows_[i * n_ + j] -= 2.0 * v[i] * p[j];
  }

  bool apart(std::size_t i) const {
    const double near = std::abs(diagonal_[i]) + std::abs(diagonal_[i + 1]);
    return std::abs(beside_[i]) <= std::numeric_limits<double>::epsilon() * near;
  }

  /// Splits off values from the end.
  void diagonalise() {
    std::size_t steps = 0;
    for (std::size_t last = n_; last-- > 1;) {
      while (!apart(last - 1) && steps++ < kStepsPerValue * n_) {
        std::size_t first = last - 1;
        while (first > 0 && !apart(first - 1)) --first;
        step(first, last);
      }
    }
  }

  /// One implicit QR step on rows and columns [first, last].
  void step(std::size_t first, std::size_t last) {
    const double off = beside_[last - 1], half = (diagonal_[last - 1] - diagonal_[last]) / 2.0;
    const double shift = diagonal_[last] - off * (off / (half + std::copysign(std::hypot(half, off), half)));
    double x = diagonal_[first] - shift, z = beside_[first];
    for (std::size_t k = first; k < last; ++k) {
      const double r = std::hypot(x, z), c = r > 0.0 ? x / r : 1.0, s = r > 0.0 ? z / r : 0.0;
      if (k > first) beside_[k - 1] = r;
      const double a = diagonal_[k], b = beside_[k], d = diagonal_[k + 1];
      diagonal_[k] = c * c * a + 2.0 * c * s * b + s * s * d;
      diagonal_[k + 1] = s * s * a - 2.0 * c * s * b + c * c * d;
      beside_[k] = c * s * (d - a) + (c * c - s * s) * b;
      x = beside_[k];
      if (k + 1 < last) {
        z = s * beside_[k + 1];
        beside_[k + 1] *= c;
      }
      double* const upper = &rows_[k * n_];
      double* const lower = upper + n_;
      for (std::size_t j = 0; j < n_; ++j) {
        const double old = upper[j];
        upper[j] = c * old + s * lower[j];
        lower[j] = c * lower[j] - s * old;
      }
    }
  }

  Eigen sorted() const {
    std::vector<std::size_t> order(n_);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t x, std::size_t y) { return diagonal_[x] > diagonal_[y]; });
    Eigen out;
    for (const std::size_t i : order) {
      out.values.push_back(diagonal_[i]);
      const auto row = rows_.begin() + static_cast<std::ptrdiff_t>(i * n_);
      out.vectors.insert(out.vectors.end(), row, row + static_cast<std::ptrdiff_t>(n_));
    }
    return out;
  }

  std::size_t n_;
  std::vector<double> a_;                  // [n, n]
  std::vector<double> rows_;               // [n, n] what was applied so far; eigenvectors at the end
  std::vector<double> diagonal_, beside_;  // [n] of the tridiagonal form
};

}  // namespace

Eigen symmetric_eigen(std::vector<double> matrix, std::int64_t n) {
  return Solver(std::move(matrix), static_cast<std::size_t>(n)).solve();
}

}  // namespace lode
