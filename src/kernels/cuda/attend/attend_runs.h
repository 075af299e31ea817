// SPDX-License-Identifier: Apache-2.0
// Decode attention over stretches of lists that lie somewhere already, such as those of chosen buckets:
// nobody has to write out which rows are meant, and what no choice decides (sink and window) is attended
// while the choice is still being made.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// A stretch of a list of rows.
struct RowRun {
  std::int32_t first = 0, count = 0;
};

/// Far keys of every query token and KV head, as stretches; in device memory. Rows are unique; the order of
/// the stretches decides the last bits.
struct RowRuns {
  static constexpr int kMost = 256;

  const RowRun* runs = nullptr;        // [N, Hkv, count]
  int count = 0;                       ///< of a query token and KV head, some of them empty
  int tabled = 0;                      ///< of these, how many are in `rows`; the others are in `more`
  const std::int32_t* rows = nullptr;  // [sequences, Hkv, row_stride]
  std::int64_t row_stride = 0;
  const std::int32_t* more = nullptr;  // [N, Hkv, more_stride]
  std::int64_t more_stride = 0;
  std::int32_t* counts = nullptr;  // [N, Hkv] written: keys in all stretches
  std::int64_t capacity = 0;       ///< the most there can be
  std::int64_t sink = 0, window = 0;
};

/// Whether attention takes stretches for this layout and group; `count` of RowRuns::kMost at most.
bool can_attend_runs(const KvLayout& layout, int group);

/// Every query attends sink, its stretches and its window. To be launched directly behind the kernel that
/// makes the stretches, which must have waited for what was in front of it before it let this one start:
/// queries, keys and values are read before that kernel ends. Workspace and `max_tokens` as for
/// attend_rows_decode.
void attend_runs_decode(const Queries& queries, const RowRuns& runs, std::int64_t max_tokens, void* workspace,
                        StreamHandle stream);

/// Writes stretches out as lists: rows [N, Hkv, capacity], and how many there are of each.
void list_runs(const Queries& queries, const RowRuns& runs, std::int32_t* rows, StreamHandle stream);

}  // namespace lode::cuda
