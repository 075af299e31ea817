// SPDX-License-Identifier: Apache-2.0
#include "ann/coded_keys.h"

#include <algorithm>
#include <cmath>

#include "kernels/kernels.h"

namespace lode {

void CodedKeys::resize(std::int64_t keys) {
  codes_.resize(static_cast<std::size_t>(keys * head_dim_));
  scales_.resize(static_cast<std::size_t>(keys));
  squares_.resize(static_cast<std::size_t>(keys));
}

void CodedKeys::put(std::int64_t at, std::span<const float> key) {
  float most = 0.0f;
  bool finite = true;
  for (const float x : key) {
    most = std::max(most, std::abs(x));
    finite = finite && std::isfinite(x);
  }
  const float scale = finite && most > 0.0f ? most / 127.0f : 0.0f;
  // Of subnormal numbers the reciprocal is infinite; they count as 0.
  const float inverse = scale > 0.0f && std::isfinite(1.0f / scale) ? 1.0f / scale : 0.0f;
  std::vector<float> scaled(key.size(), 0.0f);
  double square = 0.0;
  if (inverse > 0.0f) {
    for (std::size_t i = 0; i < key.size(); ++i) {
      scaled[i] = std::nearbyint(key[i] * inverse);
      square += static_cast<double>(scaled[i]) * scaled[i];
    }
  }
  kernels().narrow(scaled.data(), head_dim_, DType::q8, codes_.data() + at * head_dim_);
  scales_[static_cast<std::size_t>(at)] = inverse > 0.0f ? scale : 0.0f;
  squares_[static_cast<std::size_t>(at)] = static_cast<float>(square * scale * scale);
}

WalkKeys CodedKeys::view() const {
  return {.rows = {.type = DType::q8,
                   .k = reinterpret_cast<const std::byte*>(codes_.data()),
                   .v = nullptr,
                   .k_scale = scales_.data(),
                   .v_scale = nullptr,
                   .rows = size(),
                   .d = head_dim_},
          .squares = squares_.data()};
}

std::int64_t CodedKeys::bytes() const {
  return static_cast<std::int64_t>(codes_.capacity() +
                                   (scales_.capacity() + squares_.capacity()) * sizeof(float));
}

}  // namespace lode
