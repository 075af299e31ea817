// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/squeezed/drop_rows.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 512;

/// A block a list. Rows are looked through in parallel; the few that go are then known in any order, and each finds its
/// own part of the work by its rank among them.
__global__ void drop_kernel(std::int32_t* rows, std::int32_t* counts, std::int64_t capacity,
                            std::int32_t end) {
  __shared__ int places[kBlockTokens];  // of rows that go
  __shared__ bool goes[kBlockTokens];   // of the list's last rows
  __shared__ int found;
  std::int32_t* const list = rows + blockIdx.x * capacity;
  const int count = counts[blockIdx.x], id = static_cast<int>(threadIdx.x);
  if (id == 0) found = 0;
  if (id < kBlockTokens) goes[id] = false;
  __syncthreads();
  for (int i = id; i < count; i += kThreads)
    if (list[i] >= end) places[atomicAdd(&found, 1)] = i;
  __syncthreads();
  const int gone = found, left = count - gone, place = id < gone ? places[id] : count;
  if (place < count && place >= left) goes[place - left] = true;
  __syncthreads();
  if (id == 0) counts[blockIdx.x] = left;
  if (place >= left) return;
  // The holes in their order take the rows behind `left` that stay, in theirs.
  int rank = 0;
  for (int i = 0; i < gone; ++i) rank += places[i] < place ? 1 : 0;
  for (int i = 0; i < gone; ++i) {
    if (goes[i] || rank-- > 0) continue;
    list[place] = list[left + i];
    return;
  }
}

}  // namespace

void drop_rows(std::int32_t* rows, std::int32_t* counts, std::int64_t capacity, std::int64_t lists,
               std::int32_t end, StreamHandle stream) {
  if (lists == 0) return;
  Launch(static_cast<unsigned>(lists), kThreads, 0, stream)(drop_kernel, rows, counts, capacity, end);
}

}  // namespace lode::cuda
