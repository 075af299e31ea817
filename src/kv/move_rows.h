// SPDX-License-Identifier: Apache-2.0
// Rows of a store put in another order, in place: for methods whose lists become runs by it
// (select/shared/orders_rows.h). The store does not know: whoever moves rows says so to whoever reads them, and
// moves them back before anybody else does.
#pragma once

#include "kv/store.h"

namespace lode {

/// Rows [begin, begin + tokens.size()) of a head hold these tokens, each once, and all others their own.
struct RowOrder {
  Position begin = 0;
  std::vector<Position> tokens;  // [rows], a permutation of [begin, end)
  Position end() const { return begin + static_cast<Position>(tokens.size()); }
  Position token_of(Position row) const {
    return row >= begin && row < end() ? tokens[static_cast<std::size_t>(row - begin)] : row;
  }
  /// The order that undoes this one.
  RowOrder inverse() const;
};

/// Row begin + i of each head of a layer becomes what its row tokens[i] was, keys, values and scales. All
/// threads take part, with room for one part of one head beside the store; no second copy stays. Rows that a
/// file is mapped on become memory of this process, the file stays as it is. All or nothing.
void move_rows(KvStore& kv, int layer, std::span<const RowOrder> orders /*[Hkv]*/, ThreadPool& pool);

}  // namespace lode
