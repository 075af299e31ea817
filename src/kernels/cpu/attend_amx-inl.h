// SPDX-License-Identifier: Apache-2.0
// Decode attention over runs and lists of bf16 on the matrix unit. Included by table_amx.cc after
// attend_causal_bf16-inl.h and attend_bf16-inl.h, whose order of keys it keeps. Keys and values are tiles as they are
// stored: of a run hardly anything is moved, so that little is done a key but reading it; rows of a list are copied.
//
//   per block of kBlock keys:     S[i, g] = k_i . q_g    keys are tile rows, queries packed once in pairs of
//                                                        columns
//                                 m, P = softmax step    rounded to bf16, then turned in registers
//                                 O[g, :] += P[g, i] v_i
//
// The unit multiplies pairs, of which a pair of values is two neighbouring columns of one key where they are stored;
// each output wants one of them. For few queries, weights are therefore tile rows twice, as the pairs (p, 0) for even
// columns and (0, p) for odd. For a tile full of queries that would be half of all work: values of two keys, i of
// the first tile and i of the second, are interleaved instead, once a block for all queries of the pass.
//
// Either way an output becomes what it was + (the sum over the first tile + the sum over the second), and as the unit
// takes denormal numbers for 0, so do the other instructions meanwhile: a query's bits do not depend on how many share
// its pass. What a 0 meets may be infinite or NaN, and 0 times that is NaN: a query whose sums are not finite at the
// end is attended again without tiles.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace lode {
namespace {

constexpr int kTileKeys = 16;     // rows of a tile
constexpr int kTileColumns = 32;  // columns of a tile of bf16
static_assert(kBlock == 2 * kTileKeys && kTileKeys == kW);
// How far ahead memory is asked: into the first-level cache for keys and values of the next block, into the
// second for what comes behind them, since more may be on its way there.
constexpr int kNearRows = kBlock;
constexpr std::int64_t kFarBytes = 8192;
// Rows of a list are asked for so many rows ahead, into the second-level cache, from which they are copied.
constexpr int kRowsAhead = 64;

/// Steps of kTileColumns over a row of d columns. The last one ends with the row, over columns of the one
/// before.
inline int steps_of(int d) {
  return (d + kTileColumns - 1) / kTileColumns;
}
inline int step_at(int step, int d) {
  return (step + 1) * kTileColumns <= d ? step * kTileColumns : d - kTileColumns;
}

/// Whether G queries fill a tile by themselves, so that values are interleaved; else even and odd columns share one.
template <int G>
constexpr bool kFillTile = G == kTileKeys;

/// The pairs of a step over a query, zeros where a step before had the column.
LODE_INLINE __m512i query_pairs(const float* q /*[d]*/, int step, int d) {
  const int at = step_at(step, d), done = step * kTileColumns - at;
  const __mmask32 mask = ~0u << done;
  const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), q + at),
               high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> kW), q + at + kW);
  return bits(_mm512_cvtne2ps_pbh(high, low));
}

/// Queries as tiles: [steps, kTileKeys pairs, G].
template <int G>
void pack_query_tiles(const float* q /*[queries, d]*/, int queries, int d,
                      std::uint32_t* packed /*zeros, unless queries fill a tile*/) {
  for (int step = 0; step < steps_of(d); ++step, packed += kTileKeys * G) {
    if constexpr (kFillTile<G>) {
      __m512i pairs[G];
      for (int g = 0; g < G; ++g)
        pairs[g] = g < queries ? query_pairs(q + std::int64_t{g} * d, step, d) : _mm512_setzero_si512();
      transpose(pairs);
      for (int j = 0; j < kTileKeys; ++j) _mm512_store_si512(packed + j * G, pairs[j]);
    } else {
      for (int g = 0; g < queries; ++g) {
        alignas(64) std::uint32_t pairs[kTileKeys];
        _mm512_store_si512(pairs, query_pairs(q + std::int64_t{g} * d, step, d));
        for (int j = 0; j < kTileKeys; ++j) packed[j * G + g] = pairs[j];
      }
    }
  }
}

/// Outputs so far [queries, d] to sums even columns of a step beside odd ones, and back.
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
    const __m512 zero = _mm512_setzero_ps();  // makes -0, which depends on the way of adding, 0
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_permutex2var_ps(even, low, odd), zero));
    _mm512_storeu_ps(to + kW, _mm512_add_ps(_mm512_permutex2var_ps(even, high, odd), zero));
  }
}
template <int G>
bool all_finite_sums(const float* sums /*of the query*/, int d) {
  __m512 zero = _mm512_setzero_ps();
  for (int i = 0; i < 2 * steps_of(d); ++i, sums += G * kW)
    zero = _mm512_fmadd_ps(_mm512_loadu_ps(sums), _mm512_setzero_ps(), zero);  // NaN of what is not finite
  return _mm512_cmp_ps_mask(zero, zero, _CMP_UNORD_Q) == 0;
}

