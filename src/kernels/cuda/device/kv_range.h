// SPDX-License-Identifier: Apache-2.0
// The memory of one sequence's keys and values on the GPU: a range of addresses for its longest length,
// backed by physical pages as the sequence grows (the driver's virtual memory). Addresses never change.
#pragma once

#include <set>
#include <vector>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/layout.h"

namespace lode::cuda {

class KvRange {
 public:
  /// Reserves addresses only. The layout's layer_stride is set here. `without`: [layers] those that have no rows, and no
  /// memory of their own: they show that of a layer which has, so that who goes over all layers reads something; empty:
  /// all have.
  KvRange(KvLayout layout, int layers, std::int64_t max_tokens, std::vector<bool> without = {});
  ~KvRange();
  KvRange(const KvRange&) = delete;
  KvRange& operator=(const KvRange&) = delete;

  const KvLayout& layout() const { return layout_; }
  char* base() const { return base_; }
  bool has_rows(int layer) const { return without_.empty() || !without_[static_cast<std::size_t>(layer)]; }
  enum class Part { k, v };
  /// Whether a part of a head lies here by itself.
  bool holds(int layer, int head, Part part) const {
    return has_rows(layer) && (!layout_.shared_rows || (head == 0 && part == Part::k));
  }
  /// Backs rows [0, tokens) of every layer that has rows; new pages hold zeros. RunError when the GPU has not so much
  /// memory: what was backed before stays.
  void back(std::int64_t tokens);
  std::int64_t backed_bytes() const;

  /// For a range whose tokens are elsewhere but for some: backs rows [begin, end) of every layer alone, and
  /// gives back the memory that holds nothing but rows of [begin, end). Whole blocks around the rows that are
  /// left stay. Not together with back(); no work that uses the rows may be under way.
  void hold(std::int64_t begin, std::int64_t end);
  void let_go(std::int64_t begin, std::int64_t end);

  /// Copies rows [begin, end) of one layer and head between the range and plain host rows [.., d]; host
  /// points at the row `begin`. Whole blocks in one call of the driver.
  void to_host(int layer, int head, Part part, std::int64_t begin, std::int64_t end, void* host,
               StreamHandle) const;
  void to_device(int layer, int head, Part part, std::int64_t begin, std::int64_t end, const void* host,
                 StreamHandle);

 private:
  template <class Copy>
  void for_blocks(int layer, int head, Part part, std::int64_t begin, std::int64_t end,
                  const Copy& copy) const;
  void map_layers(std::int64_t offset, std::int64_t bytes);
  void unmap(std::size_t first_piece);

  KvLayout layout_;
  int layers_ = 0;
  std::int64_t max_tokens_ = 0, granularity_ = 0;
  char* base_ = nullptr;
  std::int64_t backed_ = 0;      ///< bytes of each layer that have memory by back()
  std::set<std::int64_t> held_;  ///< pages of each layer that have memory by hold()
  struct Piece {
    unsigned long long handle = 0;  ///< 0: another layer's
    char* at = nullptr;
    std::int64_t bytes = 0;
  };
  std::vector<Piece> pieces_;
  std::vector<bool> without_;       // [layers] or empty
  std::int64_t layers_backed_ = 0;  ///< that have rows
};

}  // namespace lode::cuda
