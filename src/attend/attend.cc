// SPDX-License-Identifier: Apache-2.0
// From query sets to kernel work and back: sets -> parts (parts.h) -> attend_items -> states, merged into the
// output.
#include "attend/attend.h"

#include <algorithm>
#include <limits>

#include "attend/mass.h"
#include "attend/parts.h"
#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/attend_span.h"
#include "kernels/kernels.h"
#include "lodestone/attention.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// A part on its way through the kernels.
struct PartWork {
  Part part;
  std::vector<float> q;       // [queries, d] when they had to be gathered
  std::vector<float> output;  // [queries, d] when it does not go to its place at once
  std::vector<float> lse;     // [queries]
  std::vector<float> peaks;   // AttendItem::peaks when they are wanted and the part is one run from row 0 on
};

/// Queries of any number of blocks that attend to one KV head of their whole document together.
struct SharedRows {
  KvRows kv;
  Run all;                       // of its rows
  std::vector<float> q, output;  // [queries, d]
  std::vector<float> lse;        // [queries]
  std::vector<float> peaks;      // AttendItem::peaks, when they are wanted
};

/// One call of attend.
struct Call {
  std::span<const QueryBlock> blocks;
  const LayerGeometry& geometry;
  std::span<float* const> outputs;
  std::vector<SetGroup> groups;
  std::vector<std::vector<float>> lse;           // per block: [T, Hq]
  std::vector<std::vector<PartWork>> work = {};  // [groups]
  bool far_only = false;                         ///< sink and window are somebody else's
  std::span<const TailRows> tails = {};          ///< one a block, or none at all
  std::vector<SharedRows> shared = {};           // [Hkv]
  std::vector<std::int64_t> shared_row = {};     // [groups] the first of its queries there; -1 = none
  bool peaks = false;                            ///< are wanted, wherever an item can have them
};

std::size_t peaks_of(Position end, std::size_t queries) {
  return static_cast<std::size_t>((end + AttendItem::kPeakKeys - 1) / AttendItem::kPeakKeys) * queries;
}

/// Whether the tokens of a branch's block come by the hundred. Generated tokens, drafted ones too, are attended
/// one by one, so that their bits do not depend on how many come at once.
bool is_wide(const QueryBlock& block) {
  return block.tokens > 1 && block.phase != Phase::generation;
}

/// Whether a group's only part is over all of its queries: then that part is the result.
bool is_whole(const SetGroup& group, const std::vector<PartWork>& parts) {
  if (parts.size() != 1) return false;
  std::uint32_t heads = 0;
  for (const Selection::Set& set : group.sets) heads |= set.queries.heads;
  const QueryRows& queries = parts[0].part.queries;
  return queries.heads == heads && queries.token_begin == group.token_begin &&
         queries.token_end == group.token_end;
}

/// The kernel's view of a part. Alone over its queries, it writes to its place in the output.
AttendItem item_of(Call& call, PartWork& work, bool alone) {
  const QueryRows& queries = work.part.queries;
  const QueryBlock& block = call.blocks[queries.block];
  const KvLayer& kv = work.part.behind ? call.tails[queries.block].kv : block.kv;
  const std::int64_t d = call.geometry.head_dim;
  std::int64_t first = -1;
  queries.for_each(call.geometry,
                   [&](std::int64_t, std::int64_t query) { first = first < 0 ? query : first; });
  AttendItem item = {.q = block.q.data() + first * d,
                     .queries = queries.count(),
                     .kv = kv.heads[static_cast<std::size_t>(queries.kv_head)],
                     .runs = work.part.keys.runs(),
                     .rows = work.part.keys.rows(),
                     .log_weights = work.part.keys.log_weights(),
                     .o = call.outputs[queries.block] + first * d,
                     .lse = call.lse[queries.block].data() + first};
  if (!queries.contiguous()) {
    work.q.resize(static_cast<std::size_t>(queries.count() * d));
    queries.for_each(call.geometry, [&](std::int64_t row, std::int64_t query) {
      std::copy_n(block.q.data() + query * d, d, work.q.data() + row * d);
    });
    item.q = work.q.data();
  }
  if (!alone || !queries.contiguous()) {
    work.output.resize(static_cast<std::size_t>(queries.count() * d));
    work.lse.resize(static_cast<std::size_t>(queries.count()));
    item.o = work.output.data();
    item.lse = work.lse.data();
  }
  if (call.peaks && !work.part.behind && item.rows.empty() && item.runs.size() == 1 &&
      item.runs[0].begin == 0) {
    work.peaks.resize(peaks_of(item.runs[0].end, static_cast<std::size_t>(item.queries)));
    item.peaks = work.peaks.data();
  }
  return item;
}

