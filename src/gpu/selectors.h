// SPDX-License-Identifier: Apache-2.0
// Methods whose keys the GPU chooses by itself, without a word from the host inside a step.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/select.h"
#include "lodestone/spec.h"

namespace lode {

/// What stays fixed for a GPU selector's life.
struct GpuGeometry {
  int layers = 0, query_heads = 0, kv_heads = 0, head_dim = 0;
  std::int64_t max_tokens = 0;
  int most_queries = 0;  ///< query tokens of one call of select
};

/// One method, all layers. A step calls begin once on the host, then, on the stream (perhaps in a graph that
/// is replayed later): upload, and select for each layer.
class GpuSelector {
 public:
  virtual ~GpuSelector() = default;
  /// The queries of the step, at positions [position, position + count).
  virtual void begin(std::int64_t position, int count) = 0;
  virtual void upload(cuda::StreamHandle stream) = 0;
  /// Far keys of the layer's queries; the lists stay until the next call for the same layer.
  virtual cuda::RowLists select(int layer, const cuda::Queries& queries, const float* q_unrotated,
                                cuda::StreamHandle stream) = 0;
  /// Keys chosen by each list of a layer in the last call: device memory, [lists] as RowLists has them.
  virtual const std::int32_t* counts(int layer) const = 0;
  virtual int lists_per_head() const = 0;
  /// Bytes of index and keys read to choose for a query at `position`, all KV heads of one layer.
  virtual std::int64_t select_bytes(std::int64_t position) const = 0;
  virtual std::int64_t bytes() const = 0;  ///< of GPU memory
};

/// Null when the GPU has no selector for this spec: the host's chooses then.
std::unique_ptr<GpuSelector> make_gpu_selector(const Spec& spec, const GpuGeometry& geometry,
                                               std::int64_t key_row_bytes);

}  // namespace lode
