// SPDX-License-Identifier: Apache-2.0
// Products of quads of bytes in registers of AVX-512, by VNNI where the build has it: words are two bytes then, each multiplied
// by itself. What each function means is said in quads_avx2.h and
// quads_words-inl.h.
#pragma once

#include "kernels/cpu/simd/vec_avx512.h"

namespace lode {
namespace {

struct Int32s {
  __m512i x;
};
LODE_INLINE Int32s load_ints(const std::int32_t* p) {
  return {_mm512_loadu_si512(p)};
}
LODE_INLINE Int32s no_ints() {
  return {_mm512_setzero_si512()};
}
LODE_INLINE Vec to_floats(Int32s a) {
  return {_mm512_cvtepi32_ps(a.x)};
}
LODE_INLINE void store_words(std::uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.x)));
}
LODE_INLINE Vec quotient(float a, Vec b) {
  return {_mm512_div_ps(_mm512_set1_ps(a), b.x)};
}
/// exp_of by fewer operations, within 3 units in the last place for a in [-10, 0] and 2e-6 below.
LODE_INLINE Vec exp_of_weight(Vec a) {
  const __mmask16 counts = _mm512_cmp_ps_mask(a.x, _mm512_set1_ps(-87.33f), _CMP_NLT_UQ);
  const __m512 log2e = _mm512_set1_ps(1.44269504f);
  const __m512 n = round_nearest({_mm512_mul_ps(a.x, log2e)}).x;
  const Vec r = {_mm512_fmsub_ps(a.x, log2e, n)};  // 2^(n + r), |r| <= 1/2
  Vec y = fma(set1(1.327647198e-3f), r, set1(9.675541334e-3f));
  y = fma(y, r, set1(5.550713274e-2f));
  y = fma(y, r, set1(2.402211972e-1f));
  y = fma(y, r, set1(6.931469671e-1f));
  y = fma(y, r, set1(1.0f));
  return {_mm512_maskz_scalef_ps(counts, y.x, n)};
}
LODE_INLINE Vec max_bits(Vec a, Vec b) {
  return {_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.x), _mm512_castps_si512(b.x)))};
}
LODE_INLINE bool any_bits_outside(Vec a, Vec low, Vec high) {
  const __m512i x = _mm512_sub_epi32(_mm512_castps_si512(a.x), _mm512_castps_si512(low.x));
  const __m512i span = _mm512_sub_epi32(_mm512_castps_si512(high.x), _mm512_castps_si512(low.x));
  return _mm512_cmp_epu32_mask(x, span, _MM_CMPINT_NLT) != 0;
}

template <int kBy>
LODE_INLINE __m512i swap_lanes(__m512i x) {
  if constexpr (kBy == 1) return _mm512_shuffle_epi32(x, _MM_PERM_CDAB);
  if constexpr (kBy == 2) return _mm512_shuffle_epi32(x, _MM_PERM_BADC);
  if constexpr (kBy == 4) return _mm512_shuffle_i32x4(x, x, 0xb1);
  if constexpr (kBy == 8) return _mm512_shuffle_i32x4(x, x, 0x4e);
}
template <int kBy>
LODE_INLINE Vec swap_lanes(Vec a) {
  return {_mm512_castsi512_ps(swap_lanes<kBy>(_mm512_castps_si512(a.x)))};
}
template <int E, int kBy>
LODE_INLINE Int32s fold(Int32s a, Int32s b) {
  __m512i own, other;
  if constexpr (kBy == 1 && E == 2) {
    own = _mm512_mask_blend_epi32(0xaaaa, a.x, b.x);
    other = swap_lanes<1>(_mm512_mask_blend_epi32(0xaaaa, b.x, a.x));
  } else if constexpr (kBy == 1) {
    own = _mm512_unpacklo_epi32(a.x, b.x), other = _mm512_unpackhi_epi32(a.x, b.x);
  } else if constexpr (kBy == 2) {
    own = _mm512_unpacklo_epi64(a.x, b.x), other = _mm512_unpackhi_epi64(a.x, b.x);
  } else if constexpr (kBy == 4) {
    own = _mm512_mask_blend_epi64(0xcc, a.x, b.x);
    other = _mm512_permutex2var_epi64(a.x, _mm512_setr_epi64(2, 3, 8, 9, 6, 7, 12, 13), b.x);
  } else {
    own = _mm512_mask_blend_epi64(0xf0, a.x, b.x), other = _mm512_shuffle_i64x2(a.x, b.x, 0x4e);
  }
  return {_mm512_add_epi32(own, other)};
}

