// SPDX-License-Identifier: Apache-2.0
// Walks over a graph of keys for many queries at once, a block each: those of ann/graph/beam_search.h, to the bit where
// keys and queries are finite.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// A KeyGraph and its BeamKeys in device memory.
struct WalkedGraph {
  std::int64_t nodes = 0;
  int degree = 0;                         ///< at most kMostWalkedDegree
  const std::uint32_t* links = nullptr;   // [nodes, degree] of ann/graph/key_graph.h
  const std::int32_t* entries = nullptr;  // [entry_count]
  int entry_count = 0;                    ///< at most 4 * degree
  const void* rows = nullptr;             // [nodes, stride] CodedRows
  int stride = 0;
  std::uint32_t* seen =
      nullptr;  // [kWalksAtOnce, seen_words(nodes)] a bit for each node that a walk has seen
};
inline constexpr std::int64_t kWalksAtOnce = 1024;
/// Words of 32 bits, whole pieces of 16 bytes.
constexpr std::int64_t seen_words(std::int64_t nodes) {
  return (nodes + 127) / 128 * 4;
}

/// Queries as CodedQuery has them, and the keys that each wants.
struct WalkingQueries {
  std::int64_t count = 0;
  int code_bytes = 0;                    ///< of a query's high numbers, and of its low ones: a multiple of 16
  const void* codes = nullptr;           // [count, 2, code_bytes] high, then low
  int each = 0;                          ///< at most kMostWanted; may be 0
  const std::int32_t* wanted = nullptr;  // [count, each]
};

inline constexpr int kMostWalkedDegree = 32, kMostWanted = 64, kMostWalkedBeam = 150, kWalkKeeps = 160;

/// Of walks that expand the best `beam` of the best kWalkKeeps nodes, visits[x] += the walks whose best `beam` have the
/// node x, uses[x, i] += those of them whose query wants where the link goes.
void watch_walks(const WalkedGraph& graph, const WalkingQueries& queries, int beam,
                 std::uint32_t* visits /*[nodes]*/, std::uint32_t* uses /*[nodes, degree]*/,
                 StreamHandle stream);

/// Which of its wanted keys are among the kWalkKeeps best of each query's walk, a bit each.
void found_by_walks(const WalkedGraph& graph, const WalkingQueries& queries, int beam,
                    std::uint64_t* found /*[count]*/, StreamHandle stream);

/// The best `keep` <= kWalkKeeps nodes of each query's walk that keeps as many, best first; -1 behind the last.
void best_by_walks(const WalkedGraph& graph, const WalkingQueries& queries, int beam, int keep,
                   std::int32_t* best /*[count, keep]*/, StreamHandle stream);

/// A wanted key that a walk missed.
struct MissedKey {
  std::int32_t query = 0, rank = 0;  ///< among its wanted ones
};
inline constexpr int kMostOffers = 6;
/// The wanted keys of the same query that the walk found and that lie nearest to the missed one, nearest first and of
/// equal ones the earlier key; -1 behind the last.
void offers_for(const WalkedGraph& graph, const float* squares /*[nodes]*/, int numbers,
                const WalkingQueries& queries, const std::uint64_t* found, const MissedKey* missed,
                std::int64_t count, std::int32_t* offers /*[count, kMostOffers]*/, StreamHandle stream);

}  // namespace lode::cuda
