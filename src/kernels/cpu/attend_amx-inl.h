// SPDX-License-Identifier: Apache-2.0
// Decode attention over runs of bf16 on the matrix unit. Included by table_amx.cc after amx-inl.h and
// attend_bf16-inl.h, whose softmax and rounding it keeps. Keys and values are tiles as they are stored:
// nothing of them is moved, transposed or interleaved, so that little is done a key but reading it.
//
//   per block of kBlock keys:     S[i, g] = k_i . q_g    keys are tile rows, queries packed once in pairs of
//                                                        columns; a tile of S is turned in registers
//                                 m, P = softmax step    sixteen keys in the lanes, rounded to bf16
//                                 O[g, :] += P[g, i] v_i
//
// The unit multiplies pairs: in a tile of values, a pair is two neighbouring columns of one key, of which
// each output wants one. So weights are tile rows twice, as the pairs (p, 0) for even columns and (0, p) for
// odd. What the 0 meets may be infinite or NaN, and 0 times that is NaN: a query whose sums are not finite at
// the end is attended again without tiles.
#pragma once

#include <cstdint>
#include <cstring>

namespace lode {
namespace {

constexpr int kTileKeys = 16;     // rows of a tile
constexpr int kTileColumns = 32;  // columns of a tile of bf16
static_assert(kBlock == 2 * kTileKeys && kTileKeys == kW);
// How far ahead memory is asked: into the first-level cache for keys and values of the next block, into the
// second for what comes behind them, since more may be on its way there.
constexpr int kNearKeys = kBlock;
constexpr std::int64_t kFarBytes = 8192;

/// Steps of kTileColumns over a row of d columns. The last one ends with the row, over columns of the one
/// before.
inline int steps_of(int d) {
  return (d + kTileColumns - 1) / kTileColumns;
}
inline int step_at(int step, int d) {
  return (step + 1) * kTileColumns <= d ? step * kTileColumns : d - kTileColumns;
}

/// Queries as tiles: [steps, kTileKeys pairs, G], zeros where a step before had the column.
template <int G>
void pack_query_tiles(const float* q /*[queries, d]*/, int queries, int d, std::uint32_t* packed) {
  for (int step = 0; step < steps_of(d); ++step, packed += kTileKeys * G)
    for (int g = 0; g < queries; ++g) {
      const int at = step_at(step, d), done = step * kTileColumns - at;
      const __mmask32 mask = ~0u << done;
      const float* from = q + std::int64_t{g} * d + at;
      const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from),
                   high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> kW), from + kW);
      alignas(64) std::uint32_t pairs[kTileKeys];
      _mm512_store_si512(pairs, bits(_mm512_cvtne2ps_pbh(high, low)));
      for (int j = 0; j < kTileKeys; ++j) packed[j * G + g] = pairs[j];
    }
}

/// Outputs so far [queries, d] to sums as add_tile_values keeps them, and back.
template <int G>
void take_tile_outputs(const float* o, int queries, int d, float* sums /*[steps, 2, G, kW]*/) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int step = 0; step < steps_of(d); ++step, sums += 2 * G * kW)
    for (int g = 0; g < queries; ++g) {
      const float* from = o + std::int64_t{g} * d + step_at(step, d);
      const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + kW);
      _mm512_storeu_ps(sums + g * kW, _mm512_permutex2var_ps(a, even, b));
      _mm512_storeu_ps(sums + (G + g) * kW, _mm512_permutex2var_ps(a, odd, b));
    }
}
template <int G>
void give_tile_outputs(const float* sums /*of the query*/, int d, float* o /*[d]*/) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int step = 0; step < steps_of(d); ++step, sums += 2 * G * kW) {
    const __m512 even = _mm512_loadu_ps(sums), odd = _mm512_loadu_ps(sums + G * kW);
    float* to = o + step_at(step, d);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(to + kW, _mm512_permutex2var_ps(even, high, odd));
  }
}
template <int G>
bool all_finite_sums(const float* sums /*of the query*/, int d) {
  __m512 zero = _mm512_setzero_ps();
  for (int i = 0; i < 2 * steps_of(d); ++i, sums += G * kW)
    zero = _mm512_fmadd_ps(_mm512_loadu_ps(sums), _mm512_setzero_ps(), zero);  // NaN of what is not finite
  return _mm512_cmp_ps_mask(zero, zero, _CMP_UNORD_Q) == 0;
}

