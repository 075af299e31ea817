// SPDX-License-Identifier: Apache-2.0
#include "cluster/merge_states.h"

#include <algorithm>
#include <vector>

namespace lode {

namespace {

/// Rows of a state as one message: [rows, d] outputs, then [rows] lse.
struct Packed {
  std::vector<float> values;
  std::int64_t rows = 0, d = 0;

  Packed(std::int64_t rows_, std::int64_t d_)
      : values(static_cast<std::size_t>(rows_ * (d_ + 1))), rows(rows_), d(d_) {}
  AttentionState state() { return {values.data(), values.data() + rows * d, rows, d}; }
  std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(values)); }
};

Packed pack(const AttentionState& state, const Share& share) {
  Packed packed(share.count(), state.d);
  std::copy_n(state.output + share.begin * state.d, share.count() * state.d, packed.state().output);
  std::copy_n(state.lse + share.begin, share.count(), packed.state().lse);
  return packed;
}

}  // namespace

void merge_own_rows(Communicator& ranks, AttentionState state, std::span<const Share> rows) {
  const Share own = rows[static_cast<std::size_t>(ranks.rank())];
  std::vector<Packed> out, in;
  for (const Share& wanted : rows) {
    out.push_back(pack(state, wanted));
    in.emplace_back(own.count(), state.d);
  }
  std::vector<std::span<const std::byte>> to;
  std::vector<std::span<std::byte>> from;
  for (Packed& packed : out) to.push_back(packed.bytes());
  for (Packed& packed : in) from.push_back(packed.bytes());
  ranks.exchange(to, from);
  const AttentionState merged = {state.output + own.begin * state.d, state.lse + own.begin, own.count(),
                                 state.d};
  merged.clear();
  for (Packed& packed : in) merge(merged, packed.state());
}

void merge_states(Communicator& ranks, AttentionState state, MergedParts wanted) {
  if (ranks.size() == 1) return;
  std::vector<Share> shares;
  for (int r = 0; r < ranks.size(); ++r) shares.push_back(share_of(state.rows, r, ranks.size()));
  merge_own_rows(ranks, state, shares);
  const auto gather = [&](float* numbers, std::int64_t of_row) {
    std::vector<std::span<std::byte>> parts;
    for (const Share& share : shares)
      parts.push_back(std::as_writable_bytes(
          std::span(numbers + share.begin * of_row, static_cast<std::size_t>(share.count() * of_row))));
    ranks.all_gather(parts);
  };
  if (wanted == MergedParts::output) return gather(state.output, state.d);
  std::vector<float> both(static_cast<std::size_t>(state.rows * (state.d + 1)));  // [rows, d + 1]
  const auto row_of = [&](std::int64_t row) { return both.data() + row * (state.d + 1); };
  const Share own = shares[static_cast<std::size_t>(ranks.rank())];
  for (std::int64_t row = own.begin; row < own.end; ++row) {
    std::copy_n(state.output + row * state.d, state.d, row_of(row));
    row_of(row)[state.d] = state.lse[row];
  }
  gather(both.data(), state.d + 1);
  for (std::int64_t row = 0; row < state.rows; ++row) {
    std::copy_n(row_of(row), state.d, state.output + row * state.d);
    state.lse[row] = row_of(row)[state.d];
  }
}

}  // namespace lode
