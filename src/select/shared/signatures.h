// SPDX-License-Identifier: Apache-2.0
// The packed signatures of one sequence and layer: computed once per key, appended, cut, saved, never
// computed again. Tables over them, where there are any, are made from them and not saved.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ann/hashing/half_tables.h"
#include "lodestone/types.h"

namespace lode {

class SectionWriter;
class SectionReader;

class SignatureIndex {
 public:
  SignatureIndex() = default;
  /// No keys yet: the first to be added is `begin`. `sets` signatures of `words` words for each key.
  SignatureIndex(Position begin, int sets, int words);

  Position begin() const { return begin_; }
  Position end() const { return end_; }  ///< keys [begin, end) are in
  int words() const { return words_; }
  /// Signatures of keys [from, to) in one set: [to - from, words].
  const std::uint32_t* keys(int set, Position from) const {
    return codes_[static_cast<std::size_t>(set)].data() + std::int64_t{from - begin_} * words_;
  }

  /// Room for keys [end(), end() + count): the caller writes set s at new_keys(s), then all are in.
  void grow(std::int64_t count);
  std::uint32_t* writable(int set, Position from) {
    return codes_[static_cast<std::size_t>(set)].data() + std::int64_t{from - begin_} * words_;
  }
  void roll_back(std::int64_t tokens);  ///< forgets keys at or beyond
  /// Makes tables of one set anew if they have fallen behind its keys. Of 32-bit signatures only.
  void refresh_tables(int set);
  /// Of the first keys of a set, or of none.
  const HalfTables& tables(int set) const { return tables_[static_cast<std::size_t>(set)]; }
  std::int64_t bytes() const;  ///< memory held

  /// `functions` is the fingerprint of what made the signatures.
  void save(SectionWriter& out, const std::string& functions) const;
  /// What save wrote; InputError unless it fits sets, words, first key, functions and a context of `tokens`.
  static SignatureIndex load(const SectionReader& in, Position begin, int sets, int words,
                             const std::string& functions, std::int64_t tokens);

 private:
  Position begin_ = 0, end_ = 0;
  int words_ = 1;
  std::vector<std::vector<std::uint32_t>> codes_;  // [S][keys, words]
  std::vector<HalfTables> tables_;                 // [S]
};

}  // namespace lode
