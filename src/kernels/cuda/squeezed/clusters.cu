// SPDX-License-Identifier: Apache-2.0
// Work map: a cluster of blocks for each (KV head, stretch of query tokens). Each block owns a share of the
// nodes: it streams their centroids once for four queries at a time (cluster_tiles.cuh), keeps the scores in
// shared memory, and the blocks exchange no more than the sums of the softmax, which are taken as scores
// come, and how many keys each keeps. The first centroids are fetched before the queries are waited for.
//
// Work of a decode step is reading the centroids; passes over them repeat for each four queries of a stretch.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/squeezed/cluster_passes.cuh"
#include "kernels/cuda/squeezed/clusters.h"

namespace lode::cuda {

namespace {

constexpr int kRoom = 200 << 10;  // of a block's shared memory

int pieces_of(int head_dim) {
  return (head_dim + kPieceDims - 1) / kPieceDims;
}
/// Compiled for these.
int pieces_compiled(int head_dim) {
  const int pieces = pieces_of(head_dim);
  return pieces <= 2 ? 2 : pieces <= 4 ? pieces : kMostPieces;
}
/// Shared memory of a block over so many ranks, at most.
std::int64_t room_for(std::int64_t most_nodes, int ranks) {
  constexpr std::int64_t kNodeBytes = 32, kBesides = 8 << 10;
  return (most_nodes / ranks + kTile) * kNodeBytes + kBesides;
}

/// A block's shared memory, in bytes from its start.
struct Plan {
  int tiles = 0;   // most of one block
  int stride = 0;  // of scores
  int scores = 0, starts = 0, weights = 0, total = 0;

  __host__ __device__ Plan(std::int64_t nodes, int query_bytes, int ranks) {
    tiles = static_cast<int>(((nodes + kTile - 1) / kTile + ranks - 1) / ranks);
    stride = (tiles * kTile + 31) / 32 * 32 + 8;
    scores = query_bytes;
    starts = scores + kQueries * stride * 4;
    weights = starts + (tiles * kTile + 4) * 4;
    total = weights + tiles * kTile * 4;
  }
};

struct Params {
  ClusterChoiceTask task;
  Queries queries;
  int group = 0;
};

template <int kPieces, CentroidKind kKind, int kRanks>
class ClusterChooser : ClusterPasses {
 public:
  using Own = Tiles<kPieces, kKind>;

  __device__ ClusterChooser(const Params& params, char* memory)
      : ClusterChooser(params.task, params, Plan(params.task.tables.most_nodes, Own::kQueryBytes, kRanks),
                       memory) {}

  __device__ void run() {
    if (tid_ == 0) open_inboxes();
    __syncwarp();  // for racecheck, to which a barrier's opening is the warp's
    if (tid_ == 0) expect_messages(4);
    __syncwarp();
    take_tables();
    fetch_first();
    __syncwarp();
    arrive_in_cluster();
    take_weight();
    expect_queries();
    wait_for_cluster();  // others write here after that
    wait_for_predecessor();
    release_successor();
    const int rows = query_rows();
    for (int row = 0;; row += kQueries) {
      if (row > 0) fetch_first();
      take_queries<Own, kPieces>(row, rows);
      score();
      exchange_sums(row / kQueries);
      if (row + kQueries >= rows) break;
      add_weights(row > 0);
    }
    const int2 mine = keep(rows > kQueries);
    __syncthreads();  // the list, which all threads have written and will read
    wait_for(&shared().of_keys);
    mine.y > kFewKeys ? write_lists<8>(mine.x, mine.y) : write_lists<4>(mine.x, mine.y);
  }

 private:
  static constexpr bool kSpreads = kKind == CentroidKind::q8_spreads;
  static constexpr int kMostHeld = kSpreads ? 16 : 18;  // rows of tiles, in registers
  static constexpr int kHeld =                          // tiles that a warp has on the way at once
      std::clamp(kMostHeld / Own::kLayout.fours, 1, 4);
  static constexpr int kFewKeys = 4 * kThreads;
  static constexpr int kLine = 128;  // bytes; of tiles of more than 32 the rest comes unasked

  __device__ ClusterChooser(const ClusterChoiceTask& task, const Params& params, const Plan& plan,
                            char* memory)
      : ClusterPasses(task, params.queries, params.group, {plan.stride, plan.scores, plan.weights}, kRanks,
                      memory),
        plan_(plan) {}

