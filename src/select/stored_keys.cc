// SPDX-License-Identifier: Apache-2.0
#include "select/stored_keys.h"

#include <algorithm>
#include <cmath>

#include "kernels/kernels.h"
#include "model/rope.h"

namespace lode {

void read_stored_keys(std::span<const KvRows> heads, Position row, const Rope* rope, std::span<float> keys) {
  const auto key_of = [&](std::size_t head) {
    const auto d = static_cast<std::size_t>(heads[head].d);
    return keys.subspan(head * d, d);
  };
  for (std::size_t h = 0; h < heads.size(); ++h) {
    kernels().widen(heads[h].k + row * heads[h].row_bytes(), heads[h].type, heads[h].d, key_of(h).data());
    const float scale = heads[h].type == DType::q8 ? heads[h].k_scale[row] : 1.0f;
    for (float& x : key_of(h)) x *= scale;
  }
  if (rope != nullptr) rope->unrotate(keys, row);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const std::span<float> key = key_of(h);
    if (!std::all_of(key.begin(), key.end(), [](float x) { return std::isfinite(x); })) {
      std::fill(key.begin(), key.end(), 0.0f);
    }
  }
}

}  // namespace lode
