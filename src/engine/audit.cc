// SPDX-License-Identifier: Apache-2.0
#include "engine/audit.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"

namespace lode {

namespace {

void compare(const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
             std::span<float* const> outputs, WorkReport& report) {
  const std::int64_t d = geometry.head_dim;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const std::int64_t rows = blocks[b].tokens * geometry.query_heads;
    std::vector<float> exact(static_cast<std::size_t>(rows * d));  // [T, Hq, d]
    float* const exact_output = exact.data();
    attend_full(blocks.subspan(b, 1), geometry, {&exact_output, 1});
    for (std::int64_t r = 0; r < rows; ++r) {
      const double error = relative_error(outputs[b] + r * d, exact.data() + r * d, d);
      report.audit_error_sum += error;
      report.audit_error_max = std::max(report.audit_error_max, error);
    }
    report.audited += rows;
  }
}

}  // namespace

double relative_error(const float* a, const float* exact, std::int64_t n) {
  double difference = 0, norm = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    difference += (static_cast<double>(a[i]) - exact[i]) * (static_cast<double>(a[i]) - exact[i]);
    norm += static_cast<double>(exact[i]) * exact[i];
  }
  return difference == 0 ? 0.0 : std::sqrt(difference / norm);
}

ForwardHooks audit_hooks(double rate, std::uint64_t seed, const ForwardHooks* next, WorkReport& report) {
  ForwardHooks hooks;
  hooks.attended = [=, &report](const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
                                const Selection* selection, std::span<float* const> outputs) {
    const std::uint64_t draw = hash_seed(seed, geometry.layer, blocks.front().begin);
    if (selection != nullptr && Rng(draw).uniform() < rate) compare(geometry, blocks, outputs, report);
    if (next != nullptr && next->attended) next->attended(geometry, blocks, selection, outputs);
  };
  if (next != nullptr) hooks.mass = next->mass;
  return hooks;
}

}  // namespace lode
