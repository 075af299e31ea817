// SPDX-License-Identifier: Apache-2.0
// Random numbers made on the GPU: for benchmarks of shapes without weights or texts, and for keys drawn at
// random. The same seed gives the same.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// out[i] = centre + width * u, u uniform in (-1, 1), rounded to `type` (f32, f16, bf16).
void fill_uniform(void* out, DType type, std::int64_t n, float centre, float width, std::uint64_t seed,
                  StreamHandle stream);

/// numbers[n, head, i], for the far keys i in [sink, position + 1 - window) of query token n, is
/// nth_uniform(hash_seed(seed, head, position), i - sink) (base/rng.h), and -inf for those below the sink;
/// entries behind the far keys are left alone.
void draw_numbers(const Queries& queries, std::uint64_t seed, std::int64_t sink, std::int64_t window,
                  std::int64_t max_tokens, float* numbers /*[N, Hkv, max_tokens]*/, StreamHandle stream);

}  // namespace lode::cuda