/// While one lives, this thread takes denormal numbers for 0, as the matrix unit does.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) {
    constexpr unsigned kInputsAndResults = 0x8040;
    settle_memory();
    _mm_setcsr(before_ | kInputsAndResults);
    settle_memory();
  }
  ~FlushDenormals() {
    settle_memory();
    _mm_setcsr(before_);
  }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};

/// Queries of a pass over memory, in chunks of up to kTileKeys of them.
constexpr int kTileQueries = 64;
constexpr int kMostChunks = kTileQueries / kTileKeys;

/// What is asked for while a chunk of queries attends a block of keys, or of values, of a run: the lines
/// kNearRows and kFarBytes behind it, some at each product of tiles, the rest while each of two tiles of
/// weights is computed.
struct LinesBehind {
  const std::byte *near, *far;
  int products, at_product, at_weights;  // products of a block, and lines at each

  LODE_INLINE void ask_at_product(int i) const { ask(i * at_product, (i + 1) * at_product); }
  LODE_INLINE void ask_at_weights(int tile) const {
    const int begin = products * at_product + tile * at_weights;
    ask(begin, begin + at_weights);
  }

 private:
  LODE_INLINE void ask(int begin, int end) const {
#pragma GCC unroll 8
    for (int line = begin; line < end; ++line) {
      __builtin_prefetch(near + line * kLineBytes, 0, 3);
      __builtin_prefetch(far + line * kLineBytes, 0, 2);
    }
  }
};

/// The same of a list: all lines of some rows at each of `products` and at two tiles of weights, those of
/// kNearRows and of twice as many rows behind it.
struct RowsBehind {
  const std::byte* part;
  const Position* rows;  // [near], and kNearRows behind them [far]
  std::int64_t row_bytes;
  int near, far, lines, at_once;  // rows of each (far <= near), lines of a row, rows at a time

  LODE_INLINE void ask_at_product(int i) const { ask(i * at_once); }
  LODE_INLINE void ask_at_weights(int tile) const { ask((products_for(lines) + tile) * at_once); }
  /// Products of a block whose rows have so many lines.
  static int products_for(int lines) { return (lines + 1) / 2 * 2; }

 private:
  LODE_INLINE void ask(int begin) const {
    for (int i = begin; i < std::min(begin + at_once, near); ++i) {
      const std::byte* const row = part + rows[i] * row_bytes;
      const std::byte* const behind = i < far ? part + rows[i + kNearRows] * row_bytes : row;
      for (int line = 0; line < lines; ++line) {
        __builtin_prefetch(row + line * kLineBytes, 0, 3);
        __builtin_prefetch(behind + line * kLineBytes, 0, 2);
      }
    }
  }
};

/// A chunk of queries at a block of keys.
struct Turn {
  std::int64_t block;
  int chunk, chunks;
};

/// Where a block's rows lie as two tiles: as stored where they can, else in a copy. Of kTileKeys rows or
/// fewer both tiles are the first.
struct TilePair {
  const std::byte* tiles[2];
};

/// Keys and values of a run as tiles.
class RunTiles {
 public:
  static constexpr int kLag = 2;  // steps between a block's scores and its values
  RunTiles(const KvRows& kv, RunRows rows, std::int64_t count)
      : row_bytes_(kv.row_bytes()),
        parts_{kv.k + rows.begin * row_bytes_, kv.v + rows.begin * row_bytes_},
        count_(count),
        d_(kv.d) {
    for (const std::byte* part : parts_)
      for (std::int64_t at = 0; at < kBlock * row_bytes_; at += kLineBytes) __builtin_prefetch(part + at);
  }
  /// Called before anything of block b is wanted, in rising order.
  void bring(std::int64_t) {}
  TilePair keys(std::int64_t b) { return pair(0, b); }
  TilePair values(std::int64_t b) { return pair(1, b); }
  LinesBehind behind_keys(Turn turn) const { return behind(0, turn); }
  LinesBehind behind_values(Turn turn) const { return behind(1, turn); }