/// Where the tiles of n rows begin: as stored, but for one that is not full, which is copied. Of n <=
/// kTileKeys both are the first.
LODE_INLINE void find_tiles(const std::byte* rows, std::int64_t row_bytes, int n,
                            std::byte* copy /*[kTileKeys, row]*/, const std::byte* (&tiles)[2]) {
  tiles[0] = rows, tiles[1] = rows + kTileKeys * row_bytes;
  if (const int left = n % kTileKeys; left > 0) {
    const std::byte*& last = tiles[n / kTileKeys];
    std::memcpy(copy, last, static_cast<std::size_t>(left * row_bytes));
    std::memset(copy + left * row_bytes, 0, static_cast<std::size_t>((kTileKeys - left) * row_bytes));
    last = copy;
  }
  if (n <= kTileKeys) tiles[1] = tiles[0];
}

/// What is asked for ahead of the keys (or values) of a run.
struct Asking {
  const std::byte *near, *far, *end;
  Asking(const std::byte* begin, const std::byte* end_of_run, std::int64_t row_bytes)
      : near(begin), far(begin), end(end_of_run) {
    ask<3>(near, kNearKeys * row_bytes);
    far = near + kFarBytes;
  }
  /// `bytes` more of both.
  LODE_INLINE void more(std::int64_t bytes) {
    ask<3>(near, bytes);
    ask<2>(far, bytes);
  }
  template <int kCache>
  LODE_INLINE void ask(const std::byte*& at, std::int64_t bytes) {
    for (const std::byte* stop = end - at < bytes ? end : at + bytes; at < stop; at += kLineBytes)
      __builtin_prefetch(at, 0, kCache);
  }
};

// Tiles: 0, 1 scores [kTileKeys, G]; 2 queries [pairs, G]; 3, 4 keys or values; 5 weights [2, G, keys];
// 6, 7 outputs [2, G, kW].
template <int G>
constexpr TileShape kDecodeShapes[8] = {{16, 4 * G}, {16, 4 * G}, {16, 4 * G}, {16, 64},
                                        {16, 64},    {2 * G, 64}, {2 * G, 64}, {2 * G, 64}};

/// s[i, g] = k_i . q_g for the keys of two tiles. Asks for `bytes` more.
template <int G>
LODE_NOINLINE void tile_scores(const std::uint32_t* q /*[steps, pairs, G]*/, int d,
                               const std::byte* const (&keys)[2], std::int64_t bytes, Asking& ask,
                               float* s /*[kBlock, G]*/) {
  const std::int64_t row_bytes = std::int64_t{bytes_of(DType::bf16)} * d;
  const int steps = steps_of(d);
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  for (int step = 0; step < steps; ++step, q += kTileKeys * G) {
    const std::int64_t at = std::int64_t{bytes_of(DType::bf16)} * step_at(step, d);
    _tile_loadd(2, q, 4 * G);
    _tile_loadd(3, keys[0] + at, row_bytes);
    _tile_dpbf16ps(0, 3, 2);
    ask.more(bytes / steps);
    _tile_loadd(4, keys[1] + at, row_bytes);
    _tile_dpbf16ps(1, 4, 2);
  }
  _tile_stored(0, s, 4 * G);
  _tile_stored(1, s + kTileKeys * G, 4 * G);
  settle_memory();
}

/// x: [kW, G] across its registers. Register g becomes the numbers of g.
template <int G>
LODE_INLINE void part_queries(__m512* x) {
  if constexpr (G > 1) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512 low[G / 2], high[G / 2];
    unroll<G / 2>([&](auto i) LODE_INLINE_LAMBDA {
      low[i] = _mm512_permutex2var_ps(x[2 * i], even, x[2 * i + 1]);
      high[i] = _mm512_permutex2var_ps(x[2 * i], odd, x[2 * i + 1]);
    });
    part_queries<G / 2>(low);
    part_queries<G / 2>(high);
    unroll<G / 2>([&](auto i) LODE_INLINE_LAMBDA { x[2 * i] = low[i], x[2 * i + 1] = high[i]; });
  }
}

