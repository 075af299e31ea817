// SPDX-License-Identifier: Apache-2.0
// Chooses the scores of nodes that go with the table that kernels() has chosen.
#include "kernels/select/centroid_scores.h"

#include "kernels/family.h"

namespace lode {

extern const CentroidScoreKernels kScalarCentroidScores;
#if defined(__x86_64__)
extern const CentroidScoreKernels kAvx2CentroidScores;
extern const CentroidScoreKernels kAvx512CentroidScores;
extern const CentroidScoreKernels kAvx512VnniCentroidScores;
#endif

namespace {

const KernelFamily<CentroidScoreKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<CentroidScoreKernels> all(
      &kScalarCentroidScores, &kAvx2CentroidScores, &kAvx512CentroidScores,
      __builtin_cpu_supports("avx512vnni") ? &kAvx512VnniCentroidScores : nullptr);
#else
  static const KernelFamily<CentroidScoreKernels> all(&kScalarCentroidScores);
#endif
  return all;
}

}  // namespace

std::span<const CentroidScoreKernels* const> supported_centroid_score_kernels() {
  return family().supported();
}

const CentroidScoreKernels& centroid_score_kernels() {
  return family().best();
}

}  // namespace lode