 private:
  TilePair pair(int part, std::int64_t b) {
    const std::byte* rows = parts_[part] + b * kBlock * row_bytes_;
    TilePair pair = {{rows, rows + kTileKeys * row_bytes_}};
    const std::int64_t n = std::min<std::int64_t>(count_ - b * kBlock, kBlock);
    if (const int left = static_cast<int>(n) % kTileKeys; left > 0) {  // zeros behind the end
      const std::byte*& last = pair.tiles[n / kTileKeys];
      std::memcpy(copies_[part], last, static_cast<std::size_t>(left * row_bytes_));
      std::memset(copies_[part] + left * row_bytes_, 0,
                  static_cast<std::size_t>((kTileKeys - left) * row_bytes_));
      last = copies_[part];
    }
    if (n <= kTileKeys) pair.tiles[1] = pair.tiles[0];
    return pair;
  }
  /// What to ask for during a turn. Behind a run's end lies what this thread attends next, or nothing: asking does
  /// no harm.
  LinesBehind behind(int part, Turn turn) const {
    const int of_chunk = static_cast<int>(kBlock * row_bytes_ / kLineBytes) / turn.chunks;
    // Measured for 64 and 128 lines a block: more or fewer at once are slower.
    const int at_weights = std::min(22, of_chunk / 2), products = (steps_of(d_) + 1) / 2 * 2;
    const int left = of_chunk - 2 * at_weights;
    const std::byte* near =
        parts_[part] + (turn.block * kBlock + kNearRows) * row_bytes_ + turn.chunk * of_chunk * kLineBytes;
    return {.near = near,
            .far = near + kFarBytes,
            .products = products,
            .at_product = (left + products - 1) / products,
            .at_weights = at_weights};
  }

  std::int64_t row_bytes_;
  const std::byte* parts_[2];  // keys, values
  std::int64_t count_;
  int d_;
  alignas(64) std::byte copies_[2][kTileKeys * kMaxHeadDim * 2];
};

/// Keys and values of a list as tiles. Copying scattered rows takes no longer than reading them, as long as a
/// row's key and value are copied together and nothing else is done meanwhile. So blocks are copied some at a
/// time, and then attended: a tile waits for what was written to the same place of any page just before.
class ListTiles {
 public:
  static constexpr int kLag = 0;
  ListTiles(const KvRows& kv, ListRows rows, std::int64_t count)
      : row_bytes_(kv.row_bytes()), k_(kv.k), v_(kv.v), rows_(rows.rows), count_(count), d_(kv.d) {}
  void bring(std::int64_t b) {
    if (b % kTogether == 0) copy_lines<8>(b);
  }
  TilePair keys(std::int64_t b) const { return pair(k_tiles_, b); }
  TilePair values(std::int64_t b) const { return pair(v_tiles_, b); }
  RowsBehind behind_keys(Turn turn) const { return behind(k_, turn); }
  RowsBehind behind_values(Turn turn) const { return behind(v_, turn); }

 private:
  static constexpr int kTogether = 2;  // blocks; keys and values of these fit in a first-level cache
  static constexpr int kTiles = kTogether * kBlock / kTileKeys;

  static TilePair pair(const std::byte* const (&tiles)[kTiles], std::int64_t b) {
    const std::int64_t first = b % kTogether * 2;
    return {{tiles[first], tiles[first + 1]}};
  }

  /// What to ask for during a turn whose block lies as stored; beside copies it was asked for.
  RowsBehind behind(const std::byte* part, Turn turn) const {
    const int of_chunk = kBlock / turn.chunks, lines = registers_of(d_);
    const std::int64_t first = turn.block * kBlock + kNearRows + turn.chunk * of_chunk;
    const std::int64_t tile = turn.block % kTogether * 2;
    const bool stored = !copied_[tile] && !copied_[tile + 1];
    const auto rows_from = [&](std::int64_t row) {
      return stored ? static_cast<int>(std::clamp<std::int64_t>(count_ - row, 0, of_chunk)) : 0;
    };
    const int spots = RowsBehind::products_for(lines) + 2;
    return {.part = part,
            .rows = rows_ + first,
            .row_bytes = row_bytes_,
            .near = rows_from(first),
            .far = rows_from(first + kNearRows),
            .lines = lines,
            .at_once = (of_chunk + spots - 1) / spots};
  }

