// SPDX-License-Identifier: Apache-2.0
// Work map: a cluster of blocks for each (KV head, stretch of query tokens), as for one level (clusters.cu).
// Block r owns the coarsest nodes r, r + ranks, ... and all that is below them, so that neighbours, which
// questions keep together, are spread over the blocks, and no block tells another what it keeps. Level by
// level it scores its nodes, four queries a pass, exchanges the sums of the softmax, and makes the next
// level's list of the children of what it keeps. Nodes are rows of whole sectors, read one by one, sixteen to
// a product; rows of few children are asked for as soon as their parent is kept.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/squeezed/cluster_levels.h"
#include "kernels/cuda/squeezed/cluster_passes.cuh"

namespace lode::cuda {

namespace {

constexpr int kHeld = 2;           // tiles that a warp has on the way at once
constexpr int kFewEntries = 1024;  // more keep memory busy without being asked for early
constexpr int kRoom = 200 << 10;   // of a block's shared memory

/// Compiled for these.
int pieces_compiled(int head_dim) {
  const int pieces = (head_dim + kPieceDims - 1) / kPieceDims;
  return pieces <= 2 ? 2 : pieces <= 4 ? 4 : kMostPieces;
}

/// Bytes of a node's row.
__host__ __device__ constexpr int row_bytes_of(int pieces, CentroidKind kind) {
  return kind == CentroidKind::f16  ? pieces * 64
         : kind == CentroidKind::q8 ? pieces * 32
                                    : (pieces + TileLayout::of_spreads(pieces)) * 32;
}

/// A block's shared memory, in bytes from its start.
struct Plan {
  int stride = 0;  // of scores
  int ids = 0, nodes = 0, scores = 0, weights = 0, total = 0;

  __host__ __device__ Plan(int most_entries, int query_bytes) {
    const int entries = (most_entries + kTile - 1) / kTile * kTile;
    stride = (entries + 31) / 32 * 32 + 8;
    nodes = query_bytes;
    scores = nodes + entries * 8;
    weights = scores + kQueries * stride * 4;
    ids = weights + entries * 4;
    total = ids + entries * 4;
  }
};

struct Params {
  ClusterLevelsTask task;
  Queries queries;
  int group = 0;
};

template <int kPieces, CentroidKind kKind>
class LevelsChooser : ClusterPasses {
 public:
  using Own = Tiles<kPieces, kKind>;
  static constexpr int kRowBytes = row_bytes_of(kPieces, kKind);

  __device__ LevelsChooser(const Params& params, char* memory)
      : LevelsChooser(params.task, params, Plan(params.task.most_entries, Own::kQueryBytes), memory) {}

  __device__ void run() {
    if (tid_ == 0) open_inboxes();
    __syncwarp();  // for racecheck, to which a barrier's opening is the warp's
    if (tid_ == 0) expect_messages(8);
    __syncwarp();
    take_top();
    fetch_first();
    __syncwarp();
    arrive_in_cluster();
    expect_queries();
    wait_for_cluster();  // others write here after that
    wait_for_predecessor();
    release_successor();
    int2 mine = {};  // nodes that are kept, and what is directly below them
    for (;; ++level_) {
      compared_ += nodes_;
      mine = keep(score_level());
      if (level_ + 1 == task_.levels) break;
      descend(mine);
    }
    if (tid_ < ranks_)
      send(address_in(found() + rank_, tid_), make_float2(__int_as_float(mine.y), __int_as_float(compared_)),
           address_in(&shared().of_keys, tid_));
    __syncthreads();  // the list, which all threads have written and will read
    wait_for(&shared().of_keys);
    write_lists(mine);
  }

 private:
  __device__ LevelsChooser(const ClusterLevelsTask& task, const Params& params, const Plan& plan,
                           char* memory)
      : ClusterPasses(task.choice, params.queries, params.group, {plan.stride, plan.scores, plan.weights},
                      static_cast<int>(gridDim.x), memory),
        task_(task),
        plan_(plan) {}

  /// Of each block: keys that it keeps, nodes that it has compared.
  __device__ static int2* found() {
    __shared__ int2 found[kMostRanks];
    return found;
  }

  __device__ const ClusterLevelTable& table() const { return task_.level[level_]; }
  __device__ const char* rows() const {
    return reinterpret_cast<const char*>(table().rows) +
           std::int64_t{kv_head_} * table().most_nodes * kRowBytes;
  }
  __device__ const ClusterNode* nodes() const {
    return table().nodes + std::int64_t{kv_head_} * (table().most_nodes + 1);
  }

