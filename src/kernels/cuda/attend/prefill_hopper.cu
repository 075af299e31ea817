// SPDX-License-Identifier: Apache-2.0
// Prefill attention on Hopper's matrix unit, for heads of 128: FlashAttention-3 (Shah and others, 2024,
// arXiv:2407.08608, algorithm 1 with its overlap inside a warpgroup, section 3.2). One warpgroup brings tiles
// of 128 keys and values to shared memory; two multiply, 64 rows each (a row is one query head of one token,
// a KV head's group side by side): while the weights of a tile meet its values, the scores of the next are
// made and their softmax taken. Ours are the layout of the store and that copies are plain asynchronous ones,
// because where a sequence lies is known on the device alone; so rows by a list cost no more than rows side
// by side, and rows of a caller's arrays lie at any distance. A query's bits depend on its own keys alone, not on how the prompt was cut into chunks.
#include <type_traits>

#include "kernels/cuda/attend/prefill.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/hopper_matrix.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/matrix.cuh"

namespace lode::cuda {

namespace {

constexpr int kDim = 128, kRowBytes = 2 * kDim, kKeys = 128, kRows = 128, kGroupThreads = 128, kStages = 2;
// Where this file is compiled for another architecture, the kernel is an empty one for 32 threads.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kThreads = 3 * kGroupThreads;
#else
constexpr int kThreads = 32;
#endif
constexpr int kHostThreads = 3 * kGroupThreads;

// A tile lies as two panels of 64 columns: rows of 128 bytes, in which the 16-byte piece c of row r is at c ^
// (r % 8), the matrix unit's 128-byte swizzle. Groups of 8 rows are 1024 bytes.
constexpr int kPanel = 128 * 128, kTile = 2 * kPanel;  // bytes
constexpr int kShared = kTile + kStages * 2 * kTile + 1024 + 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// `Place` says where rows are. Lists are of the engine's layers alone.
template <class T, class Place>
class Attention {
 public:
  __device__ Attention(const Queries& in, int position, const PrefillKeys& keys, const Place& place,
                       char* memory)
      : in_(in),
        keys_(keys),
        place_(place),
        position_(position),
        base_((shared_address(memory) + 1023) / 1024 * 1024),
        group_(in.query_heads / in.layout.kv_heads),
        kv_head_(static_cast<int>(blockIdx.y)),
        // The last queries have the most keys: they start first.
        first_(static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows),
        rows_(in.count * group_),
        team_(static_cast<int>(threadIdx.x) / kGroupThreads - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    const int part = static_cast<int>(blockIdx.z);
    places_ = keys.places(kv_head_, part);
    list_tiles_ = (places_.y - places_.x + kKeys - 1) / kKeys;
    const int2 near = keys.near_keys(part, position + first_ / group_,
                                     position + (min(first_ + kRows, rows_) - 1) / group_);
    near_ = near.x, end_ = near.y;
    near_first_ = near_ / kKeys * kKeys;
    tiles_ = list_tiles_ + (end_ > near_ ? (end_ - near_first_ + kKeys - 1) / kKeys : 0);
    output_ = std::int64_t{part} * in.count * in.query_heads;
  }

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * kStages; ++i) {
        full(i).init(kGroupThreads);
        empty(i).init(8);  // the warps that multiply
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (team_ < 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      bring();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      multiply();
    }
  }

 private:
  /// Tile 2 stage is keys, 2 stage + 1 values.
  __device__ unsigned tile_at(int i) const { return base_ + kTile + static_cast<unsigned>(i) * kTile; }
  __device__ Barrier full(int i) const {
    return {base_ + kTile + 2 * kStages * kTile + 8u * static_cast<unsigned>(i)};
  }
  __device__ Barrier empty(int i) const { return {full(i).at + 8u * 2 * kStages}; }

  __device__ int position_of(int row) const {
    return keys_.all > 0 ? end_ - 1 : position_ + min(first_ + row, rows_ - 1) / group_;
  }
  __device__ std::int64_t query_row(int row) const {
    const int at = first_ + row;
    return std::int64_t{at / group_} * in_.query_heads + kv_head_ * group_ + at % group_;
  }