  /// A loop over a row's lines would cost more than they do.
  template <int Most>
  void copy_lines(std::int64_t b) {
    if constexpr (Most > 1) {
      if (row_bytes_ < Most * kLineBytes) return copy_lines<Most - 1>(b);
    }
    copy_blocks<Most>(b);
  }
  /// Copies kTogether blocks, whose rows have `Whole` lines and maybe more.
  template <int Whole>
  LODE_NOINLINE void copy_blocks(std::int64_t b) {
    for (int t = 0; t < kTiles; ++t) {
      const std::int64_t first = b * kBlock + t * kTileKeys;
      if (first >= count_) {
        if (t % 2 == 1) k_tiles_[t] = k_tiles_[t - 1], v_tiles_[t] = v_tiles_[t - 1], copied_[t] = true;
        return;
      }
      const auto n = static_cast<int>(std::min<std::int64_t>(count_ - first, kTileKeys));
      std::byte* const k = copies_ + t * kTileKeys * row_bytes_;
      std::byte* const v = k + kTiles * kTileKeys * row_bytes_;
      copied_[t] = !is_run(rows_ + first, n);
      if (copied_[t]) copy_rows<Whole>(first, n, k, v);
      k_tiles_[t] = copied_[t] ? k : k_ + rows_[first] * row_bytes_;
      v_tiles_[t] = copied_[t] ? v : v_ + rows_[first] * row_bytes_;
      if (t % 2 == 1 && copied_[t - 1] != copied_[t])
        ask_for_tile<Whole>(copied_[t] ? first - kTileKeys : first);
    }
  }
  template <int Whole>
  LODE_INLINE void ask_for_tile(std::int64_t first) const {
    for (int i = 0; i < kTileKeys; ++i) ask<Whole>(first + i + kRowsAhead);
  }
  /// n rows from the first on to a tile each of keys and values, with zeros behind.
  template <int Whole>
  LODE_INLINE void copy_rows(std::int64_t first, int n, std::byte* to_k, std::byte* to_v) const {
    const std::int64_t bytes = row_bytes_;
    const Position* const rows = rows_ + first;
    const std::byte *const k = k_, *const v = v_;  // read once: what is written might be members
    for (int i = 0; i < n; ++i, to_k += bytes, to_v += bytes) {
      ask<Whole>(first + i + kRowsAhead);
      copy_row<Whole>(k + rows[i] * bytes, v + rows[i] * bytes, bytes, to_k, to_v);
    }
    if (n == kTileKeys) return;
    std::memset(to_k, 0, static_cast<std::size_t>((kTileKeys - n) * bytes));
    std::memset(to_v, 0, static_cast<std::size_t>((kTileKeys - n) * bytes));
  }
  template <int Whole>
  static LODE_INLINE void copy_row(const std::byte* k, const std::byte* v, std::int64_t bytes,
                                   std::byte* to_k, std::byte* to_v) {
    unroll<Whole>([&](auto line) LODE_INLINE_LAMBDA {
      constexpr std::int64_t kAt = line * kLineBytes;
      _mm512_storeu_si512(to_k + kAt, _mm512_loadu_si512(k + kAt));
      _mm512_storeu_si512(to_v + kAt, _mm512_loadu_si512(v + kAt));
    });
    for (std::int64_t at = Whole * kLineBytes; at < bytes; at += kLineBytes) {
      const std::int64_t left = (bytes - at) / bytes_of(DType::bf16);
      const __mmask32 mask = left >= kTileColumns ? ~0u : (1u << left) - 1u;
      _mm512_mask_storeu_epi16(to_k + at, mask, _mm512_maskz_loadu_epi16(mask, k + at));
      _mm512_mask_storeu_epi16(to_v + at, mask, _mm512_maskz_loadu_epi16(mask, v + at));
    }
  }
  template <int Whole>
  LODE_INLINE void ask(std::int64_t i) const {
    if (i >= count_) return;
    const std::byte *k = k_ + rows_[i] * row_bytes_, *v = v_ + rows_[i] * row_bytes_;
    unroll<Whole>([&](auto line) LODE_INLINE_LAMBDA {
      __builtin_prefetch(k + line * kLineBytes, 0, 2);
      __builtin_prefetch(v + line * kLineBytes, 0, 2);
    });
  }
  /// Whether n rows fill a tile where they are stored.
  static bool is_run(const Position* rows, int n) {
    if (n < kTileKeys) return false;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(rows),
                                    _mm512_add_epi32(_mm512_set1_epi32(rows[0]), lane)) == 0;
  }

  std::int64_t row_bytes_;
  const std::byte *k_, *v_;
  const Position* rows_;
  std::int64_t count_;
  int d_;
  bool copied_[kTiles];  // or lies as stored
  const std::byte *k_tiles_[kTiles], *v_tiles_[kTiles];
  alignas(64) std::byte copies_[2 * kTogether * kBlock * kMaxHeadDim * 2];
};

template <class Rows>
using TilesOf = std::conditional_t<std::is_same_v<Rows, RunRows>, RunTiles, ListTiles>;

/// Rows of a tile of weights and of outputs.
template <int G>
constexpr int kOutRows = kFillTile<G> ? G : 2 * G;

// Tiles: 0, 1 scores [kTileKeys, G]; 2 queries [pairs, G]; 3, 4 keys or values; 5 weights [kOutRows, pairs];
// 6, 7 outputs [kOutRows, kW].
template <int G>
constexpr TileShape kDecodeShapes[8] = {{16, 4 * G}, {16, 4 * G},       {16, 4 * G},       {16, 64},
                                        {16, 64},    {kOutRows<G>, 64}, {kOutRows<G>, 64}, {kOutRows<G>, 64}};

