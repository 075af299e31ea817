// SPDX-License-Identifier: Apache-2.0
// Chooses the scores of nodes that go with the table that kernels() has chosen.
#include "kernels/select/centroid_scores.h"

#include "kernels/family.h"

namespace lode {

extern const NodeScoreKernels kScalarNodeScores;
#if defined(__x86_64__)
extern const NodeScoreKernels kAvx2NodeScores;
extern const NodeScoreKernels kAvx512NodeScores;
extern const NodeScoreKernels kAvx512VnniNodeScores;
#endif

namespace {

const KernelFamily<NodeScoreKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<NodeScoreKernels> all(
      &kScalarNodeScores, &kAvx2NodeScores, &kAvx512NodeScores,
      __builtin_cpu_supports("avx512vnni") ? &kAvx512VnniNodeScores : nullptr);
#else
  static const KernelFamily<NodeScoreKernels> all(&kScalarNodeScores);
#endif
  return all;
}

}  // namespace

std::span<const NodeScoreKernels* const> supported_node_score_kernels() {
  return family().supported();
}

const NodeScoreKernels& node_score_kernels() {
  return family().best();
}

}  // namespace lode
