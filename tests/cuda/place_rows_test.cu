// SPDX-License-Identifier: Apache-2.0
// Keys and values reach their rows, and nothing else is touched.
#include <cuda_runtime.h>

#include <vector>

#include "harness.h"
#include "kernels/cuda/device/place_rows.h"

namespace lode::cuda {
namespace {

void check_places(DType type, int dim) {
  constexpr std::int64_t kRows = 200, kHeads = 3;
  const KvLayout layout = {kHeads, dim, type, 0};
  const std::int64_t bytes = layout.layer_bytes(kRows), row = layout.row_bytes();
  const std::vector<std::int64_t> places = {layout.key_offset(2, 0), layout.key_offset(0, 127),
                                            layout.key_offset(1, 128), layout.key_offset(2, 199)};
  std::vector<char> rows(places.size() * 2 * row), expected(bytes, 7), found(bytes);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<char>(i * 31 + 1);
  for (std::size_t i = 0; i < places.size(); ++i) {
    for (std::int64_t b = 0; b < row; ++b) {
      expected[places[i] + b] = rows[2 * i * row + b];
      expected[places[i] + layout.value_offset() + b] = rows[(2 * i + 1) * row + b];
    }
  }
  Stream stream;
  const Buffer range(bytes, "a test"), at(std::ssize(places) * 8, "a test"), from(std::ssize(rows), "a test");
  fill(range.as<void>(), 7, bytes, stream.get());
  copy(at.as<void>(), places.data(), at.bytes(), stream.get());
  copy(from.as<void>(), rows.data(), from.bytes(), stream.get());
  place_rows(range.as<char>(), layout, at.as<std::int64_t>(), from.as<char>(), 0, stream.get());
  place_rows(range.as<char>(), layout, at.as<std::int64_t>(), from.as<char>(), std::ssize(places),
             stream.get());
  copy(found.data(), range.as<void>(), bytes, stream.get());
  stream.synchronize();
  LODE_CHECK(found == expected);
}

LODE_TEST(keys_and_values_go_to_their_rows_alone) {
  check_places(DType::bf16, 128);
  check_places(DType::f32, 64);
  check_places(DType::f16, 6);
}

}  // namespace
}  // namespace lode::cuda
