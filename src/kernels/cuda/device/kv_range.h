// SPDX-License-Identifier: Apache-2.0
// The memory of one sequence's keys and values on the GPU: a range of addresses for its longest length,
// backed by physical pages as the sequence grows (the driver's virtual memory). Addresses never change.
#pragma once

#include <set>
#include <span>
#include <vector>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/layout.h"

namespace lode::cuda {

/// What a layer has in a range.
struct LayerRows {
  int kv_heads = 0, head_dim = 0;
  int shows = 0;  ///< the layer whose memory is here: its own number, or that of a layer of the same heads
  bool operator==(const LayerRows&) const = default;
};

class KvRange {
 public:
  /// Reserves addresses only. The layout's layer_stride is set here. `rows`: [layers]; empty: all have the layout's heads
  /// and memory of their own.
  KvRange(KvLayout layout, int layers, std::int64_t max_tokens, std::vector<LayerRows> rows = {});
  ~KvRange();
  KvRange(const KvRange&) = delete;
  KvRange& operator=(const KvRange&) = delete;

  /// Of layers that say nothing else.
  const KvLayout& layout() const { return layout_; }
  KvLayout layout(int layer) const;
  char* base() const { return base_; }
  char* layer(int layer) const { return base_ + layer * layout_.layer_stride; }
  /// Whether its memory is its own.
  bool has_rows(int layer) const { return shown_by(layer) == layer; }
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
  /// left stay. Not together with back(), nor where heads differ; no work that uses the rows may be under way.
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
  /// Bytes of a layer that get memory.
  struct Growth {
    std::int64_t offset = 0, bytes = 0;
  };
  int shown_by(int layer) const {
    return rows_.empty() ? layer : rows_[static_cast<std::size_t>(layer)].shows;
  }
  void map_layers(std::span<const Growth> growth /*[layers]*/);
  void unmap(std::size_t first_piece);

  KvLayout layout_;
  int layers_ = 0;
  std::int64_t max_tokens_ = 0, granularity_ = 0;
  std::vector<LayerRows> rows_;  // [layers] or empty
  char* base_ = nullptr;
  std::vector<std::int64_t> backed_;  // [layers] bytes that have memory by back()
  std::set<std::int64_t> held_;       ///< pages of each layer that have memory by hold()
  struct Piece {
    unsigned long long handle = 0;  ///< 0: another layer's
    char* at = nullptr;
    std::int64_t bytes = 0;
  };
  std::vector<Piece> pieces_;
};

}  // namespace lode::cuda
