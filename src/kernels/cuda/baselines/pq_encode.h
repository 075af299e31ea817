// SPDX-License-Identifier: Apache-2.0
// Product-quantised keys on the GPU (PQCache): each part of a key is named by the nearest of its centroids,
// once, when its row is in the store; a step scores all far keys by what their codes stand for. As
// select/baselines/product_codes.h has it on the CPU. Deterministic, no word from the host inside a step.
#pragma once

#include <cstdint>

#include "kernels/cuda/select/select.h"

namespace lode::cuda {

/// Codes of one model layer's keys, indexed by position, and the centroids that they name.
struct KeyCodes {
  std::uint8_t* codes = nullptr;  // [Hkv, planes(), capacity]
  const float* centroids =
      nullptr;  // [Hkv, parts, width + 1, entries()]; last -|c|^2 / 2, -inf where none is
  std::int64_t sequence_stride = 0;  ///< bytes from one sequence's codes to the next one's
  std::int64_t capacity = 0;         ///< keys of a head
  int parts = 2, width = 64;         ///< of a key, channels of a part
  int bits = 6;                      ///< of a part's code, 1 to 8

  LODE_HD bool nibbles() const { return bits <= 4; }
  /// Centroids of a part, filled up to sixteen.
  LODE_HD int entries() const { return nibbles() ? 16 : 1 << bits; }
  /// Bytes of a key's code; the first of two parts that share one is in its lower bits.
  LODE_HD int planes() const { return nibbles() ? (parts + 1) / 2 : parts; }
  LODE_HD std::int64_t layer_bytes(int kv_heads) const {
    return std::int64_t{kv_heads} * planes() * capacity;
  }
  LODE_HD std::int64_t centroids_of_head() const { return std::int64_t{parts} * (width + 1) * entries(); }
};

/// Codes keys [begin, end) of `layers` consecutive layers of one sequence, the first of which `base` and
/// `codes` name; codes and centroids of a layer lie behind those of the one before it. A key with a NaN or an
/// infinity counts as 0. The bits of nearest_centroids (ann/product_quantizer.h): one chain of fused
/// multiply-adds for each product, the lowest of equally near centroids.
void code_keys(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
               const KeyCodes& codes, StreamHandle stream);

/// Device memory for score_codes.
std::int64_t code_tables_bytes(int queries, int query_heads, int kv_heads, const KeyCodes& codes);

/// As score_keys (select.h), of what the codes stand for; keys of the same code have the same score.
void score_codes(const Queries& queries, const KeyCodes& codes, std::int64_t sink, std::int64_t window,
                 std::int64_t max_tokens, void* tables, float* scores /*[N, Hq, max_tokens]*/,
                 ExponentialSum* sums /*[N, Hq, sums_of_keys(max_tokens)] or null*/, StreamHandle stream);

}  // namespace lode::cuda