  /// Keys, of each block.
  __device__ static int* kept_keys() {
    __shared__ int keys[kRanks];
    return keys;
  }

  /// This block's share of the nodes, and where their keys begin.
  __device__ void take_tables() {
    const ClusterTables& tables = choice_.tables;
    step_ = *choice_.step;
    const double least = choice_.squares ? step_.threshold * step_.threshold : step_.threshold;
    least_ = __double2float_rd(least);  // numbers that are above the one are above the other
    const std::int32_t* const of_parts = tables.nodes + kv_head_ * (tables.most_parts + 1);
    int nodes = of_parts[tables.most_parts];  // beside the step: all parts count but after a roll back
    if (step_.parts != tables.most_parts) nodes = of_parts[step_.parts];
    const int tiles = (nodes + kTile - 1) / kTile, each = (tiles + kRanks - 1) / kRanks;
    const int first_tile = min(tiles, rank_ * each);
    tiles_ = min(tiles, first_tile + each) - first_tile;
    nodes_ = max(0, min(nodes - first_tile * kTile, tiles_ * kTile));
    centroids_ = reinterpret_cast<const char*>(tables.centroids) +
                 (std::int64_t{kv_head_} * ((tables.most_nodes + kTile - 1) / kTile) + first_tile) *
                     Own::kLayout.bytes();
    const std::int32_t* const first =
        tables.first + std::int64_t{kv_head_} * (tables.most_nodes + 1) + first_tile * kTile;
    for (int i = tid_; nodes_ > 0 && i <= nodes_; i += kThreads) at<int>(plan_.starts)[i] = first[i];
  }
  __device__ int keys_of(int node) const {
    return at<int>(plan_.starts)[node + 1] - at<int>(plan_.starts)[node];
  }

  __device__ const char* tile_at(int tile) const {
    return centroids_ + std::int64_t{tile} * Own::kLayout.bytes();
  }
  /// And asks for the tile that will take its place, where that pays: with spreads, of which fewer are held.
  __device__ void fetch(int slot, int tile) {
    if (tile < tiles_) Own::fetch(tile_at(tile), lane_, held_[slot]);
    const int next = tile + kHeld * kWarps;
    if (kSpreads && next < tiles_ && lane_ * kLine < Own::kLayout.bytes())
      ask_for(tile_at(next) + lane_ * kLine);
  }
  __device__ void fetch_first() {
#pragma unroll
    for (int slot = 0; slot < kHeld; ++slot) fetch(slot, warp_ + slot * kWarps);
  }

  /// Logits of this block's nodes; of each warp the highest and the sum of exponentials.
  __device__ void score() {
    const int g = lane_ / 4, t = lane_ % 4;
    const auto asked = Own::ask(memory_, lane_);
    const QueryUnits units = shared().units[t];
    float* const to = at<float>(plan_.scores) + t * plan_.stride;
    float2 sum = make_float2(-kLargestLogit, 0.0f);
    for (int from = warp_; from < tiles_; from += kHeld * kWarps) {
#pragma unroll
      for (int slot = 0; slot < kHeld; ++slot) {
        const int tile = from + slot * kWarps, low = tile * kTile + g, high = low + 8;
        if (tile >= tiles_) break;
        const float2 keys = make_float2(low < nodes_ ? static_cast<float>(keys_of(low)) : 0.0f,
                                        high < nodes_ ? static_cast<float>(keys_of(high)) : 0.0f);
        const float2 raw = Own::logits(held_[slot], asked, units, keys);
        fetch(slot, tile + kHeld * kWarps);
        const float2 z = make_float2(bounded(raw.x, low), bounded(raw.y, high));
        if (low < nodes_) to[low] = z.x;
        if (high < nodes_) to[high] = z.y;
        add_to(sum, z, keys);
      }
    }
    post_sum(sum);
  }