/// Merges states of some queries into the output, one row after the other.
void merge_rows(Call& call, const QueryRows& queries, std::span<float> output, std::span<float> lse) {
  const std::int64_t d = call.geometry.head_dim;
  queries.for_each(call.geometry, [&](std::int64_t row, std::int64_t query) {
    merge({.output = call.outputs[queries.block] + query * d,
           .lse = call.lse[queries.block].data() + query,
           .rows = 1,
           .d = d},
          {.output = output.data() + row * d, .lse = lse.data() + row, .rows = 1, .d = d});
  });
}

/// Brings the states of a group's parts, then the tails of its sets, together.
void collect(Call& call, std::size_t g) {
  const SetGroup& group = call.groups[g];
  const std::int64_t d = call.geometry.head_dim;
  const bool in_place = call.work[g].size() == 1 && call.work[g][0].output.empty();
  const std::int64_t shared = call.shared_row.empty() ? -1 : call.shared_row[g];
  for (const Selection::Set& set : group.sets) {
    if (in_place) break;
    const QueryRows queries = {group.block, group.kv_head, set.queries.heads, group.token_begin,
                               group.token_end};
    queries.for_each(call.geometry, [&](std::int64_t, std::int64_t query) {
      AttentionState{.output = call.outputs[group.block] + query * d,
                     .lse = call.lse[group.block].data() + query,
                     .rows = 1,
                     .d = d}
          .clear();
    });
  }
  if (shared >= 0) {
    SharedRows& rows = call.shared[static_cast<std::size_t>(group.kv_head)];
    const QueryRows queries = {group.block, group.kv_head, all_heads(call.geometry.group()),
                               group.token_begin, group.token_end};
    merge_rows(call, queries, std::span(rows.output).subspan(static_cast<std::size_t>(shared * d)),
               std::span(rows.lse).subspan(static_cast<std::size_t>(shared)));
  }
  for (PartWork& work : call.work[g]) {
    if (!in_place) merge_rows(call, work.part.queries, work.output, work.lse);
  }
  for (const Selection::Set& set : group.sets) {
    if (set.tail_lse.empty()) continue;
    const QueryRows queries = {group.block, group.kv_head, set.queries.heads, group.token_begin,
                               group.token_end};
    LODE_ASSERT(std::ssize(set.tail_lse) == queries.count() &&
                std::ssize(set.tail_output) == queries.count() * d);
    std::vector<float> output(set.tail_output.begin(), set.tail_output.end()),
        lse(set.tail_lse.begin(), set.tail_lse.end());
    merge_rows(call, queries, output, lse);
  }
}

/// Parts of a group on both sides of the seam: the document's first.
std::vector<Part> split(std::vector<Part> parts, const TailRows& tail) {
  std::vector<Part> behind;
  for (Part& part : parts) behind.push_back({part.queries, part.keys.split(tail.seam), true});
  if (tail.elsewhere) behind.clear();
  parts.insert(parts.end(), std::make_move_iterator(behind.begin()), std::make_move_iterator(behind.end()));
  std::erase_if(parts, [](const Part& part) { return part.keys.empty(); });
  return parts;
}

/// The parts of a group that no other block has a share in.
std::vector<Part> own_parts(const Call& call, std::size_t g) {
  const SetGroup& group = call.groups[g];
  const QueryBlock& block = call.blocks[group.block];
  const TailRows* const tail = tail_of(call.tails, group.block);
  if (tail == nullptr) return cut(group, block, call.geometry.dense, call.far_only);
  if (call.shared_row[g] < 0) return split(cut(group, block, call.geometry.dense), *tail);
  if (tail->elsewhere) return {};
  Part part = {.queries = {group.block, group.kv_head, all_heads(call.geometry.group()), group.token_begin,
                           group.token_end},
               .keys = {},
               .behind = true};
  part.keys.add({0, block.begin + static_cast<Position>(group.token_end) - tail->seam});
  part.keys.finish();
  return {std::move(part)};
}

