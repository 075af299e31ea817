// SPDX-License-Identifier: Apache-2.0
// Sections of saved signatures: shape = {sets, words, begin, end} int64, functions (text), and codes
// [sets, end - begin, words] uint32.
#include "select/shared/signatures.h"

#include <algorithm>
#include <array>

#include "io/container.h"
#include "lodestone/error.h"

namespace lode {

SignatureIndex::SignatureIndex(Position begin, int sets, int words)
    : begin_(begin),
      end_(begin),
      words_(words),
      codes_(static_cast<std::size_t>(sets)),
      tables_(static_cast<std::size_t>(sets)) {}

void SignatureIndex::refresh_tables(int set) {
  // Keys that are not in the tables are searched one by one: at most an eighth of all.
  constexpr std::int64_t kLeastBehind = 256, kMostShare = 8;
  LODE_ASSERT(words_ == 1);
  const std::int64_t keys = end_ - begin_;
  HalfTables& tables = tables_[static_cast<std::size_t>(set)];
  if (keys - tables.size() > std::max(kLeastBehind, tables.size() / kMostShare) || tables.size() > keys)
    tables.build(codes_[static_cast<std::size_t>(set)]);
}

void SignatureIndex::grow(std::int64_t count) {
  end_ += static_cast<Position>(count);
  for (auto& codes : codes_) codes.resize(static_cast<std::size_t>(std::int64_t{end_ - begin_} * words_));
}

void SignatureIndex::roll_back(std::int64_t tokens) {
  if (end_ <= tokens) return;
  end_ = std::max(begin_, static_cast<Position>(tokens));
  grow(0);
  for (HalfTables& tables : tables_) {
    if (tables.size() > end_ - begin_) tables = {};
  }
}

std::int64_t SignatureIndex::bytes() const {
  std::size_t bytes = 0;
  for (const auto& codes : codes_) bytes += codes.capacity() * sizeof(std::uint32_t);
  std::int64_t of_tables = 0;
  for (const HalfTables& tables : tables_) of_tables += tables.bytes();
  return static_cast<std::int64_t>(bytes) + of_tables;
}

void SignatureIndex::save(SectionWriter& out, const std::string& functions) const {
  const std::array<std::int64_t, 4> shape = {std::ssize(codes_), words_, begin_, end_};
  std::vector<std::uint32_t> all;
  for (const auto& codes : codes_) all.insert(all.end(), codes.begin(), codes.end());
  out.add<std::int64_t>("shape", shape);
  out.add("functions", std::as_bytes(std::span(functions)));
  out.add<std::uint32_t>("codes", all);
}

SignatureIndex SignatureIndex::load(const SectionReader& in, Position begin, int sets, int words,
                                    const std::string& functions, std::int64_t tokens) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto shape = in.values<std::int64_t>("shape");
  require(shape.size() == 4 && shape[0] == sets && shape[1] == words,
          "as many signatures of a key, and bits of each, as the functions give");
  require(shape[2] == begin && shape[3] >= begin && shape[3] <= std::max<std::int64_t>(begin, tokens),
          "keys behind the sink and within the context");
  const auto made_by = in.values<char>("functions");
  require(std::string_view(made_by.data(), made_by.size()) == functions,
          "signatures of the functions that the spec names: index the text again");
  const auto all = in.values<std::uint32_t>("codes");
  const std::int64_t each = (shape[3] - begin) * words;
  require(std::ssize(all) == sets * each, "a section 'codes' of the size that 'shape' gives");
  SignatureIndex index(begin, sets, words);
  for (int set = 0; set < sets; ++set) {
    const auto own = all.subspan(static_cast<std::size_t>(set * each), static_cast<std::size_t>(each));
    index.codes_[static_cast<std::size_t>(set)].assign(own.begin(), own.end());
  }
  index.end_ = static_cast<Position>(shape[3]);
  return index;
}

}  // namespace lode
