// SPDX-License-Identifier: Apache-2.0
// Kernels beside the table of kernels.h: a family has a table for each instruction set, and the one in use
// goes with the table that kernels() has chosen.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace lode {

template <class Table>
class KernelFamily {
 public:
  /// Null: there is none. `extended` is for AVX-512 with an extension of the family's own, null where the
  /// processor lacks it.
  explicit KernelFamily(const Table* scalar, const Table* avx2 = nullptr, const Table* avx512 = nullptr,
                        const Table* extended = nullptr)
      : scalar_(scalar), avx2_(avx2), avx512_(avx512), extended_(extended) {
    for (const KernelTable* table : supported_kernels()) {
      for (const Table* one : going_with(*table)) {
        if (std::find(supported_.begin(), supported_.end(), one) == supported_.end())
          supported_.push_back(one);
      }
    }
    best_ = going_with(kernels()).back();
  }

  std::span<const Table* const> supported() const { return supported_; }  ///< on this machine
  const Table& best() const { return *best_; }

 private:
  /// Those that run wherever this table of kernels runs, the best last.
  std::vector<const Table*> going_with(const KernelTable& table) const {
    if (avx2_ != nullptr && table.name == "avx2") return {avx2_};
    if (avx512_ != nullptr && (table.name.starts_with("avx512") || table.name == "amx")) {
      if (extended_ != nullptr) return {avx512_, extended_};
      return {avx512_};
    }
    return {scalar_};
  }

  const Table *scalar_, *avx2_, *avx512_, *extended_, *best_ = nullptr;
  std::vector<const Table*> supported_;
};

}  // namespace lode
