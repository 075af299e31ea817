// SPDX-License-Identifier: Apache-2.0
// Chooses the tiled products that go with the table that kernels() has chosen.
#include "kernels/tiled_product.h"

#include <algorithm>

#include "kernels/family.h"

namespace lode {

extern const TiledProductKernels kScalarTiledProducts;
#if defined(__x86_64__)
extern const TiledProductKernels kAvx2TiledProducts;
extern const TiledProductKernels kAvx512TiledProducts;
extern const TiledProductKernels kAvx512VnniTiledProducts;
#endif

namespace {

const KernelFamily<TiledProductKernels>& family() {
#if defined(__x86_64__)
  static const KernelFamily<TiledProductKernels> all(
      &kScalarTiledProducts, &kAvx2TiledProducts, &kAvx512TiledProducts,
      __builtin_cpu_supports("avx512vnni") ? &kAvx512VnniTiledProducts : nullptr);
#else
  static const KernelFamily<TiledProductKernels> all(&kScalarTiledProducts);
#endif
  return all;
}

}  // namespace

void RoundedRows::resize(std::int64_t new_rows, std::int64_t new_cols) {
  rows = new_rows;
  cols = new_cols;
  const auto fit = [&](auto& numbers, int each) {
    const auto count = static_cast<std::size_t>(rows * cols / each);
    if (numbers.size() < count) numbers.resize(count);
  };
  fit(high, 1), fit(low, 1);
  fit(scales, 32);
  fit(minus16, 16), fit(minus32, 32);
  fit(sums16, 16), fit(sums32, 32);
}

void RoundedRows::copy_row(std::int64_t from, std::int64_t to) {
  const auto copy = [&](auto& numbers, int each) {
    const std::int64_t count = cols / each;
    std::copy_n(numbers.begin() + from * count, count, numbers.begin() + to * count);
  };
  copy(high, 1), copy(low, 1);
  copy(scales, 32);
  copy(minus16, 16), copy(minus32, 32);
  copy(sums16, 16), copy(sums32, 32);
}

std::span<const TiledProductKernels* const> supported_tiled_product_kernels() {
  return family().supported();
}

const TiledProductKernels& tiled_product_kernels() {
  return family().best();
}

}  // namespace lode
