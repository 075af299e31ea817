// SPDX-License-Identifier: Apache-2.0
// Losses with their gradients.
#pragma once

#include "lodestone/types.h"

namespace lode {

/// Mean over rows of KL(target || softmax(logits)), in nats; `gradient` of it by the logits, unless its data
/// is null. A row of targets sums to 1, or to 0: such a row has no loss and no gradient.
double kl_divergence(Matrix<const float> logits /*[n, C]*/, Matrix<const float> targets /*[n, C]*/,
                     Matrix<float> gradient /*[n, C]*/);

/// softmax of each row, in place; a row whose largest number is not finite becomes NaN.
void softmax_rows(Matrix<float> x);

}  // namespace lode
