// SPDX-License-Identifier: Apache-2.0
// Random numbers made on the GPU, for benchmarks of shapes without weights or texts. The same seed gives the
// same.
#pragma once

#include "kernels/cuda/device.h"
#include "lodestone/types.h"

namespace lode::cuda {

/// out[i] = centre + width * u, u uniform in (-1, 1), rounded to `type` (f32, f16, bf16).
void fill_uniform(void* out, DType type, std::int64_t n, float centre, float width, std::uint64_t seed,
                  StreamHandle stream);

}  // namespace lode::cuda
