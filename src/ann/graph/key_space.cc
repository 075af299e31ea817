// SPDX-License-Identifier: Apache-2.0
#include "ann/graph/key_space.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ann/symmetric_eigen.h"
#include "kernels/kernels.h"
#include "kernels/select/int8_dot.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr double kFarOff = 4.0;       // times the median length: what is longer is shortened to that
constexpr std::size_t kTogether = 4;  // rows whose products are added at once

using Square = std::vector<double>;  // [d, d]

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// A sample of the finite rows. Some that are far longer than most would decide alone which directions
/// matter, so they count as rows of a few times the median length.
struct Sample {
  std::vector<double> rows;  // [n, d]
  std::size_t d = 0;

  explicit Sample(Matrix<const float> all) : d(at(all.cols)) {
    const std::int64_t count = std::min(KeySpace::kSample, all.rows);
    rows.reserve(at(count) * d);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::span<const float> row = all[i * all.rows / count];
      if (std::all_of(row.begin(), row.end(), [](float v) { return std::isfinite(v); }))
        rows.insert(rows.end(), row.begin(), row.end());
    }
  }

  std::size_t count() const { return rows.size() / d; }

  /// Shortens rows that are much longer than half of those that are not 0.
  void clip() {
    std::vector<double> lengths(count()), some;
    for (std::size_t i = 0; i < count(); ++i) {
      const double* const row = &rows[i * d];
      lengths[i] = std::sqrt(std::inner_product(row, row + d, row, 0.0));
      if (lengths[i] > 0.0) some.push_back(lengths[i]);
    }
    if (some.empty()) return;
    const auto middle = some.begin() + std::ssize(some) / 2;
    std::nth_element(some.begin(), middle, some.end());
    const double limit = kFarOff * *middle;
    for (std::size_t i = 0; i < count(); ++i)
      for (std::size_t j = 0; lengths[i] > limit && j < d; ++j) rows[i * d + j] *= limit / lengths[i];
  }

  std::vector<double> mean() const {
    std::vector<double> sum(d, 0.0);
    for (std::size_t i = 0; i < rows.size(); ++i) sum[i % d] += rows[i];
    for (double& x : sum) x /= std::max(1.0, static_cast<double>(count()));
    return sum;
  }

  void centre(const std::vector<double>& by) {
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] -= by[i % d];
  }

  /// Sum of x x^T.
  Square products() {
    rows.resize((count() + kTogether - 1) / kTogether * kTogether * d, 0.0);
    Square sum(d * d, 0.0);
    for (std::size_t i = 0; i < rows.size(); i += kTogether * d) {
      const double *const x = &rows[i], *const y = x + d, *const z = y + d, *const w = z + d;
      for (std::size_t j = 0; j < d; ++j)
        for (std::size_t c = 0; c <= j; ++c)
          sum[j * d + c] += x[j] * x[c] + y[j] * y[c] + z[j] * z[c] + w[j] * w[c];
    }
    for (std::size_t j = 0; j < d; ++j)
      for (std::size_t c = 0; c < j; ++c) sum[c * d + j] = sum[j * d + c];
    return sum;
  }
};

/// The lower factor of the moment over its mean diagonal, of which some is added to all of it.
Square cholesky(const Square& moment, std::int64_t d) {
  double trace = 0.0;
  for (std::int64_t i = 0; i < d; ++i) trace += moment[at(i * d + i)];
  const double unit = trace > 0.0 && std::isfinite(trace) ? static_cast<double>(d) / trace : 0.0;
  Square lower(at(d * d), 0.0);
  for (std::int64_t i = 0; i < d; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) {
      double sum = unit > 0.0 ? moment[at(i * d + j)] * unit + (i == j ? 1e-3 : 0.0) : (i == j ? 1.0 : 0.0);
      for (std::int64_t k = 0; k < j; ++k) sum -= lower[at(i * d + k)] * lower[at(j * d + k)];
      lower[at(i * d + j)] = i == j ? std::sqrt(std::max(sum, 1e-6)) : sum / lower[at(j * d + j)];
    }
  }
  return lower;
}

Square inverse_of_lower(const Square& lower, std::int64_t d) {
  Square inverse(at(d * d), 0.0);
  for (std::int64_t c = 0; c < d; ++c) {
    for (std::int64_t i = c; i < d; ++i) {
      double sum = i == c ? 1.0 : 0.0;
      for (std::int64_t k = c; k < i; ++k) sum -= lower[at(i * d + k)] * inverse[at(k * d + c)];
      inverse[at(i * d + c)] = sum / lower[at(i * d + i)];
    }
  }
  return inverse;
}

