// SPDX-License-Identifier: Apache-2.0
#include "gpu/select/saap/bucket_labels.h"

#include <algorithm>

#include "kernels/cuda/saap/buckets.h"
#include "kernels/cuda/select/select.h"

namespace lode {

namespace {

constexpr std::int64_t kPiece = 1 << 16;  // keys that are labelled at a time

}  // namespace

BucketLabels::BucketLabels(int head_dim)
    : points_(kPiece * head_dim * 4, "keys on their way into buckets"),
      found_(kPiece * 4, "labels on their way") {}

void BucketLabels::make(const GpuKeys& keys, const Head& head, std::int64_t begin, std::int64_t end,
                        std::uint16_t* labels, cuda::StreamHandle stream) const {
  for (std::int64_t at = begin; at < end; at += kPiece) {
    const std::int64_t count = std::min(kPiece, end - at);
    cuda::gather_keys({.layer = keys.base + head.layer * keys.layout.layer_stride,
                       .layout = keys.layout,
                       .kv_head = head.kv_head,
                       .begin = at,
                       .count = count,
                       .frequencies = head.roped ? nullptr : keys.frequencies,
                       .rope_scale = keys.rope_scale},
                      points_.as<float>(), stream);
    cuda::assign(points_.as<float>(), count, head.centroids, head.buckets, keys.layout.head_dim,
                 found_.as<std::int32_t>(), nullptr, stream);
    cuda::narrow_labels(found_.as<std::int32_t>(), count, labels + at, stream);
  }
}

}  // namespace lode
