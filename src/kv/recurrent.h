// SPDX-License-Identifier: Apache-2.0
// The state of a sequence's recurrent layers, which stands beside the rows of its other layers: one for all tokens
// so far instead of a row for each. A state cannot be cut back, so some are kept as they were at earlier tokens.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

namespace lode {

class RecurrentStates {
 public:
  /// Floats of each layer's state; 0: it is not recurrent. Empty: none is, and all else here does nothing.
  explicit RecurrentStates(std::vector<std::int64_t> floats);

  bool empty() const { return total_ == 0; }
  bool has(int layer) const { return !floats_.empty() && floats_[static_cast<std::size_t>(layer)] > 0; }
  std::int64_t floats() const { return total_; }

  /// A layer's state after the tokens that count; at first it is zero.
  std::span<const float> before(int layer) const;
  /// Where a step puts what it makes of it. The step may be given up: then this is written anew.
  std::span<float> after(int layer);
  /// The step's states count, those of every recurrent layer; `tokens` are all that count now.
  void commit(std::int64_t tokens);

  /// The states as they are can be gone back to from now on. Beyond kMost others the one whose neighbours lie closest
  /// goes.
  void keep();
  static constexpr std::size_t kMost = 8;
  /// The most tokens up to `tokens` that it can be gone back to; 0 always can. Where a GPU is ahead, of those here.
  std::int64_t reachable(std::int64_t tokens) const;
  /// To tokens that are reachable; nothing where these are earlier ones.
  void roll_back(std::int64_t tokens);
  /// Begins with what `other` has after its last token, as if at token 0; nothing is copied.
  void branch_from(const RecurrentStates& other);

  // For files.
  std::int64_t tokens() const { return tokens_; }
  std::vector<std::int64_t> kept() const;  ///< tokens, rising, those that count now last
  std::span<const float> at(std::int64_t tokens) const;
  /// Rising; the last one becomes what counts.
  void restore(std::int64_t tokens, std::span<const float> states);

 private:
  using Buffer = std::shared_ptr<std::vector<float>>;
  std::vector<std::int64_t> floats_, begin_;  // [L]
  std::int64_t total_ = 0, tokens_ = 0;
  Buffer first_, now_, next_;            // at token 0, after tokens_, of the step that runs
  std::map<std::int64_t, Buffer> kept_;  // by tokens
};

}  // namespace lode