  /// The nodes above the threshold, closed up, in the place of the scores: where each one's keys begin, and
  /// its place among the keys that this block keeps, of whose number it tells the others. Returns how many
  /// nodes and keys. A thread has neighbours, an odd number of them, so that reading is free of bank
  /// conflicts.
  __device__ int2 keep(bool others) const {
    const int run = (nodes_ + kThreads - 1) / kThreads | 1, begin = min(nodes_, tid_ * run),
              end = min(nodes_, begin + run);
    unsigned kept = 0;  // a block has room for fewer than 32 nodes a thread
    int2 mine = {};
    for (int node = begin; node < end; ++node) {
      if (step_.threshold == 0.0 || weight_of(node, others) > least_)
        kept |= 1u << (node - begin), ++mine.x, mine.y += keys_of(node);
    }
    int2 all, before = sum_before(mine, all);
    if (tid_ < kRanks)
      send(address_in(kept_keys() + rank_, tid_), static_cast<unsigned>(all.y),
           address_in(&shared().of_keys, tid_));
    int2* const list = at<int2>(plan_.scores);
    const std::int32_t* const rows = keys_of_head();
    for (; kept != 0; kept &= kept - 1) {
      const int node = begin + __ffs(static_cast<int>(kept)) - 1, first = at<int>(plan_.starts)[node],
                keys = keys_of(node);
      list[before.x++] = make_int2(first, before.y);
      before.y += keys;
      ask_for(rows + first), ask_for(rows + first + keys - 1);
    }
    return all;
  }

  /// The keys of this block's kept nodes to the lists of all tokens of the stretch, behind those of the
  /// blocks before it; the last block adds the keys that are in no cluster.
  template <int kAtOnce>
  __device__ void write_lists(int kept, int keys) const {
    int before = 0, all = 0;
    for (int r = 0; r < kRanks; ++r) {
      if (r < rank_) before += kept_keys()[r];
      all += kept_keys()[r];
    }
    const int2* const list = at<int2>(plan_.scores);
    const std::int32_t* const from = keys_of_head();
    const int steps = kept > 1 ? 32 - __clz(kept - 1) : 0;
    for (int first = tid_; first < keys; first += kAtOnce * kThreads) {
      int low[kAtOnce] = {}, row[kAtOnce];
      for (int step = steps - 1; step >= 0; --step) {  // the last node that begins at or before the key
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const int next = low[u] + (1 << step);
          if (next < kept && list[next].y <= first + u * kThreads) low[u] = next;
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = first + u * kThreads;
        if (i < keys) row[u] = __ldg(from + list[low[u]].x + i - list[low[u]].y);
      }
      write_rows(row, before, first, keys);
    }
    if (rank_ == kRanks - 1) add_others(all, [](std::int64_t) {});
  }

  const Plan plan_;
  float least_ = 0.0f;               ///< a kept node's sum is above
  const char* centroids_ = nullptr;  ///< of this block's first tile
  int tiles_ = 0;                    ///< of this block
  typename Own::Held held_[kHeld];
};

template <int kPieces, CentroidKind kKind, int kRanks>
__global__ void __launch_bounds__(kThreads, kPieces <= 4 ? 2 : 1)
    choose_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  ClusterChooser<kPieces, kKind, kRanks>(p, memory).run();
#endif
}

/// Such that all blocks run at once. By the GPU and the index alone: sums of another cut differ in their last
/// bits, and a choice must not depend on how many queries come together.
int ranks_of(int kv_heads, std::int64_t most_nodes) {
  static PerDevice<bool> placed;
  const bool sixteen = placed.get([] {
    return can_place(choose_kernel<kMostPieces, CentroidKind::q8_spreads, 16>, 16, kThreads, kRoom);
  });
  if (kv_heads <= 8) return sixteen ? 16 : 8;
  return kv_heads <= 16 || room_for(most_nodes, 4) > kRoom ? 8 : 4;
}

template <int kPieces, CentroidKind kKind, int kRanks>
void launch(const Params& p, StreamHandle stream) {
  const int shared = Plan(p.task.tables.most_nodes, Tiles<kPieces, kKind>::kQueryBytes, kRanks).total;
  const auto kernel = choose_kernel<kPieces, kKind, kRanks>;
  prepare_clusters(kernel, shared);
  const int stretches = (p.queries.count + p.task.stretch - 1) / p.task.stretch;
  const dim3 grid(kRanks, static_cast<unsigned>(p.queries.layout.kv_heads), static_cast<unsigned>(stretches));
  EarlyLaunch(grid, kThreads, shared, kRanks, stream)(kernel, p);
}

template <int kPieces, CentroidKind kKind>
void launch_for_kv_heads(const Params& p, StreamHandle stream) {
  switch (ranks_of(p.queries.layout.kv_heads, p.task.tables.most_nodes)) {
    case 16:
      return launch<kPieces, kKind, 16>(p, stream);
    case 8:
      return launch<kPieces, kKind, 8>(p, stream);
    default:
      return launch<kPieces, kKind, 4>(p, stream);
  }
}

template <int kPieces>
void launch_for_kind(const Params& p, StreamHandle stream) {
  switch (p.task.tables.kind) {
    case CentroidKind::f16:
      return launch_for_kv_heads<kPieces, CentroidKind::f16>(p, stream);
    case CentroidKind::q8:
      return launch_for_kv_heads<kPieces, CentroidKind::q8>(p, stream);
    case CentroidKind::q8_spreads:
      return launch_for_kv_heads<kPieces, CentroidKind::q8_spreads>(p, stream);
  }
}

}  // namespace

