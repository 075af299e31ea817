// SPDX-License-Identifier: Apache-2.0
// How a server shares out what its models leave of a GPU's memory.
#pragma once

#include <algorithm>
#include <cstdint>

namespace lode::serve {

struct GpuShares {
  std::int64_t documents = 0;  ///< bytes of open documents and of those that are being read
  std::int64_t questions = 0;  ///< of questions' and answers' own keys and values, for each model
  std::int64_t reserve =
      0;  ///< that nobody is promised: captured graphs, libraries, kernels, what is not counted
};

/// `free`: bytes beside the weights; `steps`: of them what the steps of all models take; `wanted`: for documents (0 =
/// all that the others leave). The shares of all together are at most `free`.
inline GpuShares share_gpu(std::int64_t free, std::int64_t steps, std::int64_t models, std::int64_t wanted) {
  constexpr std::int64_t kOfReserve = 64, kOfQuestions = 8;
  constexpr std::int64_t kLeastReserve = std::int64_t{1} << 30;
  GpuShares shares;
  shares.reserve = std::min(free / kOfQuestions, kLeastReserve + free / kOfReserve);
  const std::int64_t left = std::max<std::int64_t>(0, free - shares.reserve - steps),
                     questions = left / kOfQuestions;
  shares.questions = questions / std::max<std::int64_t>(1, models);
  shares.documents = wanted > 0 ? std::min(wanted, left - questions) : left - questions;
  return shares;
}

}  // namespace lode::serve
