// SPDX-License-Identifier: Apache-2.0
// How far two keys of a head are apart, as its queries see it: the root mean square of q . k - q . k' over
// queries of the context, turned to where questions about it will stand.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/selector.h"
#include "select/device_keys.h"

namespace lode {

/// Queries of a context before RoPE, evenly spread: those at multiples of a stride that doubles whenever
/// there are more than kMost. What is kept depends on positions alone, not on how the context came; where one
/// was cut, what is left stays as coarse as it was.
class QuerySample {
 public:
  static constexpr std::int64_t kMost = 512;

  void take(const KvWrite& write);
  /// The same from the queries of the chunk's wanted tokens alone.
  void take_wanted(const SampledQueries& chunk);
  void roll_back(std::int64_t tokens);
  /// What is kept of tokens [begin, end).
  KeptQueries kept(Position begin, Position end) const;
  /// Takes that behind what is kept here, which becomes as coarse; false, and nothing changes, where it does not fit.
  bool take_back(const KeptQueries& kept);

  std::int64_t tokens() const { return std::ssize(positions_); }
  /// The tokens of the next chunk that may be kept, rising.
  std::vector<Position> wanted(Position begin, std::int64_t tokens) const;
  Position begin() const { return positions_.empty() ? 0 : positions_.front(); }  ///< the first one's
  std::int64_t bytes() const { return static_cast<std::int64_t>(q_.capacity() * sizeof(float)); }
  /// At most so many bytes are ever held of a text of so many tokens.
  static std::int64_t bytes_for(const LayerGeometry& geometry, std::int64_t tokens);
  std::span<const float> token(std::int64_t i) const {
    return std::span(q_).subspan(static_cast<std::size_t>(i * width_), static_cast<std::size_t>(width_));
  }

 private:
  void add(Position position, std::span<const float> q);
  void thin_to(std::int64_t stride);

  std::int64_t stride_ = 1, width_ = 0;  // width: Hq * d
  std::int64_t coarsest_ =
      1;  // the stride at which what is kept was last thinned: a cut lowers stride_ alone
  std::vector<Position> positions_;  // rising
  std::vector<float> q_;             // [tokens, Hq, d] before RoPE
};

/// The sample's queries `which`, as if their tokens stood on positions from `position` on, where questions
/// and answers will: [which, Hq, d].
std::vector<float> queries_behind(const QuerySample& sample, std::span<const std::int64_t> which,
                                  const LayerGeometry& geometry, Position position);

/// Keys [begin, end) of a layer.
struct KeyRange {
  KvLayer kv;
  Position begin = 0, end = 0;
  DeviceKeys* device = nullptr;  ///< that has them too
};

/// L [d, d] per KV head, lower triangular, such that |(k - k') L|^2 is the mean square of scale (q . k - q .
/// k') over the sample's queries of the head's group, rotated to positions from `position` on, and kRidge as
/// much again spread over all directions alike. Queries weigh as much as they are sharp: the root of the sum
/// of p^2 over their softmax p over `keys`; alike when there are none. The identity for a head without
/// queries. The same for any number of threads.
std::vector<std::vector<float>> query_metric(const QuerySample& sample, const LayerGeometry& geometry,
                                             Position position, const KeyRange& keys = {});

}  // namespace lode
