// SPDX-License-Identifier: Apache-2.0
#include "gpu/lists.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>

#include "gpu/backend.h"

namespace lode {

namespace {

constexpr std::int64_t kAlign = 256;  // bytes between the arrays of one upload

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

/// Plain keys and weighted ones of a set below far_end, merged in rising order.
void add_keys(const FarKeys& far, Position far_end, std::vector<Position>& rows,
              std::vector<float>& weights) {
  const auto end_of_plain = std::lower_bound(far.plain.begin(), far.plain.end(), far_end);
  rows.insert(rows.end(), far.plain.begin(), end_of_plain);
  weights.resize(rows.size(), 0.0f);
  std::size_t weighted = 0;
  const auto take_weighted_below = [&](Position end) {
    for (; weighted < far.rows.size() && far.rows[weighted] < end; ++weighted) {
      rows.push_back(far.rows[weighted]);
      weights.push_back(far.log_weights[weighted]);
    }
  };
  for (const Run& run : far.runs) {
    for (Position row = run.begin; row < std::min(run.end, far_end); ++row) {
      take_weighted_below(row);
      rows.push_back(row);
      weights.push_back(0.0f);
    }
  }
  take_weighted_below(far_end);
}

}  // namespace

void HostLists::assign(std::span<const SetGroup> groups, std::span<const ListedBlock> blocks,
                       const LayerGeometry& geometry, std::int64_t tokens) {
  const int group = geometry.group();
  dense_ = geometry.dense;
  if (!blocks.empty() && blocks.front().seam) dense_.window = 0;
  weighted_ = false;
  bool apart = false, tails = false;
  for (const SetGroup& g : groups) {
    for (const Selection::Set& set : g.sets) {
      apart = apart || set.queries.heads != all_heads(group);
      weighted_ = weighted_ || !set.log_weights.empty();
      tails = tails || !set.tail_lse.empty();
    }
  }
  lists_per_head_ = apart ? group : 1;
  const auto lists = static_cast<std::size_t>(tokens * geometry.kv_heads * lists_per_head_);
  rows_.assign(lists, {});
  weights_.assign(lists, {});
  tail_lse_.assign(tails ? static_cast<std::size_t>(tokens * geometry.query_heads) : 0,
                   -std::numeric_limits<float>::infinity());
  tail_output_.assign(tail_lse_.size() * static_cast<std::size_t>(geometry.head_dim), 0.0f);
  for (const SetGroup& g : groups) {
    const ListedBlock& block = blocks[g.block];
    const std::int64_t begin = std::max(g.token_begin, -block.first),
                       end = std::min(g.token_end, tokens - block.first);
    for (std::int64_t t = begin; t < end; ++t)
      for (std::size_t s = 0; s < g.sets.size(); ++s) add_set(g, s, block, t, geometry);
  }
}

/// The keys of a set for one token of its block, once where the group shares a list, and what it estimates of the rest.
void HostLists::add_set(const SetGroup& group, std::size_t set_index, const ListedBlock& block,
                        std::int64_t token, const LayerGeometry& geometry) {
  const Selection::Set& set = group.sets[set_index];
  const std::int64_t number = block.first + token, heads = std::popcount(set.queries.heads);
  Position far_end = block.block->far_end(token, geometry.dense),
           near_begin =
               static_cast<Position>(std::int64_t{block.block->begin} + token + 1 - geometry.dense.window);
  if (block.seam) {
    far_end = std::min(far_end, *block.seam);
    near_begin = (far_end + cuda::kBlockTokens - 1) / cuda::kBlockTokens * cuda::kBlockTokens;
  }
  std::int64_t nth = 0;  // of the set's heads
  for (std::uint32_t rest = set.queries.heads; rest != 0; rest &= rest - 1, ++nth) {
    const int head = std::countr_zero(rest);
    if (lists_per_head_ > 1 || nth == 0) {
      const auto list = static_cast<std::size_t>(
          (number * geometry.kv_heads + group.kv_head) * lists_per_head_ + (lists_per_head_ > 1 ? head : 0));
      add_keys(group.far[set_index], far_end, rows_[list], weights_[list]);
      // Where the window is the context's end, the kernel's own, which slides, leaves a gap behind it.
      for (Position row = far_end; row < near_begin; ++row) rows_[list].push_back(row);
      weights_[list].resize(rows_[list].size(), 0.0f);
    }
    if (set.tail_lse.empty()) continue;
    const std::int64_t from = (token - group.token_begin) * heads + nth,
                       to = number * geometry.query_heads + std::int64_t{group.kv_head} * geometry.group() +
                            head;
    tail_lse_[static_cast<std::size_t>(to)] = set.tail_lse[static_cast<std::size_t>(from)];
    std::copy_n(set.tail_output.data() + from * geometry.head_dim, geometry.head_dim,
                tail_output_.data() + to * geometry.head_dim);
  }
}

void HostLists::add_to_all(Position begin, Position end) {
  for (std::size_t list = 0; list < rows_.size(); ++list) {
    for (Position row = begin; row < end; ++row) rows_[list].push_back(row);
    weights_[list].resize(rows_[list].size(), 0.0f);
  }
}

cuda::RowLists HostLists::upload(cuda::Buffer& device, cuda::StreamHandle stream) const {
  std::size_t most = 1;
  for (const auto& list : rows_) most = std::max(most, list.size());
  const auto lists = static_cast<std::int64_t>(rows_.size()), capacity = static_cast<std::int64_t>(most);
  const std::int64_t rows_bytes = aligned(lists * capacity * 4), counts_bytes = aligned(lists * 4);
  const std::int64_t weights_bytes = weighted_ ? rows_bytes : 0;
  const auto tail_bytes = aligned(static_cast<std::int64_t>(tail_output_.size() * sizeof(float)));
  const auto lse_bytes = aligned(static_cast<std::int64_t>(tail_lse_.size() * sizeof(float)));
  const std::int64_t total = counts_bytes + rows_bytes + weights_bytes + tail_bytes + lse_bytes;
  if (device.bytes() < total) {
    device = {};
    device = cuda::Buffer(total + total / 4, "the lists of chosen keys");
  }
  std::vector<std::byte> staged(static_cast<std::size_t>(total));
  std::byte* at = staged.data();
  const auto put = [&](std::int64_t place, const auto& values) {
    std::ranges::copy(std::as_bytes(std::span(values)), at + place);
  };
  for (std::int64_t i = 0; i < lists; ++i) {
    const auto& rows = rows_[static_cast<std::size_t>(i)];
    const auto count = static_cast<std::int32_t>(rows.size());
    std::memcpy(at + i * 4, &count, 4);
    put(counts_bytes + i * capacity * 4, rows);
    if (weighted_) put(counts_bytes + rows_bytes + i * capacity * 4, weights_[static_cast<std::size_t>(i)]);
  }
  const std::int64_t tails_at = counts_bytes + rows_bytes + weights_bytes;
  put(tails_at, tail_output_);
  put(tails_at + tail_bytes, tail_lse_);
  // Pageable memory: the call returns once the bytes have left.
  cuda::copy(device.as<std::byte>(), at, total, stream);

  auto* const to = device.as<std::byte>();
  const auto floats = [&](std::int64_t offset) { return reinterpret_cast<const float*>(to + offset); };
  return {.rows = reinterpret_cast<const std::int32_t*>(to + counts_bytes),
          .counts = reinterpret_cast<const std::int32_t*>(to),
          .log_weights = weighted_ ? floats(counts_bytes + rows_bytes) : nullptr,
          .capacity = capacity,
          .lists_per_head = lists_per_head_,
          .sink = dense_.sink,
          .window = dense_.window,
          .tail_output = tail_lse_.empty() ? nullptr : floats(tails_at),
          .tail_lse = tail_lse_.empty() ? nullptr : floats(tails_at + tail_bytes)};
}

cuda::Queries part_of(const cuda::Queries& queries, int first, int count) {
  const std::int64_t q = first * std::int64_t{queries.query_heads} * queries.layout.head_dim;
  cuda::Queries some = queries;
  some.count = count;
  some.tokens += first;
  some.q += q;
  some.o += q;
  if (some.lse != nullptr) some.lse += std::int64_t{first} * queries.query_heads;
  return some;
}

void attend_lists(const cuda::Queries& queries, const cuda::RowLists& lists, std::int64_t max_tokens,
                  void* workspace, cuda::StreamHandle stream) {
  const std::int64_t q = std::int64_t{queries.query_heads} * queries.layout.head_dim,
                     per_token = std::int64_t{queries.layout.kv_heads} * lists.lists_per_head;
  for (int first = 0; first < queries.count; first += kMostSparseTokens) {
    const cuda::Queries some = part_of(queries, first, std::min(kMostSparseTokens, queries.count - first));
    cuda::RowLists of = lists;
    of.rows += first * per_token * lists.capacity;
    of.counts += first * per_token;
    if (of.log_weights != nullptr) of.log_weights += first * per_token * lists.capacity;
    if (of.tail_output != nullptr) of.tail_output += first * q;
    if (of.tail_lse != nullptr) of.tail_lse += std::int64_t{first} * queries.query_heads;
    attend_rows_decode(some, of, max_tokens, workspace, stream);
  }
}

}  // namespace lode
