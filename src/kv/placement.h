// SPDX-License-Identifier: Apache-2.0
// Where the keys and values of a context on a GPU lie: there, or in host memory with a few of them there.
// Said before anything is allocated.
#pragma once

#include <cstdint>
#include <string>

#include "lodestone/engine.h"

namespace lode {

/// What keys and values of the host's type are on a GPU, which has no kernels for 8 and 4 bits.
inline DType type_on_gpu(DType host) {
  return host == DType::q8 || host == DType::q4 ? DType::bf16 : host;
}
/// Whether a GPU has them in their own type. Else they lie in host memory, and the GPU gets those that it needs.
inline bool lies_on_gpu(DType host) {
  return type_on_gpu(host) == host;
}

/// What there is to place. All in bytes unless said otherwise.
struct PlacementTask {
  std::int64_t weights = 0;
  std::int64_t working = 0;          ///< activations and partial results, whatever the placement
  std::int64_t token_bytes = 0;      ///< K and V of one token, all layers
  std::int64_t gpu_token_bytes = 0;  ///< the same in the type that the GPU has them in; 0 = alike
  std::int64_t layers = 0;
  std::int64_t max_tokens = 0;
  std::int64_t held = 0;   ///< with keys in host memory: sink, window and what is generated, all layers
  std::int64_t moved = 0;  ///< with keys in host memory: buffers that take part in moving them
  std::int64_t limit = 0;  ///< of GPU memory
  bool by_flag = false;    ///< `limit` is --gpu-memory's, not what the GPU has free
  KvTier wanted = KvTier::automatic;
};

struct Placement {
  bool on_host = false;
  std::int64_t gpu_bytes = 0;                      ///< at most, weights included
  std::int64_t host_bytes = 0;                     ///< of keys and values of max_tokens in host memory
  std::int64_t most_on_gpu = 0, most_on_host = 0;  ///< tokens that would fit with either placement
  std::string sentence;                            ///< all of it, for people
};

/// On the GPU where that fits, else in host memory, where a prefill needs room for one layer's keys and
/// values on the GPU. InputError with all numbers when neither fits, or not the one that is wanted.
Placement place_kv(const PlacementTask& task);

}  // namespace lode