  __device__ void take_top() {
    step_ = *choice_.step;
    const ClusterTables& tables = choice_.tables;
    const int all = tables.nodes[kv_head_ * (tables.most_parts + 1) + step_.parts];
    nodes_ = max(0, (all - rank_ + ranks_ - 1) / ranks_);
  }
  __device__ int id_of(int entry) const {
    return level_ == 0 ? rank_ + entry * ranks_ : at<int>(plan_.ids)[entry];
  }

  // What is on the way ------------------------------------------------------------------------------------

  struct Coming {
    typename Own::Held held;
    ClusterNode node[2];  ///< lane / 4 and lane / 4 + 8
    int end[2];           ///< of their children
  };

  __device__ void fetch(int slot, int tile) {
    Coming& to = coming_[slot];
    if (tile * kTile >= nodes_) return;
    const int entry = tile * kTile + lane_ / 4;
    const char* row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = entry + 8 * half < nodes_;
      // Behind the last entry it is read again, and not used.
      const int id = id_of(min(entry + 8 * half, nodes_ - 1));
      row[half] = rows() + std::int64_t{id} * kRowBytes;
      const int4 raw = __ldg(reinterpret_cast<const int4*>(nodes() + id));
      to.node[half] = {__int_as_float(raw.x), __int_as_float(raw.y), there ? raw.z : 0, raw.w};
      to.end[half] = __ldg(&nodes()[id + 1].first);
    }
    fetch_rows(row, to.held);
  }
  __device__ void fetch_rows(const char* const (&row)[2], typename Own::Held& to) const {
    const int t = lane_ % 4;
    const auto load = [&](int half, int quad) {
      return __ldg(reinterpret_cast<const uint4*>(row[half]) + quad * 4 + t);
    };
    if constexpr (kKind == CentroidKind::f16) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) to.rows[2 * i] = load(0, i), to.rows[2 * i + 1] = load(1, i);
    } else {
      constexpr int kAll = Own::kLayout.fours;  // pieces
#pragma unroll
      for (int i = 0; i + 1 < kAll; i += 2) {
        const uint4 low = load(0, i / 2), high = load(1, i / 2);
        to.rows[i] = make_uint4(low.x, low.y, high.x, high.y);
        to.rows[i + 1] = make_uint4(low.z, low.w, high.z, high.w);
      }
      if constexpr (kAll % 2 == 1) {
        const auto one = [&](int half) {
          return __ldg(reinterpret_cast<const uint2*>(row[half] + (kAll - 1) * kPieceDims) + t);
        };
        const uint2 low = one(0), high = one(1);
        to.rows[kAll - 1] = make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }
  __device__ void fetch_first() {
#pragma unroll
    for (int slot = 0; slot < kHeld; ++slot) fetch(slot, warp_ + slot * kWarps);
  }

  // Scores ------------------------------------------------------------------------------------------------

  /// Scores of the level's nodes for all queries; whether all but the last pass are among the weights.
  __device__ bool score_level() {
    const int rows = query_rows();
    take_weight();
    for (int row = 0;; row += kQueries, ++pass_) {
      if (row > 0 || level_ > 0) fetch_first();
      if (level_ == 0 || rows > kQueries) take_queries<Own, kPieces>(row, rows);
      score();
      exchange_sums(pass_);
      if (row + kQueries >= rows) break;
      add_weights(row > 0);
    }
    ++pass_;
    return rows > kQueries;
  }

  /// Logits of this block's nodes; of each warp the highest and the sum of exponentials.
  __device__ void score() {
    const int g = lane_ / 4, t = lane_ % 4;
    const auto asked = Own::ask(memory_, lane_);
    const QueryUnits units = shared().units[t];
    float* const to = at<float>(plan_.scores) + t * plan_.stride;
    float2 sum = make_float2(-kLargestLogit, 0.0f);
    for (int from = warp_; from * kTile < nodes_; from += kHeld * kWarps) {
#pragma unroll
      for (int slot = 0; slot < kHeld; ++slot) {
        const int tile = from + slot * kWarps, low = tile * kTile + g, high = low + 8;
        if (tile * kTile >= nodes_) break;
        Coming& own = coming_[slot];
        if constexpr (Own::kLayout.scales > 0) own.held.scales[0] = {own.node[0].scale, own.node[1].scale};
        if constexpr (Own::kHasSpreads) own.held.scales[1] = {own.node[0].root, own.node[1].root};
        const float2 keys =
            make_float2(static_cast<float>(own.node[0].keys), static_cast<float>(own.node[1].keys));
        const float2 raw = Own::logits(own.held, asked, units, keys);
        if (t < 2)
          at<int2>(plan_.nodes)[low + 8 * t] =
              t == 0 ? make_int2(own.node[0].first, own.end[0]) : make_int2(own.node[1].first, own.end[1]);
        fetch(slot, tile + kHeld * kWarps);
        const float2 z = make_float2(bounded(raw.x, low), bounded(raw.y, high));
        to[low] = z.x, to[high] = z.y;
        add_to(sum, z, keys);
      }
    }
    post_sum(sum);
  }

  // What is kept ------------------------------------------------------------------------------------------

  /// The nodes above the level's threshold, closed up, in the place of the scores: where each one's children
  /// (or keys) begin, and its place among those that this block keeps. Returns how many of both. A thread has
  /// neighbours, an odd number of them, so that reading is free of bank conflicts.
  __device__ int2 keep(bool others) const {
    const double threshold = choice_.step[level_].threshold;
    // Numbers that are above the one are above the other.
    const float least = __double2float_rd(choice_.squares ? threshold * threshold : threshold);
    const int run = (nodes_ + kThreads - 1) / kThreads | 1, begin = min(nodes_, tid_ * run),
              end = min(nodes_, begin + run);
    const int2* const node = at<int2>(plan_.nodes);
    unsigned kept = 0;  // a block has room for fewer than 32 nodes a thread
    int2 mine = {};
    for (int i = begin; i < end; ++i) {
      if (threshold == 0.0 || weight_of(i, others) > least)
        kept |= 1u << (i - begin), ++mine.x, mine.y += node[i].y - node[i].x;
    }
    int2 all, before = sum_before(mine, all);
    const bool last = level_ + 1 == task_.levels;
    for (; kept != 0; kept &= kept - 1) {
      const int2 children = node[begin + __ffs(static_cast<int>(kept)) - 1];
      at<int2>(plan_.scores)[before.x++] = make_int2(children.x, before.y);
      before.y += children.y - children.x;
      if (last) ask_for(keys_of_head() + children.x), ask_for(keys_of_head() + children.y - 1);
    }
    return all;
  }

  /// Children first, first + kThreads, ... of the kept nodes: kAtOnce of them, what is beyond the last is
  /// not asked for.
  template <int kAtOnce>
  __device__ void find(int2 kept, int first, int (&child)[kAtOnce]) const {
    const int2* const list = at<int2>(plan_.scores);
    int low[kAtOnce] = {}, steps = 0;
    while (1 << steps < kept.x) ++steps;
    for (int step = steps - 1; step >= 0; --step) {  // the last node that begins at or before the child
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int next = low[u] + (1 << step);
        if (next < kept.x && list[next].y <= first + u * kThreads) low[u] = next;
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) child[u] = list[low[u]].x + first + u * kThreads - list[low[u]].y;
  }

  /// The children of what is kept become what is compared next.
  __device__ void descend(int2 kept) {
    constexpr int kAtOnce = 4;
    __syncthreads();  // the list
    const ClusterLevelTable& below = task_.level[level_ + 1];
    const char* const rows =
        reinterpret_cast<const char*>(below.rows) + std::int64_t{kv_head_} * below.most_nodes * kRowBytes;
    for (int first = tid_; first < kept.y; first += kAtOnce * kThreads) {
      int child[kAtOnce];
      find(kept, first, child);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (first + u * kThreads >= kept.y) continue;
        at<int>(plan_.ids)[first + u * kThreads] = child[u];
        if (kept.y > kFewEntries) continue;
        const char* const row = rows + std::int64_t{child[u]} * kRowBytes;
        ask_for(row);
        if (kRowBytes > 128) ask_for(row + 128);
      }
    }
    nodes_ = kept.y;
    __syncthreads();
  }

