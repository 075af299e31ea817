// SPDX-License-Identifier: Apache-2.0
// Speed of one layer's attention on the GPU, by the selectors and kernels of the step (gpu/select/selectors.h).
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv/store.h"
#include "lodestone/spec.h"
#include "model/config.h"

namespace lode {

struct GpuAttentionTask {
  const ModelConfig* shape = nullptr;
  const Rope* rope = nullptr;
  std::int64_t context = 0, batch = 1, queries = 1;  ///< more than 8 only of one sequence
  DType kv_type = DType::bf16;
  std::optional<double> keep;  ///< share of the far keys that lists are cut or filled to
  bool rotate = true;          ///< on a GPU, past its caches; without: a trial, not for times
  double largest = 0;          ///< as AttentionBenchOptions has it
  std::uint64_t seed = 1;
  /// Writes and commits `context` tokens of one layer; null: independent numbers, made on the GPU.
  std::function<void(std::uint64_t seed, KvStore&)> make_keys;
  /// Queries of the last `queries` positions for keys that were made by `keys_seed`, [T, Hq, d] after RoPE
  /// and before it.
  std::function<void(std::uint64_t keys_seed, std::uint64_t seed, std::vector<float>& q,
                     std::vector<float>& q_unrotated)>
      make_queries;
};

/// Medians over replays of a graph of many calls that rotate over copies of the layer, the gap between two
/// nodes of a graph included.
struct GpuAttentionRow {
  std::string attention;
  double selectivity = 1.0;
  double median_us = 0;  ///< a call's first kernels run beside the end of the one before
  double apart_us = 0;   ///< of a call that waits for the one before, less what a wait alone takes
  double select_us = 0, attend_us = 0;  ///< the one without the other, measured apart
  std::int64_t bytes = 0;               ///< that must be read
  double limit_us = 0;                  ///< of a kernel that does nothing but read as many
  double build_seconds = 0;             ///< of the index over one sequence
};

/// The first row is `full`. More than 8 query tokens are a user input whose tokens choose together, after
/// which they attend as a prefill; methods whose tokens do not are left out, and `note` is told, as of what
/// is being done. InputError names a spec whose keys the GPU does not choose.
std::vector<GpuAttentionRow> bench_attention_on_gpu(const GpuAttentionTask& task, std::span<const Spec> specs,
                                                    const std::function<void(std::string_view)>& note);

}  // namespace lode
