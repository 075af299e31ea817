// SPDX-License-Identifier: Apache-2.0
// Indexes of buckets on the GPU: keys as they were before RoPE, their labels, the lists of each bucket, and
// centroids trained from them. Runs outside of steps, where a context is indexed or has grown.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// Keys of one layer and KV head as float32 rows, un-rotated unless `frequencies` is null; a key with a
/// number that is not finite becomes 0. Row i is key positions[i], or begin + i * step where there are none.
struct GatherTask {
  const char* layer = nullptr;  ///< first byte of the layer of one sequence
  KvLayout layout;
  int kv_head = 0;
  std::int64_t begin = 0, step = 1, count = 0;
  const std::int32_t* positions = nullptr;  // [count]
  const float* frequencies = nullptr;       // [d/2]
  float rope_scale = 1.0f;
};
void gather_keys(const GatherTask& task, float* out /*[count, d]*/, StreamHandle stream);

/// Labels of 32 bits to 16.
void narrow_labels(const std::int32_t* from, std::int64_t count, std::uint16_t* to, StreamHandle stream);

/// Sorts keys [begin, end) of each KV head into the lists of their buckets.
struct ListTask {
  const std::uint16_t* labels = nullptr;  // [Hkv, max_tokens]
  int kv_heads = 0, buckets = 0;
  std::int64_t max_tokens = 0, begin = 0, end = 0;
  std::int32_t* offsets = nullptr;  // [Hkv, C + 1]
  std::int32_t* rows = nullptr;     // [Hkv, max_tokens] rising in each bucket
  void* workspace = nullptr;        ///< list_workspace_bytes
};
std::int64_t list_workspace_bytes(int kv_heads, int buckets, std::int64_t max_tokens);
void list_buckets(const ListTask& task, StreamHandle stream);

/// One step of spherical k-means: centroids become the normalised sums of their points, in the order of the
/// points; an empty cluster takes a point of its own choice. Deterministic.
void move_centroids(const float* points /*[n, d]*/, std::int64_t n, const std::int32_t* labels /*[n]*/,
                    int clusters, int d, float* centroids /*[C, d]*/, StreamHandle stream);

}  // namespace lode::cuda