/// s[i, g] = k_i . q_g for the keys of two tiles.
template <int G, class Behind>
LODE_NOINLINE void tile_scores(const std::uint32_t* q /*[steps, pairs, G]*/, int d, const TilePair& keys,
                               const Behind& behind, float* s /*[kBlock, G]*/) {
  const std::int64_t row_bytes = std::int64_t{bytes_of(DType::bf16)} * d;
  const int steps = steps_of(d);
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  for (int step = 0; step < steps; ++step, q += kTileKeys * G) {
    const std::int64_t at = std::int64_t{bytes_of(DType::bf16)} * step_at(step, d);
    _tile_loadd(2, q, 4 * G);
    _tile_loadd(3, keys.tiles[0] + at, row_bytes);
    _tile_dpbf16ps(0, 3, 2);
    behind.ask_at_product(step);
    _tile_loadd(4, keys.tiles[1] + at, row_bytes);
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

/// scores[g * stride + i] = q_g . k[begin + i] of up to G queries, as tile_scores makes them.
template <int G>
void score_on_tiles(const float* q /*[queries, d]*/, int queries, const KvRows& kv, std::int64_t begin,
                    std::int64_t end, float* scores, std::int64_t stride) {
  alignas(64) std::uint32_t packed[kMaxHeadDim / 2 * G] = {};
  alignas(64) float s[kBlock * G];
  pack_query_tiles<G>(q, queries, kv.d, packed);
  settle_memory_of(packed), settle_memory_of(s);
  RunTiles rows(kv, RunRows{begin}, end - begin);
  const Tiles tiles(kDecodeShapes<G>);
  for (std::int64_t b = 0; begin + b * kBlock < end; ++b) {
    tile_scores<G>(packed, kv.d, rows.keys(b), rows.behind_keys({.block = b, .chunk = 0, .chunks = 1}), s);
    for (int t = 0; t < 2; ++t) {
      const std::int64_t at = b * kBlock + t * kTileKeys;
      const int keys = static_cast<int>(std::clamp<std::int64_t>(end - begin - at, 0, kTileKeys));
      __m512 x[G];
      unroll<G>([&](auto j) LODE_INLINE_LAMBDA { x[j] = _mm512_load_ps(s + (t * G + j) * kW); });
      part_queries<G>(x);
      for (int g = 0; g < queries; ++g) store_first(scores + g * stride + at, {x[g]}, keys);
    }
  }
}

/// What G queries of one pass keep.
template <int G>
struct TileState {
  std::uint32_t* packed;  // [steps, pairs, G]: the queries
  float* sums;            // [steps, 2, G, kW]: outputs
  float* l;  // [G, kW]: sums of weights so far, one per key modulo kTileKeys; lanes as scores have
  float* m;  // [kW]: lane i is of query i % G
};

/// A block between its scores and its values.
template <int G>
struct TileBlock {
  alignas(64) float s[kBlock * G];  // [keys, G]
  /// Weights: of a tile full of queries [G, pairs of keys i of both tiles], else [2 tiles, even and odd, G, keys].
  alignas(64) std::uint32_t w[kTileKeys * (kFillTile<G> ? G : 4 * G)];
  alignas(64) float alpha[kW];  // what sums so far must be multiplied by; lanes as m
  bool rises;                   // any alpha is not 1
};

/// Raises maxima to those of a block, and scales the sums of weights so far.
template <int G>
LODE_NOINLINE void raise_maxima(Vec high, TileState<G>& state, TileBlock<G>& block) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int s = G; s < kW; s *= 2)
    high.x =
        _mm512_max_ps(high.x, _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(s)), high.x));
  const Vec before = load(state.m);
  const __mmask16 rise = _mm512_cmp_ps_mask(high.x, before.x, _CMP_GT_OQ);
  const Vec now = {_mm512_mask_mov_ps(before.x, rise, high.x)};
  const Vec alpha = {_mm512_mask_mov_ps(set1(1.0f).x, rise, weight_of(before - now).x)};
  store(state.m, now);
  store(block.alpha, alpha);
  block.rises = true;
  for (int j = 0; j < G; ++j) store(state.l + j * kW, load(state.l + j * kW) * alpha);
}

/// Gives keys behind the nth no weight.
template <int G>
LODE_NOINLINE void hide_behind(int n, TileBlock<G>& block) {
  for (int i = n * G; i < kBlock * G; ++i) block.s[i] = kMinusInfinity;
}

/// As weight_of, within 1e-4, a twentieth of what rounding to bf16 takes: 2^(n + r) with n whole and 0 <= r <= 1.
LODE_INLINE Vec coarse_weight_of(Vec a) {
  constexpr int kBehindWhole = 0x09;                                           // x - floor(x)
  const __m512 x = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-200.0f), a.x),  // NaN: second operand
                                 _mm512_set1_ps(1.44269504089f));
  const Vec r = {_mm512_reduce_ps(x, kBehindWhole)};
  Vec y = fma(set1(7.8024523e-2f), r, set1(2.2606716e-1f));
  y = fma(y, r, set1(6.9583354e-1f));
  y = fma(y, r, set1(9.9992522e-1f));
  return {_mm512_scalef_ps(y.x, x)};  // takes floor(x)
}

