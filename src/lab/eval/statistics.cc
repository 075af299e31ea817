// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "lodestone/error.h"

namespace lode {

namespace {

/// The continued fraction of the incomplete beta function (Abramowitz and Stegun 26.5.8), by Lentz's method.
double beta_fraction(double a, double b, double x) {
  constexpr double kTiny = 1e-300;
  double c = 1.0, d = 1.0 - (a + b) * x / (a + 1.0);
  d = 1.0 / (std::abs(d) < kTiny ? kTiny : d);
  double value = d;
  for (int m = 1; m <= 500; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    double step = 1.0;
    for (const double term : {even, odd}) {
      d = 1.0 + term * d;
      d = 1.0 / (std::abs(d) < kTiny ? kTiny : d);
      c = 1.0 + term / c;
      if (std::abs(c) < kTiny) c = kTiny;
      step = c * d;
      value *= step;
    }
    if (std::abs(step - 1.0) < 1e-15) break;
  }
  return value;
}

double incomplete_beta(double a, double b, double x) {
  if (x <= 0.0 || x >= 1.0) return x <= 0.0 ? 0.0 : 1.0;
  const double front =
      std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x));
  const bool direct = x < (a + 1.0) / (a + b + 2.0);
  return direct ? front * beta_fraction(a, b, x) / a : 1.0 - front * beta_fraction(b, a, 1.0 - x) / b;
}

double student_t_cdf(double t, double degrees) {
  const double tail = 0.5 * incomplete_beta(degrees / 2.0, 0.5, degrees / (degrees + t * t));
  return t > 0 ? 1.0 - tail : tail;
}

}  // namespace

Interval difference_by_document(std::span<const double> points, std::span<const std::int64_t> document) {
  Interval interval = mean_by_document(points, document);
  if (interval.low) interval.low = std::max(*interval.low, -100.0);
  if (interval.high) interval.high = std::min(*interval.high, 100.0);
  return interval;
}

double student_t_quantile(double p, double degrees) {
  LODE_ASSERT(p > 0.0 && p < 1.0 && degrees >= 1.0);
  double low = -1.0, high = 1.0;
  while (student_t_cdf(low, degrees) > p) low *= 2.0;
  while (student_t_cdf(high, degrees) < p) high *= 2.0;
  for (int i = 0; i < 200 && high - low > 1e-13 * (1.0 + std::abs(low)); ++i) {
    const double middle = 0.5 * (low + high);
    (student_t_cdf(middle, degrees) < p ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

Interval mean_by_document(std::span<const double> values, std::span<const std::int64_t> document) {
  LODE_ASSERT(values.size() == document.size());
  struct Sums {
    double value = 0, count = 0;
  };
  std::map<std::int64_t, Sums> sums;
  double all = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    Sums& s = sums[document[i]];
    s.value += values[i];
    s.count += 1;
    all += values[i];
  }
  const auto n = static_cast<double>(values.size());
  Interval interval = {.mean = values.empty() ? 0.0 : all / n,
                       .documents = static_cast<std::int64_t>(sums.size())};
  if (sums.size() < kLeastDocuments) return interval;
  double squares = 0;
  for (const auto& [id, s] : sums)
    squares += (s.value - interval.mean * s.count) * (s.value - interval.mean * s.count);
  const auto clusters = static_cast<double>(sums.size());
  const double error = std::sqrt(clusters / (clusters - 1.0) * squares) / n;
  const double reach = student_t_quantile(0.975, clusters - 1.0) * error;
  interval.low = interval.mean - reach;
  interval.high = interval.mean + reach;
  return interval;
}

}  // namespace lode
