// SPDX-License-Identifier: Apache-2.0
// The signature kernels for AVX2. Bits are counted by table look-ups of nibbles (Mula, Kurz, Lemire, "Faster
// population counts using AVX2 instructions", 2018), and counts of all digits of a group's sum are added as
// bytes before the bytes of a key are summed.
#include <algorithm>
#include <bit>

#include "kernels/cpu/simd/vec_avx2.h"
//
#include "kernels/cpu/select/signature-inl.h"

namespace lode {
namespace {

constexpr int kBlock = 16;  // keys at a time; numbers at a time in the selection

LODE_INLINE __m256i load_words(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

/// Set bits of each byte, times 2^shift.
LODE_INLINE __m256i count_bytes(__m256i x, int shift) {
  const __m256i once = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2,
                                        3, 1, 2, 2, 3, 2, 3, 3, 4);
  const __m256i table = _mm256_sll_epi16(once, _mm_cvtsi32_si128(shift));
  const __m256i low = _mm256_set1_epi8(15);
  return _mm256_add_epi8(_mm256_shuffle_epi8(table, _mm256_and_si256(x, low)),
                         _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), low)));
}

/// A query's words, repeated over the register.
template <int W>
LODE_INLINE __m256i repeat(const std::uint32_t* query) {
  if constexpr (W == 1) return _mm256_set1_epi32(static_cast<int>(query[0]));
  if constexpr (W == 2) {
    return _mm256_set1_epi64x(static_cast<long long>(query[0] | std::uint64_t{query[1]} << 32));
  }
  if constexpr (W == 4) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(query)));
  }
}

/// Sums of the bytes of each key of one register, 8 / W of them.
template <int W>
LODE_INLINE void store_sums(__m256i bytes, std::uint16_t* to) {
  if constexpr (W == 1) {
    const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, _mm256_set1_epi8(1)),
                                           _mm256_set1_epi16(1));  // [8] int32
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(sums, sums), 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  } else {
    alignas(32) std::uint64_t sums[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), _mm256_sad_epu8(bytes, _mm256_setzero_si256()));
    for (int i = 0; i < 8 / W; ++i)
      to[i] = static_cast<std::uint16_t>(W == 2 ? sums[i] : sums[2 * i] + sums[2 * i + 1]);
  }
}

template <int W>
void distances_of(const std::uint32_t* keys, std::int64_t n, const Digit* digits, int used, int constant,
                  bool add, std::uint16_t* distance) {
  constexpr int kKeys = 8 / W;                     // of one register
  __m256i zero[kMostDigits], change[kMostDigits];  // of a digit, and where it changes with the key bit
  for (int d = 0; d < used; ++d) {
    zero[d] = repeat<W>(digits[d].zero);
    change[d] = _mm256_xor_si256(zero[d], repeat<W>(digits[d].one));
  }
  const __m256i always = _mm256_set1_epi16(static_cast<short>(constant));
  std::int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    for (int part = 0; part < W; ++part) __builtin_prefetch(keys + i * W + part * 16 + kAheadWords, 0, 3);
    alignas(32) std::uint16_t sums[kBlock];
    for (int part = 0; part < kBlock / kKeys; ++part) {
      const __m256i key = load_words(keys + (i + part * kKeys) * W);
      __m256i bytes = _mm256_setzero_si256();
      for (int d = 0; d < used; ++d) {
        const __m256i digit = _mm256_xor_si256(zero[d], _mm256_and_si256(key, change[d]));
        bytes = _mm256_add_epi8(bytes, count_bytes(digit, digits[d].shift));
      }
      store_sums<W>(bytes, sums + part * kKeys);
    }
    __m256i total = _mm256_add_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(sums)), always);
    if (add) total = _mm256_add_epi16(total, load_words(distance + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(distance + i), total);
  }
  for (; i < n; ++i) {
    int sum = constant + (add ? distance[i] : 0);
    for (int d = 0; d < used; ++d) {
      for (int w = 0; w < W; ++w) {
        const std::uint32_t key = keys[i * W + w];
        sum += std::popcount((key & digits[d].one[w]) | (~key & digits[d].zero[w])) << digits[d].shift;
      }
    }
    distance[i] = static_cast<std::uint16_t>(sum);
  }
}

void distances(const std::uint32_t* keys, std::int64_t n, int words, const std::uint32_t* queries, int count,
               bool add, std::uint16_t* distance) noexcept {
  for_digits(queries, words, count, add,
             [&]<int W>(const Digit* digits, int used, int constant, bool add_to) {
               distances_of<W>(keys, n, digits, used, constant, add_to, distance);
             });
}

std::uint16_t least(const std::uint16_t* x, std::int64_t n) noexcept {
  __m256i low = _mm256_set1_epi16(-1);
  std::int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) low = _mm256_min_epu16(low, load_words(x + i));
  const __m128i half = _mm_min_epu16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  auto least = static_cast<std::uint16_t>(_mm_extract_epi16(_mm_minpos_epu16(half), 0));
  for (; i < n; ++i) least = std::min(least, x[i]);
  return least;
}

/// Two bits for each number that is <= limit.
LODE_INLINE std::uint32_t up_to(const std::uint16_t* x, __m256i limit) {
  const __m256i above = _mm256_subs_epu16(load_words(x), limit);
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi16(above, _mm256_setzero_si256())));
}

std::int64_t count_up_to(const std::uint16_t* x, std::int64_t n, std::uint16_t limit) noexcept {
  const __m256i limits = _mm256_set1_epi16(static_cast<short>(limit));
  std::int64_t count = 0, i = 0;
  for (; i + kBlock <= n; i += kBlock) count += std::popcount(up_to(x + i, limits));
  count /= 2;
  for (; i < n; ++i) count += x[i] <= limit ? 1 : 0;
  return count;
}

std::int64_t collect_up_to(const std::uint16_t* x, std::int64_t n, std::uint16_t limit, Position offset,
                           Position* rows) noexcept {
  const __m256i limits = _mm256_set1_epi16(static_cast<short>(limit));
  Position* to = rows;
  std::int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock)
    to = rows_of<2>(up_to(x + i, limits) & 0x55555555u, offset + static_cast<Position>(i), to);
  for (; i < n; ++i) {
    if (x[i] <= limit) *to++ = offset + static_cast<Position>(i);
  }
  return to - rows;
}

}  // namespace

extern const SignatureKernels kAvx2Signatures;
constinit const SignatureKernels kAvx2Signatures = LODE_SIGNATURE_TABLE("avx2");

}  // namespace lode
