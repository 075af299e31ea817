// SPDX-License-Identifier: Apache-2.0
// Coded products for AVX-512 with VNNI, whose instruction multiplies unsigned with signed bytes: keys are
// lifted by 128, which adds the query's `offset`, and a query comes as high and low bytes. All sums are
// modulo 2^32, in which the exact product fits.
#include <cstring>

#include "kernels/cpu/simd/avx512.h"
#include "kernels/select/int8_dot.h"

namespace lode {
namespace {

constexpr int kBytes = 64;  // of a register
constexpr int kKeys = 4;    // whose sums are folded together

/// Lane sums of four registers: {sum a, sum b, sum c, sum d}.
inline __m128i fold(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/// Four keys of kWords registers each. The bytes of a scale meet zeros of the query.
template <int kWords>
inline __m128i four(const CodedQuery& q, const std::int8_t* const (&keys)[kKeys], int words) {
  const __m512i lift = _mm512_set1_epi8(-128);
  __m512i high[kKeys], low[kKeys];
  for (int j = 0; j < kKeys; ++j) high[j] = low[j] = _mm512_setzero_si512();
  for (int w = 0; w < (kWords > 0 ? kWords : words); ++w) {
    const __m512i q_high = _mm512_load_si512(q.high + w * kBytes);
    const __m512i q_low = _mm512_load_si512(q.low + w * kBytes);
    for (int j = 0; j < kKeys; ++j) {
      const __m512i key = _mm512_xor_si512(_mm512_loadu_si512(keys[j] + std::int64_t{w} * kBytes), lift);
      high[j] = _mm512_dpbusd_epi32(high[j], key, q_high);
      low[j] = _mm512_dpbusd_epi32(low[j], key, q_low);
    }
  }
  for (int j = 0; j < kKeys; ++j) low[j] = _mm512_add_epi32(low[j], _mm512_slli_epi32(high[j], 8));
  return fold(low[0], low[1], low[2], low[3]);
}

template <int kWords>
void score_words(const CodedQuery& q, const CodedRows& keys, const Position* rows, std::int64_t count,
                 float* scores) {
  const auto* const codes = reinterpret_cast<const std::int8_t*>(keys.data);
  const __m128i offset = _mm_set1_epi32(static_cast<std::int32_t>(q.offset));
  for (std::int64_t i = 0; i < count; i += kKeys) {
    const std::int8_t* at[kKeys];
    alignas(16) float scale[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      at[j] = codes + std::int64_t{rows[i + j < count ? i + j : count - 1]} * keys.stride;
      std::memcpy(scale + j, at[j] + keys.stride - CodedRows::kScaleBytes, sizeof *scale);
    }
    const __m128i sums = _mm_sub_epi32(four<kWords>(q, at, keys.stride / kBytes), offset);
    const __m128 products = _mm_mul_ps(_mm_cvtepi32_ps(sums), _mm_load_ps(scale));
    const auto left = count - i < kKeys ? static_cast<unsigned>(count - i) : unsigned{kKeys};
    _mm_mask_storeu_ps(scores + i, static_cast<__mmask8>((1u << left) - 1), products);
  }
}

void score_coded(const CodedQuery& q, const CodedRows& keys, const Position* rows, std::int64_t count,
                 float* scores) noexcept {
  if (keys.stride == kBytes) return score_words<1>(q, keys, rows, count, scores);
  if (keys.stride == 2 * kBytes) return score_words<2>(q, keys, rows, count, scores);
  return score_words<0>(q, keys, rows, count, scores);
}

}  // namespace

extern const Int8DotKernels kAvx512VnniInt8Dot;
constinit const Int8DotKernels kAvx512VnniInt8Dot = {"avx512vnni", score_coded};

}  // namespace lode
