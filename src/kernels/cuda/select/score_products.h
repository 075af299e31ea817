// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/select/select.h"

namespace lode::cuda {

/// score_keys on the matrix unit. False, and nothing is enqueued, where the store's type or its rows are not
/// for it.
bool score_products(const Queries& queries, std::int64_t sink, std::int64_t window, std::int64_t max_tokens,
                    float* scores, ExponentialSum* sums, StreamHandle stream);

}  // namespace lode::cuda
