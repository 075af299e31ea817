// SPDX-License-Identifier: Apache-2.0
// Losses with their gradients.
#pragma once

#include <span>

#include "lodestone/types.h"

namespace lode {

/// Mean over rows of KL(target || softmax(logits)), in nats; `gradient` of it by the logits, unless its data
/// is null. A row of targets sums to 1, or to 0: such a row has no loss and no gradient.
double kl_divergence(Matrix<const float> logits /*[n, C]*/, Matrix<const float> targets /*[n, C]*/,
                     Matrix<float> gradient /*[n, C]*/);

/// What a partition of keys and a classifier of queries make of attention, both as logits over buckets, in
/// nats: with P = softmax(keys), p = softmax(queries) and a key k that stands for w_k keys of its text,
///
///   T_qc = sum_k A_qk P_kc,   n_c = 1 + sum_k w_k P_kc,   loss = -mean_q sum_c T_qc log(p_qc n / n_c),   n =
///   sum_c n_c
///
/// so minus the logarithm of how many times a mean key's attention those keys are given that are attended. It
/// bounds from above what equation 1 of SAAP would say of attention rebuilt from buckets, sum_c p_qc P_kc /
/// n_c (Jensen). One bucket for all keys has loss 0, so that none swallows the rest. Gradients are by the
/// logits.
double partition_loss(Matrix<const float> keys /*[n_k, C]*/, Matrix<const float> queries /*[n_q, C]*/,
                      Matrix<const float> attention /*[n_q, n_k]*/, std::span<const float> weights /*[n_k]*/,
                      Matrix<float> keys_gradient /*[n_k, C]*/, Matrix<float> queries_gradient /*[n_q, C]*/);

/// softmax of each row, in place; a row whose largest number is not finite becomes NaN.
void softmax_rows(Matrix<float> x);

}  // namespace lode
