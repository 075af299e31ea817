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

/// `full` as a selector that names every far key; the engine has no need of it, comparisons and tests do.
std::unique_ptr<Selector> make_full_selector(const LayerGeometry& geometry);

}  // namespace lode
