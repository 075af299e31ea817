// SPDX-License-Identifier: Apache-2.0
// Prefill attention in bf16 with float32 sums, on the matrix unit where the build has AMX, else by AVX-512's
// products of bf16 pairs. Included by table_amx.cc and table_avx512bf16.cc after tile-inl.h.
//
//   per block of kCausalKeys keys:  S^T = K Q^T     [keys, 32 queries]: keys are tile rows as they are stored
//                                m, P = softmax  down the lanes, in float32
//                                O^T += V^T P    [d, 32 queries]: V is transposed once per block, P packed in
//                                pairs
// Queries, keys, weights and values are rounded to bf16; m, l and O stay float32.
#pragma once

#include <algorithm>
#include <cstdint>

namespace lode {
namespace {

constexpr int kCausalKeys = 128;  // keys of one softmax step
static_assert(kPanel == 32);      // two tiles of 16 queries

#if defined(__AMX_BF16__) || defined(__AMXBF16__)  // as GCC and as older clang call it
/// What a call of causal_on_tiles needs while it runs.
struct CausalUnit {
  Tiles tiles{kWholeTiles};
};

/// Four products c[i][j] (+)= a[i] b[j] of 16 x 16 tiles over `steps` steps of 32. Rows of a lie a_row bytes
/// apart and steps 64 bytes, tiles of b (1 KiB each) b_step bytes per step; c has rows of kPanel floats.
inline void multiply_tiles(const std::uint16_t* a0, const std::uint16_t* a1, std::int64_t a_row,
                           const std::uint16_t* b0, const std::uint16_t* b1, std::int64_t b_step, int steps,
                           bool add, float* c) {
  constexpr std::int64_t kRow = kPanel * sizeof(float);
  float* low = c + 16 * kPanel;
  settle_memory();
  if (add) {
    _tile_loadd(0, c, kRow);
    _tile_loadd(1, c + 16, kRow);
    _tile_loadd(2, low, kRow);
    _tile_loadd(3, low + 16, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < steps; ++i) {
    _tile_loadd(4, a0 + i * 32, a_row);
    _tile_loadd(6, b0 + i * b_step, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + i * b_step, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + i * 32, a_row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, kRow);
  _tile_stored(1, c + 16, kRow);
  _tile_stored(2, low, kRow);
  _tile_stored(3, low + 16, kRow);
}

#else
struct CausalUnit {};

LODE_INLINE __m512bh pairs_of(__m512i x) {
  __m512bh to;
  __builtin_memcpy(&to, &x, sizeof to);
  return to;
}
LODE_INLINE __m512bh pairs_at(const std::uint16_t* p) {
  return pairs_of(_mm512_loadu_si512(p));
}

/// The same without a matrix unit: eight rows of c at a time, whose sums stay in registers.
inline void multiply_tiles(const std::uint16_t* a0, const std::uint16_t* a1, std::int64_t a_row,
                           const std::uint16_t* b0, const std::uint16_t* b1, std::int64_t b_step, int steps,
                           bool add, float* c) {
  constexpr int kRows = 8;
  for (int first = 0; first < 32; first += kRows) {
    const auto* const a = reinterpret_cast<const std::byte*>(first < 16 ? a0 : a1) + first % 16 * a_row;
    float* const to = c + first * kPanel;
    __m512 x[kRows], y[kRows];
    unroll<kRows>([&](auto r) LODE_INLINE_LAMBDA {
      x[r] = add ? _mm512_loadu_ps(to + r * kPanel) : _mm512_setzero_ps();
      y[r] = add ? _mm512_loadu_ps(to + r * kPanel + 16) : _mm512_setzero_ps();
    });
    for (int i = 0; i < steps; ++i) {
      for (int pair = 0; pair < 16; ++pair) {
        const auto u = pairs_at(b0 + i * b_step + pair * 32), v = pairs_at(b1 + i * b_step + pair * 32);
        unroll<kRows>([&](auto r) LODE_INLINE_LAMBDA {
          std::int32_t two;
          __builtin_memcpy(&two, a + r * a_row + i * 64 + pair * 4, sizeof two);
          const auto w = pairs_of(_mm512_set1_epi32(two));
          x[r] = _mm512_dpbf16_ps(x[r], w, u);
          y[r] = _mm512_dpbf16_ps(y[r], w, v);
        });
      }
    }
    unroll<kRows>([&](auto r) LODE_INLINE_LAMBDA {
      _mm512_storeu_ps(to + r * kPanel, x[r]);
      _mm512_storeu_ps(to + r * kPanel + 16, y[r]);
    });
  }
}
#endif

/// Scratch of one call, cut from one allocation; bf16 parts are counted as floats of two.
struct CausalBf16Scratch {
  float *k, *v;            // [kCausalKeys, d]
  std::uint16_t* keys;     // bf16 [kCausalKeys, wide]
  std::uint16_t* turned;   // bf16 [wide, kCausalKeys]: V^T
  std::uint16_t* p;        // bf16 [2, kCausalKeys / 32, 16, 16, 2]: weights, keys in pairs
  float* s;                // [kCausalKeys, kPanel]
  float *alpha, *visible;  // [kPanel]
  float* panels;

  /// Columns, filled with zeros up to a whole step of the matrix unit.
  static int wide(int d) { return (d + 31) / 32 * 32; }
  /// Of one panel: q bf16 [2, wide / 32, 16, 16, 2], o [wide, kPanel], m [kPanel], l [kPanel].
  static std::int64_t panel_floats(int d) { return (wide(d) / 2 + wide(d) + 2) * std::int64_t{kPanel}; }
  static std::int64_t floats(int d, std::int64_t rows) {
    return 16 + std::int64_t{kCausalKeys} * (2 * d + wide(d) + kPanel / 2 + kPanel) + 2 * kPanel +
           (rows + kPanel - 1) / kPanel * panel_floats(d);
  }
  CausalBf16Scratch(float* from, int d) {
    auto* at = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(from) + 63) / 64 * 64);
    const auto take = [&](std::int64_t n) { return at += n, at - n; };
    keys = reinterpret_cast<std::uint16_t*>(take(std::int64_t{kCausalKeys} * wide(d) / 2));
    turned = reinterpret_cast<std::uint16_t*>(take(std::int64_t{kCausalKeys} * wide(d) / 2));
    p = reinterpret_cast<std::uint16_t*>(take(std::int64_t{kCausalKeys} * kPanel / 2));
    s = take(std::int64_t{kCausalKeys} * kPanel);
    alpha = take(kPanel), visible = take(kPanel);
    k = take(std::int64_t{kCausalKeys} * d), v = take(std::int64_t{kCausalKeys} * d);
    panels = at;
  }
};

/// One panel of 32 query rows.
struct CausalBf16Panel {
  std::uint16_t* q;
  float *o, *m, *l;
  CausalBf16Panel(float* at, int d) {
    const std::int64_t wide = CausalBf16Scratch::wide(d);
    q = reinterpret_cast<std::uint16_t*>(at), o = at + wide / 2 * kPanel;
    m = o + wide * kPanel, l = m + kPanel;
  }
};

/// Columns [c, c + kW) of row i that are among n rows of d.
LODE_INLINE int lanes_of(int i, int c, int n, int d) {
  return i >= n || c >= d ? 0 : d - c < kW ? d - c : kW;
}
/// Columns [c, c + kW) of a row of d, zeros behind it.
LODE_INLINE Vec load_padded(const float* row, int c, int d) {
  return load_first(row + c, lanes_of(0, c, 1, d));
}
LODE_INLINE void transpose(Vec (&x)[kW]) {
  __m512i y[kW];
  for (int i = 0; i < kW; ++i) y[i] = _mm512_castps_si512(x[i].x);
  transpose(y);
  for (int i = 0; i < kW; ++i) x[i] = {_mm512_castsi512_ps(y[i])};
}

/// Rows behind the tile's last one repeat it.
inline void load_panel(const CausalTile& tile, int first_row, int d, const SoftmaxState& state,
                       const CausalBf16Panel& panel) {
  const int wide = CausalBf16Scratch::wide(d);
  const auto row_of = [&](int r) { return std::min(first_row + r, tile.rows() - 1); };
  for (int half = 0; half < kPanel; half += kW)
    for (int c = 0; c < wide; c += 32) {
      __m512i pairs[kW];
      Vec low[kW], high[kW];
      for (int r = 0; r < kW; ++r) {
        const std::int64_t row = row_of(half + r);
        const float *q = tile.q + (row / tile.group) * tile.stride_q + (row % tile.group) * d,
                    *o = state.o + row * d;
        pairs[r] = join_bf16(load_padded(q, c, d), load_padded(q, c + kW, d));
        low[r] = load_padded(o, c, d), high[r] = load_padded(o, c + kW, d);
      }
      transpose(pairs), transpose(low), transpose(high);
      for (int j = 0; j < kW; ++j) {
        _mm512_storeu_si512(panel.q + half * wide + (c / 2 + j) * 32, pairs[j]);
        store(panel.o + (c + j) * kPanel + half, low[j]);
        store(panel.o + (c + kW + j) * kPanel + half, high[j]);
      }
    }
  for (int r = 0; r < kPanel; ++r) panel.m[r] = state.m[row_of(r)], panel.l[r] = state.l[row_of(r)];
}
inline void store_panel(const CausalTile& tile, int first_row, int d, const CausalBf16Panel& panel,
                        const SoftmaxState& state) {
  const int rows = std::min(kPanel, tile.rows() - first_row);
  for (int half = 0; half < rows; half += kW)
    for (int c = 0; c < d; c += kW) {
      Vec o[kW];
      for (int j = 0; j < kW; ++j) o[j] = load(panel.o + (c + j) * kPanel + half);
      transpose(o);
      for (int r = half; r < std::min(rows, half + kW); ++r)
        store_first(state.o + std::int64_t{first_row + r} * d + c, o[r - half], d - c < kW ? d - c : kW);
    }
  for (int r = 0; r < rows; ++r) state.m[first_row + r] = panel.m[r], state.l[first_row + r] = panel.l[r];
}

/// Keys as bf16 rows with zeros behind.
inline void narrow_keys(const CausalBf16Scratch& at, int n, int d) {
  const int wide = CausalBf16Scratch::wide(d);
  for (int i = 0; i < kCausalKeys; ++i)
    for (int c = 0; c < wide; c += 32) {
      const auto part = [&](int from) {
        return load_first(at.k + std::int64_t{i} * d + from, lanes_of(i, from, n, d));
      };
      _mm512_storeu_si512(at.keys + i * wide + c, join_bf16(part(c), part(c + kW)));
    }
}
/// The same of rows that are bf16 already.
inline void copy_keys(const CausalBf16Scratch& at, const std::uint16_t* k /*[n, d]*/, int n, int d) {
  const int wide = CausalBf16Scratch::wide(d);
  for (int i = 0; i < kCausalKeys; ++i)
    for (int c = 0; c < wide; c += 32) {
      const int columns = i >= n ? 0 : std::min(d - c, 32);
      const auto mask = static_cast<__mmask32>((std::uint64_t{1} << columns) - 1);
      _mm512_storeu_si512(at.keys + i * wide + c,
                          _mm512_maskz_loadu_epi16(mask, k + std::int64_t{i} * d + c));
    }
}
/// Values as bf16 columns with zeros behind; pair(i, c) gives rows i and i + 1 at columns [c, c + kW), in pairs.
inline void turn_pairs(const CausalBf16Scratch& at, int d, auto pair) {
  for (int c = 0; c < CausalBf16Scratch::wide(d); c += 16)
    for (int i = 0; i < kCausalKeys; i += 32) {
      __m512i pairs[16];
      for (int r = 0; r < 16; ++r) pairs[r] = pair(i + 2 * r, c);
      transpose(pairs);
      for (int r = 0; r < 16; ++r) _mm512_storeu_si512(at.turned + (c + r) * kCausalKeys + i, pairs[r]);
    }
}
/// Of the widened values, or of rows that are bf16 already.
inline void turn_values(const CausalBf16Scratch& at, int n, int d) {
  const auto part = [&](int row, int c) {
    return load_first(at.v + std::int64_t{row} * d + c, lanes_of(row, c, n, d));
  };
  turn_pairs(at, d, [&](int row, int c) { return pair_bf16(part(row, c), part(row + 1, c)); });
}
inline void turn_values(const CausalBf16Scratch& at, const std::uint16_t* v /*[n, d]*/, int n, int d) {
  const auto part = [&](int row, int c) {
    const auto mask = static_cast<__mmask16>((1u << lanes_of(row, c, n, d)) - 1u);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, v + std::int64_t{row} * d + c));
  };
  turn_pairs(at, d, [&](int row, int c) {
    return _mm512_or_si512(part(row, c), _mm512_slli_epi32(part(row + 1, c), 16));
  });
}
/// Brings a block of n keys and values from row b on. Returns whether sums must look at each value by itself.
template <DType T>
bool bring_block(const CausalBf16Scratch& at, const KvRows& kv, std::int64_t b, int n, bool diagonal) {
  const int d = kv.d;
  if constexpr (T == DType::bf16) {
    const auto* const k = reinterpret_cast<const std::uint16_t*>(kv.k) + b * d;
    const auto* const v = reinterpret_cast<const std::uint16_t*>(kv.v) + b * d;
    copy_keys(at, k, n, d);
    turn_values(at, v, n, d);
    if (diagonal) widen_rows<T>(kv.v, kv.v_scale, b, n, d, at.v);
  } else {
    widen_rows<T>(kv.k, kv.k_scale, b, n, d, at.k);
    widen_rows<T>(kv.v, kv.v_scale, b, n, d, at.v);
    narrow_keys(at, n, d);
    turn_values(at, n, d);
  }
  return diagonal && !all_finite(at.v, std::int64_t{n} * d);
}
/// Softmax step of one panel over n keys: scores to weights in pairs, zeros behind; m, l updated; alpha =
/// factor of earlier sums. As panel_softmax, but for the rounding.
inline void pack_weights(const CausalBf16Scratch& at, const CausalBf16Panel& panel, int n) {
  for (int half = 0; half < 2; ++half) {
    const float* s = at.s + half * kW;
    const Vec old = load(panel.m + half * kW), low = set1(kMinusInfinity);
    Vec high[4] = {old, low, low, low};  // one would wait for itself
    int i = 0;
    for (; i + 4 <= n; i += 4)
      unroll<4>([&](auto j)
                    LODE_INLINE_LAMBDA { high[j] = max_passing_nan(high[j], load(s + (i + j) * kPanel)); });
    for (; i < n; ++i) high[0] = max_passing_nan(high[0], load(s + i * kPanel));
    const Vec best = max_passing_nan(max_passing_nan(high[0], high[1]), max_passing_nan(high[2], high[3]));
    const Vec safe = where_above(best, low, best, set1(0.0f));  // no finite score yet: see softmax_step
    const Vec scale = weight_of(old - safe);
    Vec sum = load(panel.l + half * kW) * scale;
    for (i = 0; i < (n + 31) / 32 * 32; i += 2) {
      const Vec a = i < n ? weight_of(load(s + i * kPanel) - safe) : set1(0.0f);
      const Vec b = i + 1 < n ? weight_of(load(s + (i + 1) * kPanel) - safe) : set1(0.0f);
      sum = sum + a;
      sum = sum + b;
      _mm512_storeu_si512(at.p + half * kCausalKeys * 16 + i * 16, pair_bf16(a, b));
    }
    store(panel.m + half * kW, best);
    store(panel.l + half * kW, sum);
    store(at.alpha + half * kW, scale);
  }
}