  /// Keys and values of tile after tile. A tile is announced once the next is under way, or earlier where
  /// there is no room yet for the next.
  __device__ void bring() const {
    const auto stored = place_.rows(in_);
    int waiting = -1, ahead = listed(0);
    unsigned gathered = 0;
    for (int n = 0; n < 2 * tiles_; ++n) {
      const int tile = n / 2, slot = tile % kStages * 2 + n % 2;
      if (tile >= kStages) {
        const int parity = tile / kStages % 2 ^ 1;
        if (!empty(slot).passed(parity)) {
          announce<0>(waiting);
          waiting = -1;
          empty(slot).wait(parity);
        }
      }
      if (kHasLists && tile < list_tiles_) {
        if (n % 2 == 0) {
          gathered = place_of(ahead);
          ahead = listed(tile + 1);
        }
        if constexpr (kHasLists)
          gather(stored.layer + n % 2 * kBlockTokens * kRowBytes, gathered, tile_at(slot));
      } else {
        const int first = near_first_ + (tile - list_tiles_) * kKeys;
        load(stored.at(kv_head_, first, n % 2), step(n % 2), first, tile_at(slot));
      }
      announce<1>(waiting);
      waiting = slot;
    }
    announce<0>(waiting);
  }
  template <int Newer>
  __device__ void announce(int slot) const {
    if (slot < 0) return;
    asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(Newer) : "memory");
    full(slot).arrive();
  }
  /// The row of a list's tile that this lane looks up: of those that its warp brings, rows 2 warp and 2 warp
  /// + 1 of each 8; -1 for none.
  __device__ int listed(int tile) const {
    const int place = places_.x + tile * kKeys + lane_ / 2 * 8 + warp_ * 2 + lane_ % 2;
    return place < places_.y ? keys_.row(kv_head_, place) : -1;
  }
  /// Where a row lies in its layer, in rows, less than 2^31 of them.
  __device__ unsigned place_of(int row) const {
    if (row < 0) return kNowhere;
    const auto at = static_cast<unsigned>(row);
    return (at / kBlockTokens * static_cast<unsigned>(in_.layout.kv_heads) +
            static_cast<unsigned>(kv_head_)) *
               2 * kBlockTokens +
           at % kBlockTokens;
  }
  /// Zeros behind the end of the list.
  __device__ void gather(const char* rows, unsigned place, unsigned to) const {
    const int chunk = lane_ % 16, row = warp_ * 2 + lane_ / 16;
    to += static_cast<unsigned>(chunk / 8 * kPanel + row * 128 + ((chunk % 8) ^ row) * 16);
    rows += chunk * 16;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      const unsigned at = __shfl_sync(~0u, place, 2 * i + lane_ / 16);
      bring_piece(to + i * 1024, rows + std::int64_t{at} * kRowBytes, at != kNowhere);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  /// Bytes from one row of a tile to the next, of keys or values.
  __device__ __forceinline__ std::int64_t step(int value) const {
    if constexpr (kHasLists)
      return kRowBytes;
    else
      return value != 0 ? place_.kv.v_row : place_.kv.k_row;
  }
  /// Zeros for rows that no query of the block may see.
  __device__ __forceinline__ void load(const char* rows, std::int64_t step, int first, unsigned to) const {
    const int chunk = static_cast<int>(threadIdx.x) % 16, row = static_cast<int>(threadIdx.x) / 16;
    to += static_cast<unsigned>(chunk / 8 * kPanel + row * 128 + ((chunk % 8) ^ row) * 16);
    const char* from = rows + row * step + chunk * 16;
    const int left = end_ - first - row, skipped = near_ - first - row;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i)
      bring_piece(to + i * 1024, from + i * 8 * step, 8 * i < left && 8 * i >= skipped);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  static __device__ __forceinline__ void bring_piece(unsigned to, const char* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(wanted ? from : nullptr),
                 "r"(wanted ? 16 : 0)
                 : "memory");
  }

