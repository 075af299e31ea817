// SPDX-License-Identifier: Apache-2.0
// Selection by signatures in one launch. A cluster of up to 16 blocks takes one list: its blocks sign the
// queries together (a warp computes one output, every block gets all of a layer's), while their own pieces of
// the keys' signatures are on their way to shared memory; each measures its piece, keeps the distances and
// counts them by level; the cluster's counts give the level where the budget ends and every block its place
// in the list; each block writes its rows. Distances are small integers, so nothing depends on timing.
//
// Heads that share their keys' signatures are measured together: with c of G queries having bit b set, a key
// adds min(c, G - c) at b, and |G - 2c| more where its bit is not the majority's. The first part is the same
// for all keys; the second, split by powers of two, is one popcount for each: two for four heads.
#include <cooperative_groups.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/device/sm_count.h"
#include "kernels/cuda/hash/signatures.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 512, kOutputs = 8, kMostHeads = 16, kMostWords = 4, kMostPlanes = 5;
constexpr int kMostCluster = 16;
constexpr int kUnit = static_cast<int>(kSignatureUnit);  // keys that a warp compacts at once, 8 a lane
constexpr int kHeldBytes = 96 << 10;                     // of signatures that a block fetches ahead
constexpr int kStageBytes = 64 << 10;                    // of weights likewise

struct Params {
  Queries queries;
  const float* q = nullptr;
  SignNets nets;
  const std::uint32_t* given = nullptr;
  Signatures signatures;
  SignatureRule rule;
  SignatureRanks ranks;
  int together = 1;  ///< heads of one list
  int levels = 0;    ///< distances are in [0, levels); `levels` marks what is no far key
  int step = 1;      ///< mismatches of one level
  int columns = 4;   ///< copies of the histogram; 0: a byte for each thread
  std::int64_t net_weights = 0, net_biases = 0;  ///< of one network
  int widest = 0;                                ///< of its layers
  int kept = 0;                                  ///< distances of a block that fit in shared memory
  int held = 0;                                  ///< keys whose signatures do
  int stage_bytes = 0;                           ///< of weights that one warp fetches ahead
  std::int32_t *rows = nullptr, *counts = nullptr;
  std::int64_t capacity = 0;
};

/// The blocks of one list. A block that has arrived may go on; it ends only when all have.
struct Cluster {
#if __CUDA_ARCH__ >= 900
  __device__ static int size() {
    return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
  }
  __device__ static int rank() {
    return static_cast<int>(cooperative_groups::this_cluster().block_rank());
  }
  __device__ static void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __device__ static void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  template <class T>
  __device__ static T* of(T* mine, int other) {
    return cooperative_groups::this_cluster().map_shared_rank(mine, other);
  }
#else
  __device__ static int size() {
    return 1;
  }
  __device__ static int rank() {
    return 0;
  }
  __device__ static void arrive() {
    __syncthreads();
  }
  __device__ static void wait() {}
  template <class T>
  __device__ static T* of(T* mine, int) {
    return mine;
  }
#endif
  __device__ static void sync() {
    arrive();
    wait();
  }
};

__device__ __forceinline__ void fetch(void* to, const void* from) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
}
__device__ __forceinline__ void close_group() {
  asm volatile("cp.async.commit_group;");
}

/// Places in dynamic shared memory, in this order.
struct Places {
  std::int64_t scores, codes, counts, levels, sums, activations, stage, end;
  __host__ __device__ Places(const Params& p, int threads, int score_bytes) {
    const auto up = [](std::int64_t x) { return (x + 15) / 16 * 16; };
    scores = 0;
    codes = scores + up(std::int64_t{p.kept} * score_bytes);
    counts = codes + up(std::int64_t{p.held} * p.signatures.words * 4);
    levels = counts + up(std::int64_t{p.levels + 1} * (p.columns > 0 ? p.columns * 4 : threads));
    sums = levels + up(std::int64_t{p.levels} * 4);
    activations = sums + up(std::int64_t{p.levels} * 8);
    stage = activations + up(std::int64_t{2} * p.together * p.widest * 4);
    end = stage + std::int64_t{threads} / 32 * p.stage_bytes;
  }
};

/// What the threads of a block share besides.
struct Shared {
  unsigned words[kMostHeads][kMostWords];    // the queries' signatures
  unsigned against[kMostHeads][kMostWords];  // what keys are compared with, by source
  unsigned planes[kMostPlanes][kMostWords];
  int level, nearer, ties;         // where the list ends
  int before_nearer, before_ties;  // of the blocks in front of this one
  int warp_nearer[kThreads / 32], warp_ties[kThreads / 32];
};

