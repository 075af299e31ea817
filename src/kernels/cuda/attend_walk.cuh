// SPDX-License-Identifier: Apache-2.0
// One warp's walk over keys and values for decode attention. Tiles of 16 keys are read once by cp.async, each
// lane into a place of its own, in the order in which the lane's registers want it, so there are no barriers,
// no bank conflicts, and any order of rows costs the same:
//
//   S[16 heads, 16 keys] = Q K^T     mma.m16n8k16: a lane's 16 bytes of a key serve as its k-indices, Q is
//   laid out alike P = exp2(S - m)                  running maximum and sum per head and warp O[16 heads, d]
//   += P V            P's accumulators are the next product's operand; V's 16 bytes of two keys interleaved
//
// The group's heads are the rows of the matrices, padded to 16.
#pragma once

#include "kernels/cuda/attend.h"
#include "kernels/cuda/matrix.cuh"

namespace lode::cuda {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kTile = 16;  // keys
constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;

struct Params {
  Queries queries;
  RowLists lists;
  bool has_lists = false;
  int most_parts = 1;           ///< clusters that share a list
  unsigned* tickets = nullptr;  // [N, Hkv, lists]
  float* posted = nullptr;      // [N, Hkv, lists, posted_floats]
};

/// The keys of one list, numbered from 0: sink, rows, window.
struct Keys {
  const std::int32_t* rows = nullptr;
  const float* log_weights = nullptr;
  int sink = 0, listed = 0, window_begin = 0, count = 0;

  __device__ Keys(const Params& p, int position, std::int64_t list) {
    const int all = position + 1;
    if (!p.has_lists) {
      sink = count = all;
      return;
    }
    sink = static_cast<int>(min(p.lists.sink, std::int64_t{all}));
    listed = p.lists.counts[list];
    window_begin = static_cast<int>(max(std::int64_t{sink}, all - p.lists.window));
    count = sink + listed + (all - window_begin);
    rows = p.lists.rows + list * p.lists.capacity - sink;
    if (p.lists.log_weights != nullptr) log_weights = p.lists.log_weights + list * p.lists.capacity - sink;
  }
  __device__ int row(int key) const {
    if (key < sink) return key;
    return key < sink + listed ? rows[key] : key - sink - listed + window_begin;
  }
  __device__ float weight(int key) const {
    return key >= sink && key < sink + listed ? log_weights[key] : 0.0f;
  }
};

/// Through L1: past it (.cg), pieces that go to scattered places of shared memory come at half the rate (2.6
/// TB/s on an H200).
__device__ __forceinline__ void fetch(unsigned to, const char* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}

/// exp2(m - peak), where the empty state's -inf gives 0 whatever the peak is.
__device__ __forceinline__ float decay(float m, float peak) {
  return m == -INFINITY ? 0.0f : exp2f(m - peak);
}

/// One warp's walk over its tiles.
template <class T, int D, bool kWide>
struct Walk {
  static constexpr int kKeyPieces = (D + 31) / 32;    // 16-byte pieces of one key's row that a lane holds
  static constexpr int kValuePieces = (D + 63) / 64;  // of one value's row
  static constexpr int kFetches = 2 * kKeyPieces + 4 * kValuePieces;
  static constexpr int kStageBytes = kFetches * 32 * 16;
  static constexpr int kStages = D <= 128 ? 3 : 2;
  static constexpr unsigned kNone = 0xffffffffu;

  const Params& p;
  const Keys& keys;
  const char* base;                  // of this sequence, layer and KV head
  unsigned ring;                     // shared address of the warp's stage 0
  int first = 0, end = 0, mine = 0;  // first tile's first key, end of the piece, number of tiles
  unsigned places = kNone;  // of two tiles: where key lane % 16 of tile lane / 16 lies, in 16 bytes from base
  int rows_behind = -1;     // the rows of the two tiles behind them, under way, or -1

  unsigned q[kKeyPieces * 2][kWide ? 4 : 2];  // operand A of each product with 16 dimensions
  float o[kValuePieces * 8][4];
  float m[2] = {-INFINITY, -INFINITY},
        l[2] = {};  // of heads lane / 4 and lane / 4 + 8; l sums this lane's keys

  __device__ Walk(const Params& params, const Keys& k) : p(params), keys(k) {}