/// Gathers the queries that attend to the whole document, by KV head.
void gather_shared(Call& call, const std::vector<bool>& prefilled) {
  const std::int64_t d = call.geometry.head_dim, heads = call.geometry.group();
  call.shared_row.assign(call.groups.size(), -1);
  call.shared.resize(static_cast<std::size_t>(call.geometry.kv_heads));
  for (std::size_t g = 0; g < call.groups.size(); ++g) {
    const SetGroup& group = call.groups[g];
    const QueryBlock& block = call.blocks[group.block];
    const TailRows* const tail = tail_of(call.tails, group.block);
    if (tail == nullptr || prefilled[group.block] || is_wide(block) || !group.complete ||
        group.token_end - group.token_begin != 1)
      continue;
    SharedRows& rows = call.shared[static_cast<std::size_t>(group.kv_head)];
    const KvRows& kv = block.kv.heads[static_cast<std::size_t>(group.kv_head)];
    LODE_ASSERT(rows.q.empty() || rows.kv.k == kv.k);
    rows.kv = kv;
    rows.all = {0, tail->seam};
    call.shared_row[g] = std::ssize(rows.q) / d;
    const auto first =
        block.q.begin() + (group.token_begin * call.geometry.query_heads + group.kv_head * heads) * d;
    rows.q.insert(rows.q.end(), first, first + heads * d);
  }
  for (SharedRows& rows : call.shared) {
    rows.output.resize(rows.q.size());
    rows.lse.resize(rows.q.size() / static_cast<std::size_t>(d));
  }
}

/// Attends all blocks but those that prefill attention does, everything in one call of the kernels.
void run_parts(Call& call, const std::vector<bool>& prefilled) {
  ThreadPool& pool = *call.geometry.pool;
  call.work.resize(call.groups.size());
  if (!call.tails.empty()) gather_shared(call, prefilled);
  pool.for_each(std::ssize(call.groups), [&](std::int64_t item, int) {
    const auto g = static_cast<std::size_t>(item);
    if (prefilled[call.groups[g].block]) return;
    for (Part& part : own_parts(call, g))
      call.work[g].push_back({.part = std::move(part), .q = {}, .output = {}, .lse = {}});
  });
  std::vector<AttendItem> items;
  for (SharedRows& rows : call.shared) {
    if (rows.q.empty()) continue;
    items.push_back({.q = rows.q.data(),
                     .queries = static_cast<int>(rows.lse.size()),
                     .kv = rows.kv,
                     .runs = {&rows.all, 1},
                     .o = rows.output.data(),
                     .lse = rows.lse.data()});
    if (!call.peaks) continue;
    rows.peaks.resize(peaks_of(rows.all.end, rows.lse.size()));
    items.back().peaks = rows.peaks.data();
  }
  for (std::size_t g = 0; g < call.work.size(); ++g) {
    const bool shared = !call.shared_row.empty() && call.shared_row[g] >= 0;
    const bool alone = !shared && is_whole(call.groups[g], call.work[g]);
    for (PartWork& work : call.work[g]) items.push_back(item_of(call, work, alone));
  }
  attend_items(items, call.geometry.scale, pool);
  pool.for_each(std::ssize(call.groups), [&](std::int64_t item, int) {
    const auto g = static_cast<std::size_t>(item);
    if (!prefilled[call.groups[g].block]) collect(call, g);
  });
}

/// Work of all blocks; far_keys(b, t, head) are those that the selection names, of each head as many as are
/// not attended `elsewhere`.
AttendWork count(const Call& call, const auto& far_keys, std::span<const std::int64_t> elsewhere = {},
                 std::span<AttendWork> by_block = {}) {
  AttendWork total;
  for (std::size_t b = 0; b < call.blocks.size(); ++b) {
    AttendWork work;
    const QueryBlock& block = call.blocks[b];
    for (std::int64_t t = 0; t < block.tokens; ++t) {
      const std::int64_t all = std::int64_t{block.begin} + t + 1;
      const std::int64_t far = std::int64_t{block.far_end(t, call.geometry.dense)} - block.far_begin;
      for (int head = 0; head < call.geometry.kv_heads; ++head) {
        // Heads that choose apart may together ask for more than there is; reading everything once would
        // serve them.
        const std::int64_t left = elsewhere.empty() ? far : far - elsewhere[static_cast<std::size_t>(head)];
        const std::int64_t chosen = std::min<std::int64_t>(left, far_keys(b, t, head));
        work += work_of(all, far, chosen, block.kv.heads[static_cast<std::size_t>(head)].token_bytes());
      }
    }
    if (!by_block.empty()) by_block[b] += work;
    total += work;
  }
  return total;
}