template <int E>
LODE_INLINE Vec repeated(const float* p) {
  if constexpr (E == 2) return {_mm512_castpd_ps(_mm512_set1_pd(*reinterpret_cast<const double*>(p)))};
  if constexpr (E != 2) return load_repeated<E>(p);
}

using Bytes = __m512i;
LODE_INLINE Bytes load_bytes(const std::byte* p) {
  return _mm512_loadu_si512(p);
}
LODE_INLINE Bytes load_bytes_first(const std::byte* p, int count) {
  return _mm512_maskz_loadu_epi8(count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1, p);
}
struct QueryPiece {
  __m512i first, second;
};
LODE_INLINE QueryPiece load_query(const std::byte* p) {
  return {_mm512_load_si512(p), _mm512_load_si512(p + 64)};
}
LODE_INLINE __m512i even_words(__m512i x) {
  return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8);
}
LODE_INLINE __m512i odd_words(__m512i x) {
  return _mm512_srai_epi16(x, 8);
}
template <int G>
LODE_INLINE __m512i load_for_each(const std::byte* p) {
  if constexpr (G == 1) return _mm512_loadu_si512(p);
  if constexpr (G == 2)
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  if constexpr (G == 4) return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (G == 8) return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
LODE_INLINE __m512i four_bytes(const std::byte* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

LODE_INLINE void store_bytes(std::byte* to, __m512i x) {
  _mm512_store_si512(to, x);
}

#ifdef __AVX512VNNI__

constexpr int kPreparedSize = 1;
constexpr bool kPreparesAll = false;
constexpr std::uint32_t kKeyOffset = 128;  // which makes bytes unsigned
constexpr int kMostWeight = 65535;
constexpr int kWordBlock = 64;
constexpr int kQuadRows[4] = {0, 1, 2, 3};

/// sum += the products of four bytes in each lane. The compiler would copy sums from register to register.
LODE_INLINE void add_quads_of(__m512i unsigned_bytes, __m512i signed_bytes, __m512i& sum) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

struct Sum {
  __m512i high, low;
};
LODE_INLINE Sum sum_from(Int32s start) {
  return {_mm512_setzero_si512(), start.x};
}
LODE_INLINE Int32s total(Sum sum) {
  return {_mm512_add_epi32(_mm512_slli_epi32(sum.high, 8), sum.low)};
}

LODE_INLINE void prepare(Bytes bytes, std::byte* to) {
  store_bytes(to, bytes);
}
struct KeyPiece {
  __m512i x;
};
template <int G>
constexpr std::int64_t piece_at(int piece) {
  return std::int64_t{piece} * (64 / G);
}
template <int G>
LODE_INLINE KeyPiece load_piece(const std::byte* piece) {
  return {_mm512_xor_si512(load_for_each<G>(piece), _mm512_set1_epi8(-128))};
}
LODE_INLINE void split_words(const std::uint16_t* q, std::byte* high, std::byte* low) {
  const __m512i x = _mm512_loadu_si512(q), up = _mm512_add_epi16(x, _mm512_set1_epi16(128));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi16_epi8(_mm512_srai_epi16(up, 8)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi16_epi8(x));
}
LODE_INLINE void split_query(const std::uint16_t* q, std::byte* first, std::byte* second) {
  split_words(q, first, second);
  split_words(q + 32, first + 32, second + 32);
}
LODE_INLINE void add_scores(Sum& sum, KeyPiece key, QueryPiece q) {
  add_quads_of(key.x, q.first, sum.high);
  add_quads_of(key.x, q.second, sum.low);
}

struct Quads {
  __m512i x;
};
LODE_INLINE Quads quads_of(Bytes bytes) {
  return {bytes};
}
template <int G>
struct QuadWeights {
  alignas(64) std::byte high[kWordBlock * G], low[kWordBlock * G];
  LODE_INLINE void store(int t, Vec a) {
    const __m512i x = _mm512_cvttps_epi32(a.x);
    _mm_store_si128(reinterpret_cast<__m128i*>(high + 16 * t), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
    _mm_store_si128(reinterpret_cast<__m128i*>(low + 16 * t), _mm512_cvtepi32_epi8(x));
  }
  LODE_INLINE void store(int t, Vec a, Vec b) {
    const __m512i x = _mm512_cvttps_epi32(a.x), y = _mm512_cvttps_epi32(b.x);
    const auto both = [&](std::byte* to, __m512i u, __m512i v) LODE_INLINE_LAMBDA {
      const __m128i first = _mm512_cvtepi32_epi8(u), second = _mm512_cvtepi32_epi8(v);
      _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi16(first, second));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + 16), _mm_unpackhi_epi16(first, second));
    };
    both(high + 16 * t, _mm512_srli_epi32(x, 8), _mm512_srli_epi32(y, 8));
    both(low + 16 * t, x, y);
  }
};
struct WeightPair {
  __m512i high, low;
};
template <int G>
LODE_INLINE WeightPair weights_of(const QuadWeights<G>& w, int at) {
  return {four_bytes(w.high + at), four_bytes(w.low + at)};
}
LODE_INLINE void add_values(Sum& sum, Quads values, WeightPair w) {
  add_quads_of(w.high, values.x, sum.high);
  add_quads_of(w.low, values.x, sum.low);
}

