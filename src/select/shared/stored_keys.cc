// SPDX-License-Identifier: Apache-2.0
#include "select/shared/stored_keys.h"

#include <algorithm>
#include <cmath>

#include "kernels/kv_row.h"
#include "kernels/rope.h"

namespace lode {

namespace {

std::span<float> part_of(std::span<float> x, std::span<const KvRows> heads, std::size_t head) {
  const auto d = static_cast<std::size_t>(heads[head].d);
  return x.subspan(head * d, d);
}

void clear_unless_finite(std::span<float> x) {
  if (!std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); }))
    std::fill(x.begin(), x.end(), 0.0f);
}

}  // namespace

void read_stored_keys(std::span<const KvRows> heads, Position row, const Rope* rope, std::span<float> keys) {
  for (std::size_t h = 0; h < heads.size(); ++h) read_key_row(heads[h], row, part_of(keys, heads, h).data());
  if (rope != nullptr) rope->unrotate(keys, row);
  for (std::size_t h = 0; h < heads.size(); ++h) clear_unless_finite(part_of(keys, heads, h));
}

void read_stored_values(std::span<const KvRows> heads, Position row, std::span<float> values) {
  for (std::size_t h = 0; h < heads.size(); ++h) {
    read_value_row(heads[h], row, part_of(values, heads, h).data());
    clear_unless_finite(part_of(values, heads, h));
  }
}

}  // namespace lode
