// SPDX-License-Identifier: Apache-2.0
// Decode attention over threads: items are cut into chunks of keys, each chunk gives a partial state, and the
// states of an item are merged in rising order by whichever thread finishes the item's last chunk.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/attention.h"
#include "lodestone/error.h"

namespace lode {
namespace {

// Keys of one chunk. Runs are cut at absolute multiples of it, so that a run's chunks do not depend on where
// other runs lie; small enough that 8k keys of one head keep eight threads busy, large enough that a partial
// state is under 2 % of the bytes read.
constexpr std::int64_t kChunkKeys = AttendItem::kPeakKeys;
// Scattered rows cost more each and come in smaller numbers.
constexpr std::int64_t kChunkRows = 512;

std::atomic<std::int64_t> merge_nanoseconds{0};

/// Consecutive segments of one item that one thread attends into one state.
struct Chunk {
  std::int64_t item = 0;
  std::size_t segment_begin = 0, segment_end = 0;  // runs, into Plan::segments
  std::int64_t row_begin = 0, row_end = 0;         // or rows of the item
  std::int64_t state = 0;                          // floats into the state buffer
};

struct Plan {
  std::vector<Run> segments;
  std::vector<Chunk> chunks;
  std::vector<std::size_t> first_chunk;  // [items + 1]
  std::vector<std::size_t> stretches;    // where each ends, of chunks that one thread takes together
  std::int64_t state_floats = 0;
};

std::int64_t state_size(const AttendItem& item) {
  return std::int64_t{item.queries} * (item.kv.d + 2);
}

void plan_runs(const AttendItem& item, std::int64_t index, Plan& plan) {
  std::int64_t keys = kChunkKeys;  // of the open chunk; full, so that the first segment opens one
  const auto add = [&](Run segment) {
    const std::int64_t n = segment.end - segment.begin;
    if (keys + n > kChunkKeys) {
      plan.chunks.push_back({.item = index, .segment_begin = plan.segments.size()});
      keys = 0;
    }
    plan.segments.push_back(segment);
    plan.chunks.back().segment_end = plan.segments.size();
    keys += n;
  };
  for (std::size_t r = 0; r < item.runs.size();) {
    // Runs that touch are one run: a range selected in parts has the bits of the whole range.
    Run run = item.runs[r++];
    while (r < item.runs.size() && item.runs[r].begin == run.end) run.end = item.runs[r++].end;
    while (run.begin < run.end) {
      const std::int64_t cut = (run.begin / kChunkKeys + 1) * kChunkKeys;
      const auto end = static_cast<Position>(cut < run.end ? cut : run.end);
      add({run.begin, end});
      run.begin = end;
    }
  }
}

/// Chunks side by side go to one thread, which asks the memory for the next one's keys while it attends one;
/// fewer and fewer together, so that threads end at the same time.
void plan_stretches(Plan& plan, int threads) {
  constexpr std::size_t kMost = 16;
  const std::size_t shares = 4 * static_cast<std::size_t>(threads);
  for (std::size_t at = 0; at < plan.chunks.size();) {
    const std::size_t left = plan.chunks.size() - at;
    at += std::clamp<std::size_t>(left / shares, 1, kMost);
    plan.stretches.push_back(at);
  }
}

Plan make_plan(std::span<const AttendItem> items, int threads) {
  Plan plan;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const AttendItem& item = items[i];
    LODE_ASSERT(item.kv.d > 0 && item.kv.d <= kMaxHeadDim);
    LODE_ASSERT(item.log_weights.empty() || item.log_weights.size() == item.rows.size());
    LODE_ASSERT(item.peaks == nullptr ||
                (item.runs.size() == 1 && item.runs[0].begin == 0 && item.rows.empty()));
    const auto index = static_cast<std::int64_t>(i);
    plan.first_chunk.push_back(plan.chunks.size());
    plan_runs(item, index, plan);
    const auto rows = static_cast<std::int64_t>(item.rows.size());
    for (std::int64_t r = 0; r < rows; r += kChunkRows)
      plan.chunks.push_back({.item = index, .row_begin = r, .row_end = std::min(rows, r + kChunkRows)});
    for (std::size_t c = plan.first_chunk.back(); c < plan.chunks.size(); ++c) {
      plan.chunks[c].state = plan.state_floats;
      plan.state_floats += state_size(item);
    }
  }
  plan.first_chunk.push_back(plan.chunks.size());
  plan_stretches(plan, threads);
  return plan;
}

SoftmaxState state_at(float* floats, const AttendItem& item) {
  const std::int64_t values = std::int64_t{item.queries} * item.kv.d;
  return {floats, floats + values, floats + values + item.queries};
}

/// What a thread needs for its chunks.
struct Scratch {
  std::vector<float> scaled;   // [queries, d]
  std::vector<Position> rows;  // of runs that are attended as one list
  std::vector<float> floats;   // [state_size]: the state, which a chunk's own place is too cold to hold
};

/// Runs side by side are attended as one list of rows: each by itself would begin with nothing on its way
/// from memory, and end with sums to fold.
void attend_segments(const KernelTable& table, const AttendItem& item, std::span<const Run> segments,
                     const SoftmaxState& state, Scratch& scratch) {
  if (segments.size() == 1)
    return table.attend_run(scratch.scaled.data(), item.queries, item.kv, segments[0].begin, segments[0].end,
                            state);
  scratch.rows.clear();
  for (const Run& run : segments) {
    const auto at = static_cast<std::ptrdiff_t>(scratch.rows.size());
    scratch.rows.resize(scratch.rows.size() + static_cast<std::size_t>(run.end - run.begin));
    std::iota(scratch.rows.begin() + at, scratch.rows.end(), run.begin);
  }
  table.attend_rows(scratch.scaled.data(), item.queries, item.kv, scratch.rows.data(), nullptr,
                    std::ssize(scratch.rows), state);
}

void attend_chunk(const KernelTable& table, const AttendItem& item, const Plan& plan, const Chunk& chunk,
                  float scale, Scratch& scratch, float* floats) {
  scratch.floats.assign(static_cast<std::size_t>(state_size(item)), 0.0f);
  const SoftmaxState state = state_at(scratch.floats.data(), item);
  std::fill_n(state.m, item.queries, -std::numeric_limits<float>::infinity());
  std::vector<float>& scaled = scratch.scaled;
  scaled.resize(static_cast<std::size_t>(item.queries) * item.kv.d);
  for (std::size_t i = 0; i < scaled.size(); ++i) scaled[i] = item.q[i] * scale;
  if (chunk.segment_end > chunk.segment_begin)
    attend_segments(
        table, item,
        std::span(plan.segments).subspan(chunk.segment_begin, chunk.segment_end - chunk.segment_begin), state,
        scratch);
  if (chunk.row_end > chunk.row_begin)
    table.attend_rows(scaled.data(), item.queries, item.kv, item.rows.data() + chunk.row_begin,
                      item.log_weights.empty() ? nullptr : item.log_weights.data() + chunk.row_begin,
                      chunk.row_end - chunk.row_begin, state);
  std::copy(scratch.floats.begin(), scratch.floats.end(), floats);
}

/// Folds the partial states of an item into its output and log-sum-exp, in rising order.
void merge_item(const AttendItem& item, std::span<const Chunk> chunks, float* states) {
  const std::int64_t d = item.kv.d;
  for (std::size_t c = 0; item.peaks != nullptr && c < chunks.size(); ++c)
    std::copy_n(state_at(states + chunks[c].state, item).m, item.queries,
                item.peaks + c * static_cast<std::size_t>(item.queries));
  for (int r = 0; r < item.queries; ++r) {
    float* o = item.o + r * d;
    std::fill_n(o, d, 0.0f);
    float top = -std::numeric_limits<float>::infinity();
    for (const Chunk& chunk : chunks) {
      const float m = state_at(states + chunk.state, item).m[r];
      top = m > top ? m : top;
    }
    const float safe = std::isinf(top) && top < 0 ? 0.0f : top;  // no finite score in any chunk
    float sum = 0.0f;
    for (const Chunk& chunk : chunks) {
      const SoftmaxState part = state_at(states + chunk.state, item);
      const float weight = std::exp(part.m[r] - safe);
      sum += part.l[r] * weight;
      for (std::int64_t c = 0; c < d; ++c) o[c] += part.o[r * d + c] * weight;
    }
    item.lse[r] = sum == 0.0f ? -std::numeric_limits<float>::infinity() : safe + std::log(sum);
    if (sum == 0.0f) continue;  // nothing attended, or only keys of weight 0: the empty set
    for (std::int64_t c = 0; c < d; ++c) o[c] /= sum;
  }
}

}  // namespace