#else

LODE_INLINE __m512i add_products(__m512i sum, __m512i a, __m512i b, __m512i c, __m512i d) {
  return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(a, b), _mm512_madd_epi16(c, d)));
}

}  // namespace
}  // namespace lode

#include "kernels/cpu/simd/quads_words-inl.h"

namespace lode {
namespace {

LODE_INLINE void split_query(const std::uint16_t* q, std::byte* first, std::byte* second) {
  for (int half = 0; half < 2; ++half) {
    // Each four words: the even ones, then the odd ones.
    const __m512i apart = _mm512_shuffle_epi8(
        _mm512_loadu_si512(q + 32 * half),
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first + 32 * half), _mm512_cvtepi64_epi32(apart));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(second + 32 * half),
                        _mm512_cvtepi64_epi32(_mm512_srli_epi64(apart, 32)));
  }
}
template <int G>
struct QuadWeights {
  alignas(64) std::byte words[2 * kWordBlock * G];
  LODE_INLINE void store(int t, Vec a) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(words + 32 * t),
                       _mm512_cvtepi32_epi16(_mm512_cvttps_epi32(a.x)));
  }
  LODE_INLINE void store(int t, Vec a, Vec b) {
    const __m256i x = _mm512_cvtepi32_epi16(_mm512_cvttps_epi32(a.x)),
                  y = _mm512_cvtepi32_epi16(_mm512_cvttps_epi32(b.x));
    const __m256i low = _mm256_unpacklo_epi32(x, y), high = _mm256_unpackhi_epi32(x, y);
    _mm256_store_si256(reinterpret_cast<__m256i*>(words + 32 * t),
                       _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_store_si256(reinterpret_cast<__m256i*>(words + 32 * t + 32),
                       _mm256_permute2x128_si256(low, high, 0x31));
  }
};

#endif

/// Row r of a quad becomes byte r of each four: of columns 16 L + 4 kOutput + e in lane 4 L + e.
template <int kOutput>
LODE_INLINE Quads interleave(const Bytes (&x)[4]) {
  const auto pairs = [](__m512i a, __m512i b) LODE_INLINE_LAMBDA {
    return kOutput < 2 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
  };
  const __m512i a = pairs(x[0], x[1]), b = pairs(x[2], x[3]);
  return quads_of(kOutput % 2 == 0 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpackhi_epi16(a, b));
}

}  // namespace
}  // namespace lode
