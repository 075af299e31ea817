// SPDX-License-Identifier: Apache-2.0
// Blocked matrix work on vector registers, for whichever vec_*.h was included before: prefill attention and
// the assignment of points to centroids.
//
// Rows that arrive as rows (keys, values, centroids) are read element by element and broadcast; what lies in
// the lanes is the other side, transposed once per tile: query rows, or points. So neither K nor V is ever
// transposed, and the softmax over keys runs down the lanes without a horizontal step.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace lode {
namespace {

constexpr int kPanel = 2 * kW;                 // query rows (or points) of one panel: two vectors
constexpr int kKeyBlock = kW == 16 ? 96 : 48;  // keys of one softmax step, a multiple of every kTileRows

/// A[i, k] at data + i * row + k * column.
struct Elements {
  const float* data;
  std::int64_t row, column;
};

/// c[i, :] = scale[:] * c[i, :] + sum_k a[i, k] b[k, :] for R rows of one panel; scale null = start from 0.
template <int R>
inline void tile_fma(Elements a, const float* b /*[K, kPanel]*/, std::int64_t K, const float* scale,
                     float* c /*[R, kPanel]*/) {
  Vec x[R], y[R];
  if (scale) {
    const Vec s = load(scale), t = load(scale + kW);
    for (int i = 0; i < R; ++i) x[i] = load(c + i * kPanel) * s, y[i] = load(c + i * kPanel + kW) * t;
  } else {
    for (int i = 0; i < R; ++i) x[i] = y[i] = set1(0.0f);
  }
  for (std::int64_t k = 0; k < K; ++k) {
    const Vec u = load(b + k * kPanel), v = load(b + k * kPanel + kW);
    const float* column = a.data + k * a.column;
    for (int i = 0; i < R; ++i) {
      const Vec w = set1(column[i * a.row]);
      x[i] = fma(w, u, x[i]);
      y[i] = fma(w, v, y[i]);
    }
  }
  for (int i = 0; i < R; ++i) store(c + i * kPanel, x[i]), store(c + i * kPanel + kW, y[i]);
}

/// tile_fma over any number of rows.
inline void panel_fma(Elements a, std::int64_t rows, const float* b, std::int64_t K, const float* scale,
                      float* c) {
  std::int64_t i = 0;
  const auto at = [&](std::int64_t row) { return Elements{a.data + row * a.row, a.row, a.column}; };
  for (; i + Vec::kTileRows <= rows; i += Vec::kTileRows)
    tile_fma<Vec::kTileRows>(at(i), b, K, scale, c + i * kPanel);
  if constexpr (Vec::kTileRows > 4)
    for (; i + 4 <= rows; i += 4) tile_fma<4>(at(i), b, K, scale, c + i * kPanel);
  for (; i + 2 <= rows; i += 2) tile_fma<2>(at(i), b, K, scale, c + i * kPanel);
  for (; i < rows; ++i) tile_fma<1>(at(i), b, K, scale, c + i * kPanel);
}

/// panel[c, r] = x[r * stride + c] for the first `rows` of kPanel rows; lanes beyond repeat the last row.
inline void transpose_to_panel(const float* x, std::int64_t stride, int rows, int d,
                               float* panel /*[d, kPanel]*/) {
  for (int half = 0; half < 2; ++half) {
    const int first = half * kW < rows ? half * kW : rows - 1;
    const int n = rows - first < kW ? rows - first : kW;
    for (int c = 0; c < d; ++c)
      store(panel + c * kPanel + half * kW, load_strided(x + first * stride + c, stride, n));
  }
}

/// Widens keys [begin, begin + n) of K or V, times their scale for q8.
template <DType T>
inline void widen_rows(const std::byte* rows, const float* scales, std::int64_t begin, int n, int d,
                       float* to /*[n, d]*/) {
  for (int i = 0; i < n; ++i) {
    const std::byte* row = rows + (begin + i) * row_bytes_of(T, d);
    const Vec scale = set1(T == DType::q8 ? scales[begin + i] : 1.0f);
    int c = 0;
    for (; c + kW <= d; c += kW) {
      const Vec x = load_columns<T>(row, c, d);
      store(to + std::int64_t{i} * d + c, T == DType::q8 ? x * scale : x);
    }
    if (c < d) {
      const Vec x = load_columns_first<T>(row, c, d - c, d);
      store_first(to + std::int64_t{i} * d + c, T == DType::q8 ? x * scale : x, d - c);
    }
    if constexpr (T == DType::q4) turn_back_q4(to + std::int64_t{i} * d, d);
  }
}

/// Softmax step of one panel over n keys: scores to weights in place; m, l updated; alpha = factor of earlier
/// sums.
inline void panel_softmax(float* s /*[n, kPanel]*/, int n, float* m, float* l, float* alpha) {
  for (int v = 0; v < kPanel; v += kW) {
    const Vec old = load(m + v);
    Vec best = old;
    for (int j = 0; j < n; ++j) best = max_passing_nan(best, load(s + j * kPanel + v));
    const Vec low = set1(kMinusInfinity);
    const Vec safe = where_above(best, low, best, set1(0.0f));  // no finite score yet: see softmax_step
    const Vec scale = exp_of(old - safe);
    Vec sum = load(l + v) * scale;
    for (int j = 0; j < n; ++j) {
      const Vec p = exp_of(load(s + j * kPanel + v) - safe);
      store(s + j * kPanel + v, p);
      sum = sum + p;
    }
    store(m + v, best);
    store(l + v, sum);
    store(alpha + v, scale);
  }
}

/// Scores of keys that a row may not see become -inf: key j is seen where visible[row] > j.
inline void mask_panel(float* s, int n, const float* visible) {
  for (int j = 0; j < n; ++j)
    for (int v = 0; v < kPanel; v += kW) {
      float* at = s + j * kPanel + v;
      store(at, where_above(load(visible + v), set1(static_cast<float>(j)), load(at), set1(kMinusInfinity)));
    }
}

/// o = alpha o + P V with each weight used only where its key is visible: on the diagonal a NaN or infinity
/// in the value of a later token must not reach earlier ones as 0 * NaN.
inline void add_visible(const float* v, const float* p, int n, int d, const float* visible,
                        const float* alpha, float* o) {
  for (int c = 0; c < d; ++c)
    for (int h = 0; h < kPanel; h += kW) {
      Vec acc = load(o + c * kPanel + h) * load(alpha + h);
      for (int j = 0; j < n; ++j) {
        const Vec next = fma(set1(v[std::int64_t{j} * d + c]), load(p + j * kPanel + h), acc);
        acc = where_above(load(visible + h), set1(static_cast<float>(j)), next, acc);
      }
      store(o + c * kPanel + h, acc);
    }
}

inline bool all_finite(const float* x, std::int64_t n) {
  // x - x is 0 for numbers and NaN for the rest; a NaN stays in the sum.
  Vec sum = set1(0.0f);
  std::int64_t i = 0;
  for (; i + kW <= n; i += kW) sum = sum + (load(x + i) - load(x + i));
  for (; i < n; i += kW) {
    const Vec rest = load_first(x + i, static_cast<int>(n - i));
    sum = sum + (rest - rest);
  }
  alignas(64) float lanes[kW];
  store(lanes, sum);
  for (int k = 0; k < kW; ++k)
    if (lanes[k] != 0.0f) return false;
  return true;
}

/// Scratch of attend_causal, cut from one allocation. Panels hold kPanel query rows each, transposed.
struct CausalScratch {
  float *k, *v;    // [kKeyBlock, d]
  float* s;        // [kKeyBlock, kPanel]
  float* alpha;    // [kPanel]
  float* visible;  // [kPanel]
  float* panels;   // per panel: q [d, kPanel], o [d, kPanel], m [kPanel], l [kPanel]
  static std::int64_t panel_floats(int d) { return (2 * std::int64_t{d} + 2) * kPanel; }
  static std::int64_t floats(int d, std::int64_t rows) {
    return (2 * std::int64_t{d} + kPanel) * kKeyBlock + 2 * kPanel +
           (rows + kPanel - 1) / kPanel * panel_floats(d);
  }
  CausalScratch(float* at, int d) {
    k = at, v = k + kKeyBlock * d, s = v + kKeyBlock * d, alpha = s + kKeyBlock * kPanel;
    visible = alpha + kPanel, panels = visible + kPanel;
  }
};

/// Where the query rows of a tile lie: row r is token r / group, head r % group.
struct CausalTile {
  const float* q;  // token t, head g at q + t * stride_q + g * d
  std::int64_t stride_q;
  int tokens, group;
  std::int64_t first;  // position of token 0
  int rows() const { return tokens * group; }
};

inline void load_panel(const CausalTile& tile, int first_row, int d, const SoftmaxState& state,
                       float* panel) {
  float *q = panel, *o = q + d * kPanel, *m = o + d * kPanel, *l = m + kPanel;
  for (int r = 0; r < kPanel; ++r) {
    const int row = first_row + r < tile.rows() ? first_row + r : tile.rows() - 1;
    const float* from = tile.q + (row / tile.group) * tile.stride_q + (row % tile.group) * d;
    for (int c = 0; c < d; ++c) q[c * kPanel + r] = from[c];
    for (int c = 0; c < d; ++c) o[c * kPanel + r] = state.o[std::int64_t{row} * d + c];
    m[r] = state.m[row], l[r] = state.l[row];
  }
}
inline void store_panel(const CausalTile& tile, int first_row, int d, const float* panel,
                        const SoftmaxState& state) {
  const float *o = panel + d * kPanel, *m = o + d * kPanel, *l = m + kPanel;
  for (int r = 0; r < kPanel && first_row + r < tile.rows(); ++r) {
    const std::int64_t row = first_row + r;
    for (int c = 0; c < d; ++c) state.o[row * d + c] = o[c * kPanel + r];
    state.m[row] = m[r], state.l[row] = l[r];
  }
}

template <DType T>
void causal_typed(const CausalTile& tile, const KvRows& kv, std::int64_t begin, std::int64_t end,
                  const SoftmaxState& state, float* scratch) {
  const int d = kv.d, rows = tile.rows();
  CausalScratch at(scratch, d);
  const int panels = (rows + kPanel - 1) / kPanel;
  for (int p = 0; p < panels; ++p)
    load_panel(tile, p * kPanel, d, state, at.panels + p * CausalScratch::panel_floats(d));
  const std::int64_t last = tile.first + tile.tokens;  // one past the last visible key
  if (end > last) end = last;
  for (std::int64_t b = begin; b < end; b += kKeyBlock) {
    const int n = end - b < kKeyBlock ? static_cast<int>(end - b) : kKeyBlock;
    const bool diagonal = b + n > tile.first + 1;
    widen_rows<T>(kv.k, kv.k_scale, b, n, d, at.k);
    widen_rows<T>(kv.v, kv.v_scale, b, n, d, at.v);
    const bool careful = diagonal && !all_finite(at.v, std::int64_t{n} * d);
    for (int p = 0; p < panels; ++p) {
      float* q = at.panels + p * CausalScratch::panel_floats(d);
      float *o = q + d * kPanel, *m = o + d * kPanel, *l = m + kPanel;
      int most = 0;  // keys of the block that the panel's last token sees
      for (int r = 0; r < kPanel; ++r) {
        const int row = p * kPanel + r < rows ? p * kPanel + r : rows - 1;
        const std::int64_t seen = tile.first + row / tile.group + 1 - b;
        const int clipped = seen < 0 ? 0 : seen < n ? static_cast<int>(seen) : n;
        at.visible[r] = static_cast<float>(clipped);
        most = clipped > most ? clipped : most;
      }
      if (most == 0) continue;
      panel_fma({at.k, d, 1}, most, q, d, nullptr, at.s);
      if (diagonal) mask_panel(at.s, most, at.visible);
      panel_softmax(at.s, most, m, l, at.alpha);
      if (careful) {
        add_visible(at.v, at.s, most, d, at.visible, at.alpha, o);
      } else {
        panel_fma({at.v, 1, d}, d, at.s, most, at.alpha, o);
      }
    }
  }
  for (int p = 0; p < panels; ++p)
    store_panel(tile, p * kPanel, d, at.panels + p * CausalScratch::panel_floats(d), state);
}

void attend_causal(const float* q, std::int64_t stride_q, int tokens, int group, Position first,
                   const KvRows& kv, std::int64_t begin, std::int64_t end, const SoftmaxState& state,
                   float* scratch) noexcept {
  for_type(kv.type, [&]<DType T>() {
    causal_typed<T>({q, stride_q, tokens, group, first}, kv, begin, end, state, scratch);
  });
}
std::int64_t causal_scratch(int d, std::int64_t rows) noexcept {
  return CausalScratch::floats(d, rows);
}

constexpr int kCentroidBlock = Vec::kTileRows * 4;

/// Points of one panel against all centroids.
inline void assign_panel(const float* points /*[d, kPanel]*/, const float* centroids, std::int64_t c, int d,
                         int n, std::int32_t* label, float* best) {
  alignas(64) float s[kCentroidBlock * kPanel];
  alignas(64) float top[kPanel], index[kPanel];
  for (int r = 0; r < kPanel; ++r) top[r] = kMinusInfinity, index[r] = 0.0f;
  for (std::int64_t b = 0; b < c; b += kCentroidBlock) {
    const int rows = c - b < kCentroidBlock ? static_cast<int>(c - b) : kCentroidBlock;
    panel_fma({centroids + b * d, d, 1}, rows, points, d, nullptr, s);
    for (int v = 0; v < kPanel; v += kW) {
      Vec high = load(top + v), where = load(index + v);
      for (int j = 0; j < rows; ++j) {
        const Vec x = load(s + j * kPanel + v);
        where =
            where_above(x, high, set1(static_cast<float>(b + j)), where);  // exact: fewer than 2^24 centroids
        high = max_passing_nan(high, x);
      }
      store(top + v, high);
      store(index + v, where);
    }
  }
  for (int r = 0; r < n; ++r) {
    label[r] = static_cast<std::int32_t>(index[r]);
    if (best) best[r] = top[r];
  }
}

void assign(const float* x, std::int64_t n, const float* centroids, std::int64_t c, int d,
            std::int32_t* label, float* best) noexcept {
  alignas(64) float panel[kMaxHeadDim * kPanel];  // [d, kPanel]
  for (std::int64_t i = 0; i < n; i += kPanel) {
    const int rows = n - i < kPanel ? static_cast<int>(n - i) : kPanel;
    transpose_to_panel(x + i * d, d, rows, d, panel);
    assign_panel(panel, centroids, c, d, rows, label + i, best ? best + i : nullptr);
  }
}

}  // namespace
}  // namespace lode