/// Scores of n keys to weights as two tiles, zeros behind; m and the sums of weights updated.
template <int G>
LODE_NOINLINE void tile_weights(const float* s /*[kBlock, G]*/, int n, PairState& state,
                                std::uint32_t* w /*[2, 2, G, kTileKeys]*/) {
  __m512 x[2][G];
  unroll<2>([&](auto t) LODE_INLINE_LAMBDA {
    const int left = n - t * kTileKeys;
    const __mmask16 mask = left >= kW ? 0xffff : left > 0 ? first_lanes(left) : 0;
    unroll<G>([&](auto g) LODE_INLINE_LAMBDA { x[t][g] = _mm512_loadu_ps(s + (t * G + g) * kW); });
    part_queries<G>(x[t]);
    unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
      x[t][g] = _mm512_mask_blend_ps(mask, _mm512_set1_ps(kMinusInfinity), x[t][g]);
    });
  });
  unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
    raise_maximum(max_passing_nan(max_passing_nan(set1(kMinusInfinity), {x[0][g]}), {x[1][g]}), g, state);
  });
  unroll<G>([&](auto g) LODE_INLINE_LAMBDA {
    Vec sum = load(state.l_acc + g * kW);
    unroll<2>([&](auto t) LODE_INLINE_LAMBDA {
      const __m256bh rounded = _mm512_cvtneps_pbh(weight_of(Vec{x[t][g]} - set1(state.base[g])).x);
      __m256i narrow;
      std::memcpy(&narrow, &rounded, sizeof narrow);
      const __m512i even = _mm512_cvtepu16_epi32(narrow), odd = _mm512_slli_epi32(even, 16);
      _mm512_storeu_si512(w + (t * 2 * G + g) * kW, even);
      _mm512_storeu_si512(w + (t * 2 * G + G + g) * kW, odd);
      sum = sum + Vec{_mm512_castsi512_ps(odd)};
    });
    store(state.l_acc + g * kW, sum);
  });
}

/// sums = alpha_g sums + sum_i p[g, i] v_i for the values of two tiles. Asks for `bytes` more.
template <int G>
LODE_NOINLINE void add_tile_values(const std::uint32_t* w /*[2, 2, G, kTileKeys]*/, int d,
                                   const std::byte* const (&values)[2], const PairState& state,
                                   std::int64_t bytes, Asking& ask) {
  constexpr int kTile = 2 * G * kW;  // words of a tile of weights or outputs
  const std::int64_t row_bytes = std::int64_t{bytes_of(DType::bf16)} * d;
  const int steps = steps_of(d), asks = (steps + 1) / 2 * 2;
  for (int g = 0; g < G; ++g)
    if (state.alpha[g] != 1.0f)
      for (int i = g; i < 2 * steps * G; i += G)
        store(state.sums + i * kW, load(state.sums + i * kW) * set1(state.alpha[g]));
  settle_memory();
  for (int step = 0; step < steps; step += 2) {
    const int other = step + 1 < steps ? step + 1 : step;  // an odd last one is done twice
    const std::int64_t at = std::int64_t{bytes_of(DType::bf16)} * step_at(step, d),
                       other_at = std::int64_t{bytes_of(DType::bf16)} * step_at(other, d);
    _tile_loadd(6, state.sums + step * kTile, 64);
    _tile_loadd(7, state.sums + other * kTile, 64);
    for (int t = 0; t < 2; ++t) {
      _tile_loadd(5, w + t * kTile, 64);
      _tile_loadd(3, values[t] + at, row_bytes);
      _tile_dpbf16ps(6, 5, 3);
      ask.more(bytes / asks);
      _tile_loadd(4, values[t] + other_at, row_bytes);
      _tile_dpbf16ps(7, 5, 4);
    }
    _tile_stored(6, state.sums + step * kTile, 64);
    _tile_stored(7, state.sums + other * kTile, 64);
  }
  settle_memory();
}