  __device__ void load_queries(const float* from /*[heads, D]*/, int heads) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kKeyPieces; ++j) {
#pragma unroll
      for (int half = 0; half < (kWide ? 2 : 1); ++half) {
        const int head = g + 8 * half, at = (j * 4 + t) * 8;
        float x[8] = {};
        if (head < heads && at < D) {
          const float4 low = *reinterpret_cast<const float4*>(from + head * D + at);
          const float4 high = *reinterpret_cast<const float4*>(from + head * D + at + 4);
          x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
          x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        }
        constexpr int kStep = kWide ? 2 : 1;
        q[2 * j][half] = pack<T>(x[0], x[1]), q[2 * j][half + kStep] = pack<T>(x[2], x[3]);
        q[2 * j + 1][half] = pack<T>(x[4], x[5]), q[2 * j + 1][half + kStep] = pack<T>(x[6], x[7]);
      }
    }
  }

  /// The row of key lane % 16 of tile 2 pair + lane / 16, or -1.
  __device__ int row_of(int pair) const {
    const int lane = threadIdx.x % 32, tile = 2 * pair + lane / kTile;
    const int key = first + tile * kWarps * kTile + lane % kTile;
    return tile < mine && key < end ? keys.row(key) : -1;
  }
  __device__ unsigned place_of(int row) const {
    return row < 0 ? kNone
                   : static_cast<unsigned>((row / kBlockTokens * p.queries.layout.block_stride()) >> 4) +
                         static_cast<unsigned>(row % kBlockTokens) * (D * 2 / 16);
  }

  /// Place of chunk t of a key's piece j for lane 4 g + t, in bytes from the half tile's start. Odd pieces
  /// are swapped by halves of 128 bytes, so that the eight lanes that copy a line write to different banks.
  __device__ static unsigned key_place(int j, int g, int t) {
    return j * 512 + (((g ^ (j & 1)) * 4 + t) * 16);
  }

  /// Starts to fetch a tile; after the second of a pair, asks for the rows of a later pair. Memory serves
  /// requests of 128 bytes as fast as smaller ones, so eight lanes copy a whole line of a key, each to where
  /// the lane that will use it looks.
  __device__ void fetch_tile(int tile) {
    if (tile < mine) {
      const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      const unsigned stage = ring + tile % kStages * kStageBytes;
      const int of_pair = tile % 2 * kTile;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 4 * i + lane / 8;
        const unsigned at = __shfl_sync(0xffffffffu, places, of_pair + key);
        const char* const row = base + std::uint64_t{at} * 16;
#pragma unroll
        for (int j = 0; j < kValuePieces; ++j) {
          const int chunk = j * 8 + lane % 8;
          if (chunk >= 4 * kKeyPieces) continue;
          fetch(stage + key / 8 * (kKeyPieces * 512) + key_place(chunk / 4, key % 8, chunk % 4),
                at == kNone ? base : row + chunk * 16, at != kNone && chunk * 8 < D);
        }
      }
      unsigned to = stage + 2 * kKeyPieces * 512 + lane * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned at = __shfl_sync(0xffffffffu, places, of_pair + 2 * t + i % 2 + i / 2 * 8);
        const char* const row = base + p.queries.layout.value_offset() + std::uint64_t{at} * 16;
#pragma unroll
        for (int j = 0; j < kValuePieces; ++j, to += 512)
          fetch(to, at == kNone ? base : row + (j * 8 + g) * 16, at != kNone && (j * 8 + g) * 8 < D);
      }
      if (tile % 2 == 1) {
        places = place_of(rows_behind);
        rows_behind = row_of(tile / 2 + 2);
      }
    }
    asm volatile("cp.async.commit_group;");
  }

  __device__ static uint4 piece(unsigned at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at));
    return x;
  }

  __device__ void score(unsigned stage, float (&s)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kKeyPieces; ++j) {
        const uint4 k =
            piece(stage + half * (kKeyPieces * 512) + key_place(j, threadIdx.x % 32 / 4, threadIdx.x % 4));
        unsigned a[4] = {}, b[4] = {};
        if constexpr (kWide) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = q[2 * j][i], b[i] = q[2 * j + 1][i];
        } else {
          a[0] = q[2 * j][0], a[2] = q[2 * j][1], b[0] = q[2 * j + 1][0], b[2] = q[2 * j + 1][1];
        }
        multiply<T>(s[half], a, k.x, k.y);
        multiply<T>(s[half], b, k.z, k.w);
      }
    }
  }

  __device__ void soften(int tile, float (&s)[2][4]) {
    const int t = threadIdx.x % 4, at = first + tile * kWarps * kTile;
    const float scale = p.queries.scale * kLog2e;
    const bool ragged = at + kTile > end;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = at + half * 8 + 2 * t + i % 2;
        s[half][i] *= scale;
        if (keys.log_weights != nullptr && key < end) s[half][i] += keys.weight(key) * kLog2e;
        if (ragged && key >= end) s[half][i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < (kWide ? 2 : 1); ++r) {
      float peak = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
      peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
      peak = fmaxf(fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2)), m[r]);
      if (__any_sync(0xffffffffu, peak > m[r])) {
        const float keep = decay(m[r], peak);
        l[r] *= keep;
#pragma unroll
        for (int i = 0; i < kValuePieces * 8; ++i) o[i][2 * r] *= keep, o[i][2 * r + 1] *= keep;
        m[r] = peak;
      }
      const float shift = m[r] == -INFINITY ? 0.0f : m[r];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          s[half][i] = exp2f(s[half][i] - shift);
          l[r] += s[half][i];
        }
      }
    }
    if constexpr (!kWide) s[0][2] = s[0][3] = s[1][2] = s[1][3] = 0.0f;
  }

  __device__ void add_values(unsigned from, const float (&s)[2][4]) {
    const unsigned a[4] = {pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]), pack<T>(s[1][0], s[1][1]),
                           pack<T>(s[1][2], s[1][3])};