  /// Queries times scale and log2 e, 64 rows of each team.
  __device__ void stage_queries() const {
    const float factor = in_.scale * 1.4426950408889634f;
    for (int i = static_cast<int>(threadIdx.x) % kGroupThreads; i < 64 * 16; i += kGroupThreads) {
      const int row = team_ * 64 + i / 16, chunk = i % 16;
      float4 a = {}, b = {};
      if (first_ + row < rows_) {
        const auto* from = reinterpret_cast<const float4*>(in_.q + query_row(row) * kDim + chunk * 8);
        a = from[0];
        b = from[1];
      }
      const unsigned to =
          base_ + static_cast<unsigned>(chunk / 8 * kPanel + row * 128 + ((chunk % 8) ^ (row % 8)) * 16);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(pack<T>(a.x * factor, a.y * factor)), "r"(pack<T>(a.z * factor, a.w * factor)),
                   "r"(pack<T>(b.x * factor, b.y * factor)), "r"(pack<T>(b.z * factor, b.w * factor))
                   : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;\nbar.sync %0, %1;" ::"r"(team_ + 1), "n"(kGroupThreads)
                 : "memory");
  }

  __device__ void multiply() {
    if (first_ + team_ * 64 >= rows_) return pass();
    if (tiles_ == 0) return store();
    stage_queries();
    float s[64];
    unsigned p[kKeys / 16][4];
    full(0).wait(0);
    start_scores(0, s);
    wait_for_products<0>(s);
    release(0);
    softmax(0, s);
    pack_weights(s, p);
    for (int tile = 1; tile < tiles_; ++tile) {
      const int slot = tile % kStages * 2, before = (tile - 1) % kStages * 2 + 1;
      full(slot).wait(tile / kStages % 2);
      start_scores(slot, s);
      full(before).wait((tile - 1) / kStages % 2);
      start_outputs(before, p);
      wait_for_products<1>(s);
      release(slot);
      const float2 keep = softmax(tile, s);
      wait_for_products<0>(out_);
      release(before);
      rescale(keep);
      pack_weights(s, p);
    }
    const int last = (tiles_ - 1) % kStages * 2 + 1;
    full(last).wait((tiles_ - 1) / kStages % 2);
    start_outputs(last, p);
    wait_for_products<0>(out_);
    store();
  }
  /// Without rows of its own a team lets the tiles go by.
  __device__ void pass() const {
    for (int n = 0; n < 2 * tiles_; ++n) {
      const int slot = n / 2 % kStages * 2 + n % 2;
      full(slot).wait(n / 2 / kStages % 2);
      release(slot);
    }
  }
  __device__ void release(int slot) const {
    if (lane_ == 0) empty(slot).arrive();
  }
  __device__ void start_scores(int slot, float (&s)[64]) const {
    fence_products();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const auto at = static_cast<unsigned>(k / 4 * kPanel + k % 4 * 32);
      Unit<T>::scores(s, descriptor(base_ + static_cast<unsigned>(team_) * 64 * 128 + at, 16, 1024),
                      descriptor(tile_at(slot) + at, 16, 1024), k > 0);
    }
    commit_products();
  }
  __device__ void start_outputs(int slot, const unsigned (&p)[kKeys / 16][4]) {
    fence_products();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      Unit<T>::outputs(out_, p[k],
                       descriptor(tile_at(slot) + static_cast<unsigned>(k) * 16 * 128, kPanel, 1024));
    commit_products();
  }

  /// Scores become weights; returns by what earlier sums are to be multiplied.
  __device__ float2 softmax(int tile, float (&s)[64]) {
    mask_where_needed(tile, s);
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float high = max_[half];
#pragma unroll
      for (int n = 0; n < 16; ++n) high = fmaxf(high, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      const float base = high == -INFINITY ? 0.0f : high;
      keep[half] = exp2_fast(max_[half] - base);
      max_[half] = high;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          sum += s[4 * n + 2 * half + i] = exp2_fast(s[4 * n + 2 * half + i] - base);
      }
      sum_[half] = fmaf(sum_[half], keep[half], sum);
    }
    return {keep[0], keep[1]};
  }
  __device__ void mask_where_needed(int tile, float (&s)[64]) const {
    const int row = team_ * 64 + warp_ * 16;
    if (tile < list_tiles_) {
      const int left = places_.y - places_.x - tile * kKeys;
      if (left < kKeys) mask({0, left - 1}, {0, left - 1}, s);
      return;
    }
    const int first = near_first_ + (tile - list_tiles_) * kKeys;
    if (first + kKeys - 1 > position_of(row) || first < keys_.near_of(position_of(row + 15)))
      mask(seen_by(row + lane_ / 4, first), seen_by(row + lane_ / 4 + 8, first), s);
  }
  /// First and last key that a row sees, counted from `first`.
  __device__ int2 seen_by(int row, int first) const {
    const int position = position_of(row);
    return {keys_.near_of(position) - first, position - first};
  }
  /// Of each half only columns from its first to its last one stay.
  __device__ void mask(int2 of_first, int2 of_second, float (&s)[64]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = n * 8 + lane_ % 4 * 2 + i;
          const int2 seen = half == 0 ? of_first : of_second;
          if (column < seen.x || column > seen.y) s[4 * n + 2 * half + i] = -INFINITY;
        }
      }
    }
  }
  __device__ void rescale(float2 keep) {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      out_[4 * n] *= keep.x;
      out_[4 * n + 1] *= keep.x;
      out_[4 * n + 2] *= keep.y;
      out_[4 * n + 3] *= keep.y;
    }
  }
  static __device__ void pack_weights(const float (&s)[64], unsigned (&p)[kKeys / 16][4]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[k][i] = pack<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
  }

  __device__ void store() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = team_ * 64 + warp_ * 16 + lane_ / 4 + 8 * half;
      if (first_ + row >= rows_) continue;
      float* to = in_.o + (output_ + query_row(row)) * kDim + lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < 16; ++n)
        *reinterpret_cast<float2*>(to + n * 8) = {out_[4 * n + 2 * half] / sum,
                                                  out_[4 * n + 2 * half + 1] / sum};
      if (in_.lse != nullptr && lane_ % 4 == 0)
        in_.lse[output_ + query_row(row)] = 0.69314718055994531f * (max_[half] + log2f(sum));
    }
  }

  static constexpr bool kHasLists = std::is_same_v<Place, InLayer>;
  static constexpr unsigned kNowhere = ~0u;

  const Queries& in_;
  const PrefillKeys& keys_;
  const Place& place_;
  const int position_;
  const unsigned base_;  // shared memory: queries, tiles, barriers
  const int group_, kv_head_, first_, rows_, team_, warp_, lane_;
  int end_, tiles_;                     // keys that some query of the block sees
  int2 places_;                         // of the head's list
  int list_tiles_, near_, near_first_;  // tiles of the list come first, then those from near_first_ on
  std::int64_t output_;                 // first row of this part's plane
  float out_[64] = {}, max_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
};

