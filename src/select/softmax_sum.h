// SPDX-License-Identifier: Apache-2.0
// How the heads of a group choose together by scores that cannot be added: by the sum of their softmax
// weights.
#pragma once

#include <span>

#include "lodestone/types.h"

namespace lode {

/// scores[0, i] := sum_r softmax(scores[r])[i], NaN as -inf; all rows are spoilt. Weights below e^-87 of a
/// row's largest count as 0.
void sum_softmax(Matrix<float> scores /*[rows, n]*/);

/// scores := log softmax(scores), NaN as -inf. Infinite scores stay so and count nothing in the sum.
void log_softmax(std::span<float> scores);

/// scores[0, i] := log sum_r exp(scores[r, i])
void sum_exponentials(Matrix<float> scores /*[rows, n]*/);

}  // namespace lode
