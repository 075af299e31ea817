// SPDX-License-Identifier: Apache-2.0
// Scores of nodes for AVX-512 with VNNI: products with numbers of 8 bits are sums of whole numbers. A query
// comes as three digits of 8 bits under a common power of two, 22 bits of its largest number, so that nothing
// is lost beside sums in floats; each digit meets four dimensions of sixteen nodes in one instruction, and
// no sum has to be folded. Centroids of 16 and 32 bits are scored as without VNNI.
#include <cmath>

#include "kernels/cpu/simd/transpose_avx512.h"
#include "kernels/cpu/simd/vec_avx512.h"
// What else the vectors can do is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/select/centroid_scores-inl.h"

namespace lode {
namespace {

constexpr int kDigits = 3, kBits = 22;
constexpr int kLine = 64;   // bytes of a register
constexpr int kNodes = kW;  // scored together
constexpr int kNumbersAhead = 256;
constexpr int kSign = 128;  // what makes a signed byte an unsigned one

/// Some numbers of each query.
struct Coded {
  alignas(kLine) std::int8_t digits[kDigits][kMostNodeQueries][kMaxHeadDim];  // lowest first; zeros behind
  std::int32_t lifted[kDigits]
                     [kMostNodeQueries];  // what a digit's sum grows by with all bytes lifted by kSign
  float unit[kMostNodeQueries];           // of the lowest digit; NaN: a query that is no number

  void assign(const float* x /*[k]*/, std::int64_t k, int query) {
    __m512 most = _mm512_setzero_ps();
    bool finite = true;
    for (std::int64_t i = 0; i < k; i += kW) {
      const __m512 a = _mm512_abs_ps(load_first(x + i, k - i < kW ? static_cast<int>(k - i) : kW).x);
      finite &=
          _mm512_cmp_ps_mask(a, _mm512_set1_ps(std::numeric_limits<float>::infinity()), _CMP_NLT_UQ) == 0;
      most = _mm512_max_ps(most, a);
    }
    int exponent = 0;
    std::frexp(_mm512_reduce_max_ps(most), &exponent);
    unit[query] = finite ? std::ldexp(1.0f, exponent - kBits) : std::numeric_limits<float>::quiet_NaN();
    __m512i sums[kDigits] = {};
    for (std::int64_t i = 0; i < (k + kLine - 1) / kLine * kLine; i += kW) {
      const int some = k - i < kW ? static_cast<int>(k - i) : kW;
      const __m512 a = some > 0 && finite ? load_first(x + i, some).x : _mm512_setzero_ps();
      __m512i whole =
          _mm512_cvtps_epi32(_mm512_scalef_ps(a, _mm512_set1_ps(static_cast<float>(kBits - exponent))));
      for (int digit = 0; digit < kDigits; ++digit) {
        const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
        _mm_store_si128(reinterpret_cast<__m128i*>(digits[digit][query] + i), _mm512_cvtepi32_epi8(low));
        sums[digit] = _mm512_add_epi32(sums[digit], low);
        whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
      }
    }
    for (int digit = 0; digit < kDigits; ++digit)
      lifted[digit][query] = kSign * _mm512_reduce_add_epi32(sums[digit]);
  }
};

/// Four dimensions of sixteen rows in a register: kQuads of them, some of the last ones zeros.
template <int kQuads>
LODE_INLINE void load_quads(const std::byte* const (&rows)[kNodes], std::int64_t at, std::int64_t bytes,
                            __m512i (&x)[kQuads]) {
  if constexpr (kQuads == 16) {
    const __mmask64 mask = bytes < kLine ? (std::uint64_t{1} << bytes) - 1 : ~std::uint64_t{0};
    unroll<16>([&](auto n) LODE_INLINE_LAMBDA { x[n] = _mm512_maskz_loadu_epi8(mask, rows[n] + at); });
  } else {
    const __mmask32 mask = bytes < kLine / 2 ? (1u << bytes) - 1 : ~0u;
    unroll<8>([&](auto n) LODE_INLINE_LAMBDA {
      constexpr int row = n < 4 ? n : n + 4;
      x[n] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, rows[row] + at)),
                                _mm256_maskz_loadu_epi8(mask, rows[row + 4] + at), 1);
    });
  }
  transpose(x);
}

/// acc += the products of four dimensions of sixteen nodes with the same four of a query. The compiler would
/// spread them over a register first, with twice the instructions: more than are decoded in the time.
LODE_INLINE void add_products(__m512i quad, const std::int8_t* four, __m512i& acc) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(acc)
      : "v"(quad), "m"(*reinterpret_cast<const std::int8_t(*)[4]>(four)));
}

