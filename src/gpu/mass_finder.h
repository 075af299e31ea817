// SPDX-License-Identifier: Apache-2.0
// Tells a step's hook what its queries attended to (kernels/cuda/attend/large_masses.h).
#pragma once

#include "kernels/cuda/attend/large_masses.h"
#include "kernels/cuda/device/device.h"
#include "lodestone/selector.h"
#include "model/llama.h"

namespace lode {

class MassFinder {
 public:
  /// Whether the kernel takes heads of this shape.
  static bool takes(int query_heads, int kv_heads, int head_dim);
  /// Calls hooks.mass for each (token, KV head) that gave a key hooks.least_mass or more, tokens rising; waits for the
  /// stream. `query.least` is set here. RunError when there is no memory.
  void report(cuda::MassQuery query, const LayerGeometry& where, std::int32_t sequence,
              const ForwardHooks& hooks, const cuda::Stream& stream);
  std::int64_t bytes() const { return workspace_.bytes() + found_.bytes() + counter_.bytes(); }

 private:
  void report_some(const cuda::MassQuery& query, const LayerGeometry& where, std::int32_t sequence,
                   const ForwardHooks& hooks, const cuda::Stream& stream);

  cuda::Buffer workspace_, found_, counter_;  // made when first needed
};

}  // namespace lode