std::int64_t attend_merge_nanoseconds() noexcept {
  return merge_nanoseconds.load(std::memory_order_relaxed);
}

void attend_items(std::span<const AttendItem> items, float scale, ThreadPool& pool) {
  const KernelTable& table = kernels();
  const Plan plan = make_plan(items, pool.size());
  const auto states = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(plan.state_floats));
  const auto remaining = std::make_unique<std::atomic<std::int64_t>[]>(items.size());
  const auto finish = [&](std::size_t i) {
    const auto start = std::chrono::steady_clock::now();
    const std::size_t first = plan.first_chunk[i], end = plan.first_chunk[i + 1];
    merge_item(items[i], std::span(plan.chunks).subspan(first, end - first), states.get());
    merge_nanoseconds.fetch_add((std::chrono::steady_clock::now() - start).count(),
                                std::memory_order_relaxed);
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::size_t chunks = plan.first_chunk[i + 1] - plan.first_chunk[i];
    remaining[i].store(static_cast<std::int64_t>(chunks), std::memory_order_relaxed);
    if (chunks == 0) finish(i);
  }
  std::vector<Scratch> scratch(static_cast<std::size_t>(pool.size()));
  pool.for_each(std::ssize(plan.stretches), [&](std::int64_t stretch, int worker) {
    const auto s = static_cast<std::size_t>(stretch);
    for (std::size_t c = s == 0 ? 0 : plan.stretches[s - 1]; c < plan.stretches[s]; ++c) {
      const Chunk& chunk = plan.chunks[c];
      const auto i = static_cast<std::size_t>(chunk.item);
      attend_chunk(table, items[i], plan, chunk, scale, scratch[static_cast<std::size_t>(worker)],
                   states.get() + chunk.state);
      if (remaining[i].fetch_sub(1, std::memory_order_acq_rel) == 1) finish(i);
    }
  });
}

}  // namespace lode
