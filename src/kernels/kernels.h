// SPDX-License-Identifier: Apache-2.0
// Contracts of the compute kernels: pure functions on views. One table of them per instruction set, each
// compiled with its own flags; the best that the machine has is chosen once
// (LODESTONE_ISA=scalar|avx2|avx512|avx512vnni|avx512bf16|amx forces one).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "lodestone/kv_view.h"
#include "lodestone/selection.h"
#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// The longest row of a key or value: latent rows have 576 numbers, and what clusters points beside a head lifts them by
/// one more.
inline constexpr int kMaxHeadDim = 640;

/// Running softmax accumulation of `rows` queries over keys seen so far: output unnormalised.
///   m[r] = max score so far (-inf before the first), l[r] = sum exp(s - m), o[r, :] = sum exp(s - m) v
struct SoftmaxState {
  float* o = nullptr;  // [rows, d]
  float* m = nullptr;  // [rows]
  float* l = nullptr;  // [rows]
};

/// Kernels of one instruction set. All are noexcept, allocate nothing, never read past a row's end, and
/// return the same bits for the same input whatever the alignment. Q rows are float32 and already scaled by
/// 1/sqrt(d). A NaN in q, k or v reaches the output of that query; a score of -inf has weight 0; a score of
/// +inf gives NaN. A query's result does not depend on which others share the call. attend_bf16-inl.h,
/// attend_amx-inl.h and attend_q8-inl.h round.
struct KernelTable {
  std::string_view name;

  /// Accumulates keys [begin, end) into `state`: `queries` rows share the pass, so each key is read once.
  void (*attend_run)(const float* q /*[queries, d]*/, int queries, const KvRows& kv, std::int64_t begin,
                     std::int64_t end, const SoftmaxState& state) noexcept;
  /// The same over rows[0..count), with optional log-weights (null = 0) added to the scores.
  void (*attend_rows)(const float* q /*[queries, d]*/, int queries, const KvRows& kv, const Position* rows,
                      const float* log_weights, std::int64_t count, const SoftmaxState& state) noexcept;
  /// scores[g * stride + i] = q[g] . k[begin + i], for i in [0, end - begin).
  void (*score_run)(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                    float* scores, std::int64_t stride) noexcept;
  /// The same for what attend_run has attended: queries may be rounded as there, where that is faster.
  void (*score_attended)(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                         float* scores, std::int64_t stride) noexcept;
  /// scores[g * stride + i] = q[g] . k[rows[i]].
  void (*score_rows)(const float* q, int queries, const KvRows& kv, const Position* rows, std::int64_t count,
                     float* scores, std::int64_t stride) noexcept;
  /// One tile of causal attention: query tokens [0, tokens) of the `group` heads that share this KV head,
  /// token t at position first + t, attend keys [begin, min(end, first + t + 1)). Token t, head g is at q + t
  /// * stride_q + g * d, float32, pre-scaled; state row t * group + g belongs to it. `scratch` holds
  /// causal_scratch(d, tokens * group) floats. What lies in later tokens' keys and values never reaches a
  /// token, not even as a NaN.
  void (*attend_causal)(const float* q, std::int64_t stride_q, int tokens, int group, Position first,
                        const KvRows& kv, std::int64_t begin, std::int64_t end, const SoftmaxState& state,
                        float* scratch) noexcept;
  std::int64_t (*causal_scratch)(int d, std::int64_t rows) noexcept;  ///< floats that attend_causal needs
  int causal_rows;  ///< query rows (tokens times group) of one tile that suit this machine
  /// y[m, n] = sum_k x[m, k] w[n, k], float32 accumulation; w rows [n_begin, n_end) only. For 1 <= m <= 8.
  void (*gemv)(const float* x /*[m, k]*/, int m, const void* w /*[n, k]*/, DType w_type, std::int64_t k,
               std::int64_t n_begin, std::int64_t n_end, float* y /*[m, stride_y]*/,
               std::int64_t stride_y) noexcept;
  /// x . y
  float (*dot)(const float* x, const float* y, std::int64_t n) noexcept;
  /// Nearest centroid by inner product: label[i] = argmax_c x[i] . c (lowest index wins ties), best[i] = that
  /// product (best may be null). d <= kMaxHeadDim, c < 2^24; a point with a NaN gets label 0.
  void (*assign)(const float* x /*[n, d]*/, std::int64_t n, const float* centroids /*[c, d]*/, std::int64_t c,
                 int d, std::int32_t* label, float* best) noexcept;
  /// Widening and narrowing of n numbers, to nearest even. q8: whole numbers in [-127, 127]; scales are the
  /// caller's.
  void (*widen)(const void* from, DType type, std::int64_t n, float* to) noexcept;
  /// Exclusive or of `bytes` bytes in 8-byte words (what is left over counts as well): the plain read that
  /// benches compare with.
  std::uint64_t (*read)(const void* from, std::int64_t bytes) noexcept;
  void (*narrow)(const float* from, std::int64_t n, DType type, void* to) noexcept;
};