Square product(const Square& a, const Square& b, std::int64_t d) {
  Square out(at(d * d), 0.0);
  for (std::int64_t i = 0; i < d; ++i)
    for (std::int64_t k = 0; k < d; ++k)
      for (std::int64_t j = 0; j < d; ++j) out[at(i * d + j)] += a[at(i * d + k)] * b[at(k * d + j)];
  return out;
}

Square transposed(const Square& a, std::int64_t d) {
  Square out(a.size());
  for (std::int64_t i = 0; i < d; ++i)
    for (std::int64_t j = 0; j < d; ++j) out[at(j * d + i)] = a[at(i * d + j)];
  return out;
}

/// The most directions in the fewest cache lines that leave out at most kLost of the variance.
std::int64_t directions_kept(const std::vector<double>& variances) {
  double all = 0.0;
  for (const double x : variances) all += std::max(0.0, x);
  const auto d = std::ssize(variances);
  for (std::int64_t stride = CodedRows::kLine;; stride += CodedRows::kLine) {
    const std::int64_t count = std::min(d, stride - CodedRows::kScaleBytes);
    double rest = 0.0;
    for (std::int64_t i = count; i < d; ++i) rest += std::max(0.0, variances[at(i)]);
    if (count == d || rest <= KeySpace::kLost * all) return count;
  }
}

}  // namespace

KeySpace KeySpace::of(Matrix<const float> queries, Matrix<const float> keys, int numbers) {
  LODE_ASSERT(queries.rows > 0 && keys.rows > 0 && queries.cols == keys.cols);
  const std::int64_t d = keys.cols;
  Sample own(keys), asked(queries);
  // Twice, since where keys stand far off the origin their distance from it hides how far they lie apart.
  own.clip();
  const std::vector<double> mean = own.mean();
  own.centre(mean);
  own.clip();
  asked.clip();
  const Square lower = cholesky(asked.products(), d), upper = transposed(lower, d);
  // Of L^T k.
  const Eigen main = symmetric_eigen(product(product(upper, own.products(), d), lower, d), d);
  KeySpace space(static_cast<int>(d));
  space.numbers_ =
      numbers > 0 ? std::min(numbers, static_cast<int>(d)) : static_cast<int>(directions_kept(main.values));
  const auto kept = at(space.numbers_ * d);
  const Square to_keys = product(main.vectors, upper, d);                          // U L^T
  const Square to_queries = product(main.vectors, inverse_of_lower(lower, d), d);  // U L^-1
  space.keys_.assign(to_keys.begin(), to_keys.begin() + static_cast<std::ptrdiff_t>(kept));
  space.queries_.assign(to_queries.begin(), to_queries.begin() + static_cast<std::ptrdiff_t>(kept));
  for (std::int64_t i = 0; i < space.numbers_; ++i) {
    double sum = 0.0;
    for (std::int64_t j = 0; j < d; ++j) sum += to_keys[at(i * d + j)] * mean[at(j)];
    space.shift_.push_back(static_cast<float>(sum));
  }
  return space;
}

void KeySpace::key(const float* k, std::span<float> out) const {
  if (keys_.empty()) return void(std::copy_n(k, out.size(), out.begin()));
  kernels().gemv(k, 1, keys_.data(), DType::f32, head_dim_, 0, numbers_, out.data(), numbers_);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] -= shift_[i];
}

void KeySpace::query(const float* q, std::span<float> out) const {
  if (queries_.empty()) return void(std::copy_n(q, out.size(), out.begin()));
  kernels().gemv(q, 1, queries_.data(), DType::f32, head_dim_, 0, numbers_, out.data(), numbers_);
}

std::vector<float> KeySpace::values() const {
  std::vector<float> all = keys_;
  all.insert(all.end(), queries_.begin(), queries_.end());
  all.insert(all.end(), shift_.begin(), shift_.end());
  return all;
}

KeySpace KeySpace::restore(int head_dim, int numbers, std::span<const float> values) {
  KeySpace space(head_dim);
  if (values.empty()) return space;
  LODE_ASSERT(std::ssize(values) == value_count(head_dim, numbers));
  const std::size_t one = at(std::int64_t{head_dim} * numbers);
  space.numbers_ = numbers;
  space.keys_.assign(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(one));
  space.queries_.assign(values.begin() + static_cast<std::ptrdiff_t>(one),
                        values.begin() + static_cast<std::ptrdiff_t>(2 * one));
  space.shift_.assign(values.begin() + static_cast<std::ptrdiff_t>(2 * one), values.end());
  return space;
}

}  // namespace lode
