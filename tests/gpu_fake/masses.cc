// SPDX-License-Identifier: Apache-2.0
// What the played GPU says of attention mass.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu_fake/play.h"
#include "kernels/cuda/attend/large_masses.h"

namespace lode::cuda {

namespace {

/// Shares of all keys up to its own position that a query head gives, [position + 1].
std::vector<double> shares(const MassQuery& query, int token, int head) {
  const std::int64_t d = query.layout.head_dim, keys = query.position + token + 1;
  const int kv_head = head / (query.query_heads / query.layout.kv_heads);
  const float* const q = query.q + (std::int64_t{token} * query.query_heads + head) * d;
  std::vector<double> s(static_cast<std::size_t>(keys));
  for (std::int64_t i = 0; i < keys; ++i) {
    const bool in_document = i < query.seam;
    const char* const layer = in_document ? query.document : query.behind;
    const std::vector<float> key = widened(
        layer + query.layout.key_offset(kv_head, in_document ? i : i - query.seam), query.layout.type, d);
    double dot = 0;
    for (std::size_t c = 0; c < key.size(); ++c) dot += double{q[c]} * key[c];
    s[static_cast<std::size_t>(i)] = dot * query.scale;
  }
  const double peak = *std::max_element(s.begin(), s.end());
  double sum = 0;
  for (double& x : s) sum += x = std::exp(x - peak);
  for (double& x : s) x /= sum;
  return s;
}

/// Of one token and KV head; returns how many there are now.
std::int32_t find(const MassQuery& query, int token, int kv_head, LargeMass* found, std::int32_t count) {
  const int group = query.query_heads / query.layout.kv_heads;
  std::vector<double> mass(static_cast<std::size_t>(query.position + token + 1), 0.0), top = mass;
  for (int g = 0; g < group; ++g) {
    const std::vector<double> own = shares(query, token, kv_head * group + g);
    for (std::size_t i = 0; i < own.size(); ++i) mass[i] += own[i], top[i] = std::max(top[i], own[i]);
  }
  for (std::size_t i = mass.size(); i-- > 0;)  // from behind: in any order
    if (top[i] >= query.least)
      found[count++] = {token, kv_head, static_cast<std::int32_t>(i), static_cast<float>(mass[i])};
  return count;
}

}  // namespace

std::int64_t large_masses_workspace_bytes(int, int, int, std::int64_t) {
  return 64;
}

void find_large_masses(const MassQuery& query, void*, LargeMass* found, std::int32_t* counter,
                       StreamHandle stream) {
  enqueue(stream, [=] {
    std::int32_t count = 0;
    for (int token = 0; token < query.count; ++token)
      for (int head = 0; head < query.layout.kv_heads; ++head) count = find(query, token, head, found, count);
    *counter = count;
  });
}

}  // namespace lode::cuda