/// The queries' networks, spread over the cluster by groups of eight outputs, whose weights lie together: a
/// warp has a group, four lanes an output. Weights are fetched before anything is waited for.
struct Signer {
  const Params& p;
  const int first_net, size, rank, warp, warps, lane;
  char* stage;

  __device__ Signer(const Params& params, int net, char* stages)
      : p(params),
        first_net(net),
        size(Cluster::size()),
        rank(Cluster::rank()),
        warp(static_cast<int>(threadIdx.x) / 32),
        warps(static_cast<int>(blockDim.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        stage(stages + warp * params.stage_bytes) {}

  /// each(head, first output, first weight, first bias) for the warp's groups of a layer whose weights and
  /// biases begin at these places of a network.
  template <class Each>
  __device__ void groups(int layer, int weights, int biases, Each each) const {
    const int in = p.nets.widths[layer], of_head = p.nets.widths[layer + 1] / kOutputs;
    for (int group = warp * size + rank; group < p.together * of_head; group += warps * size) {
      const int head = group / of_head, output = (group - head * of_head) * kOutputs;
      each(head, output, (first_net + head) * p.net_weights + weights + output * in,
           (first_net + head) * p.net_biases + biases + output);
    }
  }
  __device__ int element() const { return p.nets.type == DType::f16 ? 2 : 4; }

  __device__ void fetch_weights() const {
    int weights = 0, biases = 0;
    char* to = stage;
    for (int layer = 0; layer < p.nets.depth; ++layer) {
      const int in = p.nets.widths[layer], bytes = kOutputs * in * element();
      groups(layer, weights, biases, [&](int, int, std::int64_t weight, std::int64_t bias) {
        const char* const from = static_cast<const char*>(p.nets.weights) + weight * element();
        for (int i = lane * 16; i < bytes; i += 512) fetch(to + i, from + i);
        if (lane < 2) fetch(to + bytes + lane * 16, p.nets.biases + bias + lane * 4);
        to += bytes + kOutputs * 4;
      });
      weights += in * p.nets.widths[layer + 1], biases += p.nets.widths[layer + 1];
    }
  }

  template <class T>
  __device__ static float product(const T* row, const float* x, int in, int part) {
    float sum = 0.0f;
    for (int i = part * kPack<T>; i < in; i += 4 * kPack<T>) {
      float w[kPack<T>];
      widen_pack<T>(*reinterpret_cast<const uint4*>(row + i), w);
#pragma unroll
      for (int k = 0; k < kPack<T>; k += 4) {
        const float4 some = *reinterpret_cast<const float4*>(x + i + k);
        sum = fmaf(w[k], some.x, sum), sum = fmaf(w[k + 1], some.y, sum);
        sum = fmaf(w[k + 2], some.z, sum), sum = fmaf(w[k + 3], some.w, sum);
      }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }

  /// x [2][together][widest]: the inputs are in the first half. The outputs end up in the half returned.
  __device__ float* run(float* x) const {
    float* y = x + p.together * p.widest;
    const char* staged = stage;
    int weights = 0, biases = 0;
    const int own = lane / 4, part = lane % 4;
    for (int layer = 0; layer < p.nets.depth; ++layer) {
      const int in = p.nets.widths[layer];
      const bool last = layer + 1 == p.nets.depth;
      groups(layer, weights, biases, [&](int head, int output, std::int64_t weight, std::int64_t bias) {
        const bool is_staged = p.stage_bytes > 0;
        const char* const from =
            is_staged ? staged : static_cast<const char*>(p.nets.weights) + weight * element();
        const float* const offset = is_staged
                                        ? reinterpret_cast<const float*>(staged + kOutputs * in * element())
                                        : p.nets.biases + bias;
        staged += kOutputs * in * element() + kOutputs * 4;
        const float* const input = x + head * p.widest;
        float sum = p.nets.type == DType::f16
                        ? product(reinterpret_cast<const __half*>(from) + own * in, input, in, part)
                        : product(reinterpret_cast<const float*>(from) + own * in, input, in, part);
        sum += offset[own];
        if (!last) sum = p.nets.relu ? (sum < 0.0f ? 0.0f : sum) : sum / (1.0f + expf(-sum));
        for (int to = part; to < size; to += 4) Cluster::of(y, to)[head * p.widest + output + own] = sum;
      });
      weights += in * p.nets.widths[layer + 1], biases += p.nets.widths[layer + 1];
      Cluster::sync();
      float* const other = x;
      x = y, y = other;
    }
    return x;
  }
};

/// From the heads' signatures to what a key is compared with.
template <int W, int P>
__device__ void combine(const Params& p, bool sources_apart, Shared& s) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int heads = p.together;
  if (warp >= W) return;
  int set = 0;
  for (int g = 0; g < heads; ++g) {
    set += s.words[g][warp] >> lane & 1;
    if (sources_apart && lane == 0) s.against[g][warp] = s.words[g][warp];
  }
  if (sources_apart) {
    if (lane == 0) s.planes[0][warp] = ~0u;
    return;
  }
  const int more = abs(heads - 2 * set) / p.step;
  const unsigned majority = __ballot_sync(~0u, 2 * set > heads);
  if (lane == 0) s.against[0][warp] = majority;
#pragma unroll
  for (int plane = 0; plane < P; ++plane) {
    // Where p.step is 1, numbers of heads are odd, and so is `more`, or there is one plane.
    const unsigned bits = __ballot_sync(~0u, more >> plane & 1);
    if (lane == 0) s.planes[plane][warp] = bits;
  }
}

/// Distances of four consecutive keys.
template <int W, int P>
struct Measure {
  const std::uint32_t* codes;  // of the list's first set
  std::int64_t next_set;       // words from one source to the next
  int sources;
  const Shared& s;
  unsigned against[W], planes[P][W];  // of the first source

  __device__ Measure(const std::uint32_t* first, std::int64_t next, int count, const Shared& shared)
      : codes(first), next_set(next), sources(count), s(shared) {}
  __device__ void prepare() {
#pragma unroll
    for (int w = 0; w < W; ++w) {
      against[w] = s.against[0][w];
#pragma unroll
      for (int plane = 0; plane < P; ++plane) planes[plane][w] = s.planes[plane][w];
    }
  }
  __device__ static void read(const std::uint32_t* from, unsigned (&raw)[4 * W]) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const uint4 some = reinterpret_cast<const uint4*>(from)[i];
      raw[4 * i] = some.x, raw[4 * i + 1] = some.y, raw[4 * i + 2] = some.z, raw[4 * i + 3] = some.w;
    }
  }
  __device__ void first_source(const unsigned (&raw)[4 * W], int (&distance)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      distance[i] = 0;
#pragma unroll
      for (int plane = 0; plane < P; ++plane) {
#pragma unroll
        for (int w = 0; w < W; ++w)
          distance[i] += __popc((raw[W * i + w] ^ against[w]) & planes[plane][w]) << plane;
      }
    }
  }
  __device__ void other_sources(std::int64_t key, int (&distance)[4]) const {
    for (int source = 1; source < sources; ++source) {
      unsigned raw[4 * W];
      read(codes + source * next_set + key * W, raw);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int w = 0; w < W; ++w) distance[i] += __popc(raw[W * i + w] ^ s.against[source][w]);
      }
    }
  }
};

