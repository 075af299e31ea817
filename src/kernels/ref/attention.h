// SPDX-License-Identifier: Apache-2.0
// Attention in float64, as the formulas read: the specification that every kernel is tested against. Slow on
// purpose.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "kernels/q4_rows.h"
#include "lodestone/kv_view.h"

namespace lode::ref {

/// Row i of K (or V), times its scale: [d].
inline std::vector<double> row(const KvRows& kv, const std::byte* rows, const float* scales, std::int64_t i) {
  const std::byte* at = rows + i * kv.row_bytes();
  std::vector<float> wide(static_cast<std::size_t>(kv.d));
  switch (kv.type) {
    case DType::f32:
      std::memcpy(wide.data(), at, wide.size() * sizeof(float));
      break;
    case DType::f16:
      for (int c = 0; c < kv.d; ++c) wide[c] = to_float(reinterpret_cast<const f16*>(at)[c]);
      break;
    case DType::bf16:
      for (int c = 0; c < kv.d; ++c) wide[c] = to_float(reinterpret_cast<const bf16*>(at)[c]);
      break;
    case DType::q8: {
      std::vector<double> scaled;
      for (int c = 0; c < kv.d; ++c)
        scaled.push_back(static_cast<double>(reinterpret_cast<const std::int8_t*>(at)[c]) * scales[i]);
      return scaled;
    }
    case DType::q4:
      widen_q4(at, kv.d, wide.data());
      break;
  }
  return {wide.begin(), wide.end()};
}
inline std::vector<double> key(const KvRows& kv, std::int64_t i) {
  return row(kv, kv.k, kv.k_scale, i);
}
inline std::vector<double> value(const KvRows& kv, std::int64_t i) {
  return row(kv, kv.v, kv.v_scale, i);
}

inline double dot(const float* q, const KvRows& kv, std::int64_t i) {
  const std::vector<double> k = key(kv, i);
  double sum = 0.0;
  for (int c = 0; c < kv.d; ++c) sum += double{q[c]} * k[static_cast<std::size_t>(c)];
  return sum;
}

/// Attention of one query: output [d] and log-sum-exp.
struct Result {
  std::vector<double> output;
  double lse = -std::numeric_limits<double>::infinity();
};

/// softmax(scale q . k_i + w_i) over `rows`, times V. `log_weights` is empty or has one weight per row.
inline Result attend(const float* q, double scale, const KvRows& kv, std::span<const std::int64_t> rows,
                     std::span<const float> log_weights = {}) {
  Result result{std::vector<double>(static_cast<std::size_t>(kv.d), 0.0)};
  std::vector<double> scores;
  double top = -std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    scores.push_back(scale * dot(q, kv, rows[i]) + (log_weights.empty() ? 0.0 : double{log_weights[i]}));
    top = scores.back() > top || std::isnan(scores.back()) ? scores.back() : top;
  }
  if (top == -std::numeric_limits<double>::infinity()) return result;  // the empty set, or only weights of 0
  double sum = 0.0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double p = std::exp(scores[i] - top);
    sum += p;
    const std::vector<double> v = value(kv, rows[i]);
    for (int c = 0; c < kv.d; ++c)
      result.output[static_cast<std::size_t>(c)] += p * v[static_cast<std::size_t>(c)];
  }
  for (double& x : result.output) x /= sum;
  result.lse = top + std::log(sum);
  return result;
}

/// All rows [begin, end).
inline Result attend(const float* q, double scale, const KvRows& kv, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = begin; i < end; ++i) rows.push_back(i);
  return attend(q, scale, kv, rows);
}

}  // namespace lode::ref
