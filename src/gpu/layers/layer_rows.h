// SPDX-License-Identifier: Apache-2.0
// What the layers of a model have in a range of keys and values on the GPU.
#pragma once

#include <vector>

#include "kernels/cuda/device/kv_range.h"
#include "model/config.h"

namespace lode {

/// [L]; empty: all are alike. A layer that attends to an earlier one's rows shows them; a recurrent one has none, and
/// shows those of a layer which has, so that who goes over all layers reads something.
std::vector<cuda::LayerRows> layer_rows(const ModelConfig& config);

/// Layers of one shape of heads lie alike, block by block.
class LayerKinds {
 public:
  static constexpr int kMost = 2;  ///< layers with a window, and those without

  /// Of a model that has no more.
  explicit LayerKinds(const ModelConfig& config);
  int count() const { return static_cast<int>(kinds_.size()); }
  int of(int layer) const { return of_layer_[static_cast<std::size_t>(layer)]; }
  /// A layer of the kind.
  int layer(int kind) const { return kinds_[static_cast<std::size_t>(kind)]; }
  static bool fits(const ModelConfig& config);

 private:
  std::vector<int> of_layer_, kinds_;
};

}  // namespace lode