AttendWork count_selected(const Call& call, std::span<const std::int64_t> elsewhere = {},
                          std::span<AttendWork> by_block = {}) {
  std::vector<std::vector<std::int64_t>> far_keys(call.blocks.size());  // per block: [T, Hkv]
  const auto place = [&](std::int64_t t, int head) {
    return static_cast<std::size_t>(t * call.geometry.kv_heads + head);
  };
  for (std::size_t b = 0; b < call.blocks.size(); ++b) far_keys[b].resize(place(call.blocks[b].tokens, 0));
  for (const SetGroup& group : call.groups) {
    for (std::int64_t t = group.token_begin; t < group.token_end; ++t) {
      const Position far_end = call.blocks[group.block].far_end(t, call.geometry.dense);
      far_keys[group.block][place(t, group.kv_head)] += group.far_keys(far_end);
    }
  }
  return count(
      call, [&](std::size_t b, std::int64_t t, int head) { return far_keys[b][place(t, head)]; }, elsewhere,
      by_block);
}

AttendWork count_all(const Call& call, std::span<AttendWork> by_block = {}) {
  return count(
      call, [](std::size_t, std::int64_t, int) { return std::numeric_limits<std::int64_t>::max(); }, {},
      by_block);
}

/// Prefill attention of one block over its whole document and its tail.
void attend_both(Call& call, std::size_t b, const TailRows& tail) {
  const QueryBlock& block = call.blocks[b];
  const std::int64_t rows = block.tokens * call.geometry.query_heads, d = call.geometry.head_dim;
  attend_span(block.q, block.tokens, call.geometry.query_heads, block.kv.heads, tail.seam,
              call.geometry.scale, call.outputs[b], call.lse[b].data(), *call.geometry.pool);
  if (tail.elsewhere) return;
  std::vector<float> output(static_cast<std::size_t>(rows * d)), lse(static_cast<std::size_t>(rows));
  attend_span(block.q, block.tokens, call.geometry.query_heads, tail.kv.heads, block.begin - tail.seam,
              call.geometry.scale, output.data(), lse.data(), *call.geometry.pool);
  merge({.output = call.outputs[b], .lse = call.lse[b].data(), .rows = rows, .d = d},
        {.output = output.data(), .lse = lse.data(), .rows = rows, .d = d});
}

/// The peaks of the groups that attended all keys by one item, or all of their document by a shared one.
std::vector<KeyPeaks> key_peaks(const Call& call) {
  std::vector<KeyPeaks> found(call.groups.size());
  for (std::size_t g = 0; g < found.size(); ++g) {
    const SetGroup& group = call.groups[g];
    if (!group.complete || group.token_end - group.token_begin != 1) continue;
    if (!call.shared_row.empty() && call.shared_row[g] >= 0) {
      const SharedRows& rows = call.shared[static_cast<std::size_t>(group.kv_head)];
      found[g] = {.end = rows.all.end,
                  .peaks = rows.peaks,
                  .stride = std::ssize(rows.lse),
                  .first = call.shared_row[g]};
    } else if (call.work[g].size() == 1 && is_whole(group, call.work[g])) {
      const PartWork& work = call.work[g].front();
      if (work.peaks.empty()) continue;
      found[g] = {.end = work.part.keys.runs().front().end,
                  .peaks = work.peaks,
                  .stride = work.part.queries.count(),
                  .first = 0};
    }
  }
  return found;
}

void run(Call& call, const std::vector<bool>& prefilled, const MassSink& mass, std::span<float* const> lse) {
  check_cancel();
  for (std::size_t b = 0; b < call.blocks.size(); ++b) {
    const QueryBlock& block = call.blocks[b];
    call.lse.emplace_back(static_cast<std::size_t>(block.tokens * call.geometry.query_heads));
    if (!prefilled[b]) continue;
    if (const TailRows* const tail = tail_of(call.tails, b); tail != nullptr) {
      attend_both(call, b, *tail);
      continue;
    }
    std::vector<KvRows> kv(block.kv.heads.begin(), block.kv.heads.end());
    for (KvRows& head : kv) head.rows = block.begin + block.tokens;  // prefill's last query is the last row's
    attend_prefill(block.q, block.tokens, call.geometry.query_heads, kv, call.geometry.scale, call.outputs[b],
                   call.lse[b].data(), *call.geometry.pool);
  }
  call.peaks = mass.least > 0;
  run_parts(call, prefilled);
  if (mass)
    report_mass({.groups = call.groups,
                 .blocks = call.blocks,
                 .tails = call.tails,
                 .lse = call.lse,
                 .peaks = call.peaks ? key_peaks(call) : std::vector<KeyPeaks>(call.groups.size())},
                call.geometry, mass);
  for (std::size_t b = 0; b < lse.size(); ++b) std::copy(call.lse[b].begin(), call.lse[b].end(), lse[b]);
}

}  // namespace

