// SPDX-License-Identifier: Apache-2.0
// How several choose together by scores that cannot be added, the heads of a group or the queries of a text:
// by the sum of their softmax weights.
#pragma once

#include <span>

#include "lodestone/types.h"

namespace lode {

/// sum[i] += softmax(scores)[i] for as many as `sum` holds, NaN as -inf; `scores` is spoilt. Infinite scores
/// share all the weight; where nothing is above -inf there is none. Weights below e^-87 of the largest count
/// as 0.
void add_softmax(std::span<float> sum, std::span<float> scores);

/// scores[0, i] := sum_r softmax(scores[r])[i], NaN as -inf; all rows are spoilt. Weights below e^-87 of a
/// row's largest count as 0.
void sum_softmax(Matrix<float> scores /*[rows, n]*/);

/// scores := log softmax(scores), NaN as -inf. Infinite scores stay so and count nothing in the sum.
void log_softmax(std::span<float> scores);

/// scores[0, i] := log sum_r exp(scores[r, i])
void sum_exponentials(Matrix<float> scores /*[rows, n]*/);

}  // namespace lode
