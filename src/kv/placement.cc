// SPDX-License-Identifier: Apache-2.0
#include "kv/placement.h"

#include <fmt/format.h>

#include <algorithm>

#include "lodestone/error.h"

namespace lode {

namespace {

std::int64_t mib(std::int64_t bytes) {
  return (bytes + (1 << 20) - 1) >> 20;
}

std::string limit_of(const PlacementTask& task) {
  return fmt::format("{} {} MiB", task.by_flag ? "--gpu-memory of" : "free GPU memory of", task.limit >> 20);
}

}  // namespace

Placement place_kv(const PlacementTask& task) {
  const std::int64_t gpu_token = task.gpu_token_bytes > 0 ? task.gpu_token_bytes : task.token_bytes;
  const std::int64_t layer_token = gpu_token / task.layers;  // one layer is on the GPU at a time
  const std::int64_t fixed = task.weights + task.working, around = fixed + task.held + task.moved;
  const std::int64_t kv = task.max_tokens * task.token_bytes;
  Placement place;
  place.host_bytes = kv;
  place.most_on_gpu = std::max<std::int64_t>(0, task.limit - fixed) / gpu_token;
  place.most_on_host = std::max<std::int64_t>(0, task.limit - around) / layer_token;
  const std::int64_t on_gpu = fixed + task.max_tokens * gpu_token,
                     on_host = around + task.max_tokens * layer_token;
  place.on_host = task.wanted == KvTier::host || (task.wanted == KvTier::automatic && on_gpu > task.limit);
  place.gpu_bytes = place.on_host ? on_host : on_gpu;
  const std::string counts = fmt::format(
      "keys and values of {} tokens take {} MiB, weights {} MiB and working memory {} MiB; within the {}, {} "
      "tokens fit on the GPU and {} with keys and values in host memory",
      task.max_tokens, mib(kv), mib(task.weights), mib(task.working), limit_of(task), place.most_on_gpu,
      place.most_on_host);
  if (place.gpu_bytes > task.limit) {
    throw InputError(fmt::format("expected room for {} MiB on the GPU with keys and values {}, found {}: {}",
                                 mib(place.gpu_bytes), place.on_host ? "in host memory" : "there",
                                 limit_of(task), counts));
  }
  place.sentence = fmt::format("keys and values lie {}, at most {} MiB of GPU memory are taken: {}",
                               place.on_host ? "in host memory" : "on the GPU", mib(place.gpu_bytes), counts);
  return place;
}

}  // namespace lode
