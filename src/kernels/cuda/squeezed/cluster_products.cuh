// SPDX-License-Identifier: Apache-2.0
// A pass over nodes and queries that choose together, on Hopper's matrix unit. Two passes of products of the
// same form, of 256 rows that a block keeps in shared memory with tiles of 128 that one warpgroup brings
// while four multiply:
//
//   sums     rows are queries, tiles are centroids: log2 sum_j N_j exp(z_j) of each query
//   weights  rows are centroids, tiles are queries: the sum over queries of what each makes of a centroid
//
// Where there is memory for them the first pass stores its exponentials (cluster_columns.cuh), and the second
// adds those up in place of making them again. Exponentials set the pace (16 a cycle and processor):
// warpgroups take those of their products of 64 x 128 while others multiply. Sums stay in a thread until the
// end: rows of a product lie in threads.
//
// Spreads are a second product, of the squares of a query's length in each plane with variances; both lie
// behind the other columns, as bfloat16, whose range holds them in units in which the root r of their product
// is 2 at the bend: r^2 = 2 s^2 / ln N of logits (select/squeezed/squeezed.cc). What is added there and log N are to
// the base 2 together log2 N times
//
//   g(r) = r + max(0, 1 - r / 2)^2,  which is 1 + r^2 / 4 up to the bend and r behind it.
//
// Roots are as slow as exponentials, and there are as many again. What follows is made of halves, two at a
// time, and stays half a register until the other product is there: 11 bits of kGainUnit g, which is a half
// from the least g, 1, to 2^28.
#pragma once

#include "kernels/cuda/device/hopper_matrix.cuh"
#include "kernels/cuda/device/matrix.cuh"
#include "kernels/cuda/squeezed/cluster_block.h"
#include "kernels/cuda/squeezed/cluster_stored.cuh"
#include "kernels/cuda/squeezed/cluster_tiles.cuh"

namespace lode::cuda {

inline constexpr int kRows = 256, kTileRows = 128, kGroupThreads = 128;
inline constexpr int kTeams = 4;                // warpgroups that multiply
inline constexpr float kNoKeys = -1e30f;        // log2 of their number, and still 0 if multiplied with 0
inline constexpr float kLargestFactor = 1e15f;  // of two: what they make of a sum of products is a float
inline constexpr float kLargestSum = 0x1p80f;   // of a tile; else exponentials get a new base
inline constexpr float kRootOfGainUnit = 0x1p-6f, kGainUnit = kRootOfGainUnit * kRootOfGainUnit;

/// Of a row of halves. Spreads have a panel of their own, of which D / 2 columns are used.
constexpr int columns_of(int head_dim, bool spreads) {
  return spreads ? head_dim + 64 : head_dim;
}

/// A tile lies as panels of 64 columns in the matrix unit's 128-byte swizzle, as in prefill_hopper.cu.
template <int D, bool kSpreads>
struct BlockShape {
  static constexpr int kColumns = columns_of(D, kSpreads), kPanels = kColumns / 64,
                       kStages = kPanels > 2 ? 2 : 4;
  static constexpr int kPanel = kTileRows * 128, kTile = kPanels * kPanel;  // bytes
  static constexpr int kStage = kTile + kTileRows * 8;                      // and two floats a row
  static constexpr int kShared = 2 * kTile + kStages * kStage + 1024 + 128;
};

struct BlockParams {
  ClusterChoiceTask task;
  Queries queries;
  int group = 0, rows = 0;           // of a KV head
  std::int64_t all_rows, all_nodes;  // in whole tiles
  __half* q = nullptr;               // [Hkv, all_rows, columns]
  float* log_keys = nullptr;         // [Hkv, all_nodes] log2 N, with spreads over kGainUnit; else kNoKeys
  float* unscale = nullptr;          // [Hkv, all_rows] from a product to a logit, to the base 2; NaN: no say
  float2* factors = nullptr;         // [Hkv, all_rows] a product's weight is exp2(x product + y), a stored
                                     // number's exp2(its base - x + y) times it; y -infinity: none
  float* weights = nullptr;          // [Hkv, all_nodes]
  std::byte* halves = nullptr;       // [Hkv, tiles of 16 nodes, columns x 16] of what has 8 bits
  std::int32_t* kept = nullptr;      // [Hkv, chunks] keys
  uint4* stored = nullptr;           // exponentials of some heads, from first_head on: stored_at()
  int first_head = 0;