#endif

template <class T, class Place>
__global__ __launch_bounds__(kThreads, 1) void hopper_kernel(const Queries in, int position,
                                                             const PrefillKeys keys, const Place place) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  Attention<T, Place>(in, position, keys, place, memory).run();
#endif
}

template <class T, class Place>
bool launch(const Queries& in, int position, const PrefillKeys& keys, const Place& place,
            StreamHandle stream) {
  const auto kernel = hopper_kernel<T, Place>;
  static const bool built = [] {
    cudaFuncAttributes found{};
    LODE_CUDA(cudaFuncGetAttributes(&found, hopper_kernel<T, Place>));
    return found.maxThreadsPerBlock >= kHostThreads;
  }();
  if (!built) return false;
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), kShared);
  const std::int64_t rows = std::int64_t{in.count} * (in.query_heads / in.layout.kv_heads);
  const dim3 grid(static_cast<unsigned>((rows + kRows - 1) / kRows),
                  static_cast<unsigned>(in.layout.kv_heads), static_cast<unsigned>(keys.parts));
  Launch(grid, kHostThreads, kShared, stream)(kernel, in, position, keys, place);
  return true;
}

template <class Place>
bool launch_for_type(const Queries& queries, int position, const PrefillKeys& keys, const Place& place,
                     StreamHandle stream) {
  if (queries.layout.type == DType::bf16)
    return launch<__nv_bfloat16>(queries, position, keys, place, stream);
  if (queries.layout.type == DType::f16) return launch<__half>(queries, position, keys, place, stream);
  return false;
}

}  // namespace

bool attend_prefill_hopper(const Queries& queries, std::int32_t position, const PrefillKeys& keys,
                           StreamHandle stream, const StridedKv* kv) {
  static_assert(kBlockTokens % kKeys == 0, "a tile lies in one block of the store");
  if (queries.layout.head_dim != kDim || queries.layout.shared_rows) return false;
  if (kv != nullptr) return launch_for_type(queries, position, keys, InCallersArrays{*kv}, stream);
  return launch_for_type(queries, position, keys, InLayer{}, stream);
}

}  // namespace lode::cuda