AttendWork& AttendWork::operator+=(const AttendWork& other) {
  dense_keys += other.dense_keys;
  far_keys += other.far_keys;
  far_total += other.far_total;
  full_keys += other.full_keys;
  kv_bytes += other.kv_bytes;
  full_bytes += other.full_bytes;
  return *this;
}

AttendWork attend(std::span<const QueryBlock> blocks, const Selection& selection,
                  const LayerGeometry& geometry, std::span<float* const> outputs, const MassSink& mass,
                  std::span<float* const> lse) {
  LODE_ASSERT(blocks.size() == outputs.size() && geometry.pool != nullptr);
  Call call = {.blocks = blocks,
               .geometry = geometry,
               .outputs = outputs,
               .groups = group_sets({&selection, 1}, blocks, geometry),
               .lse = {}};
  std::vector<bool> prefilled;
  for (const QueryBlock& block : blocks) prefilled.push_back(block.tokens > 1);
  for (const SetGroup& group : call.groups) prefilled[group.block] = prefilled[group.block] && group.complete;
  run(call, prefilled, mass, lse);
  return count_selected(call);
}

AttendWork attend_full(std::span<const QueryBlock> blocks, const LayerGeometry& geometry,
                       std::span<float* const> outputs, const MassSink& mass, std::span<float* const> lse) {
  LODE_ASSERT(blocks.size() == outputs.size() && geometry.pool != nullptr);
  std::vector<bool> prefilled;
  for (const QueryBlock& block : blocks) prefilled.push_back(block.tokens > 1);
  const std::vector<bool> skip = mass ? std::vector<bool>(blocks.size(), false) : prefilled;
  Call call = {.blocks = blocks,
               .geometry = geometry,
               .outputs = outputs,
               .groups = whole_groups(blocks, geometry, skip),
               .lse = {}};
  run(call, prefilled, mass, lse);
  return count_full(blocks, geometry);
}

void attend_branches(const BranchCall& given, const LayerGeometry& geometry, const MassSink& mass) {
  LODE_ASSERT(given.blocks.size() == given.outputs.size() && given.blocks.size() == given.tails.size() &&
              geometry.pool != nullptr);
  const bool full = given.selections.empty();
  std::vector<bool> prefilled;
  for (const QueryBlock& block : given.blocks) prefilled.push_back(is_wide(block));
  const std::vector<bool> skip = mass ? std::vector<bool>(prefilled.size(), false) : prefilled;
  Call call = {.blocks = given.blocks,
               .geometry = geometry,
               .outputs = given.outputs,
               .groups = full ? whole_groups(given.blocks, geometry, skip)
                              : group_sets(given.selections, given.blocks, geometry),
               .lse = {},
               .tails = given.tails};
  for (const SetGroup& group : call.groups) prefilled[group.block] = prefilled[group.block] && group.complete;
  run(call, prefilled, mass, given.lse);
  if (full)
    count_all(call, given.work);
  else
    count_selected(call, {}, given.work);
}

void attend_far(const QueryBlock& block, const Selection& selection, const LayerGeometry& geometry,
                AttentionState state) {
  LODE_ASSERT(geometry.pool != nullptr && state.rows == block.tokens * geometry.query_heads);
  check_cancel();
  float* const output = state.output;
  Call call = {.blocks = {&block, 1},
               .geometry = geometry,
               .outputs = {&output, 1},
               .groups = group_sets({&selection, 1}, {&block, 1}, geometry),
               .lse = {std::vector<float>(static_cast<std::size_t>(state.rows))},
               .work = {},
               .far_only = true};
  run_parts(call, {false});
  std::copy(call.lse[0].begin(), call.lse[0].end(), state.lse);
}

AttendWork count_attended(std::span<const QueryBlock> blocks, const Selection& selection,
                          const LayerGeometry& geometry, std::span<const std::int64_t> elsewhere) {
  return count_selected({.blocks = blocks,
                         .geometry = geometry,
                         .outputs = {},
                         .groups = group_sets({&selection, 1}, blocks, geometry),
                         .lse = {}},
                        elsewhere);
}

AttendWork work_of(std::int64_t all, std::int64_t far, std::int64_t chosen, std::int64_t token_bytes) {
  return {.dense_keys = all - far,
          .far_keys = chosen,
          .far_total = far,
          .full_keys = all,
          .kv_bytes = (all - far + chosen) * token_bytes,
          .full_bytes = all * token_bytes};
}

AttendWork count_full(std::span<const QueryBlock> blocks, const LayerGeometry& geometry) {
  return count_all({.blocks = blocks, .geometry = geometry, .outputs = {}, .groups = {}, .lse = {}});
}

}  // namespace lode
