// SPDX-License-Identifier: Apache-2.0
// Labels of keys on the GPU (Double Sparsity): a few channels of every key, in few bits, made once when its
// row is in the store; a step scores all far keys by them. As select/baselines/label_cache.h has it on the CPU.
// Deterministic, no word from the host inside a step.
#pragma once

#include "kernels/cuda/select/select.h"

namespace lode::cuda {

/// Labels of one model layer's keys, indexed by position.
struct KeyLabels {
  char* labels = nullptr;                  // [Hkv, capacity, label_bytes()]
  const std::int32_t* channels = nullptr;  // [Hkv, channels] of the keys, rising
  const float* levels = nullptr;           // [Hkv][low, step][channels], where labels are codes
  std::int64_t sequence_stride = 0;        ///< bytes from one sequence's labels to the next one's
  std::int64_t capacity = 0;               ///< keys of a head
  int count = 0;                           ///< channels of a label; 512 at most
  int bits = 4;  ///< of a channel; 2 or 4: codes, the first in the lowest bits; 16: as the keys are stored
  int number_bytes = 2;  ///< of a stored one

  LODE_HD bool coded() const { return bits < 16; }
  /// Eights of channels, the last one filled up with zeros.
  LODE_HD int eights() const { return (count + 7) / 8; }
  LODE_HD int label_bytes() const { return eights() * (coded() ? bits : 8 * number_bytes); }
  LODE_HD std::int64_t layer_bytes(int kv_heads) const {
    return std::int64_t{kv_heads} * capacity * label_bytes();
  }
};

/// Labels keys [begin, end) of `layers` consecutive layers of one sequence, the first of which `base` and
/// `labels` name; labels, channels and levels of a layer lie behind those of the one before it. A key with a
/// NaN or an infinity counts as 0. Codes are the nearest, as ChannelLevels::code has them.
void label_keys(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
                const KeyLabels& labels, StreamHandle stream);

/// As score_keys (select.h), over the label's channels alone; coded, up to what is the same for all keys.
void score_labels(const Queries& queries, const KeyLabels& labels, std::int64_t sink, std::int64_t window,
                  std::int64_t max_tokens, float* scores /*[N, Hq, max_tokens]*/,
                  ExponentialSum* sums /*[N, Hq, sums_of_keys(max_tokens)] or null*/, StreamHandle stream);

}  // namespace lode::cuda
