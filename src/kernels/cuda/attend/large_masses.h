// SPDX-License-Identifier: Apache-2.0
// Which keys got a large share of the attention of query tokens over all of their keys: what an answer's sources
// are made of.
#pragma once

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/layout.h"

namespace lode::cuda {

/// One key, and what the query heads of its KV head gave it together.
struct LargeMass {
  std::int32_t token = 0, kv_head = 0;
  std::int32_t row = 0;  ///< the key's position
  float mass = 0;
};

/// Query tokens side by side, and the keys of their layer: those of a document in whole blocks, then those behind it.
struct MassQuery {
  const float* q = nullptr;        // [N, Hq, d] after RoPE
  int count = 0;                   // N
  int query_heads = 0;             // Hq; group of 1 to 16
  float scale = 1.0f;              ///< of q.k
  KvLayout layout;                 ///< of both parts; head_dim a multiple of 16 from 64 to 512
  const char* document = nullptr;  ///< where its layer begins
  std::int64_t seam = 0;           ///< tokens of it, a multiple of kBlockTokens
  const char* behind = nullptr;    ///< where the layer of the keys from `seam` on begins
  std::int64_t position = 0;       ///< of the first query token; it attends to keys [0, position]
  float least = 0;                 ///< share of one query from which on a key counts

  std::int64_t keys() const { return position + count; }
  /// What can be found at most.
  std::int64_t most_found() const {
    return static_cast<std::int64_t>(static_cast<double>(count) * query_heads / least) + 1;
  }
};

std::int64_t large_masses_workspace_bytes(int count, int query_heads, int head_dim, std::int64_t keys);

/// found[0 .. *counter): the keys that got at least `least` from a query head of their group, in any order, with
///   mass = sum over the group's heads h of exp(scale q_h . k - lse_h),  lse over all keys [0, position of the token].
/// Sums are float32; of keys of 16 bits lse is that of queries rounded to their type. Keys are read twice at most: once
/// for the log-sum-exps, then where a large score was. A query with a NaN finds nothing. Device memory throughout.
void find_large_masses(const MassQuery& query, void* workspace, LargeMass* found /*[most_found()]*/,
                       std::int32_t* counter, StreamHandle stream);

}  // namespace lode::cuda