/// Eight distances, and those of them that are below or at a level, as bits.
template <class Score>
struct Eight;
template <>
struct Eight<std::uint8_t> {
  uint2 x;
  __device__ unsigned at_most(unsigned level) const {
    const unsigned l = level * 0x01010101u;
    return nibble(__vcmpleu4(x.x, l)) | nibble(__vcmpleu4(x.y, l)) << 4;
  }
  /// Four bytes of 0 or 255 to four bits.
  __device__ static unsigned nibble(unsigned bytes) { return (bytes & 0x08040201u) * 0x01010101u >> 24; }
};
template <>
struct Eight<std::uint16_t> {
  uint4 x;
  __device__ unsigned at_most(unsigned level) const {
    const unsigned words[4] = {x.x, x.y, x.z, x.w};
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      bits |= ((words[i] & 0xffff) <= level ? 1u : 0u) << 2 * i | (words[i] >> 16 <= level ? 2u : 0u)
                                                                      << 2 * i;
    return bits;
  }
};

__device__ __forceinline__ unsigned scanned(unsigned x) {
  return sum_up_to(x, static_cast<int>(threadIdx.x) % 32);
}

/// Of the cluster's counts, which lie in every block's `levels`, the sum over the cluster and over the blocks in
/// front of this one. Called by the whole block, whose cluster waits before a block of it ends.
__device__ void sum_levels(const Params& p, const int* levels, int2* sums) {
  const int size = Cluster::size(), rank = Cluster::rank();
  for (int l = static_cast<int>(threadIdx.x); l < p.levels; l += static_cast<int>(blockDim.x)) {
    int of[kMostCluster];
#pragma unroll
    for (int r = 0; r < kMostCluster; ++r) of[r] = r < size ? Cluster::of(levels, r)[l] : 0;
    int2 sum = {};
#pragma unroll
    for (int r = 0; r < kMostCluster; ++r) sum.x += of[r], sum.y += r < rank ? of[r] : 0;
    sums[l] = sum;
  }
  __syncthreads();
  Cluster::arrive();
}

