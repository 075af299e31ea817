// SPDX-License-Identifier: Apache-2.0
#include "lab/train/hash/start.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lodestone/error.h"

namespace lode {

namespace {

using Square = std::vector<double>;  // [n, n]

Square product(const Square& a, const Square& b, std::size_t n) {
  Square c(n * n, 0.0);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t k = 0; k < n; ++k) {
      for (std::size_t j = 0; j < n; ++j) c[i * n + j] += a[i * n + k] * b[k * n + j];
    }
  }
  return c;
}

/// The matrix to a power, tiny eigenvalues lifted.
Square power(const Eigen& eigen, double exponent) {
  const std::size_t n = eigen.values.size();
  const double least = std::max(eigen.values[0] * 1e-4, 1e-12);
  Square result(n * n, 0.0);
  for (std::size_t v = 0; v < n; ++v) {
    const double scale = std::pow(std::max(eigen.values[v], least), exponent);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < n; ++j)
        result[i * n + j] += scale * eigen.vectors[v * n + i] * eigen.vectors[v * n + j];
    }
  }
  return result;
}

/// Orthonormal rows [count, n], uniformly turned; count <= n.
std::vector<double> random_rotation(std::size_t count, std::size_t n, Rng& rng) {
  std::vector<double> rows(count * n);
  for (double& x : rows) x = rng.normal();
  for (std::size_t i = 0; i < count; ++i) {
    double* const row = rows.data() + i * n;
    for (std::size_t j = 0; j < i; ++j) {
      const double along = std::inner_product(row, row + n, rows.data() + j * n, 0.0);
      for (std::size_t k = 0; k < n; ++k) row[k] -= along * rows[j * n + k];
    }
    const double norm = std::sqrt(std::inner_product(row, row + n, row, 0.0));
    for (std::size_t k = 0; k < n; ++k) row[k] /= norm;
  }
  return rows;
}

/// `directions` [bits, d], each scaled so that (x - centre) . direction has mean square 1 over a second
/// moment.
std::vector<float> unit_variance(const std::vector<double>& directions, const Square& moment, std::size_t d) {
  std::vector<float> scaled(directions.size());
  for (std::size_t row = 0; row < directions.size(); row += d) {
    double square = 0.0;
    for (std::size_t i = 0; i < d; ++i) {
      for (std::size_t j = 0; j < d; ++j)
        square += directions[row + i] * moment[i * d + j] * directions[row + j];
    }
    const double inverse = 1.0 / std::sqrt(std::max(square, 1e-12));
    for (std::size_t i = 0; i < d; ++i) scaled[row + i] = static_cast<float>(directions[row + i] * inverse);
  }
  return scaled;
}

}  // namespace

void Moments::add(std::span<const float> x) {
  ++count_;
  for (std::size_t i = 0; i < x.size(); ++i) {
    sum_[i] += x[i];
    for (std::size_t j = 0; j < x.size(); ++j)
      products_[i * x.size() + j] += static_cast<double>(x[i]) * x[j];
  }
}

std::vector<double> Moments::mean() const {
  std::vector<double> mean = sum_;
  for (double& x : mean) x /= static_cast<double>(count_);
  return mean;
}

std::vector<double> Moments::about(const std::vector<double>& centre) const {
  const std::size_t d = sum_.size();
  const std::vector<double> mean = this->mean();
  std::vector<double> result(d * d);
  for (std::size_t i = 0; i < d; ++i) {
    for (std::size_t j = 0; j < d; ++j) {
      result[i * d + j] = products_[i * d + j] / static_cast<double>(count_) - mean[i] * mean[j] +
                          (mean[i] - centre[i]) * (mean[j] - centre[j]);
    }
  }
  return result;
}

LinearStart linear_start(const Moments& keys, const Moments& queries, std::int64_t bits, double gamma,
                         Rng& rng) {
  LODE_ASSERT(keys.count() > 0 && queries.count() > 0);
  const std::vector<double> mean = keys.mean();
  const std::size_t d = mean.size();
  const Square covariance = keys.about(mean), query_moment = queries.about(std::vector<double>(d, 0.0));
  const Eigen eigen = symmetric_eigen(covariance, static_cast<std::int64_t>(d));
  const Square to_keys = power(eigen, -gamma), to_queries = power(eigen, gamma);
  const Eigen long_in = symmetric_eigen(product(product(to_queries, query_moment, d), to_queries, d),
                                        static_cast<std::int64_t>(d));
  // More bits than directions: further turns of the whole space.
  std::vector<double> on_keys, on_queries;  // [bits, d]
  const auto wanted = static_cast<std::size_t>(bits);
  for (std::size_t done = 0; done < wanted;) {
    const std::size_t count = std::min(d, wanted - done);
    const std::vector<double> turn = random_rotation(count, count, rng);
    for (std::size_t b = 0; b < count; ++b) {
      std::vector<double> direction(d, 0.0);
      for (std::size_t v = 0; v < count; ++v) {
        for (std::size_t i = 0; i < d; ++i) direction[i] += turn[b * count + v] * long_in.vectors[v * d + i];
      }
      for (std::size_t j = 0; j < d; ++j) {
        double k = 0.0, q = 0.0;
        for (std::size_t i = 0; i < d; ++i) {
          k += direction[i] * to_keys[i * d + j];
          q += direction[i] * to_queries[i * d + j];
        }
        on_keys.push_back(k);
        on_queries.push_back(q);
      }
    }
    done += count;
  }
  return {.centre = {mean.begin(), mean.end()},
          .keys = unit_variance(on_keys, covariance, d),
          .queries = unit_variance(on_queries, query_moment, d)};
}

}  // namespace lode
