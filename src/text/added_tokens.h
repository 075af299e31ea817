// SPDX-License-Identifier: Apache-2.0
// Tokens that are found in the text itself before anything else: the "added_tokens" of tokenizer.json.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "lodestone/types.h"
#include "text/bpe.h"
#include "text/normalizer.h"

namespace lode {

struct AddedToken {
  TokenId id;
  std::string text;
  bool special, lstrip, rstrip, single_word, normalized;
};

/// Finds the longest of several strings at the leftmost place.
class StringFinder {
 public:
  static constexpr std::size_t kMaxBytes = 512;  ///< of one string: bounds the work at each place

  StringFinder();
  void add(std::string_view text, std::size_t value);
  std::size_t nodes() const { return nodes_.size(); }  ///< at most one a byte added
  struct Match {
    std::size_t begin, end, value;
  };
  /// False when there is none from `from` on.
  bool next(std::string_view text, std::size_t from, Match& match) const;

 private:
  struct Node {
    std::vector<std::pair<unsigned char, std::uint32_t>> children;  // sorted by byte
    std::size_t value = SIZE_MAX;
  };
  const std::pair<unsigned char, std::uint32_t>* child(std::uint32_t node, unsigned char byte) const;
  std::vector<Node> nodes_;
  std::array<bool, 256> begins_{};
};

class AddedTokens {
 public:
  /// `json` may be null. InputError: a token that is empty, too long, or at odds with the vocabulary.
  AddedTokens(const Json& json, const Bpe& bpe, const Normalizer& normalizer, const std::string& where);

  struct Segment {
    std::string_view text;
    TokenId token;  ///< -1: text between tokens
  };
  enum class Stage { before_normalizer, after_normalizer };
  /// Cuts `text` at the tokens that are looked for at this stage; specials only when `specials`.
  void cut(std::string_view text, Stage stage, bool specials, std::vector<Segment>& segments) const;

  const AddedToken* find(TokenId id) const;
  /// One more than the highest id; 0 when there are none.
  TokenId size() const { return by_id_.empty() ? 0 : by_id_.rbegin()->first + 1; }

 private:
  void add(const Json& json, const Bpe& bpe, const std::string& where);

  std::vector<AddedToken> tokens_;
  std::map<TokenId, std::size_t> by_id_;
  StringFinder raw_, normalized_;
};

}  // namespace lode