/// Keys of a block that each row of a panel sees; returns the most.
inline int set_visible(const CausalTile& tile, int first_row, std::int64_t block, int n, float* visible) {
  int most = 0;
  for (int r = 0; r < kPanel; ++r) {
    const int row = first_row + r < tile.rows() ? first_row + r : tile.rows() - 1;
    const std::int64_t seen = tile.first + row / tile.group + 1 - block;
    const int clipped = seen < 0 ? 0 : seen < n ? static_cast<int>(seen) : n;
    visible[r] = static_cast<float>(clipped);
    most = clipped > most ? clipped : most;
  }
  return most;
}

/// One block of keys for one panel.
inline void attend_panel(const CausalBf16Scratch& at, const CausalBf16Panel& panel, int most, int d,
                         bool diagonal, bool careful) {
  const int wide = CausalBf16Scratch::wide(d);
  for (int i = 0; i < most; i += 32)
    multiply_tiles(at.keys + i * wide, at.keys + (i + 16) * wide, 2 * wide, panel.q, panel.q + 16 * wide, 512,
                   wide / 32, /*add=*/false, at.s + i * kPanel);
  if (diagonal) mask_panel(at.s, most, at.visible);
  if (careful) {
    panel_softmax(at.s, most, panel.m, panel.l, at.alpha);
    return add_visible(at.v, at.s, most, d, at.visible, at.alpha, panel.o);
  }
  pack_weights(at, panel, most);
  if (any_above(set1(1.0f), load(at.alpha)) || any_above(set1(1.0f), load(at.alpha + kW)))
    for (int c = 0; c < d; ++c)
      for (int h = 0; h < kPanel; h += kW)
        store(panel.o + c * kPanel + h, load(panel.o + c * kPanel + h) * load(at.alpha + h));
  for (int c = 0; c < wide; c += 32)
    multiply_tiles(at.turned + c * kCausalKeys, at.turned + (c + 16) * kCausalKeys, 2 * kCausalKeys, at.p,
                   at.p + kCausalKeys * 16, 512, (most + 31) / 32, /*add=*/true, panel.o + c * kPanel);
}

