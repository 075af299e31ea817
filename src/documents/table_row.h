// SPDX-License-Identifier: Apache-2.0
// Where the cells of a table's row stand: columns that the document gives no cell of their own, because a span covers them or an
// empty cell is repeated there, become empty cells in front of the next one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "documents/item_number.h"

namespace lode {

/// How often a cell or row stands, as a file's attribute says: at least once.
inline std::size_t repeats_of(const std::string& attribute) {
  return static_cast<std::size_t>(std::max<std::int64_t>(number_of(attribute, 1), 1));
}

/// Columns that can get empty cells. Files say up to 16,384 of them, which no table that people read has.
constexpr std::size_t kTableColumns = 256;

/// The empty cells that a document may have: far more than people's tables need, and in proportion to the cells that it has,
/// lest a small file become a large text. Behind them, spans are ignored.
class EmptyCells {
 public:
  void note_cell() { left_ += kPerCell; }
  /// How many of the wanted ones there are: all or none.
  std::size_t take(std::size_t wanted) {
    if (wanted > left_) return 0;
    left_ -= wanted;
    return wanted;
  }

 private:
  static constexpr std::size_t kPerCell = 8, kFirst = 2048;
  std::size_t left_ = kFirst;
};

/// The row that is being read.
class TableRow {
 public:
  /// The next columns are empty. Nothing is owed for those at the end of a row.
  void cover(std::size_t columns) {
    const std::size_t room = kTableColumns - std::min(kTableColumns, column_);
    const std::size_t covered = std::min(columns, room);
    column_ += covered;
    owed_ += covered;
  }

  /// A cell in the next column: how many bars stand in front of it.
  std::size_t begin_cell(EmptyCells& empty) {
    const std::size_t own = has_cell_ ? 1 : 0;
    const std::size_t bars = own + empty.take(owed_);
    empty.note_cell();
    has_cell_ = true;
    owed_ = 0;
    ++column_;
    return bars;
  }

  std::size_t column() const { return column_; }

 private:
  std::size_t column_ = 0;  ///< of the next cell
  std::size_t owed_ = 0;    ///< empty cells
  bool has_cell_ = false;
};

}  // namespace lode
