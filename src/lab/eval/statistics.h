// SPDX-License-Identifier: Apache-2.0
// How sure a difference is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace lode {

/// Of two documents, t's single degree of freedom says next to nothing, and equal values say too much.
inline constexpr std::size_t kLeastDocuments = 3;

/// Mean over samples, with a 95 % interval where there are documents enough.
struct Interval {
  double mean = 0;
  std::optional<double> low, high;
  std::int64_t documents = 0;
};

/// The mean of `values` when samples of one document are not independent: a ratio of document sums, with the
/// cluster-robust variance and Student's t of (documents - 1) degrees of freedom, so that each document
/// counts once. Give it the differences of two methods on the same samples for a paired comparison.
/// `document[i]` tells to which document value i belongs. (Cameron and Miller, A practitioner's guide to
/// cluster-robust inference, 2015, eq. 11.)
Interval mean_by_document(std::span<const double> values, std::span<const std::int64_t> document);

/// The same of differences of scores in percent points: none lies beyond 100, whatever a t interval of few documents says.
Interval difference_by_document(std::span<const double> points, std::span<const std::int64_t> document);

/// x with P(T <= x) = p for Student's t distribution, p in (0, 1), degrees of freedom >= 1.
double student_t_quantile(double p, double degrees);

}  // namespace lode
