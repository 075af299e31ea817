// SPDX-License-Identifier: Apache-2.0
// Work map: grid (kBlocks, lists); the blocks of a list copy it in turns.
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/select/join_lists.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kBlocks = 16;

/// How many of rising rows are below `end`.
__device__ std::int64_t below(const std::int32_t* rows, std::int64_t count, std::int64_t end) {
  std::int64_t first = 0;
  while (first < count) {
    const std::int64_t middle = (first + count) / 2;
    if (rows[middle] < end)
      first = middle + 1;
    else
      count = middle;
  }
  return first;
}

__global__ void __launch_bounds__(kThreads)
    join_kernel(const __grid_constant__ Queries in, const __grid_constant__ JoinTask task) {
  const std::int64_t list = blockIdx.y, head = list / task.lists_per_head;
  const ListSource& source = task.source[task.of_head[head % in.layout.kv_heads]];
  const std::int64_t far_end = in.tokens[head / in.layout.kv_heads].position + 1 - task.window;
  wait_for_predecessor();
  release_successor();
  const std::int64_t at = (source.same_for_all ? head % in.layout.kv_heads : head) * source.lists_per_head +
                          (source.lists_per_head > 1 ? list % task.lists_per_head : 0);
  const std::int32_t* const chosen = source.rows + at * source.capacity;
  std::int64_t count = source.rows != nullptr ? source.counts[at] : 0;
  if (source.same_for_all) count = below(chosen, count, far_end);
  const std::int64_t from = source.from > task.sink ? source.from : task.sink,
                     all = count + (far_end > from ? far_end - from : 0);
  if (blockIdx.x == 0 && threadIdx.x == 0) task.counts[list] = static_cast<std::int32_t>(all);
  std::int32_t* const joined = task.rows + list * task.capacity;
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < all; i += kBlocks * kThreads)
    joined[i] = i < count ? chosen[i] : static_cast<std::int32_t>(from + (i - count));
}

}  // namespace

void join_lists(const Queries& queries, const JoinTask& task, StreamHandle stream) {
  if (queries.count == 0) return;
  const auto lists = static_cast<unsigned>(queries.count * queries.layout.kv_heads * task.lists_per_head);
  EarlyLaunch({kBlocks, lists}, kThreads, 0, 1, stream)(join_kernel, queries, task);
}

}  // namespace lode::cuda
