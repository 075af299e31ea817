// SPDX-License-Identifier: Apache-2.0
// A bounded sample of the queries of a prefill, for indexes that are made for queries.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/selector.h"
#include "select/device_keys.h"

namespace lode {

/// Keeps all heads' rotated queries of tokens drawn by a hash of their position: which ones does not depend
/// on how the text was cut into chunks. When there are too many, about every second one goes.
class CapturedQueries {
 public:
  static constexpr std::int64_t kAll = std::int64_t{1} << 62;

  CapturedQueries(int query_heads, int head_dim, std::int64_t most_tokens)
      : query_heads_(query_heads), head_dim_(head_dim), most_tokens_(most_tokens) {}

  /// Replaces what was kept from write.begin on. Tokens with a query that is not finite are left out.
  void take(const KvWrite& write);
  /// The same from the queries of the chunk's wanted tokens alone. Others may stand among them and count for nothing.
  void take_wanted(const SampledQueries& chunk);
  /// The tokens of the next chunk that may be kept, rising.
  std::vector<Position> wanted_of(Position begin, std::int64_t tokens) const;
  void cut(std::int64_t tokens);  ///< forgets positions from `tokens` on
  /// What is kept of tokens [begin, end), as bf16.
  KeptQueries kept(Position begin, Position end) const;
  /// Takes that behind what is kept here, which becomes as coarse; false, and nothing changes, where it does not fit.
  bool take_back(const KeptQueries& kept);
  void clear();

  std::int64_t tokens() const { return std::ssize(positions_); }
  std::span<const Position> positions() const { return positions_; }  ///< rising
  /// Queries of heads [first, first + heads), [tokens * heads, d]; of at most `most` tokens, at even steps.
  std::vector<float> of_heads(int first, int heads, std::int64_t most = kAll) const;
  std::int64_t bytes() const;                               ///< memory held
  std::int64_t bytes_in_pieces(std::int64_t tokens) const;  ///< of all that kept() ever gives of a text
  /// At most so many bytes are ever held of a text of so many tokens.
  std::int64_t bytes_for(std::int64_t tokens) const;

 private:
  /// Memory comes in blocks of so many tokens: a vector that grows would hold up to twice what it needs.
  static constexpr std::int64_t kBlockTokens = 128;

  void add(Position position, std::span<const float> q);
  bf16* make_room(Position position);
  void thin();
  std::size_t row() const {
    return static_cast<std::size_t>(query_heads_) * static_cast<std::size_t>(head_dim_);
  }
  bf16* queries_of(std::int64_t token);  // [Hq, d]
  const bf16* queries_of(std::int64_t token) const;

  int query_heads_, head_dim_;
  std::int64_t most_tokens_;
  int level_ = 0;  // one of 2^level_ positions is wanted
  std::vector<Position> positions_;
  std::vector<std::vector<bf16>> blocks_;  // [tokens / kBlockTokens, rounded up][kBlockTokens, Hq, d]
};

}  // namespace lode
