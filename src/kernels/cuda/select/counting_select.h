// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/select/select.h"

namespace lode::cuda {

/// What counting_select is told, but for how many lists there are.
struct CountingJob {
  const std::uint16_t* scores = nullptr;  // [lists, n]
  int levels = 1;
  bool all_ties = false;
  std::int64_t n = 0, capacity = 0;
  const std::int32_t *lengths = nullptr, *k = nullptr;
  std::int32_t *rows = nullptr, *counts = nullptr;
};

/// counting_select by counting_select.cu; false, and nothing done, where lists are too long, too many, or of
/// too many levels for it.
bool counting_select_in_cluster(const CountingJob& job, std::int64_t lists, StreamHandle stream);

}  // namespace lode::cuda