/// How many keys of a list are at a level: this GPU's, or those of all.
__device__ __forceinline__ int keys_at(const Params& p, const int2* sums, std::int64_t list, int level) {
  if (p.ranks.all == nullptr) return sums[level].x;
  const std::int64_t lists = std::int64_t{gridDim.x} / Cluster::size() * gridDim.y;
  int sum = 0;
  for (int r = 0; r < p.ranks.ranks; ++r) sum += p.ranks.all[(r * lists + list) * p.levels + level];
  return sum;
}

/// Of a choice that several GPUs make, what of it is here: the newest of the last level stay, and they are those of
/// the last ranks. Called by one warp.
__device__ void take_own(const Params& p, const int2* sums, std::int64_t list, int level, int& nearer,
                         int& ties) {
  const std::int64_t lists = std::int64_t{gridDim.x} / Cluster::size() * gridDim.y;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int own = 0;
  for (int l = lane; l < level; l += 32) own += sums[l].x;
  nearer = __reduce_add_sync(~0u, own);
  for (int r = p.ranks.rank + 1; r < p.ranks.ranks; ++r)
    ties -= p.ranks.all[(r * lists + list) * p.levels + level];
  ties = max(0, min(ties, sums[level].x));
}

/// Finds the level where the list ends from sum_levels. Called by the whole block.
__device__ void find_level(const Params& p, int budget, std::int64_t list, const int2* sums, Shared& s) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warp == 0) {
    const bool counted = p.rule.mode != SignatureRule::Mode::depth;
    int passed = 0, least = -1, limit = p.levels - 1;  // limit: by depth
    int level = -1, nearer = 0, ties = 0;              // by the budget
    for (int first = 0; first < p.levels && (level < 0 || !counted); first += 32) {
      const int l = first + lane, here = l < p.levels ? keys_at(p, sums, list, l) : 0;
      const int up_to = passed + static_cast<int>(scanned(static_cast<unsigned>(here)));
      if (p.rule.mode != SignatureRule::Mode::count) {
        const unsigned some = __ballot_sync(~0u, here > 0);
        if (least < 0 && some != 0) {
          least = first + __ffs(static_cast<int>(some)) - 1;
          limit = min(p.levels - 1, least + p.rule.depth / p.step);
        }
        if (least >= 0 && limit < first + 32 && (!counted || level < 0)) {
          // All within the depth, if the budget does not end before.
          const int at = limit - first, reached = __shfl_sync(~0u, up_to, at);
          if (!counted || reached < budget) {
            level = limit, ties = __shfl_sync(~0u, here, at), nearer = reached - ties;
            break;
          }
        }
      }
      if (counted) {
        const unsigned enough = __ballot_sync(~0u, up_to >= budget);
        if (enough != 0) {
          const int at = __ffs(static_cast<int>(enough)) - 1;
          level = first + at;
          nearer = __shfl_sync(~0u, up_to - here, at);
          ties = p.rule.all_ties ? __shfl_sync(~0u, here, at) : budget - nearer;
        }
      }
      passed = __shfl_sync(~0u, up_to, 31);
    }
    if (p.ranks.all != nullptr) {
      if (level < 0) level = p.levels - 1, ties = 1 << 30;  // fewer keys than the budget: all of them
      take_own(p, sums, list, level, nearer, ties);
    }
    int before = 0;
    for (int l = lane; l < level; l += 32) before += sums[l].y;
    before = __reduce_add_sync(~0u, before);
    if (lane == 0) {
      s.level = level, s.nearer = nearer, s.ties = ties;
      s.before_nearer = before, s.before_ties = sums[level].y;
    }
  }
  __syncthreads();
}

