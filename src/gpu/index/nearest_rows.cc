// SPDX-License-Identifier: Apache-2.0
#include "gpu/index/nearest_rows.h"

#include <algorithm>

#include "base/cancel.h"
#include "gpu/index/lloyd.h"
#include "lodestone/error.h"
#include "select/device_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kFloat = sizeof(float), kHalf = 2;
constexpr std::int64_t kQueriesAtOnce = 16384;  // what they find takes 64 MiB

std::int64_t half_row_bytes(std::int64_t width) {
  return cuda::half_width(static_cast<int>(width)) * kHalf + kFloat;
}

static_assert(DeviceKeys::kMostNearest == cuda::kMostNearest);

}  // namespace

bool NearestRows::takes(std::int64_t keys, std::int64_t width, std::int64_t k) {
  return keys >= cuda::kFewestColumns && width <= cuda::kMostWidth && k >= 1 && k <= cuda::kMostNearest;
}

std::int64_t NearestRows::bytes_for(std::int64_t queries, std::int64_t keys, std::int64_t width,
                                    std::int64_t k) {
  const std::int64_t some = std::min(queries, kQueriesAtOnce);
  const cuda::HalfRows rows = {.heads = 1, .width = static_cast<int>(width), .count = some};
  const std::int64_t found = cuda::KeysAbove::kRoom * std::int64_t{sizeof(std::uint64_t)} + (2 + k) * kFloat;
  return std::max(keys, some) * width * kFloat + (keys + some) * half_row_bytes(width) +
         cuda::nearest_keys_floats(rows, static_cast<int>(k)) * kFloat + some * found;
}

cuda::HalfRows NearestRows::halved(Matrix<const float> rows, cuda::Buffer& halves, cuda::Buffer& factors,
                                   const cuda::Stream& stream) {
  const int width = static_cast<int>(rows.cols);
  reserve(rows_, rows.rows * rows.cols * kFloat);
  reserve(halves, rows.rows * cuda::half_width(width) * kHalf);
  reserve(factors, rows.rows * kFloat);
  cuda::copy(rows_.as<void>(), rows.data, rows.rows * rows.cols * kFloat, stream.get());
  const cuda::HalfRows to = {.heads = 1,
                             .width = width,
                             .count = rows.rows,
                             .halves = halves.as<void>(),
                             .factors = factors.as<float>()};
  cuda::halve(rows_.as<float>(), to, stream.get());
  return to;
}

void NearestRows::find_some(const cuda::HalfRows& queries, const cuda::HalfRows& keys, int k,
                            std::int32_t* to, const cuda::Stream& stream) {
  const std::int64_t some = queries.count;
  reserve(partial_, cuda::nearest_keys_floats(queries, k) * kFloat);
  reserve(least_, some * kFloat);
  reserve(counts_, some * kFloat);
  reserve(above_, some * cuda::KeysAbove::kRoom * std::int64_t{sizeof(std::uint64_t)});
  reserve(found_, some * k * kFloat);
  const cuda::KeysAbove above = {
      .least = least_.as<float>(), .counts = counts_.as<std::int32_t>(), .found = above_.as<std::uint64_t>()};
  cuda::nearest_keys(queries, keys, k, above, partial_.as<float>(), found_.as<std::int32_t>(), stream.get());
  cuda::copy(to, found_.as<void>(), some * k * kFloat, stream.get());
  stream.synchronize();
}

std::vector<std::int32_t> NearestRows::find(Matrix<const float> queries, Matrix<const float> keys, int k,
                                            const cuda::Stream& stream) {
  LODE_ASSERT(takes(keys.rows, keys.cols, k) && queries.cols == keys.cols && queries.stride == queries.cols &&
              keys.stride == keys.cols);
  std::vector<std::int32_t> out(static_cast<std::size_t>(queries.rows * k));
  const cuda::HalfRows of_keys = halved(keys, keys_, key_factors_, stream);
  for (std::int64_t first = 0; first < queries.rows; first += kQueriesAtOnce) {
    check_cancel();
    const std::int64_t some = std::min(kQueriesAtOnce, queries.rows - first);
    const Matrix<const float> rows(queries[first].data(), some, queries.cols);
    find_some(halved(rows, queries_, query_factors_, stream), of_keys, k, out.data() + first * k, stream);
  }
  return out;
}

void NearestRows::release() {
  for_buffers(*this, [](cuda::Buffer& buffer) { buffer = cuda::Buffer(); });
}

std::int64_t NearestRows::bytes() const {
  std::int64_t sum = 0;
  for_buffers(*this, [&](const cuda::Buffer& buffer) { sum += buffer.bytes(); });
  return sum;
}

}  // namespace lode
