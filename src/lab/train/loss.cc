// SPDX-License-Identifier: Apache-2.0
#include "lab/train/loss.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/sgemm.h"
#include "lodestone/error.h"

namespace lode {

namespace {

double log_sum_of(std::span<const float> logits) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float z : logits) sum += std::exp(z - most);
  return most + std::log(sum);
}

}  // namespace

double kl_divergence(Matrix<const float> logits, Matrix<const float> targets, Matrix<float> gradient) {
  LODE_ASSERT(logits.rows == targets.rows && logits.cols == targets.cols);
  const float weight = 1.0f / static_cast<float>(std::max<std::int64_t>(1, logits.rows));
  double total = 0.0;
  for (std::int64_t row = 0; row < logits.rows; ++row) {
    const std::span<const float> z = logits[row], t = targets[row];
    const float most = *std::max_element(z.begin(), z.end());
    double sum = 0.0, mass = 0.0;
    for (std::size_t i = 0; i < z.size(); ++i) {
      sum += std::exp(z[i] - most);
      mass += t[i];
    }
    const double log_sum = most + std::log(sum);
    for (std::size_t i = 0; i < z.size(); ++i) {
      if (t[i] > 0.0f) total += t[i] * (std::log(static_cast<double>(t[i])) - (z[i] - log_sum));
    }
    if (gradient.data == nullptr) continue;
    const auto share = static_cast<float>(mass / sum);  // mass is 1 but for rounding, or 0
    for (std::size_t i = 0; i < z.size(); ++i)
      gradient[row][i] = weight * (share * std::exp(z[i] - most) - t[i]);
  }
  return total * weight;
}

double partition_loss(Matrix<const float> keys, Matrix<const float> queries, Matrix<const float> attention,
                      std::span<const float> weights, Matrix<float> keys_gradient,
                      Matrix<float> queries_gradient) {
  const std::int64_t n_k = keys.rows, n_q = queries.rows, c = keys.cols;
  LODE_ASSERT(queries.cols == c && attention.rows == n_q && attention.cols == n_k &&
              std::ssize(weights) == n_k);
  const auto dense = [&](std::int64_t rows) {
    return std::vector<float>(static_cast<std::size_t>(rows * c));
  };
  std::vector<float> p = dense(n_k), logs = dense(n_q), t = dense(n_q);
  const Matrix<float> shares(p.data(), n_k, c), targets(t.data(), n_q, c), log_p(logs.data(), n_q, c);
  std::vector<double> sizes(static_cast<std::size_t>(c), 1.0);
  for (std::int64_t k = 0; k < n_k; ++k) std::copy(keys[k].begin(), keys[k].end(), shares[k].begin());
  softmax_rows(shares);
  for (std::int64_t k = 0; k < n_k; ++k)
    for (std::size_t i = 0; i < sizes.size(); ++i)
      sizes[i] += static_cast<double>(weights[static_cast<std::size_t>(k)]) * shares[k][i];
  sgemm(n_q, c, n_k, {attention.data, attention.stride}, {p.data(), c}, 0.0f, t.data(), c);

  const double all = std::accumulate(sizes.begin(), sizes.end(), 0.0), mean = 1.0 / static_cast<double>(n_q);
  std::vector<double> attended(sizes.size(), 0.0);  // mean over queries of T_qc
  double loss = 0.0;
  for (std::int64_t q = 0; q < n_q; ++q) {
    const double log_sum = log_sum_of(queries[q]),
                 mass = std::accumulate(targets[q].begin(), targets[q].end(), 0.0);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const double log_share = queries[q][i] - log_sum, target = targets[q][i];
      loss -= mean * target * (log_share - std::log(sizes[i] / all));
      attended[i] += mean * target;
      queries_gradient[q][i] = static_cast<float>(mean * (mass * std::exp(log_share) - target));
      log_p[q][i] = static_cast<float>(-mean * log_share);
    }
  }
  sgemm(n_k, c, n_q, {attention.data, attention.stride, true}, {logs.data(), c}, 0.0f, keys_gradient.data,
        keys_gradient.stride);
  std::vector<double> of_key(static_cast<std::size_t>(n_k), 0.0);  // mean over queries of A_qk
  for (std::int64_t q = 0; q < n_q; ++q)
    for (std::size_t k = 0; k < of_key.size(); ++k) of_key[k] += mean * attention[q][k];
  for (std::size_t i = 0; i < sizes.size(); ++i) attended[i] /= sizes[i];
  for (double& size : sizes) size = std::log(size);
  for (std::int64_t k = 0; k < n_k; ++k) {
    const auto at = static_cast<std::size_t>(k);
    const std::span<float> gradient = keys_gradient[k];
    double through = 0.0;  // the softmax
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      gradient[i] += static_cast<float>(of_key[at] * sizes[i] + weights[at] * attended[i]);
      through += static_cast<double>(gradient[i]) * shares[k][i];
    }
    for (std::size_t i = 0; i < sizes.size(); ++i)
      gradient[i] = shares[k][i] * (gradient[i] - static_cast<float>(through));
  }
  return loss;
}

void softmax_rows(Matrix<float> x) {
  for (std::int64_t row = 0; row < x.rows; ++row) {
    const float most = *std::max_element(x[row].begin(), x[row].end());
    double sum = 0.0;
    for (float& value : x[row]) sum += value = std::exp(value - most);
    const auto inverse = static_cast<float>(1.0 / sum);
    for (float& value : x[row]) value *= inverse;
  }
}

}  // namespace lode