/// Writes the block's chosen rows. eight(i) gives the distances of keys [first + 8 i, first + 8 i + 8).
template <class GetEight>
__device__ void compact(const Params& p, int first, int count, int all_ties, std::int32_t* rows, Shared& s,
                        GetEight eight) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int units = (count + kUnit - 1) / kUnit, each = (units + warps - 1) / warps;
  const int from = min(units, warp * each), to = min(units, from + each);
  const auto level = static_cast<unsigned>(s.level);
  const auto below = [&](const auto& x) { return level == 0 ? 0u : x.at_most(level - 1); };
  int nearer = 0, ties = 0;
  for (int unit = from; unit < to; ++unit) {
    const auto x = eight(unit * 32 + lane);
    const unsigned near = below(x), upto = x.at_most(level);
    nearer += __popc(near), ties += __popc(upto ^ near);
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) {
    nearer += __shfl_xor_sync(~0u, nearer, o);
    ties += __shfl_xor_sync(~0u, ties, o);
  }
  if (lane == 0) s.warp_nearer[warp] = nearer, s.warp_ties[warp] = ties;
  __syncthreads();
  nearer = lane < warp ? s.warp_nearer[lane] : 0, ties = lane < warp ? s.warp_ties[lane] : 0;
#pragma unroll
  for (int o = 16; o > 0; o /= 2) {
    nearer += __shfl_xor_sync(~0u, nearer, o);
    ties += __shfl_xor_sync(~0u, ties, o);
  }
  nearer += s.before_nearer, ties += s.before_ties;
  const int skipped = all_ties - s.ties;  // the newest of the last level stay
  for (int unit = from; unit < to; ++unit) {
    const auto x = eight(unit * 32 + lane);
    const unsigned near = below(x), tie = x.at_most(level) ^ near;
    const unsigned own = __popc(near) | __popc(tie) << 16, up_to = scanned(own);
    int tie_at = ties + static_cast<int>((up_to - own) >> 16);
    std::int64_t place = nearer + static_cast<int>((up_to - own) & 0xffff) + max(0, tie_at - skipped);
    for (unsigned rest = near | tie; rest != 0; rest &= rest - 1) {
      const int bit = __ffs(static_cast<int>(rest)) - 1;
      if (tie >> bit & 1 && tie_at++ < skipped) continue;
      if (place < p.capacity) rows[place] = first + (unit * 32 + lane) * 8 + bit;
      ++place;
    }
    const unsigned all = __shfl_sync(~0u, up_to, 31);
    nearer += static_cast<int>(all & 0xffff), ties += static_cast<int>(all >> 16);
  }
}