  __device__ int nodes(int head) const {
    const ClusterTables& t = task.tables;
    return t.nodes[head * (t.most_parts + 1) + task.step->parts];
  }
  __host__ __device__ int tiles() const { return (task.tables.most_nodes + kTileNodes - 1) / kTileNodes; }
  __device__ const std::int32_t* first(int head) const {
    return task.tables.first + std::int64_t{head} * (task.tables.most_nodes + 1);
  }
  /// Of 16 rows and a tile's 128 nodes, as threads hold them: [2 halves of 8 rows][3 pieces][lanes], each
  /// lane's 32 numbers packed (cluster_stored.cuh), and the rows' bases. `head` is counted from first_head
  /// on.
  __device__ std::int64_t stored_at(int head, int sixteen_rows, int tile) const {
    const std::int64_t team = head * (all_rows / 64) + sixteen_rows / 4;
    return (team * (all_nodes / kTileRows) + tile) * 4 * kStoredGroup + sixteen_rows % 4 * kStoredGroup;
  }
};

enum class Pass { sums, stored_sums, weights, squares };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Sums of queries over centroids, or of centroids' weights, or their squares, over queries.
template <int D, bool kSpreads, Pass kPass>
class BlockPass {
  static constexpr bool kStores = kPass == Pass::stored_sums, kOfQueries = kPass == Pass::sums || kStores,
                        kSquares = kPass == Pass::squares;
  using S = BlockShape<D, kSpreads>;
  static constexpr int kStages = S::kStages;
  using Products = float[kTileRows / 2];
  using Gains = __half2[kTileRows / 4];