/// A query's weights to its rows of TileBlock::w; lane i of w holds key i's of the first tile and of the second.
template <int G>
LODE_INLINE void store_weights(__m512i w, std::uint32_t* to) {
  if constexpr (kFillTile<G>) {
    _mm512_store_si512(to, w);
  } else {
    const __m512i odd = _mm512_set1_epi32(-0x10000);
    _mm512_store_si512(to, _mm512_andnot_si512(odd, w));
    _mm512_store_si512(to + G * kW, _mm512_slli_epi32(w, 16));
    _mm512_store_si512(to + 2 * G * kW, _mm512_srli_epi32(w, 16));
    _mm512_store_si512(to + 3 * G * kW, _mm512_and_si512(odd, w));
  }
}

/// Scores of a block to weights; m and the sums of weights updated.
template <int G, class Behind>
LODE_NOINLINE void tile_weights(const Behind& keys, const Behind& values, TileState<G>& state,
                                TileBlock<G>& block) {
  Vec high[4];
  unroll<4>([&](auto j) LODE_INLINE_LAMBDA { high[j] = set1(kMinusInfinity); });
  unroll<2 * G>(
      [&](auto j) LODE_INLINE_LAMBDA { high[j % 4] = max_passing_nan(high[j % 4], load(block.s + j * kW)); });
  block.rises = false;
  const Vec highest = max_passing_nan(max_passing_nan(high[0], high[1]), max_passing_nan(high[2], high[3]));
  if (_mm512_cmp_ps_mask(highest.x, load(state.m).x, _CMP_GT_OQ) != 0) raise_maxima<G>(highest, state, block);
  const Vec m = load(state.m);
  const Vec base = {
      _mm512_mask_mov_ps(m.x, _mm512_cmp_ps_mask(m.x, set1(kMinusInfinity).x, _CMP_EQ_OQ), set1(0.0f).x)};
  const auto rounded = [&](int j) LODE_INLINE_LAMBDA {
    const __m512i p = _mm512_castps_si512(coarse_weight_of(load(block.s + j * kW) - base).x);
    return _mm512_and_si512(_mm512_add_epi32(p, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(-0x10000));
  };
  __m512 w[G];
  unroll<G>([&](auto j) LODE_INLINE_LAMBDA {
    const __m512i first = rounded(j), second = rounded(G + j);
    const Vec sum = load(state.l + j * kW) + Vec{_mm512_castsi512_ps(first)};
    store(state.l + j * kW, sum + Vec{_mm512_castsi512_ps(second)});
    w[j] = _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(first, 16), second));
    if constexpr (j == 0) keys.ask_at_weights(0), values.ask_at_weights(0);
    if constexpr (j == G / 2) keys.ask_at_weights(1), values.ask_at_weights(1);
  });
  part_queries<G>(w);
  unroll<G>([&](auto g)
                LODE_INLINE_LAMBDA { store_weights<G>(_mm512_castps_si512(w[g]), block.w + g * kW); });
}

/// sums = alpha_g sums, where a block raised a maximum.
template <int G>
LODE_INLINE void scale_sums(const TileBlock<G>& block, int d, float* sums /*[steps, 2, G, kW]*/) {
  for (int i = 0; block.rises && i < 2 * steps_of(d) * G; ++i)
    store(sums + i * kW, load(sums + i * kW) * set1(block.alpha[i % G]));
}
/// sums += added, the sum over the block before: added one block later, since loading what a tile has just stored stalls.
template <int G>
LODE_INLINE void take_added(int d, const float* added, float* sums /*both [steps, 2, G, kW]*/) {
  for (int i = 0; i < 2 * steps_of(d) * G; ++i)
    store(sums + i * kW, load(sums + i * kW) + load(added + i * kW));
}

/// sums = alpha_g (sums + added), added = sum_i p[g, i] v_i for the values of two tiles as they are stored.
template <int G, class Behind>
LODE_NOINLINE void add_tile_values(const TileBlock<G>& block, int d, const TilePair& values, float* added,
                                   float* sums, const Behind& behind) {
  constexpr int kTile = 2 * G * kW;  // words of a tile of weights or outputs
  const std::int64_t row_bytes = std::int64_t{bytes_of(DType::bf16)} * d;
  const int steps = steps_of(d);
  take_added<G>(d, added, sums);
  scale_sums(block, d, sums);
  settle_memory();
  for (int step = 0; step < steps; step += 2) {
    const int other = step + 1 < steps ? step + 1 : step;  // an odd last one is done twice
    const std::int64_t at = std::int64_t{bytes_of(DType::bf16)} * step_at(step, d),
                       other_at = std::int64_t{bytes_of(DType::bf16)} * step_at(other, d);
    _tile_zero(6);
    _tile_zero(7);
    for (int t = 0; t < 2; ++t) {
      _tile_loadd(5, block.w + t * kTile, 64);
      _tile_loadd(3, values.tiles[t] + at, row_bytes);
      _tile_dpbf16ps(6, 5, 3);
      behind.ask_at_product(step + t);
      _tile_loadd(4, values.tiles[t] + other_at, row_bytes);
      _tile_dpbf16ps(7, 5, 4);
    }
    _tile_stored(6, added + step * kTile, 64);
    _tile_stored(7, added + other * kTile, 64);
  }
  settle_memory();
}