/// What G queries of one pass keep.
template <int G>
struct TileQueries {
  std::uint32_t* packed;  // [steps, pairs, G]
  PairState state;        // sums [steps, 2, G, kW]
};

/// Up to kMaxQueries queries over a run, G at a time. Calls redo(query) for those whose sums are not finite;
/// their state is as it was.
template <int G, class Redo>
void attend_on_tiles(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                     const SoftmaxState& state, Redo redo) {
  const std::int64_t d = kv.d, row_bytes = kv.row_bytes();
  const std::byte *k = kv.k + begin * row_bytes, *v = kv.v + begin * row_bytes;
  Asking keys(k, kv.k + end * row_bytes, row_bytes), values(v, kv.v + end * row_bytes, row_bytes);

  const std::int64_t sums_size = std::int64_t{2} * steps_of(kv.d) * G * kW, packed_size = sums_size / 2;
  const int chunks = (queries + G - 1) / G;
  const std::int64_t asked = kBlock * row_bytes / chunks;  // while a chunk attends a block
  alignas(64) std::uint32_t packed[kMaxQueries * kMaxHeadDim / 2];
  alignas(64) float sums[kMaxQueries * kMaxHeadDim], l_acc[kMaxQueries * kW] = {}, m[kMaxQueries];
  TileQueries<G> of_chunk[(kMaxQueries + G - 1) / G];
  const auto members = [&](int c) { return queries - c * G < G ? queries - c * G : G; };
  std::memset(packed, 0, sizeof packed[0] * static_cast<std::size_t>(chunks * packed_size));
  std::memset(sums, 0, sizeof sums[0] * static_cast<std::size_t>(chunks * sums_size));
  for (int c = 0; c < chunks; ++c) {
    const int first = c * G;
    of_chunk[c] = {packed + c * packed_size, {sums + c * sums_size, m + first, l_acc + first * kW, {}, {}}};
    pack_query_tiles<G>(q + first * d, members(c), kv.d, of_chunk[c].packed);
    take_tile_outputs<G>(state.o + first * d, members(c), kv.d, of_chunk[c].state.sums);
    for (int r = first; r < first + G; ++r) {
      m[r] = r < queries ? state.m[r] : kMinusInfinity;
      l_acc[r * kW] = r < queries ? state.l[r] : 0.0f;  // what came before is one more sum
    }
  }
  {
    const Tiles tiles(kDecodeShapes<G>);
    alignas(64) float s[kBlock * G];
    alignas(64) std::uint32_t w[2 * kBlock * G];
    alignas(64) std::byte copied_keys[kTileKeys * kMaxHeadDim * 2], copied_values[sizeof copied_keys];
    for (std::int64_t b = begin; b < end; b += kBlock, k += kBlock * row_bytes, v += kBlock * row_bytes) {
      const int n = end - b < kBlock ? static_cast<int>(end - b) : kBlock;
      const std::byte *key_tiles[2], *value_tiles[2];
      find_tiles(k, row_bytes, n, copied_keys, key_tiles);
      find_tiles(v, row_bytes, n, copied_values, value_tiles);
      for (int c = 0; c < chunks; ++c) {
        tile_scores<G>(of_chunk[c].packed, kv.d, key_tiles, asked, keys, s);
        tile_weights<G>(s, n, of_chunk[c].state, w);
        add_tile_values<G>(w, kv.d, value_tiles, of_chunk[c].state, asked, values);
      }
    }
  }
  for (int r = 0; r < queries; ++r) {
    const float* own = sums + r / G * sums_size + r % G * kW;
    const float l = _mm512_reduce_add_ps(_mm512_loadu_ps(l_acc + r * kW));
    if (!all_finite_sums<G>(own, kv.d) || !(l <= std::numeric_limits<float>::max())) {
      redo(r);
      continue;
    }
    give_tile_outputs<G>(own, kv.d, state.o + r * d);
    state.m[r] = m[r], state.l[r] = l;
  }
}

}  // namespace
}  // namespace lode
