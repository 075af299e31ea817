// SPDX-License-Identifier: Apache-2.0
// How finely k-means divides a context.
#pragma once

#include <cstdint>

#include "lodestone/spec.h"

namespace lode {

/// Buckets of a context of so many keys: those that the spec asks for, or as many as give each 16 keys on average, but no more
/// than 1024 unless those would have over 32 keys, and never more than 8192. At least 1.
std::int64_t kmeans_buckets(const Spec& spec, std::int64_t keys);
/// How many of them a query attends: those that the spec asks for, or 32, or 1/32 of more than 1024.
std::int64_t kmeans_probes(const Spec& spec, std::int64_t buckets);

}  // namespace lode