/// Values of two tiles interleaved: pairs of keys i of both tiles, of the even columns of a step and of the odd ones.
LODE_NOINLINE inline void pair_values(const TilePair& values, int d,
                                      std::uint32_t* pairs /*[steps, 2, kTileKeys, kW]*/) {
  const std::int64_t row_bytes = std::int64_t{bytes_of(DType::bf16)} * d;
  const __m512i high = _mm512_set1_epi32(-0x10000);
  for (int step = 0; step < steps_of(d); ++step, pairs += 2 * kTileKeys * kW) {
    const std::int64_t at = std::int64_t{bytes_of(DType::bf16)} * step_at(step, d);
    const std::byte *a = values.tiles[0] + at, *b = values.tiles[1] + at;
    unroll<kTileKeys>([&](auto i) LODE_INLINE_LAMBDA {
      const __m512i first = _mm512_loadu_si512(a + i * row_bytes),
                    second = _mm512_loadu_si512(b + i * row_bytes);
      _mm512_store_si512(pairs + i * kW,
                         _mm512_or_si512(_mm512_andnot_si512(high, first), _mm512_slli_epi32(second, 16)));
      _mm512_store_si512(pairs + (kTileKeys + i) * kW,
                         _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_and_si512(high, second)));
    });
  }
}

/// The same as add_tile_values for the pairs of pair_values.
template <int G, class Behind>
LODE_NOINLINE void add_paired_values(const TileBlock<G>& block, int d, const std::uint32_t* pairs,
                                     float* sums, const Behind& behind) {
  constexpr int kOut = G * kW, kValues = kTileKeys * kW;  // words of a tile
  scale_sums(block, d, sums);
  settle_memory();
  _tile_loadd(5, block.w, 64);
  for (int step = 0; step < steps_of(d); ++step, sums += 2 * kOut, pairs += 2 * kValues) {
    _tile_loadd(6, sums, 64);
    _tile_loadd(3, pairs, 64);
    _tile_dpbf16ps(6, 5, 3);
    behind.ask_at_product(step);
    _tile_loadd(7, sums + kOut, 64);
    _tile_loadd(4, pairs + kValues, 64);
    _tile_dpbf16ps(7, 5, 4);
    _tile_stored(6, sums, 64);
    _tile_stored(7, sums + kOut, 64);
  }
  settle_memory();
}

/// Up to kTileQueries queries over a run or a list, in chunks of G. Their number is a power of two, and 1 where they do
/// not fill a tile; for_passes sees to that.
template <int G, class Rows>
class TileRows {
 public:
  TileRows(const float* q, int queries, const KvRows& kv, Rows rows,
           const float* log_weights /*of each row, or null*/, std::int64_t count, const SoftmaxState& state)
      : queries_(queries),
        log_chunks_(kFillTile<G> ? std::bit_width(static_cast<unsigned>((queries + G - 1) / G - 1)) : 0),
        d_(kv.d),
        count_(count),
        log_weights_(log_weights),
        state_(state),
        tiles_(kv, rows, count) {
    const std::int64_t sums = std::int64_t{2} * steps_of(d_) * G * kW;
    if (queries < chunks() * G) {  // what has no query is multiplied, too
      if constexpr (!kFillTile<G>)
        std::memset(packed_, 0, sizeof packed_[0] * static_cast<std::size_t>(sums / 2));
      std::memset(sums_, 0, sizeof sums_[0] * static_cast<std::size_t>(chunks() * sums));
    }
    if constexpr (!kFillTile<G>) std::memset(added_, 0, sizeof added_[0] * static_cast<std::size_t>(sums));
    std::memset(l_, 0, sizeof l_[0] * static_cast<std::size_t>(chunks() * G * kW));
    for (int c = 0; c < chunks(); ++c) {
      const int first = c * G;
      chunk_[c] = {packed_ + c * sums / 2, sums_ + c * sums, l_ + first * kW, m_ + c * kW};
      pack_query_tiles<G>(q + std::int64_t{first} * d_, members(c), d_, chunk_[c].packed);
      take_tile_outputs<G>(state.o + std::int64_t{first} * d_, members(c), d_, chunk_[c].sums);
      for (int i = 0; i < kW; ++i)
        chunk_[c].m[i] = i % G < members(c) ? state.m[first + i % G] : kMinusInfinity;
      for (int g = 0; g < members(c); ++g)  // what came before is one more sum
        chunk_[c].l[g] = state.l[first + g];
    }
    settle_memory_of(this);
  }