template <int W, int P, class Score>
__global__ void __launch_bounds__(kThreads, 2) near_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Shared s;
  const int size = Cluster::size(), rank = Cluster::rank(), threads = static_cast<int>(blockDim.x);
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const Places places(p, threads, sizeof(Score));
  auto* const scores = reinterpret_cast<Score*>(memory + places.scores);
  auto* const codes = reinterpret_cast<std::uint32_t*>(memory + places.codes);
  auto* const counts = reinterpret_cast<int*>(memory + places.counts);
  auto* const sums = reinterpret_cast<int2*>(memory + places.sums);
  auto* const levels = reinterpret_cast<int*>(memory + places.levels);
  auto* const activations = reinterpret_cast<float*>(memory + places.activations);

  const int kv_heads = p.queries.layout.kv_heads, group = p.queries.query_heads / kv_heads;
  const int query = static_cast<int>(blockIdx.y), list_of_query = static_cast<int>(blockIdx.x) / size;
  const int lists = static_cast<int>(gridDim.x) / size, first_head = list_of_query * p.together;
  const std::int64_t list = std::int64_t{query} * lists + list_of_query;
  std::int32_t* const rows = p.rows + list * p.capacity;
  const Signer signer(p, first_head, memory + places.stage);
  if (p.stage_bytes > 0) signer.fetch_weights();
  close_group();

  const int position = p.queries.tokens[query].position;
  const int begin = static_cast<int>(p.rule.sink);
  const int end = static_cast<int>(std::max<std::int64_t>(begin, position + 1 - p.rule.window));
  const bool alone = p.ranks.own == nullptr && p.ranks.all == nullptr;
  const int n = end - begin, wanted = p.rule.budget == nullptr ? n : p.rule.budget[query],
            budget = alone ? min(wanted, n) : wanted;
  const bool counted = p.rule.mode != SignatureRule::Mode::depth;
  if (n <= 0 || (counted && budget <= 0)) {
    if (p.ranks.own != nullptr) {
      for (int l = rank * threads + tid; l < p.levels; l += size * threads)
        p.ranks.own[list * p.levels + l] = 0;
    } else if (rank == 0 && tid == 0) {
      p.counts[list] = 0;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }
  if (alone && p.rule.mode == SignatureRule::Mode::count && budget >= n) {
    for (std::int64_t i = rank * threads + tid; i < std::min<std::int64_t>(n, p.capacity);
         i += size * threads)
      rows[i] = begin + static_cast<int>(i);
    if (rank == 0 && tid == 0) p.counts[list] = static_cast<int>(std::min<std::int64_t>(n, p.capacity));
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }

  // This block's keys.
  const int from = begin / kUnit * kUnit;
  const int share = ((end - from + size - 1) / size + kUnit - 1) / kUnit * kUnit;
  const int first = min(end, from + rank * share), last = min(end, first + share), count = last - first;
  const int sources = p.signatures.per_query_head ? p.together : 1;
  const int set = p.signatures.per_query_head ? first_head : first_head / group;
  const SignatureSets sets = p.signatures.of(p.queries.tokens[query].sequence);
  const std::int64_t next_set = sets.capacity * W;
  const std::uint32_t* const own = sets.codes + set * next_set;
  const int held = min(p.held, (count + 3) / 4 * 4);
  if (first < last) {
    for (int i = tid; i < held * W / 4; i += threads)
      fetch(codes + i * 4, own + std::int64_t{first} * W + i * 4);
  }
  close_group();
  const int count_bytes = (p.levels + 1) * (p.columns > 0 ? p.columns * 4 : threads);
  for (int i = tid; i < count_bytes / 16; i += threads) reinterpret_cast<uint4*>(counts)[i] = {};

  if (p.given == nullptr) {
    const int d = p.queries.layout.head_dim, widest = p.widest;
    const float* const q = p.q + (std::int64_t{query} * p.queries.query_heads + first_head) * d;
    for (int i = tid; i < p.together * d; i += threads) activations[i / d * widest + i % d] = q[i];
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    Cluster::sync();  // all blocks run, so that their memory may be written
    const float* const outputs = signer.run(activations);
    for (int i = warp; i < p.together * W; i += threads / 32) {
      const unsigned word = __ballot_sync(~0u, outputs[i / W * widest + i % W * 32 + lane] > 0.0f);
      if (lane == 0) s.words[i / W][i % W] = word;
    }
  } else {
    const std::uint32_t* const given =
        p.given + (std::int64_t{query} * p.queries.query_heads + first_head) * W;
    for (int i = tid; i < p.together * W; i += threads) s.words[i / W][i % W] = given[i];
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  combine<W, P>(p, sources > 1, s);
  __syncthreads();

  Measure<W, P> measure(own, next_set, sources, s);
  measure.prepare();
  const int quads = (count + kUnit - 1) / kUnit * (kUnit / 4);
  const auto finish = [&](int quad, const unsigned(&raw)[4 * W], int(&distance)[4]) {
    const int key = first + quad * 4;
    measure.first_source(raw, distance);
    if (P == 1 && sources > 1) measure.other_sources(key, distance);
    if (key < begin || key + 4 > last) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (key + i < begin || key + i >= last) distance[i] = p.levels;
      }
    }
  };
  // What is no far key is counted too, at a level of its own that nobody reads.
  unsigned char* const own_counts =
      reinterpret_cast<unsigned char*>(counts) + warp / 4 * 128 + lane * 4 + warp % 4;
  const auto keep = [&](int quad, const int(&distance)[4]) {
    if (p.columns == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ++own_counts[distance[i] * threads];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) atomicAdd(counts + distance[i] * p.columns + lane % p.columns, 1);
    }
    if (quad * 4 >= p.kept) return;
    if constexpr (sizeof(Score) == 1) {
      reinterpret_cast<unsigned*>(scores)[quad] =
          static_cast<unsigned>(distance[0] | distance[1] << 8 | distance[2] << 16 | distance[3] << 24);
    } else {
      reinterpret_cast<uint2*>(scores)[quad] =
          make_uint2(static_cast<unsigned>(distance[0] | distance[1] << 16),
                     static_cast<unsigned>(distance[2] | distance[3] << 16));
    }
  };
  const int held_quads = held / 4;
  int quad = tid;
  for (; quad < min(quads, held_quads); quad += threads) {
    unsigned raw[4 * W];
    int distance[4];
    Measure<W, P>::read(codes + quad * 4 * W, raw);
    finish(quad, raw, distance);
    keep(quad, distance);
  }
  constexpr int kAhead = W == 1 ? 4 : W == 2 ? 2 : 1;
  // Reads stay inside the set: its capacity is a multiple of the unit.
  for (; quad < quads; quad += kAhead * threads) {
    unsigned raw[kAhead][4 * W];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (quad + a * threads < quads)
        Measure<W, P>::read(own + std::int64_t{first + (quad + a * threads) * 4} * W, raw[a]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (quad + a * threads >= quads) break;
      int distance[4];
      finish(quad + a * threads, raw[a], distance);
      keep(quad + a * threads, distance);
    }
  }
  __syncthreads();
  if (p.columns == 0) {
    for (int l = warp; l < p.levels; l += threads / 32) {
      unsigned sum = 0;
      for (int i = lane; i < threads / 4; i += 32)
        sum = __dp4a(reinterpret_cast<const unsigned*>(counts)[l * threads / 4 + i], 0x01010101u, sum);
      sum = __reduce_add_sync(~0u, sum);
      if (lane == 0) levels[l] = static_cast<int>(sum);
    }
  } else {
    for (int l = tid; l < p.levels; l += threads) {
      int sum = 0;
      for (int c = 0; c < p.columns; ++c) sum += counts[l * p.columns + c];
      levels[l] = sum;
    }
  }
  Cluster::sync();
  sum_levels(p, levels, sums);
  if (p.ranks.own != nullptr) {
    if (rank == 0)
      for (int l = tid; l < p.levels; l += threads) p.ranks.own[list * p.levels + l] = sums[l].x;
    return Cluster::wait();
  }
  find_level(p, budget, list, sums, s);
  if (rank == 0 && tid == 0)
    p.counts[list] = static_cast<int>(std::min<std::int64_t>(s.nearer + s.ties, p.capacity));
  const int ties = sums[s.level].x;
  compact(p, first, count, ties, rows, s, [&](int i) {
    Eight<Score> out;
    if (i * 8 < p.kept) {
      out = reinterpret_cast<const Eight<Score>*>(scores)[i];
      return out;
    }
    Score* const to = reinterpret_cast<Score*>(&out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned raw[4 * W];
      int distance[4];
      Measure<W, P>::read(own + std::int64_t{first + i * 8 + half * 4} * W, raw);
      finish(2 * i + half, raw, distance);
#pragma unroll
      for (int k = 0; k < 4; ++k) to[half * 4 + k] = static_cast<Score>(distance[k]);
    }
    return out;
  });
  Cluster::wait();
}

