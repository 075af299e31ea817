// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding: the "model" of tokenizer.json. Vocabulary, merges, and the encoding of one piece of
// text.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "lodestone/types.h"
#include "text/utf8.h"

namespace lode {

/// From a pair of tokens to the rank of its merge and the token that it gives. Open addressing, half full at
/// most.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = kNone;
    TokenId token = -1;
  };
  static constexpr std::uint32_t kNone = UINT32_MAX;

  static std::uint64_t pair_of(TokenId left, TokenId right) {
    return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
  }

  explicit MergeTable(std::size_t merges = 0);
  /// A pair that is there already takes the new rank, as in the reference.
  void put(TokenId left, TokenId right, Merge merge);
  /// rank kNone when the pair does not merge.
  Merge find(TokenId left, TokenId right) const;
  std::size_t slots() const { return slots_.size(); }
  /// Calls `visit(left, right)` for every pair, in no particular order.
  template <class F>
  void for_each(F visit) const {
    for (const Slot& slot : slots_) {
      if (slot.pair != kEmpty) visit(static_cast<TokenId>(slot.pair >> 32), static_cast<TokenId>(slot.pair));
    }
  }

 private:
  static constexpr std::uint64_t kEmpty = UINT64_MAX;
  struct Slot {
    std::uint64_t pair = kEmpty;
    Merge merge;
  };
  std::size_t slot_of(std::uint64_t pair) const;
  std::vector<Slot> slots_;  // a power of two
};

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

class Bpe {
 public:
  /// `byte_level`: pieces are read as bytes, each of which the vocabulary holds as a printable character.
  Bpe(const Json& model, bool byte_level, const std::string& where);

  Bpe(const Bpe&) = delete;
  Bpe(Bpe&&) = default;

  /// Working memory of encode().
  struct Scratch {
    struct Symbol {
      TokenId token;               // -1: merged into the one before
      std::int32_t before, after;  // -1: none
    };
    std::vector<Symbol> symbols;
    std::vector<std::uint64_t> queue;  // rank in the upper half, index of the left symbol in the lower
    std::vector<TokenId> word;
    std::vector<std::uint32_t> ranks;
  };
  /// Appends the token of a piece that ignore_merges takes from the vocabulary as it is; false when there is
  /// none.
  bool encode_whole(std::string_view piece, std::vector<TokenId>& tokens) const;
  /// Appends the tokens that merging gives of a piece, which is valid UTF-8 and not empty.
  void encode(std::string_view piece, Scratch& scratch, std::vector<TokenId>& tokens) const;
  /// Bytes at the front of a piece that merge alike without what follows them: up to the first place where
  /// two known characters meet that no merge brings together.
  std::size_t independent_bytes(std::string_view piece) const;

  /// As the file spells it; nothing for an id that it leaves out.
  std::optional<std::string_view> text_of(TokenId token) const;
  std::optional<TokenId> find(std::string_view text) const;
  /// One more than the highest id.
  TokenId size() const { return static_cast<TokenId>(texts_.size()); }
  static constexpr TokenId kMaxTokens = 1 << 22;

 private:
  void read_vocab(const Json& model, const std::string& where);
  void read_merges(const Json& model, const std::string& where);
  void read_scores(const Json& scores, const std::string& where);
  void index_units();
  void index_meetings();
  CodePoint first_unit(std::string_view piece) const;
  TokenId unit_at_end(TokenId token, bool back) const;
  void start(std::string_view piece, std::vector<TokenId>& word) const;
  bool put_bytes(std::string_view unit, std::vector<TokenId>& word) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;

  bool byte_level_, byte_fallback_, fuse_unknown_, ignore_merges_;
  std::string where_;
  std::optional<std::string> unknown_text_;
  std::optional<TokenId> unknown_;
  std::vector<std::string> texts_;  // by id; empty: left out, unless it is empty_token_
  std::optional<TokenId> empty_token_;
  std::unordered_map<std::string_view, TokenId> ids_;  // views of texts_
  // By bytes; only with ignore_merges_ and byte_level_.
  std::unordered_map<std::string, TokenId, TextHash, std::equal_to<>> whole_;
  std::vector<TokenId> units_;              // by byte (byte_level_) or code point; -1: not in the vocabulary
  std::array<TokenId, 256> byte_tokens_{};  // "<0xHH>"; -1: not in the vocabulary
  MergeTable merges_;
  MergeTable meetings_;  // pairs of units that some merge brings together
};

}  // namespace lode
