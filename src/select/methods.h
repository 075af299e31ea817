// SPDX-License-Identifier: Apache-2.0
// One description per method; registry.cc lists them, each method's file defines its own.
#pragma once

#include <memory>

#include "lodestone/spec.h"

namespace lode {

MethodInfo full_method();
MethodInfo streaming_method();
MethodInfo topk_method();
MethodInfo random_method();
MethodInfo kmeans_method();
MethodInfo ideal_method();
MethodInfo squeezed_method();
MethodInfo hash_method();
MethodInfo hyperplanes_method();
MethodInfo saap_method();
MethodInfo retrieval_method();
MethodInfo quest_method();
MethodInfo double_sparsity_method();
MethodInfo infllm_method();
MethodInfo pqcache_method();
MethodInfo magicpig_method();
MethodInfo kdeformer_method();
MethodInfo reformer_method();
MethodInfo h2o_method();
MethodInfo snapkv_method();
MethodInfo ivf_method();
MethodInfo hnsw_method();
MethodInfo plan_method();

/// MethodInfo::make of a method that is made of its options alone.
template <class Method, class Options>
std::unique_ptr<Selector> make_of(const Spec& spec, const LayerGeometry& geometry, std::string_view) {
  return std::make_unique<Method>(geometry, Options::of(spec));
}
/// MethodInfo::validate of all whose options say what they may be.
template <class Options>
void check_of(const Spec& spec) {
  static_cast<void>(Options::of(spec));
}

/// InputError when the spec gives both of two keys that exclude each other.
void expect_not_both(const Spec& spec, std::string_view one, std::string_view other);

/// `full` as a selector that names every far key; the engine has no need of it, comparisons and tests do.
std::unique_ptr<Selector> make_full_selector(const LayerGeometry& geometry);

}  // namespace lode
