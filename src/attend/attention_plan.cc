// SPDX-License-Identifier: Apache-2.0
// Key lists of a step, checked and brought into the kernels' form once for all layers.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attend/given_heads.h"
#include "attend/keys.h"
#include "kernels/kernels.h"
#include "lodestone/attend.h"
#include "lodestone/error.h"

namespace lode {

struct AttentionPlan::Lists {
  std::vector<KeyList> keys;  // [B * per_token]
  int per_token = 1, query_heads = 0, kv_heads = 0;
  std::int64_t rows = 0;  // one past the last row of any list
};

namespace {

/// A page or a run of a list.
struct Piece {
  Run rows;
  float log_weight = 0.0f;
};

void check_heads(const KeyLists& lists, int query_heads, int kv_heads) {
  if (kv_heads < 1 || query_heads < 1 || query_heads % kv_heads != 0)
    throw InputError(
        fmt::format("plan: expected query heads that are a multiple of the KV heads, found {} and {}",
                    query_heads, kv_heads));
  if (lists.per_token != 1 && lists.per_token != kv_heads && lists.per_token != query_heads)
    throw InputError(
        fmt::format("plan: expected 1, {} (KV heads) or {} (query heads) lists a token, found {}", kv_heads,
                    query_heads, lists.per_token));
}

/// How many lists there are, when `indptr` cuts all entries into lists of whole tokens.
std::int64_t checked_lists(const KeyLists& lists) {
  const std::span<const std::int32_t> indptr = lists.indptr;
  const auto entries = std::ssize(lists.pages) + std::ssize(lists.runs);
  if (indptr.empty() || (std::ssize(indptr) - 1) % lists.per_token != 0)
    throw InputError(fmt::format("plan: expected an indptr of a multiple of {} and 1 more, found {}",
                                 lists.per_token, indptr.size()));
  if (indptr.front() != 0 || indptr.back() != entries || !std::is_sorted(indptr.begin(), indptr.end()))
    throw InputError(fmt::format("plan: expected an indptr that rises from 0 to {} entries, found {} to {}{}",
                                 entries, indptr.front(), indptr.back(),
                                 std::is_sorted(indptr.begin(), indptr.end()) ? "" : " with a fall between"));
  return std::ssize(indptr) - 1;
}

/// What belongs to pages alone, and fits them.
void check_pages(const KeyLists& lists, std::int64_t count) {
  const bool plain = lists.page_size == 1 && lists.last_page_rows.empty() && lists.log_weights.empty();
  if (!lists.runs.empty() && (!lists.pages.empty() || !plain))
    throw InputError(
        "plan: expected either runs alone or pages with their size, last rows and weights, found both");
  if (lists.page_size < 1 || lists.page_size > std::numeric_limits<Position>::max())
    throw InputError(fmt::format("plan: expected pages of 1 row or more, found {}", lists.page_size));
  if (!lists.last_page_rows.empty() && std::ssize(lists.last_page_rows) != count)
    throw InputError(fmt::format("plan: expected the rows of the last page of each of {} lists, found {}",
                                 count, lists.last_page_rows.size()));
  if (!lists.log_weights.empty() && lists.log_weights.size() != lists.pages.size())
    throw InputError(fmt::format("plan: expected a log-weight for each of {} pages, found {}",
                                 lists.pages.size(), lists.log_weights.size()));
}

Piece page_of(const KeyLists& lists, std::size_t list, std::size_t entry) {
  const Position page = lists.pages[entry];
  const bool last = entry + 1 == static_cast<std::size_t>(lists.indptr[list + 1]);
  const std::int64_t size =
      last && !lists.last_page_rows.empty() ? lists.last_page_rows[list] : lists.page_size;
  const std::int64_t begin = page * lists.page_size;
  if (page < 0 || begin > std::numeric_limits<Position>::max() - lists.page_size)
    throw InputError(
        fmt::format("plan: expected page numbers of 0 or more, found {} in list {}", page, list));
  if (size < 1 || size > lists.page_size)
    throw InputError(fmt::format("plan: expected 1 to {} rows in the last page, found {} in list {}",
                                 lists.page_size, size, list));
  const float weight = lists.log_weights.empty() ? 0.0f : lists.log_weights[entry];
  if (!std::isfinite(weight))
    throw InputError(fmt::format("plan: expected finite log-weights, found {} in list {}", weight, list));
  return {{static_cast<Position>(begin), static_cast<Position>(begin + size)}, weight};
}

Piece run_of(const KeyLists& lists, std::size_t list, std::size_t entry) {
  const Run run = lists.runs[entry];
  if (run.begin < 0 || run.end < run.begin)
    throw InputError(fmt::format(
        "plan: expected runs from a row of 0 or more to one past their last, found {} to {} in list {}",
        run.begin, run.end, list));
  return {run, 0.0f};
}

/// The pieces of a list, rising. InputError when a row is in two of them.
std::vector<Piece> pieces_of(const KeyLists& lists, std::size_t list) {
  std::vector<Piece> pieces;
  for (auto i = static_cast<std::size_t>(lists.indptr[list]); std::cmp_less(i, lists.indptr[list + 1]); ++i) {
    const Piece piece = lists.runs.empty() ? page_of(lists, list, i) : run_of(lists, list, i);
    if (piece.rows.begin < piece.rows.end) pieces.push_back(piece);
  }
  const auto before = [](const Piece& a, const Piece& b) { return a.rows.begin < b.rows.begin; };
  // Most lists come rising.
  if (!std::is_sorted(pieces.begin(), pieces.end(), before)) std::sort(pieces.begin(), pieces.end(), before);
  for (std::size_t i = 1; i < pieces.size(); ++i)
    if (pieces[i].rows.begin < pieces[i - 1].rows.end)
      throw InputError(fmt::format("plan: expected each row once a list, found row {} twice in list {}",
                                   pieces[i].rows.begin, list));
  return pieces;
}

KeyList key_list(std::span<const Piece> pieces) {
  KeyList keys;
  FarKeys weighted;  // a run has no room for weights
  for (const Piece& piece : pieces) {
    if (piece.log_weight == 0.0f) keys.add(piece.rows);
    for (Position row = piece.rows.begin; piece.log_weight != 0.0f && row < piece.rows.end; ++row) {
      weighted.rows.push_back(row);
      weighted.log_weights.push_back(piece.log_weight);
    }
  }
  keys.add(weighted, 0, std::numeric_limits<Position>::max());
  keys.finish();
  return keys;
}

/// The planned lists over a layer's keys: one item for each token and list, or KV head where these share a list.
std::vector<AttendItem> items_of(std::span<const KeyList> lists, int per_token, int query_heads,
                                 std::span<const float> q, std::span<const KvRows> kv, AttentionState state) {
  const std::int64_t d = kv.front().d, kv_heads = std::ssize(kv);
  const std::int64_t choices = std::max<std::int64_t>(per_token, kv_heads), queries = query_heads / choices;
  std::vector<AttendItem> items;
  for (std::int64_t i = 0; i < std::ssize(lists) / per_token * choices; ++i) {
    const KeyList& keys = lists[static_cast<std::size_t>(i * per_token / choices)];
    items.push_back({.q = q.data() + i * queries * d,
                     .queries = static_cast<int>(queries),
                     .kv = kv[static_cast<std::size_t>(i % choices * kv_heads / choices)],
                     .runs = keys.runs(),
                     .rows = keys.rows(),
                     .log_weights = keys.log_weights(),
                     .o = state.output + i * queries * d,
                     .lse = state.lse + i * queries});
  }
  return items;
}

}  // namespace

AttentionPlan::AttentionPlan(const KeyLists& lists, int query_heads, int kv_heads) {
  check_heads(lists, query_heads, kv_heads);
  const std::int64_t count = checked_lists(lists);
  check_pages(lists, count);
  auto made = std::make_shared<Lists>();
  made->per_token = lists.per_token;
  made->query_heads = query_heads;
  made->kv_heads = kv_heads;
  for (std::size_t list = 0; std::cmp_less(list, count); ++list) {
    const std::vector<Piece> pieces = pieces_of(lists, list);
    if (!pieces.empty()) made->rows = std::max<std::int64_t>(made->rows, pieces.back().rows.end);
    made->keys.push_back(key_list(pieces));
  }
  lists_ = std::move(made);
}

void AttentionPlan::run(std::span<const float> q, std::span<const KvRows> kv, float scale,
                        AttentionState state, ThreadPool& threads) const {
  if (std::cmp_not_equal(kv.size(), kv_heads()))
    throw InputError(fmt::format("plan: expected {} KV heads, found {}", kv_heads(), kv.size()));
  const std::int64_t d = kv.front().d, rows = kv.front().rows;
  const std::int64_t states = tokens() * query_heads();
  if (std::cmp_not_equal(q.size(), states * d) ||
      (states > 0 && query_heads_of(q.size(), kv, tokens()) != query_heads()))
    throw InputError(
        fmt::format("plan: expected queries of {} tokens, {} heads and {} numbers, found {} numbers",
                    tokens(), query_heads(), d, q.size()));
  if (state.rows != states || state.d != d)
    throw InputError(
        fmt::format("plan: expected an output of [{}, {}], found [{}, {}]", states, d, state.rows, state.d));
  if (rows < lists_->rows)
    throw InputError(fmt::format("plan: expected keys of {} rows or more, found {}", lists_->rows, rows));
  attend_items(items_of(lists_->keys, lists_->per_token, query_heads(), q, kv, state), scale, threads);
}

std::int64_t AttentionPlan::tokens() const {
  return std::ssize(lists_->keys) / lists_->per_token;
}
std::int64_t AttentionPlan::rows() const {
  return lists_->rows;
}
int AttentionPlan::query_heads() const {
  return lists_->query_heads;
}
int AttentionPlan::kv_heads() const {
  return lists_->kv_heads;
}
int AttentionPlan::lists_per_token() const {
  return lists_->per_token;
}

PlannedRows AttentionPlan::planned_rows() const {
  PlannedRows planned = {.begins = {0}, .rows = {}, .log_weights = {}};
  const bool weighted = std::any_of(lists_->keys.begin(), lists_->keys.end(),
                                    [](const KeyList& keys) { return !keys.log_weights().empty(); });
  for (const KeyList& keys : lists_->keys) {
    planned.rows.insert(planned.rows.end(), keys.rows().begin(), keys.rows().end());
    if (weighted) {
      planned.log_weights.insert(planned.log_weights.end(), keys.log_weights().begin(),
                                 keys.log_weights().end());
      planned.log_weights.resize(planned.rows.size());
    }
    for (const Run& run : keys.runs())
      for (Position row = run.begin; row < run.end; ++row) planned.rows.push_back(row);
    if (weighted) planned.log_weights.resize(planned.rows.size());
    planned.begins.push_back(std::ssize(planned.rows));
  }
  return planned;
}

}  // namespace lode
