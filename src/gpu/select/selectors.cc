// SPDX-License-Identifier: Apache-2.0
#include "gpu/select/selectors.h"

#include <algorithm>
#include <numeric>

namespace lode {

std::vector<int> GpuGeometry::covered_heads(int layer) const {
  if (!covered.empty()) return covered[static_cast<std::size_t>(layer)];
  std::vector<int> heads = all_kv_heads(std::max(kv_heads, all_heads));
  for (int& head : heads) head -= first_head;
  return heads;
}

void GpuGeometry::for_layers(const std::function<void(int first, int count)>& body) const {
  const auto has_these_heads = [&](int layer) {
    const auto l = static_cast<std::size_t>(layer);
    return rows.empty() || (rows[l].kv_heads == kv_heads && rows[l].head_dim == head_dim);
  };
  for (int first = 0, end = 0; first < layers; first = end + 1) {
    for (end = first; end < layers && has_these_heads(end);) ++end;
    if (end > first) body(first, end - first);
  }
}

std::vector<int> all_kv_heads(int kv_heads) {
  std::vector<int> all(static_cast<std::size_t>(kv_heads));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void GpuSelector::copy_counts(std::int32_t* to, int layers, cuda::StreamHandle stream) const {
  cuda::copy(to, counts(), layers * counts_per_layer() * std::int64_t{sizeof(std::int32_t)}, stream);
}

std::int64_t GpuSelector::listed(const CountedToken& of, int head) const {
  const std::int32_t* const first = of.counts + of.layer * counts_per_layer() +
                                    (std::int64_t{of.token} * of.kv_heads + head) * lists_per_head();
  return std::accumulate(first, first + lists_per_head(), std::int64_t{0});
}

std::int64_t far_keys(const LocalWindow& dense, std::int64_t position) {
  return std::max<std::int64_t>(0, position + 1 - dense.window - dense.sink);
}

}  // namespace lode
