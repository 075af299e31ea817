// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "kernels/cuda/attend/attend_latent.h"
#include "kernels/cuda/attend/split_plan.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/sm_count.h"
#include "lodestone/error.h"

namespace lode::cuda {

namespace {

constexpr int kSlots = 132;  // processors of an H200
constexpr int kTickets = 1 << 16;
constexpr int kWidestTiled = 256;  // numbers of a head; wider rows are latent, or heads of kLargeDim

/// Blocks that share a list. Bits depend on the number of KV heads by this.
int parts_for(int kv_heads, int head_dim) {
  return std::max(1, kSlots * blocks_at_once(head_dim) / kv_heads);
}
int attribute(cudaDeviceAttr what) {
  int device = 0, found = 0;
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&found, what, device));
  return found;
}

}  // namespace

int carveout_for(int shared, int blocks) {
  constexpr int kOfABlock = 1024 + 2048;  // what the system takes, and variables
  static const int most = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return std::min(100, (blocks * (shared + kOfABlock) * 100 + most - 1) / most);
}

void reserve_shared(const void* kernel, int shared, int occupied, int blocks) {
  allow_shared_bytes(kernel, shared);
  prefer_shared_percent(kernel, carveout_for(occupied, blocks));
}

unsigned reciprocal_of(int parts) {
  return parts == 1 ? ~0u : static_cast<unsigned>(((std::int64_t{1} << 32) + parts - 1) / parts);
}

void share_out(Params& p, std::int64_t most_keys, void* workspace, StreamHandle stream, bool may_wait) {
  const int kv_heads = p.queries.layout.kv_heads;
  p.group = p.queries.query_heads / kv_heads;
  p.most_parts = parts_for(kv_heads, p.queries.layout.head_dim);
  p.reciprocal = reciprocal_of(p.most_parts);
  p.beside = blocks_at_once(p.queries.layout.head_dim) == 2 ? p.most_parts / 2 * kLeastKeys : 0;
  const std::int64_t pieces = std::max<std::int64_t>(1, (most_keys + kLeastKeys - 1) / kLeastKeys);
  p.blocks = static_cast<int>(std::min<std::int64_t>(p.most_parts, pieces));
  const std::int64_t lists = std::int64_t{p.queries.count} * kv_heads * p.lists_per_head;
  const int slots = processors() * blocks_at_once(p.queries.layout.head_dim),
            waiting = may_wait && may_wait_for_room(stream) ? std::min(processors() / 2, (slots - 1) / 2) : 0;
  p.most_mergers = static_cast<int>(1 + waiting / lists);
  const std::int64_t tickets = std::int64_t{p.queries.count} * p.queries.query_heads;
  if (tickets > kTickets)
    throw RunError("expected at most " + std::to_string(kTickets) +
                   " query heads in one call of attention, found " + std::to_string(tickets));
  p.tickets = static_cast<unsigned*>(workspace);
  p.posted = reinterpret_cast<float4*>(static_cast<unsigned*>(workspace) + kTickets);
}

std::int64_t decode_workspace_bytes(int queries, int query_heads, int kv_heads, int head_dim) {
  const std::int64_t latent =
      head_dim > kWidestTiled ? latent_workspace_bytes(queries, query_heads, head_dim) : 0;
  if (latent > 0 && head_dim != kLargeDim) return latent;
  // The tickets come first, in a region of fixed size: they stay zero whatever calls came before.
  const std::int64_t columns = std::int64_t{queries} * query_heads * ((head_dim + 3) / 4);
  return std::max(latent, kTickets * 4 + columns * parts_for(kv_heads, head_dim) * std::int64_t{24});
}

}  // namespace lode::cuda