  /// The keys of this block's kept nodes to the lists of all tokens of the stretch, behind those of the
  /// blocks before it; the last block adds the keys that are in no cluster.
  __device__ void write_lists(int2 kept) const {
    constexpr int kAtOnce = 8;
    int before = 0;
    int2 all = {};  // keys, nodes
    for (int r = 0; r < ranks_; ++r) {
      if (r < rank_) before += found()[r].x;
      all.x += found()[r].x, all.y += found()[r].y;
    }
    const std::int32_t* const from = keys_of_head();
    for (int first = tid_; first < kept.y; first += kAtOnce * kThreads) {
      int at[kAtOnce], row[kAtOnce];
      find(kept, first, at);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (first + u * kThreads < kept.y) row[u] = __ldg(from + at[u]);
      write_rows(row, before, first, kept.y);
    }
    if (rank_ < ranks_ - 1) return;
    add_others(all.x, [&](std::int64_t list) {
      if (task_.compared != nullptr) task_.compared[list] = all.y;
    });
  }

  const ClusterLevelsTask& task_;
  const Plan plan_;
  int level_ = 0, pass_ = 0, compared_ = 0;
  Coming coming_[kHeld];
};

template <int kPieces, CentroidKind kKind>
__global__ void __launch_bounds__(kThreads, kPieces <= 4 ? 2 : 1)
    choose_levels_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  LevelsChooser<kPieces, kKind>(p, memory).run();