#pragma unroll
    for (int j = 0; j < kValuePieces; ++j) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = piece(from + (i * kValuePieces + j) * 512);
      const unsigned x[4][4] = {{v[0].x, v[0].y, v[0].z, v[0].w},
                                {v[1].x, v[1].y, v[1].z, v[1].w},
                                {v[2].x, v[2].y, v[2].z, v[2].w},
                                {v[3].x, v[3].y, v[3].z, v[3].w}};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        multiply<T>(o[j * 8 + 2 * r], a, __byte_perm(x[0][r], x[1][r], 0x5410),
                    __byte_perm(x[2][r], x[3][r], 0x5410));
        multiply<T>(o[j * 8 + 2 * r + 1], a, __byte_perm(x[0][r], x[1][r], 0x7632),
                    __byte_perm(x[2][r], x[3][r], 0x7632));
      }
    }
  }

  /// Starts the first fetches; nothing is waited for but the rows of the first tiles.
  __device__ void begin() {
    const int rows = row_of(0);
    rows_behind = row_of(1);
    places = place_of(rows);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch_tile(s);
  }

  __device__ void run() {
#pragma unroll
    for (int i = 0; i < kValuePieces * 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    for (int tile = 0; tile < mine; ++tile) {
      fetch_tile(tile + kStages - 1);
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
      __syncwarp();
      const unsigned at = ring + tile % kStages * kStageBytes;
      float s[2][4] = {};
      score(at, s);
      soften(tile, s);
      add_values(at + 2 * kKeyPieces * 512 + threadIdx.x % 32 * 16, s);
      __syncwarp();  // all have read the stage before the next fetch overwrites it
    }
    asm volatile("cp.async.wait_all;");
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += __shfl_xor_sync(0xffffffffu, l[r], 1);
      l[r] += __shfl_xor_sync(0xffffffffu, l[r], 2);
    }
  }

  /// The warp's state: o [heads][D], then m and l [heads][2].
  __device__ void store(float* to, int heads) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < (kWide ? 2 : 1); ++r) {
      float* const row = to + (g + 8 * r) * D;
      if (g + 8 * r >= heads) continue;
#pragma unroll
      for (int j = 0; j < kValuePieces; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = (j * 8 + 2 * t + i) * 8;
          if (at >= D) continue;
#pragma unroll
          for (int e = 0; e < 8; ++e) row[at + e] = o[j * 8 + e][2 * r + i];
        }
      }
      if (t == 0) to[heads * D + (g + 8 * r) * 2] = m[r], to[heads * D + (g + 8 * r) * 2 + 1] = l[r];
    }
  }
};

}  // namespace lode::cuda