template <DType T>
void causal_on_tiles(const CausalTile& tile, const KvRows& kv, std::int64_t begin, std::int64_t end,
                     const SoftmaxState& state, float* scratch) {
  [[maybe_unused]] const CausalUnit unit;
  const int d = kv.d, panels = (tile.rows() + kPanel - 1) / kPanel;
  const CausalBf16Scratch at(scratch, d);
  const auto panel = [&](int p) {
    return CausalBf16Panel(at.panels + p * CausalBf16Scratch::panel_floats(d), d);
  };
  for (int p = 0; p < panels; ++p) load_panel(tile, p * kPanel, d, state, panel(p));
  const std::int64_t last = tile.first + tile.tokens;  // one past the last visible key
  if (end > last) end = last;
  for (std::int64_t b = begin; b < end; b += kCausalKeys) {
    const int n = end - b < kCausalKeys ? static_cast<int>(end - b) : kCausalKeys;
    const bool diagonal = b + n > tile.first + 1;
    const bool careful = bring_block<T>(at, kv, b, n, diagonal);
    for (int p = 0; p < panels; ++p)
      if (const int most = set_visible(tile, p * kPanel, b, n, at.visible); most > 0)
        attend_panel(at, panel(p), most, d, diagonal, careful);
  }
  for (int p = 0; p < panels; ++p) store_panel(tile, p * kPanel, d, panel(p), state);
}

void attend_causal_bf16(const float* q, std::int64_t stride_q, int tokens, int group, Position first,
                        const KvRows& kv, std::int64_t begin, std::int64_t end, const SoftmaxState& state,
                        float* scratch) noexcept {
  const CausalTile tile = {q, stride_q, tokens, group, first};
  switch (kv.type) {
    case DType::f32:  // whoever stores float32 wants float32 arithmetic
      return attend_causal(q, stride_q, tokens, group, first, kv, begin, end, state, scratch);
    case DType::f16:
      return causal_on_tiles<DType::f16>(tile, kv, begin, end, state, scratch);
    case DType::bf16:
      return causal_on_tiles<DType::bf16>(tile, kv, begin, end, state, scratch);
    case DType::q8:
      return causal_on_tiles<DType::q8>(tile, kv, begin, end, state, scratch);
    case DType::q4:
      return causal_on_tiles<DType::q4>(tile, kv, begin, end, state, scratch);
  }
}
std::int64_t causal_scratch_bf16(int d, std::int64_t rows) noexcept {
  const std::int64_t tiles = CausalBf16Scratch::floats(d, rows), lanes = causal_scratch(d, rows);
  return tiles > lanes ? tiles : lanes;
}

}  // namespace
}  // namespace lode
