// SPDX-License-Identifier: Apache-2.0
// Pages of keys and what their scores can be at most (Quest), on the GPU: bounds are made once, when the rows
// of a page are in the store; a step scores the pages of its queries' far keys. The choice among them is
// top_pages (select.h). As select/baselines/page_bounds.h has it on the CPU. Deterministic, no word from the host
// inside a step.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// The largest and the least number in each channel of the keys of each page, of one model layer. Page i has
/// keys sink + [i, i + 1) * page.
struct PageBounds {
  char* bounds = nullptr;            // [Hkv, capacity][largest, least][d]: as the keys are stored, or codes
  const float* levels = nullptr;     // [Hkv][low, step][d], where bounds are codes
  std::int64_t sequence_stride = 0;  ///< bytes from one sequence's bounds to the next one's
  std::int64_t capacity = 0;         ///< pages of a head
  std::int64_t sink = 0;
  int page = 16;  ///< keys
  int bits = 16;  ///< of a bound; 2 or 4: codes, the first in the lowest bits
  /// Some may have been written by the launch just before: they are not read ahead of its end.
  bool fresh = false;

  LODE_HD bool coded() const { return bits < 16; }
  LODE_HD std::int64_t page_bytes(const KvLayout& layout) const {
    return coded() ? std::int64_t{2} * layout.head_dim * bits / 8 : 2 * layout.row_bytes();
  }
  LODE_HD std::int64_t layer_bytes(const KvLayout& layout) const {
    return layout.kv_heads * capacity * page_bytes(layout);
  }
};

/// Whether the kernels take heads of so many channels: multiples of 8 up to 256.
bool can_bound_pages(int head_dim);

/// Bounds pages [begin, end) of `layers` consecutive layers of one sequence, the first of which `base` and
/// `bounds` name; levels of a layer lie behind those of the one before it. A key with a NaN or an infinity
/// counts as 0. Codes are rounded outwards, as ChannelLevels::code does.
void bound_pages(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
                 const PageBounds& bounds, StreamHandle stream);

/// scores[n, head, i] := sum_c max(q_c least_c, q_c largest_c) of the whole pages i among the far keys of
/// query token n, per query head, or summed over the heads of each KV head; coded, up to what is the same for
/// all pages. Entries behind them are left alone. max_tokens bounds position + 1 over the life of a graph.
void score_pages(const Queries& queries, const PageBounds& bounds, bool sum_heads, std::int64_t window,
                 std::int64_t max_tokens, float* scores /*[N, Hq or Hkv, stride]*/, std::int64_t stride,
                 StreamHandle stream);

}  // namespace lode::cuda
