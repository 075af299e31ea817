// SPDX-License-Identifier: Apache-2.0
#include "gpu/select/selectors.h"

namespace lode {

namespace {

/// Kernels that choose have room for as many query heads a KV head; for larger groups the host chooses.
bool takes_group(const GpuGeometry& geometry) {
  return geometry.query_heads <= 16 * geometry.kv_heads;
}

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_selector(const Spec& spec, const GpuGeometry& geometry,
                                               std::span<Selector* const> selectors) {
  if (!takes_group(geometry)) return nullptr;
  if (spec.name == "plan") return make_gpu_plan(spec, geometry, selectors);
  if (spec.name == "streaming") return make_gpu_streaming(spec, geometry);
  if (spec.name == "random") return make_gpu_random(spec, geometry);
  if (spec.name == "ivf") return make_gpu_ivf(spec, geometry, selectors);
  if (spec.name == "snapkv") return make_gpu_snapkv(spec, geometry, selectors);
  if (spec.name == "topk") return make_gpu_topk(spec, geometry);
  if (spec.name == "quest") return make_gpu_quest(spec, geometry, selectors);
  if (spec.name == "double-sparsity") return make_gpu_double_sparsity(spec, geometry, selectors);
  if (spec.name == "pqcache") return make_gpu_pqcache(spec, geometry, selectors);
  if (spec.name == "kmeans" || spec.name == "saap") return make_gpu_buckets(spec, geometry, selectors);
  if (spec.name == "squeezed") return make_gpu_clusters(spec, geometry, selectors);
  if (spec.name == "hash" || spec.name == "hyperplanes")
    return make_gpu_signatures(spec, geometry, selectors);
  return nullptr;
}

std::unique_ptr<GpuSelector> make_gpu_selector_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                         std::uint64_t seed, double largest) {
  if (!takes_group(geometry)) return nullptr;
  if (spec.name == "plan") return make_gpu_plan_for_bench(spec, geometry, seed, largest);
  if (spec.name == "kmeans" || spec.name == "saap")
    return make_gpu_buckets_for_bench(spec, geometry, seed, largest);
  if (spec.name == "squeezed") return make_gpu_clusters_for_bench(spec, geometry, seed);
  if (spec.name == "hash" || spec.name == "hyperplanes")
    return make_gpu_signatures_for_bench(spec, geometry, seed);
  return make_gpu_selector(spec, geometry, {});
}

}  // namespace lode
