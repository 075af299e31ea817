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

void merge_states(Communicator& ranks, AttentionState state) {
  const int size = ranks.size();
  if (size == 1) return;
  const auto share = [&](int rank) { return share_of(state.rows, rank, size); };
  const Share own = share(ranks.rank());
  std::vector<Packed> out, in;
  for (int r = 0; r < size; ++r) {
    out.push_back(pack(state, share(r)));
    in.emplace_back(own.count(), state.d);
  }
  std::vector<std::span<const std::byte>> to;
  std::vector<std::span<std::byte>> from;
  for (Packed& packed : out) to.push_back(packed.bytes());
  for (Packed& packed : in) from.push_back(packed.bytes());
  ranks.exchange(to, from);
  AttentionState merged = {state.output + own.begin * state.d, state.lse + own.begin, own.count(), state.d};
  merged.clear();
  for (Packed& packed : in) merge(merged, packed.state());

  from.clear();
  for (int r = 0; r < size; ++r)
    from.push_back(std::as_writable_bytes(std::span(state.output + share(r).begin * state.d,
                                                    static_cast<std::size_t>(share(r).count() * state.d))));
  ranks.all_gather(from);
}

}  // namespace lode