  /// Of a run, turns lag behind each other, so that none waits for what was written just before.
  void attend() {
    constexpr int kLag = TilesOf<Rows>::kLag;
    const Tiles tiles(kDecodeShapes<G>);
    const FlushDenormals flush;
    const std::int64_t turns = (count_ + kBlock - 1) / kBlock << log_chunks_;
    for (std::int64_t i = 0; i < turns + kLag; ++i) {
      if (i < turns) score(i);
      if (kLag == 0) weigh(i, i, i);
      if (i >= kLag) add_values(i - kLag);
      if (kLag == 2 && i >= 1 && i <= turns) weigh(i - 1, i, i - 2);
    }
    if constexpr (!kFillTile<G>) take_added<G>(d_, added_, sums_);
  }

  /// Gives states back. Calls redo(query) for those whose sums are not finite; their state is as it was.
  template <class Redo>
  void finish(Redo redo) {
    for (int c = 0; c < chunks(); ++c) {
      __m512 l[G];
      unroll<G>([&](auto j) LODE_INLINE_LAMBDA { l[j] = load(chunk_[c].l + j * kW).x; });
      part_queries<G>(l);
      for (int g = 0; g < members(c); ++g) {
        const int r = c * G + g;
        const float* own = chunk_[c].sums + g * kW;
        const float sum = _mm512_reduce_add_ps(l[g]);
        if (!all_finite_sums<G>(own, d_) || !(sum <= std::numeric_limits<float>::max())) {
          redo(r);
          continue;
        }
        give_tile_outputs<G>(own, d_, state_.o + std::int64_t{r} * d_);
        state_.m[r] = chunk_[c].m[g], state_.l[r] = sum;
      }
    }
  }

 private:
  int chunks() const { return 1 << log_chunks_; }
  int members(int chunk) const { return std::clamp(queries_ - chunk * G, 0, G); }
  Turn turn_of(std::int64_t i) const {
    return {i >> log_chunks_, static_cast<int>(i & (chunks() - 1)), chunks()};
  }
  int keys_of(std::int64_t block) const {
    return static_cast<int>(std::min<std::int64_t>(count_ - block * kBlock, kBlock));
  }
  void score(std::int64_t i) {
    const Turn turn = turn_of(i);
    if (turn.chunk == 0) tiles_.bring(turn.block);
    TileBlock<G>& block = blocks_[i % 2];
    tile_scores<G>(chunk_[turn.chunk].packed, d_, tiles_.keys(turn.block), tiles_.behind_keys(turn), block.s);
    const int n = keys_of(turn.block);
    for (int key = 0; log_weights_ && key < n; ++key) {
      const float weight = log_weights_[turn.block * kBlock + key];
      // Rounding a weight to bf16 turns a NaN with all its low bits set into zero.
      const float more = weight == weight ? weight : __builtin_nanf("");
      for (int g = 0; g < G; ++g) block.s[key * G + g] += more;
    }
    if (n < kBlock) hide_behind(n, block);
  }
  /// Asks for what is behind the turns scored and added last.
  void weigh(std::int64_t i, std::int64_t scored, std::int64_t added) {
    tile_weights<G>(tiles_.behind_keys(turn_of(scored)), tiles_.behind_values(turn_of(added)),
                    chunk_[turn_of(i).chunk], blocks_[i % 2]);
  }
  void add_values(std::int64_t i) {
    const Turn turn = turn_of(i);
    float* const sums = chunk_[turn.chunk].sums;
    if constexpr (kFillTile<G>) {
      if (turn.chunk == 0) pair_values(tiles_.values(turn.block), d_, pairs_);
      add_paired_values(blocks_[i % 2], d_, pairs_, sums, tiles_.behind_values(turn));
    } else {
      add_tile_values(blocks_[i % 2], d_, tiles_.values(turn.block), added_, sums,
                      tiles_.behind_values(turn));
    }
  }

  int queries_, log_chunks_, d_;
  std::int64_t count_;
  const float* log_weights_;
  SoftmaxState state_;
  TilesOf<Rows> tiles_;
  alignas(64) std::uint32_t packed_[kTileQueries * kMaxHeadDim / 2],
      pairs_[kFillTile<G> ? kTileKeys * kMaxHeadDim : kW];
  alignas(64) float added_[kFillTile<G> ? kW : G * kMaxHeadDim];
  alignas(64) float sums_[kTileQueries * kMaxHeadDim], l_[kTileQueries * kW], m_[kMostChunks * kW];
  TileState<G> chunk_[kMostChunks];
  TileBlock<G> blocks_[2];
};

}  // namespace
}  // namespace lode