int most_shared_bytes() {
  static const int bytes = [] {
    int device = 0, most = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return most - static_cast<int>(sizeof(Shared)) - 1024;
  }();
  return bytes;
}

/// Shares the shared memory out: what the weights need, then distances, then signatures.
void fit(Params& p, int cluster, int threads, std::int64_t max_tokens, int score_bytes, int limit) {
  const int warps = threads / 32 * cluster;
  p.stage_bytes = 0;
  for (int i = 0; i < p.nets.depth && p.given == nullptr; ++i)
    p.stage_bytes += (p.together * p.nets.widths[i + 1] / kOutputs + warps - 1) / warps * kOutputs *
                     (p.nets.widths[i] * (p.nets.type == DType::f16 ? 2 : 4) + 4);
  if (threads / 32 * p.stage_bytes > kStageBytes) p.stage_bytes = 0;
  const std::int64_t share = (max_tokens / cluster + kUnit) / kUnit * kUnit + kUnit;
  const bool by_thread = (p.levels + 1) * threads <= limit / 3 && share <= 240 * threads;
  p.columns = by_thread ? 0 : 4;
  p.kept = p.held = 0;
  const auto room = [&] { return limit - Places(p, threads, score_bytes).end; };
  p.kept = static_cast<int>(std::clamp<std::int64_t>(room() / score_bytes / kUnit * kUnit, 0, share));
  const std::int64_t code = p.signatures.words * 4, fits = std::min<std::int64_t>(room(), kHeldBytes);
  p.held = static_cast<int>(std::clamp<std::int64_t>(fits / code / kUnit * kUnit, 0, share));
}