std::int64_t centroid_bytes(std::int64_t nodes, int head_dim, CentroidKind kind) {
  return (nodes + kTile - 1) / kTile * TileLayout(pieces_compiled(head_dim), kind).bytes();
}

void pack_centroids(std::span<const std::uint16_t> halves, int head_dim, std::int64_t first_node,
                    std::byte* to) {
  const TileLayout layout(pieces_compiled(head_dim), CentroidKind::f16);
  const std::int64_t nodes = std::ssize(halves) / head_dim;
  for (std::int64_t i = 0; i < nodes; ++i) {
    const std::int64_t node = first_node + i;
    std::byte* const tile = to + node / kTile * layout.bytes();
    for (int c = 0; c < head_dim; c += 8) {
      const std::int64_t place =
          ((c / kPieceDims * 2 + node % kTile / 8) * 32 + node % 8 * 4 + c % kPieceDims / 8) *
          std::int64_t{16};
      std::memcpy(tile + place, halves.data() + i * head_dim + c,
                  static_cast<std::size_t>(std::min(8, head_dim - c)) * 2);
    }
  }
}

void pack_centroids(const ByteCentroids& all, int head_dim, std::int64_t first_node, std::byte* to) {
  const int pieces = pieces_compiled(head_dim);
  const TileLayout layout(pieces, all.spreads.empty() ? CentroidKind::q8 : CentroidKind::q8_spreads);
  for (std::int64_t i = 0; i < std::ssize(all.scales); ++i) {
    const std::int64_t node = first_node + i;
    std::byte* const tile = to + node / kTile * layout.bytes();
    const auto put = [&](std::span<const std::byte> rows, int width, int piece) {
      for (int c = 0; c < width; c += 8) {
        const std::int64_t place =
            ((c / kPieceDims + piece) * 32 + node % 8 * 4 + c % kPieceDims / 8) * 2 + node % kTile / 8;
        std::memcpy(tile + place * 8, rows.data() + i * width + c,
                    static_cast<std::size_t>(std::min(8, width - c)));
      }
    };
    const auto put_scale = [&](int which, float scale) {
      const std::int64_t place = (which * 8 + node % 8) * 2 + node % kTile / 8;
      std::memcpy(tile + layout.fours * 512 + place * 4, &scale, sizeof scale);
    };
    put(all.centroids, head_dim, 0);
    put_scale(0, all.scales[static_cast<std::size_t>(i)]);
    if (all.spreads.empty()) continue;
    put(all.spreads, (head_dim + 1) / 2, pieces);
    put_scale(1, std::sqrt(all.spread_scales[static_cast<std::size_t>(i)]));
  }
}

bool fits_cluster_choice(std::int64_t most_nodes, int head_dim, int kv_heads) {
  if (pieces_of(head_dim) > kMostPieces) return false;
  int device = 0, most = 0;
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return room_for(most_nodes, ranks_of(kv_heads, most_nodes)) <= most;
}

void choose_clusters(const ClusterChoiceTask& task, const Queries& queries, StreamHandle stream) {
  if (queries.count == 0) return;
  const Params p = {.task = task, .queries = queries, .group = queries.query_heads / queries.layout.kv_heads};
  switch (pieces_compiled(queries.layout.head_dim)) {
    case 2:
      return launch_for_kind<2>(p, stream);
    case 3:
      return launch_for_kind<3>(p, stream);
    case 4:
      return launch_for_kind<4>(p, stream);
    default:
      return launch_for_kind<kMostPieces>(p, stream);
  }
}

}  // namespace lode::cuda