 public:
  __device__ BlockPass(const BlockParams& p, char* memory)
      : p_(p),
        base_((shared_address(memory) + 1023) / 1024 * 1024),
        memory_(memory + (base_ - shared_address(memory))),
        head_(p.first_head + static_cast<int>(blockIdx.y)),
        first_(static_cast<int>(blockIdx.x) * kRows),
        team_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads - 1, 0)),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    tiles_ = max(1, ((kOfQueries ? p.nodes(head_) : p.rows) + kTileRows - 1) / kTileRows);
  }

  __device__ void run() {
    if (!kOfQueries && first_ >= p_.nodes(head_)) return;
    if (threadIdx.x == 0) {
      stationary().init(kGroupThreads);
      for (int i = 0; i < kStages; ++i) {
        full(i).init(kGroupThreads);
        empty(i).init(4 * kTeams);  // the warps that multiply
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (team_ < 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
      bring();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
      multiply();
    }
  }

 private:
  static constexpr int kTilesAt = 2 * S::kTile, kBarriersAt = kTilesAt + kStages * S::kStage;
  __device__ unsigned tile_at(int slot) const {
    return base_ + kTilesAt + static_cast<unsigned>(slot) * S::kStage;
  }
  __device__ Barrier full(int slot) const { return {base_ + kBarriersAt + 8u * static_cast<unsigned>(slot)}; }
  __device__ Barrier empty(int slot) const { return {full(slot).at + 8u * kStages}; }
  __device__ Barrier stationary() const { return {base_ + kBarriersAt + 16u * kStages}; }

  /// A tile is announced once the next is under way, or earlier where there is no room yet for the next.
  __device__ void bring() const {
    load_rows(first_ / kTileRows, base_);
    load_rows(first_ / kTileRows + 1, base_ + S::kTile);
    commit();
    int waiting = kStages;  // that is the rows
    for (int tile = 0; tile < tiles_; ++tile) {
      const int slot = tile % kStages;
      if (tile >= kStages) {
        const int parity = tile / kStages % 2 ^ 1;
        if (!empty(slot).passed(parity)) {
          announce<0>(waiting);
          waiting = -1;
          empty(slot).wait(parity);
        }
      }
      load_tile(tile, tile_at(slot));
      commit();
      announce<1>(waiting);
      waiting = slot;
    }
    announce<0>(waiting);
  }
  static __device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int Newer>
  __device__ void announce(int slot) const {
    if (slot < 0) return;
    asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(Newer) : "memory");
    (slot == kStages ? stationary() : full(slot)).arrive();
  }
  __device__ void load_rows(int tile, unsigned to) const {
    if constexpr (kOfQueries)
      load_queries(tile, to);
    else
      load_nodes(tile, to);
  }
  /// With what is known of each row: log2 of its keys, or its factors.
  __device__ void load_tile(int tile, unsigned to) const {
    const auto row = static_cast<unsigned>(threadIdx.x);
    const std::int64_t at = std::int64_t{tile} * kTileRows + row;
    if constexpr (kOfQueries) {
      load_nodes(tile, to);
      bring_number<4>(to + S::kTile + row * 4, p_.log_keys + head_ * p_.all_nodes + at);
    } else {
      load_queries(tile, to);
      bring_number<8>(to + S::kTile + row * 8, p_.factors + head_ * p_.all_rows + at);
    }
  }
  __device__ void load_queries(int tile, unsigned to) const {
    const int chunk = static_cast<int>(threadIdx.x) % 8, row = static_cast<int>(threadIdx.x) / 8;
    to += static_cast<unsigned>(row * 128 + (chunk ^ (row % 8)) * 16);
    const __half* const from =
        p_.q + (head_ * p_.all_rows + tile * kTileRows + row) * S::kColumns + chunk * 8;
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
#pragma unroll
      for (int i = 0; i < kTileRows / 16; ++i)
        bring_piece(to + static_cast<unsigned>(panel * S::kPanel + i * 16 * 128),
                    from + i * 16 * S::kColumns + panel * 64, true);
    }
  }
  /// From tiles of 16 nodes in pieces of 32 dimensions, [2 x 8 nodes][4 x 8 dimensions] (pack_centroids): two
  /// pieces, a panel, a turn.
  __device__ void load_nodes(int tile, unsigned to) const {
    constexpr int kOfTile = S::kPanels * 128;  // of 16 bytes
    const int id = static_cast<int>(threadIdx.x), node = id / 32 % 2 * 8 + id % 32 / 4,
              chunk = id / 64 * 4 + id % 4;
    to += static_cast<unsigned>(node * 128 + (chunk ^ (node % 8)) * 16);
    const int tiles = p_.tiles(), first = tile * (kTileRows / kTileNodes);
    const ClusterTables& tables = p_.task.tables;
    const uint4* const from =
        reinterpret_cast<const uint4*>(tables.kind == CentroidKind::f16 ? tables.centroids : p_.halves) +
        (std::int64_t{head_} * tiles + first) * kOfTile + id;
#pragma unroll
    for (int i = 0; i < kTileRows / kTileNodes * S::kPanels; ++i) {
      const int of_sixteen = i / S::kPanels, panel = i % S::kPanels;
      bring_piece(to + static_cast<unsigned>(panel * S::kPanel + of_sixteen * 16 * 128),
                  from + i * kGroupThreads, first + of_sixteen < tiles);
    }
  }
  template <int kBytes>
  static __device__ __forceinline__ void bring_number(unsigned to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }
  static __device__ __forceinline__ void bring_piece(unsigned to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(wanted ? from : nullptr),
                 "r"(wanted ? 16 : 0)
                 : "memory");
  }

  __device__ void multiply() {
    take_rows();
    stationary().wait(0);
    if constexpr (kStores) to_ = stored_of_warp();
    for (int tile = 0; tile < tiles_; ++tile, to_ += kStores ? 4 * kStoredGroup : 0) {
      const int slot = tile % kStages;
      full(slot).wait(tile / kStages % 2);
      Products x;
      if constexpr (kSpreads) {
        start<__nv_bfloat16, D / 16, D / 32>(slot, x);
        wait_for_products<0>(x);
        Gains gains;
        bend(x, gains);
        start<__half, 0, D / 16>(slot, x);
        wait_for_products<0>(x);
        add(slot, x, gains);
      } else {
        start<__half, 0, D / 16>(slot, x);
        wait_for_products<0>(x);
        add(slot, x);
      }
      __syncwarp();  // all lanes have read what the slot held
      if (lane_ == 0) empty(slot).arrive();
    }
    finish();
  }
  /// Products of this warpgroup's 64 rows with those of a tile, of kSteps times 16 columns from kFirst times
  /// 16 on. As wide as they can be: each takes the unit some 35 cycles beside its own 64.
  template <class T, int kFirst, int kSteps>
  __device__ void start(int slot, Products& s) const {
    const auto team = static_cast<unsigned>(team_);
    const unsigned long long own = descriptor(base_ + team / 2 * S::kTile + team % 2 * 64 * 128, 16, 1024),
                             its = descriptor(tile_at(slot), 16, 1024);
    fence_products();
#pragma unroll
    for (int k = kFirst; k < kFirst + kSteps; ++k) {
      const auto at = static_cast<unsigned>(k / 4 * S::kPanel + k % 4 * 32);
      Unit<T>::scores(s, own + (at >> 4), its + (at >> 4), k > kFirst);
    }
    commit_products();
  }
  __device__ int row_of(int half) const {
    return first_ + team_ * 64 + warp_ * 16 + lane_ / 4 + 8 * half;
  }
  __device__ void take_rows() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t row = row_of(i), query = head_ * p_.all_rows + row,
                         node = head_ * p_.all_nodes + row;
      if constexpr (kOfQueries)
        unit_[i] = p_.unscale[query];
      else if constexpr (kSpreads)
        unit_[i] = p_.log_keys[node];
    }
  }
  template <class T>
  __device__ T beside(int slot, int column) const {  // of it + 2 (lane % 4) and the next
    return reinterpret_cast<const T*>(memory_ + kTilesAt + slot * S::kStage +
                                      S::kTile)[column / 2 + lane_ % 4];
  }

  /// Squares times variances become gains.
  static __device__ void bend(const Products& y, Gains& gains) {
    const __half2 top = __float2half2_rn(kRootOfGainUnit), slope = __float2half2_rn(-0.5f / kRootOfGainUnit),
                  most = __float2half2_rn(65504.0f);
#pragma unroll
    for (int i = 0; i < kTileRows / 4; ++i) {
      const __half2 root = __hmin2(__floats2half2_rn(sqrt_fast(y[2 * i]), sqrt_fast(y[2 * i + 1])), most),
                    before = __hfma2_relu(root, slope, top);
      gains[i] = __hfma2(before, before, root);
    }
  }
  /// Products become logits to the base 2 beyond the base of their sum, or logarithms of weights. `gains` are
  /// what log2 N is multiplied by.
  template <class... OfSpreads>
  __device__ void to_logits(int slot, Products& s, const OfSpreads&... gains) const {
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
      float4 factors = {};
      float2 log_keys = {};
      if constexpr (kOfQueries)
        log_keys = beside<float2>(slot, 8 * n);
      else
        factors = beside<float4>(slot, 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * n + 2 * half;
        const float base = base_of_sum_[half], unit = unit_[half];
        if constexpr (kSpreads) {
          const float2 gain = __half22float2((gains[i / 2], ...));
          if constexpr (kOfQueries) {
            s[i] = fmaf(log_keys.x, gain.x, fmaf(s[i], unit, -base));
            s[i + 1] = fmaf(log_keys.y, gain.y, fmaf(s[i + 1], unit, -base));
          } else {
            s[i] = fmaf(unit, gain.x, fmaf(s[i], factors.x, factors.y));
            s[i + 1] = fmaf(unit, gain.y, fmaf(s[i + 1], factors.z, factors.w));
          }
        } else if constexpr (kOfQueries) {
          s[i] = fmaf(s[i], unit, log_keys.x - base);
          s[i + 1] = fmaf(s[i + 1], unit, log_keys.y - base);
        } else {
          s[i] = fmaf(s[i], factors.x, factors.y);
          s[i + 1] = fmaf(s[i + 1], factors.z, factors.w);
        }
      }
    }
  }
  template <class... OfSpreads>
  __device__ void add(int slot, Products& s, const OfSpreads&... gains) {
    to_logits(slot, s, gains...);
    if constexpr (kOfQueries)
      add_sums(s);
    else
      add_weights(s);
  }
  /// The four threads of a row count from the same base, near the largest logit of the first tile that has
  /// keys; a new one is looked for only where a tile leaves the range. Then all of
  /// a warp do the same.
  __device__ void add_sums(const Products& s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float of_tile = exponentials(s, half, 0.0f);
      if (__any_sync(~0u, leaves(half, of_tile))) of_tile = count_anew(s, half, of_tile);
      sum_[half] += of_tile;
      if constexpr (kStores) {
        if (lane_ % 4 == 0) bases_of(to_ - lane_)[half * 8 + lane_ / 4] = base_of_sum_[half];
      }
    }
  }
  __device__ bool leaves(int half, float of_tile) const {
    return !based_[half] || of_tile > (kStores ? kMostStored : kLargestSum);
  }
  __device__ float count_anew(const Products& s, int half, float of_tile) {
    float high = kNoKeys;
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n)
      high = fmaxf(high, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
    unsigned one_leaves = leaves(half, of_tile);
    for (int o = 1; o < 4; o *= 2) {
      high = fmaxf(high, __shfl_xor_sync(~0u, high, o));
      one_leaves |= __shfl_xor_sync(~0u, one_leaves, o);
    }
    const bool anew = one_leaves && high > 0.5f * kNoKeys;  // else nothing counts
    const float by = anew ? ceilf(high) - kStoredPeak : 0.0f;
    sum_[half] *= exp2_fast(-fmaxf(by, 0.0f));  // a first base may be lower: there is no sum yet
    base_of_sum_[half] += by;
    based_[half] |= anew || of_tile != of_tile;  // a query that is no number
    return exponentials(s, half, by);
  }
  __device__ float exponentials(const Products& s, int half, float base) {
    float sum = 0.0f, other = 0.0f;
    unsigned words[kStoredWords];
    __half2 numbers[4];
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
      const float one = exp2_fast(s[4 * n + 2 * half] - base),
                  next = exp2_fast(s[4 * n + 2 * half + 1] - base);
      sum += one;
      other += next;
      if constexpr (kStores) {
        numbers[n % 4] = __floats2half2_rn(one, next);
        if (n % 4 == 3) pack_stored(numbers, words + n / 4 * 3);
      }
    }
    if constexpr (kStores) store(words, to_ + half * kStoredPieces / 2 * 32);
    return sum + other;
  }
  static __device__ void store(const unsigned (&words)[kStoredWords], uint4* to) {
#pragma unroll
    for (int i = 0; i < kStoredPieces / 2; ++i)
      __stcs(to + i * 32, make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]));
  }
  __device__ uint4* stored_of_warp() const {
    return p_.stored +
           p_.stored_at(static_cast<int>(blockIdx.y), (first_ + team_ * 64) / 16 + warp_, /*tile=*/0) + lane_;
  }
  __device__ void add_weights(const Products& s) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kTileRows / 2; ++i) {
      const float weight = exp2_fast(s[i]);
      sum[i % 4] = kSquares ? fmaf(weight, weight, sum[i % 4]) : sum[i % 4] + weight;
    }
    sum_[0] += sum[0] + sum[1];
    sum_[1] += sum[2] + sum[3];
  }

  /// The four threads of a row make one sum of theirs.
  __device__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      float sum = sum_[half];
      for (int o = 1; o < 4; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
      if (lane_ % 4 != 0) continue;
      if constexpr (kOfQueries)
        p_.factors[head_ * p_.all_rows + row] = factors(base_of_sum_[half], sum, unit_[half]);
      else
        p_.weights[head_ * p_.all_nodes + row] = (kSquares ? sqrtf(sum) : sum) * share_of_key(unit_[half]);
    }
  }
  /// Weights are a key's; with spreads, logarithms of them begin with log2 N.
  static __device__ float share_of_key(float log_keys) {
    return kSpreads ? exp2f(-fmaxf(kGainUnit * log_keys, 0.0f)) : 1.0f;
  }
  /// Of a product's weight K exp(z) / sum_j N_j exp(z_j), such that sums over queries are means, or sums of
  /// squares are means of squares; of a stored exponential's, the base and what is left without it.
  __device__ float2 factors(float base, float sum, float unscale) const {
    if (!(sum > 0.0f && sum < INFINITY)) return make_float2(0.0f, -INFINITY);
    const float keys = static_cast<float>(p_.task.step->end - p_.task.step->begin);
    const float share =
        log2f(keys) - log2f(sum) - log2f(static_cast<float>(p_.rows)) * (p_.task.squares ? 0.5f : 1.0f);
    return kStores ? make_float2(base, share) : make_float2(unscale, share - base);
  }

  const BlockParams& p_;
  const unsigned base_;  // shared memory: rows, tiles with what is beside them, barriers
  char* const memory_;
  const int head_, first_, team_, warp_, lane_;
  int tiles_;
  uint4* to_ = nullptr;  // where a tile's exponentials are stored
  float unit_[2] = {};   // of rows: queries' unscale, or nodes' log2 N
  float base_of_sum_[2] = {}, sum_[2] = {};
  bool based_[2] = {};  // whether a tile with keys has given a base
};

#endif

}  // namespace lode::cuda
