// SPDX-License-Identifier: Apache-2.0
// Matrix times a few vectors at memory speed, dot products and conversions, for whichever vec_*.h was
// included before.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace lode {
namespace {

inline float sum_of(Vec a) {
  alignas(64) float x[kW];
  store(x, a);
  for (int half = kW / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

/// Memory is asked for so many bytes ahead of those at hand, beyond the end of the page, where the machine by
/// itself stops; in the order of addresses, which short rows are read in by the block.
constexpr std::int64_t kAhead = 4096, kShortRows = 16384;

/// R weight rows times M vectors: one chain of sums for each pair, whatever M and R are, so that a vector's
/// result does not depend on its neighbours. R is chosen so that R x M chains hide the latency of the
/// additions. The lanes of kW chains fold together at the end: one at a time, folding would cost more than
/// the products of short rows.
template <DType T, int M, int R>
inline void gemv_rows(const float* x, const std::byte* w, std::int64_t k, float* y, std::int64_t stride_y) {
  constexpr int kBytes = bytes_of(T), kFolds = (M * R + kW - 1) / kW;
  Vec acc[kFolds][kW];  // chain m * R + r
  unroll<kFolds>([&](auto f) LODE_INLINE_LAMBDA {
    unroll<kW>([&](auto i) LODE_INLINE_LAMBDA { acc[f][i] = set1(0.0f); });
  });
  const auto step = [&](auto load_row, auto load_x) LODE_INLINE_LAMBDA {
    Vec v[R];
    unroll<R>([&](auto r) LODE_INLINE_LAMBDA { v[r] = load_row(r); });
    unroll<M>([&](auto m) LODE_INLINE_LAMBDA {
      const Vec u = load_x(m);
      unroll<R>([&](auto r) LODE_INLINE_LAMBDA {
        constexpr int kChain = decltype(m){} * R + decltype(r){};
        acc[kChain / kW][kChain % kW] = fma(v[r], u, acc[kChain / kW][kChain % kW]);
      });
    });
  };
  const bool in_one_line = R * k * kBytes <= kShortRows;
  std::int64_t c = 0;
  for (; c + kW <= k; c += kW) {
    if (in_one_line) prefetch(w + R * c * kBytes + kAhead, R * kW * kBytes);
    step([&](int r) LODE_INLINE_LAMBDA { return load_as<T>(w + (r * k + c) * kBytes); },
         [&](int m) LODE_INLINE_LAMBDA { return load(x + m * k + c); });
  }
  if (const int rest = static_cast<int>(k - c); rest > 0)
    step([&](int r) LODE_INLINE_LAMBDA { return load_as_first<T>(w + (r * k + c) * kBytes, rest); },
         [&](int m) LODE_INLINE_LAMBDA { return load_first(x + m * k + c, rest); });
  alignas(64) float sums[kFolds * kW];
  unroll<kFolds>([&](auto f) LODE_INLINE_LAMBDA { store(sums + f * kW, sum_lanes(acc[f])); });
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) y[m * stride_y + r] = sums[m * R + r];
}

template <DType T, int M>
void gemv_typed(const float* x, const std::byte* w, std::int64_t k, std::int64_t n_begin, std::int64_t n_end,
                float* y, std::int64_t stride_y) {
  constexpr int kRows = kW == 16 ? (M == 1 ? 8 : M <= 4 ? 4 : 2) : (M == 1 ? 8 : M == 2 ? 4 : M <= 4 ? 2 : 1);
  std::int64_t n = n_begin;
  const auto row = [&](std::int64_t i) { return w + i * k * bytes_of(T); };
  for (; n + kRows <= n_end; n += kRows) gemv_rows<T, M, kRows>(x, row(n), k, y + n, stride_y);
  for (; n < n_end; ++n) gemv_rows<T, M, 1>(x, row(n), k, y + n, stride_y);
}

void gemv(const float* x, int m, const void* w, DType w_type, std::int64_t k, std::int64_t n_begin,
          std::int64_t n_end, float* y, std::int64_t stride_y) noexcept {
  const std::byte* weights = static_cast<const std::byte*>(w);
  for_element_type(w_type, [&]<DType T>() {
    switch (m) {
      case 1:
        return gemv_typed<T, 1>(x, weights, k, n_begin, n_end, y, stride_y);
      case 2:
        return gemv_typed<T, 2>(x, weights, k, n_begin, n_end, y, stride_y);
      case 3:
        return gemv_typed<T, 3>(x, weights, k, n_begin, n_end, y, stride_y);
      case 4:
        return gemv_typed<T, 4>(x, weights, k, n_begin, n_end, y, stride_y);
      case 5:
        return gemv_typed<T, 5>(x, weights, k, n_begin, n_end, y, stride_y);
      case 6:
        return gemv_typed<T, 6>(x, weights, k, n_begin, n_end, y, stride_y);
      case 7:
        return gemv_typed<T, 7>(x, weights, k, n_begin, n_end, y, stride_y);
      case 8:
        return gemv_typed<T, 8>(x, weights, k, n_begin, n_end, y, stride_y);
      default:
        return;
    }
  });
}

float dot(const float* x, const float* y, std::int64_t n) noexcept {
  Vec acc[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  std::int64_t i = 0;
  for (; i + 4 * kW <= n; i += 4 * kW)
    for (int u = 0; u < 4; ++u) acc[u] = fma(load(x + i + u * kW), load(y + i + u * kW), acc[u]);
  for (; i + kW <= n; i += kW) acc[0] = fma(load(x + i), load(y + i), acc[0]);
  if (const int rest = static_cast<int>(n - i); rest > 0)
    acc[1] = fma(load_first(x + i, rest), load_first(y + i, rest), acc[1]);
  return sum_of((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

void widen(const void* from, DType type, std::int64_t n, float* to) noexcept {
  const std::byte* p = static_cast<const std::byte*>(from);
  for_element_type(type, [&]<DType T>() {
    constexpr int kBytes = bytes_of(T);
    std::int64_t i = 0;
    for (; i + kW <= n; i += kW) store(to + i, load_as<T>(p + i * kBytes));
    if (i < n)
      store_first(to + i, load_as_first<T>(p + i * kBytes, static_cast<int>(n - i)), static_cast<int>(n - i));
  });
}

std::uint64_t read_bytes(const void* from, std::int64_t bytes) noexcept {
  // Eight words of sums for each of four cache lines: the compiler makes whole vectors of them.
  constexpr int kWords = 32;
  const std::byte* p = static_cast<const std::byte*>(from);
  std::uint64_t sums[kWords] = {};
  std::int64_t at = 0;
  for (; at + kWords * 8 <= bytes; at += kWords * 8)
    for (int i = 0; i < kWords; ++i) {
      std::uint64_t word;
      __builtin_memcpy(&word, p + at + i * 8, 8);
      sums[i] ^= word;
    }
  std::uint64_t sum = 0;
  for (int i = 0; i < kWords; ++i) sum ^= sums[i];
  for (; at < bytes; ++at) sum ^= static_cast<std::uint64_t>(p[at]);
  return sum;
}

void narrow(const float* from, std::int64_t n, DType type, void* to) noexcept {
  for (std::int64_t i = 0; i < n; i += kW) {
    const int lanes = n - i < kW ? static_cast<int>(n - i) : kW;
    const Vec x = load_first(from + i, lanes);
    switch (type) {
      case DType::f32:
        store_first(static_cast<float*>(to) + i, x, lanes);
        break;
      case DType::f16:
        store_half_first(static_cast<std::uint16_t*>(to) + i, x, lanes);
        break;
      case DType::bf16:
        store_bf16_first(static_cast<std::uint16_t*>(to) + i, x, lanes);
        break;
      case DType::q4:  // has rows: q4_rows.h
        break;
      case DType::q8: {
        alignas(64) float rounded[kW];
        store(rounded, round_nearest(max_passing_nan(set1(-127.0f), x)));
        for (int j = 0; j < lanes; ++j)
          static_cast<std::int8_t*>(to)[i + j] =
              static_cast<std::int8_t>(rounded[j] < 127.0f ? rounded[j] : 127.0f);
        break;
      }
    }
  }
}

}  // namespace
}  // namespace lode
