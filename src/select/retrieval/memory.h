// SPDX-License-Identifier: Apache-2.0
// What `retrieval` holds before its index is there.
#pragma once

#include <cstdint>

#include "lodestone/spec.h"

namespace lode {

/// Bytes of queries that one layer keeps while a text of so many tokens is read; given back when it is
/// indexed. 0 for specs of other methods.
std::int64_t retrieval_prefill_bytes(const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens);

}  // namespace lode
