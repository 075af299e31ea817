// SPDX-License-Identifier: Apache-2.0
// The kernels for AMX (tiles, bf16): attention of its own, everything else as for AVX-512 with bf16.
#include "kernels/cpu/simd/vec_avx512.h"
// What this table takes from that of AVX-512 is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/simd/amx_tiles.h"
#include "kernels/cpu/simd/bf16_avx512.h"
#include "kernels/cpu/simd/exp-inl.h"
#include "kernels/cpu/simd/transpose_avx512.h"
//
#include "kernels/cpu/attend-inl.h"
#include "kernels/cpu/tile-inl.h"
//
#include "kernels/cpu/attend_causal_bf16-inl.h"
//
#include "kernels/cpu/attend_bf16-inl.h"
//
#include "kernels/cpu/attend_amx-inl.h"

namespace lode {

extern const KernelTable kAvx512Kernels;
const KernelTable& avx512bf16_kernels();

namespace {

/// Calls body<G>(first query, their number) for the queries of each pass over memory: 16, 32 or 64 of them, and what
/// is left at the end, so that a pass is a power of two of chunks of G.
template <class Body>
void for_passes(int queries, Body body) {
  for (int first = 0; first < queries;) {
    const int left = queries - first;
    const int n =
        left > kTileQueries / 2 && left < kTileQueries ? kTileQueries / 2 : std::min(left, kTileQueries);
    if (n > 8)
      body.template operator()<16>(first, n);
    else if (n > 4)
      body.template operator()<8>(first, n);
    else if (n > 2)
      body.template operator()<4>(first, n);
    else if (n > 1)
      body.template operator()<2>(first, n);
    else
      body.template operator()<1>(first, n);
    first += n;
  }
}

/// Whether rows are cut into tiles: of bf16, pairs of them, a whole tile at least.
bool fits_tiles(const KvRows& kv) {
  return kv.type == DType::bf16 && kv.d >= kTileColumns && kv.d % 2 == 0;
}
SoftmaxState state_from(const SoftmaxState& state, int query, int d) {
  return {state.o + std::int64_t{query} * d, state.m + query, state.l + query};
}

/// redo(query, q, state) attends one query without tiles.
template <class Rows, class Redo>
void attend_on_tiles(const float* q, int queries, const KvRows& kv, Rows rows, const float* log_weights,
                     std::int64_t count, const SoftmaxState& state, Redo redo) {
  for_passes(queries, [&]<int G>(int first, int n) {
    const float* own = q + std::int64_t{first} * kv.d;
    const SoftmaxState to = state_from(state, first, kv.d);
    TileRows<G, Rows> tiles(own, n, kv, rows, log_weights, count, to);
    tiles.attend();
    tiles.finish([&](int r) { redo(own + std::int64_t{r} * kv.d, state_from(to, r, kv.d)); });
  });
}

void attend_run_amx(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                    const SoftmaxState& state) noexcept {
  const KernelTable& pairs = avx512bf16_kernels();
  if (!fits_tiles(kv)) return pairs.attend_run(q, queries, kv, begin, end, state);
  attend_on_tiles(
      q, queries, kv, RunRows{begin}, nullptr, end - begin, state,
      [&](const float* own, const SoftmaxState& to) { pairs.attend_run(own, 1, kv, begin, end, to); });
}
/// The same bits as a run's, where rows are one.
void attend_rows_amx(const float* q, int queries, const KvRows& kv, const Position* rows,
                     const float* log_weights, std::int64_t count, const SoftmaxState& state) noexcept {
  const KernelTable& pairs = avx512bf16_kernels();
  if (!fits_tiles(kv) || count == 0)
    return pairs.attend_rows(q, queries, kv, rows, log_weights, count, state);
  attend_on_tiles(q, queries, kv, ListRows{rows}, log_weights, count, state,
                  [&](const float* own, const SoftmaxState& to) {
                    pairs.attend_rows(own, 1, kv, rows, log_weights, count, to);
                  });
}

void score_attended_amx(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                        float* scores, std::int64_t stride) noexcept {
  if (!fits_tiles(kv)) return avx512bf16_kernels().score_attended(q, queries, kv, begin, end, scores, stride);
  for (int first = 0; first < queries; first += kTileKeys)
    for_passes(std::min(queries - first, kTileKeys), [&]<int G>(int, int n) {
      score_on_tiles<G>(q + std::int64_t{first} * kv.d, n, kv, begin, end, scores + first * stride, stride);
    });
  // Where a key is infinite, columns that a step takes from the one before have met a 0.
  for (int g = 0; g < queries; ++g)
    if (!all_finite(scores + g * stride, end - begin))
      avx512bf16_kernels().score_attended(q + std::int64_t{g} * kv.d, 1, kv, begin, end, scores + g * stride,
                                          stride);
}

}  // namespace

const KernelTable& amx_kernels() {
  static const KernelTable table = [] {
    KernelTable t = avx512bf16_kernels();
    t.name = "amx";
    t.attend_run = attend_run_amx;
    t.attend_rows = attend_rows_amx;
    t.score_attended = score_attended_amx;
    t.attend_causal = attend_causal_bf16;
    return t;
  }();
  return table;
}

}  // namespace lode