/// Adds the products of queries [first, first + M) with kQuads quads of each node. Asks the memory for as
/// many lines ahead, evenly: all in one go would wait for each other.
template <int M, int kQuads>
LODE_INLINE void add_quads(const Coded& q, int first, const std::byte* const (&rows)[kNodes], std::int64_t at,
                           std::int64_t bytes, __m512i (&acc)[kDigits][M]) {
  __m512i x[kQuads];
  load_quads<kQuads>(rows, at, bytes, x);
  const __m512i lift = _mm512_set1_epi8(static_cast<char>(kSign));
  const std::byte* const ahead = rows[0] + kNodesAhead + kNodes * at;
  unroll<kQuads>([&](auto j) LODE_INLINE_LAMBDA {
    __builtin_prefetch(ahead + j * kLine);
    const __m512i quad = _mm512_xor_si512(x[j], lift);
    unroll<kDigits>([&](auto digit) LODE_INLINE_LAMBDA {
      unroll<M>([&](auto m) LODE_INLINE_LAMBDA {
        add_products(quad, q.digits[digit][first + m] + at + 4 * j, acc[digit][m]);
      });
    });
  });
}

/// Lane n of out[m] becomes the product of query first + m with row n, in float32.
template <int M>
LODE_INLINE void whole_products(const Coded& q, int first, const std::byte* const (&rows)[kNodes],
                                std::int64_t k, Vec (&out)[M]) {
  __m512i acc[kDigits][M];
  unroll<kDigits>([&](auto digit) LODE_INLINE_LAMBDA {
    unroll<M>([&](auto m)
                  LODE_INLINE_LAMBDA { acc[digit][m] = _mm512_set1_epi32(-q.lifted[digit][first + m]); });
  });
  std::int64_t at = 0;
  for (; k - at > kLine / 2; at += kLine) add_quads<M, 16>(q, first, rows, at, k - at, acc);
  if (at < k) add_quads<M, 8>(q, first, rows, at, k - at, acc);
  unroll<M>([&](auto m) LODE_INLINE_LAMBDA {
    const auto part = [&](int digit) LODE_INLINE_LAMBDA { return Vec{_mm512_cvtepi32_ps(acc[digit][m])}; };
    const Vec base = set1(256.0f);
    out[m] = fma(fma(part(2), base, part(1)), base, part(0)) * set1(q.unit[first + m]);
  });
}

/// Rows i, ..., i + kNodes - 1; behind the last one, that one again.
LODE_INLINE void sixteen_at(const std::byte* rows, std::int64_t row_bytes, std::int64_t i, std::int64_t end,
                            const std::byte* (&at)[kNodes]) {
  unroll<kNodes>([&](auto n)
                     LODE_INLINE_LAMBDA { at[n] = rows + (i + n < end ? i + n : end - 1) * row_bytes; });
}

/// Scores of queries [first, first + M) with nodes [begin, end) of 8 bits.
template <int M>
LODE_NOINLINE void score_coded(const Coded& q, const Coded& squares, int first, const NodeRows& nodes,
                               std::int64_t begin, std::int64_t end, float* z, std::int64_t stride) {
  for (std::int64_t i = begin; i < end; i += kNodes) {
    const int some = end - i < kNodes ? static_cast<int>(end - i) : kNodes;
    const auto numbers = [&](const float* x) LODE_INLINE_LAMBDA {
      __builtin_prefetch(x + i + kNumbersAhead);
      return load_first(x + i, some);
    };
    const std::byte* at[kNodes];
    Vec score[M], variance[M];
    sixteen_at(nodes.centroids, nodes.d, i, end, at);
    whole_products<M>(q, first, at, nodes.d, score);
    const Vec scale = nodes.scales ? numbers(nodes.scales) : set1(1.0f);
    unroll<M>([&](auto m) LODE_INLINE_LAMBDA { score[m] = score[m] * scale; });
    if (nodes.spreads) {
      sixteen_at(nodes.spreads, nodes.planes(), i, end, at);
      whole_products<M>(squares, first, at, nodes.planes(), variance);
      const Vec spread_scale = numbers(nodes.spread_scales), most = numbers(nodes.most);
      unroll<M>([&](auto m) LODE_INLINE_LAMBDA {
        score[m] = score[m] + of_spread(variance[m] * spread_scale, most);
      });
    }
    unroll<M>([&](auto m) LODE_INLINE_LAMBDA { store_first(z + m * stride + i, score[m], some); });
  }
}

void score_whole(const float* q, int queries, const NodeRows& nodes, float* z, std::int64_t stride) noexcept {
  if (nodes.type != DType::q8) return score(q, queries, nodes, z, stride);
  Coded coded, squares;
  for (int m = 0; m < queries; ++m) {
    coded.assign(q + m * nodes.d, nodes.d, m);
    if (!nodes.spreads) continue;
    float own[(kMaxHeadDim + 1) / 2];
    squares_of(q + m * nodes.d, nodes.d, own);
    squares.assign(own, nodes.planes(), m);
  }
  for_blocks(queries, nodes.count, [&]<int M>(int m, std::int64_t begin, std::int64_t end) {
    score_coded<M>(coded, squares, m, nodes, begin, end, z + m * stride, stride);
  });
  for (int m = 0; m < queries; ++m)  // what has no digits has the scores of floats, infinite ones included
    if (std::isnan(coded.unit[m])) score(q + m * nodes.d, 1, nodes, z + m * stride, stride);
}

}  // namespace

extern const CentroidScoreKernels kAvx512VnniCentroidScores;
constinit const CentroidScoreKernels kAvx512VnniCentroidScores = {.name = "avx512vnni", .score = score_whole};

}  // namespace lode
