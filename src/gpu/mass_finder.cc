// SPDX-License-Identifier: Apache-2.0
#include "gpu/mass_finder.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kMostTokens = 64;  // at a time: every query keeps two numbers for each block of keys
constexpr const char* kWhat = "the sources of answers";

void grow(cuda::Buffer& buffer, std::int64_t bytes) {
  if (buffer.bytes() < bytes) buffer = cuda::Buffer(bytes, kWhat);
}

/// Those of one token and KV head lie side by side in `found`.
void tell(std::span<const cuda::LargeMass> found, std::int64_t position, const LayerGeometry& where,
          std::int32_t sequence, const ForwardHooks& hooks) {
  std::vector<Position> rows;
  std::vector<float> mass;
  for (std::size_t i = 0; i < found.size();) {
    const cuda::LargeMass first = found[i];
    rows.clear(), mass.clear();
    for (; i < found.size() && found[i].token == first.token && found[i].kv_head == first.kv_head; ++i)
      rows.push_back(found[i].row), mass.push_back(found[i].mass);
    hooks.mass(where, {.sequence = sequence,
                       .kv_head = first.kv_head,
                       .query = static_cast<Position>(position + first.token),
                       .rows = rows,
                       .mass = mass});
  }
}

}  // namespace

bool MassFinder::takes(int query_heads, int kv_heads, int head_dim) {
  return head_dim % 16 == 0 && head_dim >= 64 && head_dim <= 512 && query_heads / kv_heads <= 16;
}

void MassFinder::report(cuda::MassQuery query, const LayerGeometry& where, std::int32_t sequence,
                        const ForwardHooks& hooks, const cuda::Stream& stream) {
  LODE_ASSERT(hooks.least_mass > 0);
  query.least = hooks.least_mass;
  const int all = query.count;
  for (int at = 0; at < all; at += query.count) {
    query.count = std::min(kMostTokens, all - at);
    report_some(query, where, sequence, hooks, stream);
    query.q += std::int64_t{query.count} * query.query_heads * query.layout.head_dim;
    query.position += query.count;
  }
}

void MassFinder::report_some(const cuda::MassQuery& query, const LayerGeometry& where, std::int32_t sequence,
                             const ForwardHooks& hooks, const cuda::Stream& stream) {
  constexpr std::int64_t kEach = sizeof(cuda::LargeMass);
  grow(workspace_, cuda::large_masses_workspace_bytes(query.count, query.query_heads, query.layout.head_dim,
                                                      query.keys()));
  grow(found_, query.most_found() * kEach);
  grow(counter_, sizeof(std::int32_t));
  cuda::find_large_masses(query, workspace_.as<void>(), found_.as<cuda::LargeMass>(),
                          counter_.as<std::int32_t>(), stream.get());
  std::int32_t count = 0;
  cuda::copy(&count, counter_.as<void>(), sizeof count, stream.get());
  stream.synchronize();
  std::vector<cuda::LargeMass> found(
      static_cast<std::size_t>(std::min<std::int64_t>(count, query.most_found())));
  cuda::copy(found.data(), found_.as<void>(), std::ssize(found) * kEach, stream.get());
  stream.synchronize();
  std::ranges::sort(found, {},
                    [](const cuda::LargeMass& m) { return std::tuple(m.token, m.kv_head, m.row); });
  tell(found, query.position, where, sequence, hooks);
}

}  // namespace lode