#endif
}

template <int kPieces, CentroidKind kKind>
void launch(const Params& p, StreamHandle stream) {
  const int shared = Plan(p.task.most_entries, Tiles<kPieces, kKind>::kQueryBytes).total;
  const auto kernel = choose_levels_kernel<kPieces, kKind>;
  prepare_clusters(kernel, shared);
  const int stretch = p.task.choice.stretch, stretches = (p.queries.count + stretch - 1) / stretch;
  const dim3 grid(static_cast<unsigned>(p.task.ranks), static_cast<unsigned>(p.queries.layout.kv_heads),
                  static_cast<unsigned>(stretches));
  EarlyLaunch(grid, kThreads, shared, p.task.ranks, stream)(kernel, p);
}

template <int kPieces>
void launch_for_kind(const Params& p, StreamHandle stream) {
  switch (p.task.choice.tables.kind) {
    case CentroidKind::f16:
      return launch<kPieces, CentroidKind::f16>(p, stream);
    case CentroidKind::q8:
      return launch<kPieces, CentroidKind::q8>(p, stream);
    case CentroidKind::q8_spreads:
      return launch<kPieces, CentroidKind::q8_spreads>(p, stream);
  }
}

}  // namespace

std::int64_t cluster_row_bytes(int head_dim, CentroidKind kind) {
  return row_bytes_of(pieces_compiled(head_dim), kind);
}

void pack_cluster_rows(std::span<const std::uint16_t> halves, int head_dim, std::byte* to) {
  const std::int64_t row = cluster_row_bytes(head_dim, CentroidKind::f16);
  for (std::int64_t i = 0; i < std::ssize(halves) / head_dim; ++i)
    std::memcpy(to + i * row, halves.data() + i * head_dim, static_cast<std::size_t>(head_dim) * 2);
}

void pack_cluster_rows(const ByteCentroids& nodes, int head_dim, std::byte* to) {
  const int pieces = pieces_compiled(head_dim);
  const std::int64_t row =
      row_bytes_of(pieces, nodes.spreads.empty() ? CentroidKind::q8 : CentroidKind::q8_spreads);
  const std::int64_t count = std::ssize(nodes.scales);
  const auto put = [&](std::span<const std::byte> from, int width, int first_piece) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (int c = 0; c < width; c += 8) {
        const int piece = first_piece + c / kPieceDims, t = c % kPieceDims / 8,
                  alone = piece + 1 == row / kPieceDims && piece % 2 == 0 ? 1 : 0;
        const int at = piece / 2 * 2 * kPieceDims + (alone != 0 ? t * 8 : t * 16 + piece % 2 * 8);
        std::memcpy(to + i * row + at, from.data() + i * width + c,
                    static_cast<std::size_t>(std::min(8, width - c)));
      }
    }
  };
  put(nodes.centroids, head_dim, 0);
  if (!nodes.spreads.empty()) put(nodes.spreads, (head_dim + 1) / 2, pieces);
}

std::span<const int> cluster_level_ranks(int kv_heads) {
  static constexpr int kAll[] = {4, 8, 16};
  static PerDevice<bool> placed;
  const bool sixteen = placed.get([] {
    return can_place(choose_levels_kernel<kMostPieces, CentroidKind::q8_spreads>, 16, kThreads, kRoom);
  });
  const auto all = std::span(kAll).first(sixteen ? 3 : 2);
  return all.subspan(kv_heads <= 8 ? all.size() - 1 : kv_heads <= 16 ? 1 : 0);
}

bool fits_cluster_levels(std::int64_t most_entries, int head_dim) {
  return head_dim <= kMostPieces * kPieceDims && most_entries <= kRoom &&
         Plan(static_cast<int>(most_entries), kMostPieces * 512).total <= kRoom;
}

void choose_clusters_of_levels(const ClusterLevelsTask& task, const Queries& queries, StreamHandle stream) {
  if (queries.count == 0) return;
  const Params p = {.task = task, .queries = queries, .group = queries.query_heads / queries.layout.kv_heads};
  switch (pieces_compiled(queries.layout.head_dim)) {
    case 2:
      return launch_for_kind<2>(p, stream);
    case 4:
      return launch_for_kind<4>(p, stream);
    default:
      return launch_for_kind<kMostPieces>(p, stream);
  }
}

}  // namespace lode::cuda
