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

KvRange::KvRange(KvLayout layout, int layers, std::int64_t max_tokens, std::vector<bool> without)
    : layout_(layout),
      layers_(layers),
      max_tokens_(max_tokens),
      granularity_(page_bytes()),
      without_(std::move(without)),
      layers_backed_(layers - std::count(without_.begin(), without_.end(), true)) {
  layout_.layer_stride = round_up(layout_.layer_bytes(max_tokens), granularity_);
  base_ = reserve_addresses(layout_.layer_stride * layers);
}

KvRange::~KvRange() {
  unmap(0);
  free_addresses(base_, layout_.layer_stride * layers_);
}

void KvRange::back(std::int64_t tokens) {
  const std::int64_t needed = layout_.layer_bytes(tokens);
  if (needed <= backed_) return;
  // An eighth more than needed, so that a growing sequence asks the driver seldom.
  const std::int64_t wanted =
      std::min(layout_.layer_stride, round_up(std::max(needed, backed_ + backed_ / 8), granularity_));
  map_layers(backed_, wanted - backed_);
  backed_ = wanted;
}

std::int64_t KvRange::backed_bytes() const {
  return (backed_ + std::ssize(held_) * granularity_) * layers_backed_;
}

void KvRange::hold(std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  const std::int64_t last = (layout_.layer_bytes(end) - 1) / granularity_;
  for (std::int64_t page = begin / kBlockTokens * layout_.block_stride() / granularity_; page <= last;
       ++page) {
    if (held_.contains(page)) continue;
    map_layers(page * granularity_, granularity_);
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

/// Gives memory to bytes [offset, offset + bytes) of every layer that has rows, or of none. Kernels read whole blocks: the
/// rows behind the last token are zeros.
void KvRange::map_layers(std::int64_t offset, std::int64_t bytes) {
  const std::size_t before = pieces_.size();
  try {
    for (int layer = 0; layer < layers_; ++layer) {
      if (!has_rows(layer)) continue;
      char* const at = base_ + layer * layout_.layer_stride + offset;
      const unsigned long long handle = map_pages(at, bytes);
      if (handle == 0) {
        const DeviceMemory memory = device_memory();
        throw OutOfDeviceMemory(
            "out of GPU memory: expected " + std::to_string(bytes * layers_backed_ >> 20) +
            " MiB for keys and values beside the " + std::to_string(backed_bytes() >> 20) +
            " MiB there, found " + std::to_string(memory.free >> 20) + " MiB free of " +
            std::to_string(memory.total >> 20) + " MiB");
      }
      pieces_.push_back({handle, at, bytes});
    }
    for (int layer = 0; layer < layers_ && before < pieces_.size(); ++layer) {
      if (has_rows(layer)) continue;
      char* const at = base_ + layer * layout_.layer_stride + offset;
      map_again(at, bytes, pieces_[before].handle);
      pieces_.push_back({0, at, bytes});
    }
  } catch (...) {
    unmap(before);
    throw;
  }
  synchronize_device();
}

template <class Copy>
void KvRange::for_blocks(int layer, int head, Part part, std::int64_t begin, std::int64_t end,
                         const Copy& copy) const {
  const std::int64_t row = layout_.row_bytes();
  char* const first =
      base_ + layer * layout_.layer_stride + (part == Part::v ? layout_.value_offset() : std::int64_t{0});
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t in_block = at % kBlockTokens;
    const bool whole = in_block == 0 && end - at >= kBlockTokens;
    const std::int64_t blocks = whole ? (end - at) / kBlockTokens : 1;
    const std::int64_t rows = whole ? kBlockTokens : std::min(kBlockTokens - in_block, end - at);
    copy(first + layout_.key_offset(head, at), rows * row, blocks, (at - begin) * row);
    at += blocks * rows;
  }
}

void KvRange::to_host(int layer, int head, Part part, std::int64_t begin, std::int64_t end, void* host,
                      StreamHandle stream) const {
  for_blocks(layer, head, part, begin, end,
             [&](const char* at, std::int64_t width, std::int64_t height, std::int64_t offset) {
               copy_apart(static_cast<char*>(host) + offset, width, at, layout_.block_stride(), width, height,
                          stream);
             });
}

void KvRange::to_device(int layer, int head, Part part, std::int64_t begin, std::int64_t end,
                        const void* host, StreamHandle stream) {
  for_blocks(layer, head, part, begin, end,
             [&](char* at, std::int64_t width, std::int64_t height, std::int64_t offset) {
               copy_apart(at, layout_.block_stride(), static_cast<const char*>(host) + offset, width, width,
                          height, stream);
             });
}

}  // namespace lode::cuda
