// SPDX-License-Identifier: Apache-2.0
// The choice of buckets on the GPU, for methods that keep each key in one bucket (SAAP, k-means): the network
// that scores every bucket for the queries of a group, the best `probes`, and where their keys are listed, in
// one launch. Needs clusters of blocks (sm_90).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/attend/attend_runs.h"

namespace lode::cuda {

/// Whether this GPU can: compute capability 9.0.
bool can_choose_buckets();

/// How the network of one head lies in memory: scores = W2 relu(W1 x + b1) + W3 x + b2, or W2 x + b2 without
/// a hidden layer. Weights are integers of 8 bits with a scale for each row, or of 16 (two planes of 8), laid
/// out as the matrix unit takes them: [16 rows][64 columns] pieces, each [planes][2 x 8 rows][32 lanes][16].
/// W3's columns stand behind those of W2, so that one product takes both; its rows share their scale, and x a
/// factor that makes the two parts of a row alike in size.
struct NetLayout {
  int inputs = 0, hidden = 0, buckets = 0;  // d, H (0: none), C
  int planes = 1;                           ///< bytes of a weight: 1, or 2 for the exact path
  bool residual = false;                    ///< there is W3 beside a hidden layer

  static LODE_HD constexpr int padded_rows(int n) { return (n + 15) / 16 * 16; }
  static LODE_HD constexpr int padded_columns(int n) { return (n + 127) / 128 * 128; }
  LODE_HD std::int64_t weight_bytes(int rows, int columns) const {
    return std::int64_t{planes} * padded_rows(rows) * padded_columns(columns);
  }
  /// Where W3's columns begin.
  LODE_HD int residual_column() const { return (hidden + 63) / 64 * 64; }
  LODE_HD int columns_of_output() const {
    return hidden == 0 ? inputs : residual ? residual_column() + inputs : hidden;
  }
  LODE_HD std::int64_t output_offset() const {  ///< of W2, its scales and its biases, behind those of W1
    return hidden > 0 ? weight_bytes(hidden, inputs) + std::int64_t{8} * padded_rows(hidden) : 0;
  }
  LODE_HD std::int64_t factor_offset() const {  ///< of the factor of x beside the hidden units: one float
    return output_offset() + weight_bytes(buckets, columns_of_output()) +
           std::int64_t{8} * padded_rows(buckets);
  }
  LODE_HD std::int64_t bytes() const { return factor_offset() + 16; }  ///< of one head
};

/// The network of one head in that layout. Spans may be empty: no hidden layer, no W3, no bias.
std::vector<std::byte> pack_net(const NetLayout& layout, std::span<const float> hidden_weight /*[H, d]*/,
                                std::span<const float> hidden_bias /*[H]*/,
                                std::span<const float> output_weight /*[C, H or d]*/,
                                std::span<const float> residual_weight /*[C, d]*/,
                                std::span<const float> bias /*[C]*/);

/// The keys of one layer by bucket, all sequences; device memory. Keys [sink, listed) of a sequence are in
/// `rows`, those behind are looked up in `labels`.
struct BucketTables {
  const std::uint16_t* labels = nullptr;  // [sequences, Hkv, max_tokens]
  const std::int32_t* offsets = nullptr;  // [sequences, Hkv, C + 1] into the rows of the head
  const std::int32_t* rows = nullptr;     // [sequences, Hkv, max_tokens] by bucket, rising in each
  const std::int32_t* listed = nullptr;   // [sequences]
  std::int64_t max_tokens = 0;
};

/// Which of several networks scores for a query: the last one whose `from` its position has reached.
struct NetStretches {
  static constexpr int kMost = 4;
  int networks = 1;
  std::int32_t from[kMost] = {};  // [networks] rising, the first is 0

  LODE_HD int network_for(std::int32_t position) const {
    int network = 0;
    while (network + 1 < networks && from[network + 1] <= position) ++network;
    return network;
  }
};

/// What buckets are ranked by: probability, or that over a power of how many far keys they have.
enum class BucketRank { mass, per_root_of_keys, per_key };

struct BucketChoiceTask {
  NetLayout net;
  const std::byte* nets = nullptr;  // [networks, Hkv, net.bytes()]
  NetStretches stretches;
  bool softmax = true;  ///< probabilities are summed over the group; false: its queries are
  BucketRank rank = BucketRank::mass;
  const float* q = nullptr;  // [N, Hq, d] what the network takes
  BucketTables tables;
  int probes = 0;
  std::int64_t sink = 0, window = 0;
  RowRun* runs = nullptr;        // [N, Hkv, runs_of_choice()] the best bucket first
  std::int32_t* more = nullptr;  // [N, Hkv, kShares, share] keys that are not in lists yet
  std::int64_t share = 0;        ///< room for them: as many as there may be in all
};

/// Blocks that each bring stretches of their own, of keys that are not in lists yet.
constexpr int kShares = 16;
/// Stretches of a choice: those of its buckets' lists (`tabled`), then those of the shares.
inline int tabled_runs(int probes, int buckets) {
  return probes < buckets ? probes : buckets;
}
inline int runs_of_choice(int probes, int buckets) {
  return tabled_runs(probes, buckets) + kShares;
}

/// Shared memory that a block needs; more than the GPU has: the task cannot be done there.
std::int64_t bucket_choice_shared_bytes(const BucketChoiceTask& task, int group);
bool fits_bucket_choice(const BucketChoiceTask& task, int group);

/// For every query token and KV head: the far keys in the `probes` best buckets. Ties go to the higher
/// bucket, buckets without far keys are passed over. Deterministic; which stretches the keys come in depends
/// on `listed`. Waits for the launch in front before it lets the one behind start (attend_runs_decode).
void choose_buckets(const BucketChoiceTask& task, const Queries& queries, StreamHandle stream);

/// What choose_buckets made, as attention takes it; counts [N, Hkv], of `capacity` keys each at most.
RowRuns runs_of(const BucketChoiceTask& task, std::int32_t* counts, std::int64_t capacity);

}  // namespace lode::cuda
