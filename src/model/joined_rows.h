// SPDX-License-Identifier: Apache-2.0
// GGUF files whose converter was told to put the matrices of q, k and v into one (--fuse-qkv of llama.cpp's).
#pragma once

#include "model/config.h"
#include "model/weight_files.h"

namespace lode {

/// Gives each part of such a matrix [q rows + k rows + v rows, D], and of its bias, the name that it has by itself; nothing
/// is copied. Families whose files always have it so are left alone.
void split_joined_qkv(WeightFiles& files, const ModelConfig& c);

}  // namespace lode
