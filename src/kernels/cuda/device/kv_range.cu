// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "base/out_of_memory.h"
#include "kernels/cuda/device/kv_range.h"
#include "kernels/cuda/device/pages.h"
#include "lodestone/error.h"

namespace lode::cuda {

namespace {

std::int64_t round_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

}  // namespace

KvRange::KvRange(KvLayout layout, int layers, std::int64_t max_tokens, std::vector<LayerRows> rows)
    : layout_(layout),
      layers_(layers),
      max_tokens_(max_tokens),
      granularity_(page_bytes()),
      rows_(std::move(rows)),
      backed_(static_cast<std::size_t>(layers), 0) {
  std::int64_t largest = 0;
  for (int layer = 0; layer < layers; ++layer)
    largest = std::max(largest, this->layout(layer).layer_bytes(max_tokens));
  layout_.layer_stride = round_up(largest, granularity_);
  base_ = reserve_addresses(layout_.layer_stride * layers);
}

KvRange::~KvRange() {
  unmap(0);
  free_addresses(base_, layout_.layer_stride * layers_);
}

KvLayout KvRange::layout(int layer) const {
  KvLayout own = layout_;
  if (!rows_.empty()) {
    own.kv_heads = rows_[static_cast<std::size_t>(layer)].kv_heads;
    own.head_dim = rows_[static_cast<std::size_t>(layer)].head_dim;
  }
  return own;
}

void KvRange::back(std::int64_t tokens) {
  std::vector<Growth> growth(backed_.size());
  bool any = false;
  for (std::size_t i = 0; i < growth.size(); ++i) {
    const KvLayout own = layout(static_cast<int>(i));
    const std::int64_t needed = own.layer_bytes(tokens), backed = backed_[i];
    if (needed <= backed) continue;
    // An eighth more than needed, so that a growing sequence asks the driver seldom.
    const std::int64_t wanted = std::min(round_up(own.layer_bytes(max_tokens_), granularity_),
                                         round_up(std::max(needed, backed + backed / 8), granularity_));
    growth[i] = {backed, wanted - backed};
    any = true;
  }
  if (!any) return;
  map_layers(growth);
  for (std::size_t i = 0; i < growth.size(); ++i) backed_[i] += growth[i].bytes;
}

std::int64_t KvRange::backed_bytes() const {
  std::int64_t bytes = 0;
  for (int layer = 0; layer < layers_; ++layer)
    if (has_rows(layer)) bytes += backed_[static_cast<std::size_t>(layer)] + std::ssize(held_) * granularity_;
  return bytes;
}

void KvRange::hold(std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  LODE_ASSERT(rows_.empty());
  const std::int64_t last = (layout_.layer_bytes(end) - 1) / granularity_;
  for (std::int64_t page = begin / kBlockTokens * layout_.block_stride() / granularity_; page <= last;
       ++page) {
    if (held_.contains(page)) continue;
    map_layers(std::vector<Growth>(backed_.size(), {page * granularity_, granularity_}));
    held_.insert(page);
  }
}

void KvRange::let_go(std::int64_t begin, std::int64_t end) {
  const std::int64_t first = (layout_.layer_bytes(begin) + granularity_ - 1) / granularity_;
  const std::int64_t last = end / kBlockTokens * layout_.block_stride() / granularity_;  // exclusive
  if (first >= last || held_.lower_bound(first) == held_.lower_bound(last)) return;
  held_.erase(held_.lower_bound(first), held_.lower_bound(last));
  const auto stays = std::stable_partition(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return held_.contains((piece.at - base_) % layout_.layer_stride / granularity_);
  });
  unmap(static_cast<std::size_t>(stays - pieces_.begin()));
}

void KvRange::unmap(std::size_t first_piece) {
  for (; pieces_.size() > first_piece; pieces_.pop_back()) {
    const Piece& last = pieces_.back();
    last.handle == 0 ? unmap_again(last.at, last.bytes) : unmap_pages(last.at, last.bytes, last.handle);
  }
}

/// Gives memory to bytes of layers, or to none of them. Kernels read whole blocks: the rows behind the last token are
/// zeros.
void KvRange::map_layers(std::span<const Growth> growth) {
  const std::size_t before = pieces_.size();
  std::vector<unsigned long long> handles(growth.size(), 0);
  const auto for_each = [&](bool own, const auto& map) {
    for (int layer = 0; layer < layers_; ++layer) {
      const auto [offset, bytes] = growth[static_cast<std::size_t>(layer)];
      if (bytes > 0 && has_rows(layer) == own) map(layer, this->layer(layer) + offset, bytes);
    }
  };
  try {
    for_each(true, [&](int layer, char* at, std::int64_t bytes) {
      const unsigned long long handle = map_pages(at, bytes);
      if (handle == 0) {
        const DeviceMemory memory = device_memory();
        std::int64_t all = 0;
        for_each(true, [&](int, char*, std::int64_t more) { all += more; });
        throw OutOfDeviceMemory("out of GPU memory: expected " + std::to_string(all >> 20) +
                                " MiB for keys and values beside the " +
                                std::to_string(backed_bytes() >> 20) + " MiB there, found " +
                                std::to_string(memory.free >> 20) + " MiB free of " +
                                std::to_string(memory.total >> 20) + " MiB");
      }
      pieces_.push_back({handle, at, bytes});
      handles[static_cast<std::size_t>(layer)] = handle;
    });
    for_each(false, [&](int layer, char* at, std::int64_t bytes) {
      map_again(at, bytes, handles[static_cast<std::size_t>(shown_by(layer))]);
      pieces_.push_back({0, at, bytes});
    });
  } catch (...) {
    unmap(before);
    throw;
  }
  synchronize_device();
}

template <class Copy>
void KvRange::for_blocks(int layer, int head, Part part, std::int64_t begin, std::int64_t end,
                         const Copy& copy) const {
  const KvLayout own = layout(layer);
  const std::int64_t row = own.row_bytes();
  char* const first = this->layer(layer) + (part == Part::v ? own.value_offset() : std::int64_t{0});
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t in_block = at % kBlockTokens;
    const bool whole = in_block == 0 && end - at >= kBlockTokens;
    const std::int64_t blocks = whole ? (end - at) / kBlockTokens : 1;
    const std::int64_t rows = whole ? kBlockTokens : std::min(kBlockTokens - in_block, end - at);
    copy(first + own.key_offset(head, at), rows * row, blocks, (at - begin) * row);
    at += blocks * rows;
  }
}

void KvRange::to_host(int layer, int head, Part part, std::int64_t begin, std::int64_t end, void* host,
                      StreamHandle stream) const {
  for_blocks(layer, head, part, begin, end,
             [&](const char* at, std::int64_t width, std::int64_t height, std::int64_t offset) {
               copy_apart(static_cast<char*>(host) + offset, width, at, layout(layer).block_stride(), width,
                          height, stream);
             });
}

void KvRange::to_device(int layer, int head, Part part, std::int64_t begin, std::int64_t end,
                        const void* host, StreamHandle stream) {
  for_blocks(layer, head, part, begin, end,
             [&](char* at, std::int64_t width, std::int64_t height, std::int64_t offset) {
               copy_apart(at, layout(layer).block_stride(), static_cast<const char*>(host) + offset, width,
                          width, height, stream);
             });
}

}  // namespace lode::cuda
