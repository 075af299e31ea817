// SPDX-License-Identifier: Apache-2.0
// The text that facts are hidden in: one long run of text files or prose, cut at the ends of sentences.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/rng.h"
#include "lab/tasks/meter.h"

namespace lode {

/// Whether a fact may go between text[at - 1] and text[at]: after the end of a sentence inside a paragraph,
/// that is . ! or ? and perhaps a closing quotation mark or bracket, then a space and a capital letter or an
/// opening mark.
bool is_sentence_gap(std::string_view text, std::size_t at);

/// A stretch of the haystack. Between pieces that are `gap`s a fact may be put.
struct Passage {
  struct Piece {
    std::string_view text;  ///< begins with the space that parts it from the piece before
    std::int64_t tokens = 0;
    bool gap = false;  ///< a sentence ends right before this piece, inside a paragraph
  };
  std::vector<Piece> pieces;
  std::int64_t tokens = 0;  ///< of all pieces
};

/// A text as a circle of sentences: a passage may begin at any sentence and goes on at the beginning after
/// the end, so that a short text makes long contexts. Counts each sentence's tokens once, when it is first
/// used.
class Haystack {
 public:
  /// Whether a file of a folder is a text: *.txt, *.md.
  static bool takes(const std::filesystem::directory_entry& file);
  /// The text files of a folder in the order of their names, or one file. InputError when there
  /// is none, or when one is not UTF-8. `keep`, when given, chooses files by name.
  static Haystack read(const std::filesystem::path& path, TokenMeter meter,
                       const std::function<bool(std::string_view)>& keep = {});
  /// The built-in prose, at least `bytes` of it.
  static Haystack prose(std::uint64_t seed, std::size_t bytes, TokenMeter meter);
  /// Enough of it for contexts of `tokens` tokens that differ.
  static Haystack prose_for(std::uint64_t seed, std::int64_t tokens, TokenMeter meter);
  Haystack(std::string text, TokenMeter meter);

  /// As many whole pieces from a random sentence on as `tokens` allows, and the last one cut at a word to
  /// fill the rest.
  Passage cut(std::int64_t tokens, Rng& rng) const;
  /// The same from piece `first` on.
  Passage cut_from(std::size_t first, std::int64_t tokens) const;
  /// The first piece of a random passage.
  std::size_t random_start(Rng& rng) const;

  const TokenMeter& meter() const { return meter_; }
  std::size_t bytes() const { return text_.size(); }
  std::string_view text() const { return text_; }

 private:
  struct Cut {
    std::size_t begin = 0;
    bool gap = false;
  };
  std::string_view piece(std::size_t index) const;
  std::int64_t tokens_of(std::size_t index) const;
  std::string_view fitting_start(std::string_view text, std::int64_t tokens) const;

  std::string text_;
  std::vector<Cut> cuts_;
  mutable std::vector<std::int32_t> tokens_;  // per piece, -1 = not counted yet
  TokenMeter meter_;
};

}  // namespace lode