/// As many blocks a list as fill the GPU, two on each processor.
template <int W, int P, class Score>
void launch(Params p, std::int64_t lists, std::int64_t max_tokens, StreamHandle stream) {
  const auto kernel = near_kernel<W, P, Score>;
  const auto* const name = reinterpret_cast<const void*>(kernel);
  const std::int64_t all = lists * p.queries.count;
  std::int64_t bytes = 0;
  const auto shape = [&](int size) {
    fit(p, size, kThreads, max_tokens, sizeof(Score), most_shared_bytes() / 2 - 1024);
    bytes = Places(p, kThreads, sizeof(Score)).end;
    allow_shared_bytes(name, bytes);
    return size;
  };
  int cluster = has_clusters() ? kMostCluster : 1;
  while (cluster > 1 && (all * cluster > 2 * processors() || cluster / 2 * kUnit >= max_tokens)) cluster /= 2;
  shape(cluster);
  if (cluster > 8) {
    // More than 8 blocks are not promised by every GPU, and all clusters must find room at once.
    allow_wide_clusters(name);
    if (clusters_at_once(name, cluster, kThreads, bytes) < all) cluster = shape(8);
  }
  const dim3 grid(static_cast<unsigned>(lists * cluster), static_cast<unsigned>(p.queries.count));
  EarlyLaunch(grid, kThreads, static_cast<int>(bytes), cluster, stream, false)(kernel, p);
}

template <int W, int P>
void launch_for_levels(const Params& p, std::int64_t lists, std::int64_t max_tokens, StreamHandle stream) {
  p.levels < 256 ? launch<W, P, std::uint8_t>(p, lists, max_tokens, stream)
                 : launch<W, P, std::uint16_t>(p, lists, max_tokens, stream);
}

template <int W>
void launch_for_planes(const Params& p, int planes, std::int64_t lists, std::int64_t max_tokens,
                       StreamHandle stream) {
  switch (planes) {
    case 1:
      return launch_for_levels<W, 1>(p, lists, max_tokens, stream);
    case 2:
      return launch_for_levels<W, 2>(p, lists, max_tokens, stream);
    case 3:
      return launch_for_levels<W, 3>(p, lists, max_tokens, stream);
    default:
      return launch_for_levels<W, 4>(p, lists, max_tokens, stream);
  }
}

/// Whether heads that choose together have signatures of their own.
bool are_apart(const SignatureRule& rule, const Signatures& signatures, int group) {
  return signatures.per_query_head && !rule.per_query_head && group > 1;
}
/// Mismatches of one level.
int step_of(const SignatureRule& rule, const Signatures& signatures, int group) {
  const int together = rule.per_query_head ? 1 : group;
  return !are_apart(rule, signatures, group) && together % 2 == 0 ? 2 : 1;
}

}  // namespace

int signature_levels(const SignatureRule& rule, const Signatures& signatures, int group) {
  return 32 * signatures.words * (rule.per_query_head ? 1 : group) / step_of(rule, signatures, group) + 1;
}

void select_by_signature(const Queries& queries, const float* q, const SignNets& nets,
                         const std::uint32_t* given, const Signatures& signatures, const SignatureRule& rule,
                         std::int64_t max_tokens, std::int32_t* rows, std::int64_t capacity,
                         std::int32_t* counts, StreamHandle stream, const SignatureRanks& ranks) {
  if (queries.count == 0) return;
  if (given == nullptr && ranks.ranks == 1 &&
      select_in_cluster(queries, q, nets, signatures, rule, max_tokens, rows, capacity, counts, stream))
    return;
  const int group = queries.query_heads / queries.layout.kv_heads;
  if (group > kMostHeads)
    throw RunError("signatures on the GPU: expected at most 16 query heads per KV head, found " +
                   std::to_string(group));
  Params p = {.queries = queries,
              .q = q,
              .nets = nets,
              .given = given,
              .signatures = signatures,
              .rule = rule,
              .ranks = ranks,
              .together = rule.per_query_head ? 1 : group,
              .rows = rows,
              .counts = counts,
              .capacity = capacity};
  const bool apart = are_apart(rule, signatures, group);
  p.step = step_of(rule, signatures, group);
  p.levels = signature_levels(rule, signatures, group);
  p.net_weights = nets.weights_of_net(), p.net_biases = nets.biases_of_net(), p.widest = nets.widest();
  int planes = 1;
  while (!apart && p.together / p.step >> planes != 0) ++planes;
  const std::int64_t lists = queries.query_heads / p.together;
  if (signatures.words == 1)
    launch_for_planes<1>(p, planes, lists, max_tokens, stream);
  else if (signatures.words == 2)
    launch_for_planes<2>(p, planes, lists, max_tokens, stream);
  else
    launch_for_planes<4>(p, planes, lists, max_tokens, stream);
}

}  // namespace lode::cuda
