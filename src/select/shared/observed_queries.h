// SPDX-License-Identifier: Apache-2.0
// The last queries of a context, by which methods judge keys: what users will ask is not known yet, and these
// are the nearest thing to it. Or those of a prompt, where it is.
#pragma once

#include <cstdint>
#include <vector>

#include "lodestone/selector.h"
#include "select/device_keys.h"

namespace lode {

class ObservedQueries {
 public:
  explicit ObservedQueries(std::int64_t most) : most_(most) {}

  /// Takes the tokens of a write; a gap forgets what was before it.
  void take(const KvWrite& write);
  /// The same from queries that end with those of the chunk's wanted tokens.
  void take_wanted(const SampledQueries& chunk);
  /// The tokens of a chunk that are kept, rising: its last ones.
  std::vector<Position> wanted_of(Position begin, std::int64_t tokens) const;
  void roll_back(std::int64_t tokens);

  Position begin() const { return begin_; }
  std::int64_t tokens() const { return width_ == 0 ? 0 : std::ssize(q_) / width_; }
  std::span<const float> q() const { return q_; }  ///< [tokens, Hq, d] after RoPE
  /// Queries of heads [first, first + heads) that are finite, [.., d].
  std::vector<float> of_heads(int first, int heads, int head_dim) const;
  std::int64_t bytes() const { return static_cast<std::int64_t>(q_.capacity() * sizeof(float)); }

 private:
  void take_last(Position begin, std::int64_t tokens, std::span<const float> last);

  std::int64_t most_;
  Position begin_ = 0;
  std::int64_t width_ = 0;  // Hq * d
  std::vector<float> q_;    // [tokens, Hq, d]
};

}  // namespace lode