/// The best table for this machine, or the one that LODESTONE_ISA names (InputError when it cannot run here).
const KernelTable& kernels();
/// Every table that this machine can run, plain C++ first.
std::span<const KernelTable* const> supported_kernels();

// ---- Drivers over a table: threads, splits, merges.
// -------------------------------------------------------------

/// y[m, n] = sum_k x[m, k] w[n, k]: small m streams the weights once through gemv, larger m goes to oneDNN
/// in float32, weights widened block by block. No second copy of the weights is kept.
void matmul(Matrix<const float> x, const void* w, DType w_type, std::int64_t n, Matrix<float> y,
            ThreadPool& pool);

/// Dense causal attention of T query tokens of one sequence over its whole KV, all heads; the last query
/// token sits at the last row of kv. o[t, h, :] normalised; lse may be null. Fixed key splits and tile order:
/// the same bits for any number of threads. Polls check_cancel.
void attend_prefill(std::span<const float> q /*[T, Hq, d]*/, std::int64_t tokens, int query_heads,
                    std::span<const KvRows> kv /*[Hkv]*/, float scale, float* o /*[T, Hq, d]*/,
                    float* lse /*[T, Hq]*/, ThreadPool& pool);

/// What one query group attends in decode: runs, then rows. Merged in this order.
struct AttendItem {
  const float* q = nullptr;  // [queries, d] float32, not scaled
  int queries = 0;           // heads of the group (times query tokens of the set)
  KvRows kv;
  std::span<const Run> runs;  // rising, disjoint
  std::span<const Position> rows;
  std::span<const float> log_weights;  // empty or one per row
  float* o = nullptr;                  // [queries, d] normalised
  float* lse = nullptr;                // [queries]
  /// [ceil(runs[0].end / kPeakKeys), queries], of items of one run from row 0 on and no rows, when not null: the
  /// largest score of each query among rows [i kPeakKeys, (i + 1) kPeakKeys), as the kernel rounds it.
  float* peaks = nullptr;
  static constexpr std::int64_t kPeakKeys = 1024;
};
/// Attends all items: work is cut into fixed-size pieces of keys (absolute position multiples for runs),
/// spread over the threads, and partial states are merged in rising order, so that bits depend on the item
/// alone.
void attend_items(std::span<const AttendItem> items, float scale, ThreadPool& pool);

/// Nanoseconds that all calls of attend_items have spent merging, summed over threads; for benchmarks.
std::int64_t attend_merge_nanoseconds() noexcept;

/// Positions of the k largest of n scores, ties to the higher position; rising order. k >= n gives all. NaN
/// counts as -inf.
void top_k(std::span<const float> scores, std::int64_t k, Position offset, std::vector<Position>& out);

}  // namespace lode
