// SPDX-License-Identifier: Apache-2.0
// Work map: grid (kBlocks, lists); the blocks of a list copy it in turns.
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/join_lists.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kBlocks = 16;

__global__ void __launch_bounds__(kThreads)
    join_kernel(const __grid_constant__ Queries in, const __grid_constant__ JoinTask task) {
  const std::int64_t list = blockIdx.y, head = list / task.lists_per_head;
  const ListSource& source = task.source[task.of_head[head % in.layout.kv_heads]];
  const std::int64_t far = in.tokens[head / in.layout.kv_heads].position + 1 - task.window - task.sink;
  wait_for_predecessor();
  release_successor();
  const std::int64_t at =
      head * source.lists_per_head + (source.lists_per_head > 1 ? list % task.lists_per_head : 0);
  const std::int64_t count = source.rows != nullptr ? source.counts[at] : far > 0 ? far : 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) task.counts[list] = static_cast<std::int32_t>(count);
  const std::int32_t* const chosen = source.rows + at * source.capacity;
  std::int32_t* const joined = task.rows + list * task.capacity;
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += kBlocks * kThreads)
    joined[i] = source.rows != nullptr ? chosen[i] : static_cast<std::int32_t>(task.sink + i);
}

}  // namespace

void join_lists(const Queries& queries, const JoinTask& task, StreamHandle stream) {
  if (queries.count == 0) return;
  const auto lists = static_cast<unsigned>(queries.count * queries.layout.kv_heads * task.lists_per_head);
  EarlyLaunch({kBlocks, lists}, kThreads, 0, 1, stream)(join_kernel, queries, task);
}

}  // namespace lode::cuda
