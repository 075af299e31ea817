// SPDX-License-Identifier: Apache-2.0
// One warp's walk over keys and values for decode attention. Tiles of 16 keys are read once by cp.async, each
// lane into a place of its own, in the order in which the lane's registers want it, so there are no barriers,
// no bank conflicts, and any order of rows costs the same. Keys and columns of values are the rows of the
// matrices, the group's heads their columns, padded to 8 or 16: as rows they would be padded to 16 always.
//
//   S[16 keys, 8 heads] = K Q^T       mma.m16n8k16: a lane's 16 bytes of a key serve as its k-indices, Q is
//   laid out alike; P = exp2(S - m)   running maximum and sum per head and warp
//   O[d, 8 heads] += V^T P            P transposed by movmatrix; V's 16 bytes of two keys interleaved
#pragma once

#include "kernels/cuda/attend/arriving.cuh"
#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/device/load.cuh"
#include "kernels/cuda/device/matrix.cuh"

namespace lode::cuda {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kTile = 16;  // keys
constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;

struct Params {
  Queries queries;
  RowLists lists;
  bool has_lists = false;
  int group = 1;                ///< query heads of a KV head
  int lists_per_head = 1;       ///< G where every query head has its own list
  int blocks = 1;               ///< that share a list
  int most_parts = 1;           ///< that a list is cut into; places for the records of a column
  unsigned reciprocal = 0;      ///< 2^32 / most_parts, rounded up
  int beside = 0;               ///< keys of a list whose blocks leave room for as many of the kernel behind
  int most_mergers = 1;         ///< blocks that merge the states of a list
  unsigned* tickets = nullptr;  // [N, Hkv, lists]
  float4* posted = nullptr;     // [N, Hkv, lists] places of records
};

/// The keys of one list, numbered from 0: sink, rows, window.
struct Keys {
  static constexpr bool kArriving = false;  ///< row() may be kNotYet; leave() is told what was taken
  const std::int32_t* rows = nullptr;
  const float* log_weights = nullptr;
  int sink = 0, listed = 0, window_begin = 0, count = 0;

  __device__ Keys() {}
  __device__ Keys(const Params& p, int position, std::int64_t list, int count_of_list) {
    const int all = position + 1;
    if (!p.has_lists) {
      sink = count = all;
      return;
    }
    sink = static_cast<int>(min(p.lists.sink, std::int64_t{all}));
    listed = count_of_list;
    window_begin = static_cast<int>(max(std::int64_t{sink}, all - p.lists.window));
    count = sink + listed + (all - window_begin);
    rows = p.lists.rows + list * p.lists.capacity - sink;
    if (p.lists.log_weights != nullptr) log_weights = p.lists.log_weights + list * p.lists.capacity - sink;
  }
  __device__ int row(int key) const {
    if (key < sink) return key;
    return in_list(key) ? rows[key] : key - sink - listed + window_begin;
  }
  __device__ float weight(int key) const { return in_list(key) ? log_weights[key] : 0.0f; }
  __device__ bool in_list(int key) const { return key >= sink && key < sink + listed; }
};

/// Through L1: past it (.cg), pieces that go to scattered places of shared memory come at half the rate (2.6
/// TB/s on an H200). First to leave the second-level cache, where the posted records should stay.
__device__ __forceinline__ void fetch(unsigned to, const char* from, bool valid) {
  unsigned long long first_to_leave;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_leave));
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0), "l"(first_to_leave));
}

/// exp2(m - peak), where the empty state's -inf gives 0 whatever the peak is.
__device__ __forceinline__ float decay(float m, float peak) {
  return m == -INFINITY ? 0.0f : exp2_fast(m - peak);
}

/// Within one unit of the last place, at a tenth of the instructions of a division.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Where the rows of a KV head lie: in the blocks of the engine's ranges (KvLayout).
template <int D>
struct InBlocks {
  static constexpr int kWidth = D;       ///< numbers of a head, of which the walk may take a slice
  static constexpr int kTurns = kWarps;  ///< warps that take tiles in turn; 1: each walks over all of them
  static constexpr int kBlockBytes =
      kBlockTokens * D * 2;  ///< of a block's keys, and of its values behind them

  /// Of a key, in 16 bytes from the first one.
  __device__ unsigned place(const Params& p, int row) const {
    const unsigned stride = static_cast<unsigned>(p.queries.layout.kv_heads) * (2 * kBlockBytes / 16);
    return static_cast<unsigned>(row / kBlockTokens) * stride +
           static_cast<unsigned>(row % kBlockTokens) * (D * 2 / 16);
  }
  __device__ static constexpr int value_offset() { return kBlockBytes; }  ///< from a key row to its value row
};

/// One warp's walk over its tiles, so many of them under way at once.
template <class T, int D, bool kWide, class K = Keys, int kTilesAhead = 2, class Rows = InBlocks<D>>
struct TileLoop {
  static constexpr int kKeyPieces = (D + 31) / 32;    // 16-byte pieces of one key's row that a lane holds
  static constexpr int kValuePieces = (D + 63) / 64;  // of one value's row
  static constexpr int kFetches = 2 * kKeyPieces + 4 * kValuePieces;
  static constexpr int kStageBytes = kFetches * 32 * 16;
  static constexpr int kStages = kTilesAhead;
  static constexpr unsigned kNone = 0xffffffffu;
  static constexpr int kWidth = Rows::kWidth > 0 ? Rows::kWidth : D;
  static constexpr int kStep = Rows::kTurns * kTile;  ///< keys from one of the warp's tiles to the next

  const Params& p;
  const K& keys;
  [[no_unique_address]] Rows rows_in;
  const char* base;                  // of this sequence, layer and KV head
  unsigned ring;                     // shared address of the warp's stage 0
  int first = 0, end = 0, mine = 0;  // first tile's first key, end of the piece, number of tiles
  unsigned places = kNone;  // of two tiles: where key lane % 16 of tile lane / 16 lies, in 16 bytes from base
  int rows_behind = -1;     // the rows of the two tiles behind them, under way, or -1

  static constexpr int kHeadTiles = kWide ? 2 : 1;
  // With g = lane / 4, t = lane % 4: heads 2 t and 2 t + 1 (and 8 more where wide) of columns 2 i and 2 i + 1
  // of the value's piece 8 j + g are o[][4 j + i][0, 1] and [2, 3].
  unsigned q[kHeadTiles][kKeyPieces * 2][2];  // operand B of each product with 16 dimensions, of head g
  float o[kHeadTiles][kValuePieces * 4][4];
  float m[kHeadTiles][2], l[kHeadTiles][2];  // of the two heads; l sums this lane's keys

  __device__ TileLoop(const Params& params, const K& k) : p(params), keys(k) {}

  /// The share of the warp in keys [begin, behind), a piece of the block's or of some of its warps: of four
  /// sequences of tiles its own or that of another number.
  __device__ __forceinline__ void take(int begin, int behind) {
    take(begin, behind, static_cast<int>(threadIdx.x) / 32 % kWarps);
  }
  __device__ __forceinline__ void take(int begin, int behind, int sequence) {
    end = behind;
    first = begin + sequence * kTile;
    mine = max(0, (end - first + kStep - 1) / kStep);
  }

  /// Asked for before anything else, packed when the first keys are under way.
  struct RawQueries {
    float4 x[kHeadTiles][kKeyPieces][2];
  };
  /// The first of a lane's numbers, of queries that begin there.
  __device__ static const float* queries_at(const float* from /*[heads, kWidth]*/) {
    return from + threadIdx.x % 32 / 4 * kWidth + threadIdx.x % 4 * 8;
  }
  /// `kFresh`: written since this kernel's launch was made ready, so past the first-level cache.
  template <bool kFresh = false>
  __device__ static void ask_queries(const float* at, int heads, RawQueries& raw) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int j = 0; j < kKeyPieces; ++j) {
        const bool wanted = g + 8 * h < heads && (j * 4 + t) * 8 < D;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float* const x = at + 8 * h * kWidth + 32 * j + 4 * i;
          raw.x[h][j][i] = kFresh ? load_fresh(x, wanted) : load_here(x, wanted);
        }
      }
    }
  }
  __device__ void pack_queries(const RawQueries& raw) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int j = 0; j < kKeyPieces; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 x = raw.x[h][j][i];
          q[h][2 * j + i][0] = pack<T>(x.x, x.y), q[h][2 * j + i][1] = pack<T>(x.z, x.w);
        }
      }
    }
  }

  /// Key lane % 16 of tile 2 pair + lane / 16.
  __device__ int key_of(int pair) const {
    const int lane = threadIdx.x % 32;
    return first + (2 * pair + lane / kTile) * kStep + lane % kTile;
  }
  /// Its row, or -1.
  __device__ int row_of(int pair) const {
    const int key = key_of(pair);
    return 2 * pair + static_cast<int>(threadIdx.x) % 32 / kTile < mine && key < end ? keys.row(key) : -1;
  }
  /// That row, or where a list has it.
  struct RowAt {
    const std::int32_t* at = nullptr;
    int row = -1;

    __device__ __forceinline__ int ask() const { return load_here(at, row); }
  };
  __device__ __forceinline__ RowAt row_at(int pair) const {
    const int key = key_of(pair);
    if (2 * pair + static_cast<int>(threadIdx.x) % 32 / kTile >= mine || key >= end) return {};
    return keys.in_list(key) ? RowAt{keys.rows + key, -1} : RowAt{nullptr, keys.row(key)};
  }
  /// That row, once it is there.
  __device__ __forceinline__ int arrived(int row, [[maybe_unused]] int pair) const {
    if constexpr (K::kArriving) {
      while (row == kNotYet) row = row_of(pair);
      if (row >= 0) keys.leave(key_of(pair));
      __syncwarp();
    }
    return row;
  }
  __device__ unsigned place_of(int row) const {
    return row < 0 ? kNone : rows_in.place(p, row);
  }

  /// Place of chunk t of a key's piece j for lane 4 g + t, in bytes from the half tile's start. Odd pieces
  /// are swapped by halves of 128 bytes, so that the eight lanes that copy a line write to different banks.
  __device__ static unsigned key_place(int j, int g, int t) {
    return j * 512 + (((g ^ (j & 1)) * 4 + t) * 16);
  }

  /// Starts to fetch the tile whose places lanes of_pair, of_pair + 1, ... have.
  __device__ __forceinline__ void copy_tile(unsigned stage, int of_pair) const {
    copy_keys(stage, of_pair);
    copy_values(stage, of_pair);
  }
  /// Memory serves requests of 128 bytes as fast as smaller ones, so eight lanes copy a whole line of a key,
  /// each to where the lane that will use it looks.
  __device__ __forceinline__ void copy_keys(unsigned stage, int of_pair) const {
    const int lane = threadIdx.x % 32, chunk = lane % 8, t = lane % 4;
    const char* const keys_at = base + chunk * 16;
    const unsigned to_keys = stage + key_place(chunk / 4, lane / 8, t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // key 4 i + lane / 8
      const unsigned at = __shfl_sync(0xffffffffu, places, of_pair + 4 * i + lane / 8);
      const char* const row = keys_at + std::uint64_t{at} * 16;
#pragma unroll
      for (int j = 0; j < kValuePieces; ++j) {
        if (j * 8 + chunk < 4 * kKeyPieces)
          fetch(to_keys + i / 2 * (kKeyPieces * 512) + i % 2 * 256 + j * 1024, row + j * 128,
                at != kNone && (j * 8 + chunk) * 8 < D);
      }
    }
  }
  __device__ __forceinline__ void copy_values(unsigned stage, int of_pair) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const char* const values_at = base + rows_in.value_offset() + g * 16;
    const unsigned to_values = stage + 2 * kKeyPieces * 512 + lane * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned at = __shfl_sync(0xffffffffu, places, of_pair + 2 * t + i % 2 + i / 2 * 8);
      const char* const row = values_at + std::uint64_t{at} * 16;
#pragma unroll
      for (int j = 0; j < kValuePieces; ++j)
        fetch(to_values + (i * kValuePieces + j) * 512, row + j * 128, at != kNone && (j * 8 + g) * 8 < D);
    }
  }

  /// Starts to fetch one key of a tile and its value, which were left out when the tile was fetched.
  __device__ __forceinline__ void copy_key(unsigned stage, int key, int row) const {
    constexpr int kChunks = D / 8;  // of 16 bytes
    const char* const from = base + std::uint64_t{place_of(row)} * 16;
    for (int c = threadIdx.x % 32; c < 2 * kChunks; c += 32) {
      const int at = c % kChunks, j = at / 8, chunk = at % 8;
      const unsigned to_keys = key_place(chunk / 4, key % 4, chunk % 4) + key / 8 * (kKeyPieces * 512) +
                               key / 4 % 2 * 256 + j * 1024,
                     to_values = 2 * kKeyPieces * 512 + (4 * chunk + key % 8 / 2) * 16 +
                                 ((key / 8 * 2 + key % 2) * kValuePieces + j) * 512;
      fetch(stage + (c < kChunks ? to_keys : to_values),
            from + (c < kChunks ? 0 : rows_in.value_offset()) + at * 16, true);
    }
  }

  /// Starts to fetch the keys of a tile.
  __device__ __forceinline__ void fetch_keys(int tile) {
    if (tile < mine) copy_keys(ring + tile % kStages * kStageBytes, tile % 2 * kTile);
    asm volatile("cp.async.commit_group;");
  }
  /// And its values; after the second tile of a pair, asks for the rows of a later pair.
  __device__ __forceinline__ void fetch_values(int tile) {
    if (tile < mine) {
      copy_values(ring + tile % kStages * kStageBytes, tile % 2 * kTile);
      if (tile % 2 == 1) {
        places = place_of(arrived(rows_behind, tile / 2 + 1));
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

  /// Scores of keys g and g + 8 for heads 2 t and 2 t + 1: s[][0, 1] and [2, 3].
  __device__ void score(unsigned stage, float (&s)[kHeadTiles][4]) const {
    constexpr int kAtOnce = kKeyPieces % 4 == 0 ? 4 : kKeyPieces;
    const unsigned lane_at = key_place(0, threadIdx.x % 32 / 4, threadIdx.x % 4);
    const unsigned odd_at = key_place(1, threadIdx.x % 32 / 4, threadIdx.x % 4) - 512;
    float odd[kHeadTiles][4] = {};
#pragma unroll
    for (int j0 = 0; j0 < kKeyPieces; j0 += kAtOnce) {
      uint4 low[kAtOnce], high[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const unsigned at = stage + (j0 + j) * 512 + (j % 2 == 0 ? lane_at : odd_at);
        low[j] = piece(at), high[j] = piece(at + kKeyPieces * 512);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const unsigned x[4] = {low[j].x, high[j].x, low[j].y, high[j].y};
        const unsigned y[4] = {low[j].z, high[j].z, low[j].w, high[j].w};
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) {
          multiply<T>(s[h], x, q[h][2 * (j0 + j)][0], q[h][2 * (j0 + j)][1]);
          multiply<T>(odd[h], y, q[h][2 * (j0 + j) + 1][0], q[h][2 * (j0 + j) + 1][1]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[h][i] += odd[h][i];
    }
  }

  /// Scores of the tile that begins with key `at` to weights, in the running scale of each head.
  __device__ void soften(int at, float (&s)[kHeadTiles][4]) {
    const int key = at + threadIdx.x % 32 / 4;
    const float scale = p.queries.scale * kLog2e;
    float more[2] = {};
    if (keys.log_weights != nullptr) {
      if (key < end) more[0] = keys.weight(key) * kLog2e;
      if (key + 8 < end) more[1] = keys.weight(key + 8) * kLog2e;
    }
    const bool ragged = at + kTile > end;
    bool higher = false;
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[h][i] *= scale;
        if (keys.log_weights != nullptr) s[h][i] += more[i / 2];
        if (ragged && key + i / 2 * 8 >= end) s[h][i] = -INFINITY;
        higher |= s[h][i] > m[h][i % 2];
      }
    }
    if (__any_sync(0xffffffffu, higher)) raise(s);
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[h][i] = exp2_fast(s[h][i] - (m[h][i % 2] == -INFINITY ? 0.0f : m[h][i % 2]));
        l[h][i % 2] += s[h][i];
      }
    }
  }

  /// Maxima that include these scores; what was summed before is scaled to them.
  __device__ void raise(const float (&s)[kHeadTiles][4]) {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float peak = fmaxf(s[h][r], s[h][2 + r]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, offset));
        peak = fmaxf(peak, m[h][r]);
        const float keep = decay(m[h][r], peak);
        l[h][r] *= keep;
#pragma unroll
        for (int i = 0; i < kValuePieces * 4; ++i) o[h][i][r] *= keep, o[h][i][2 + r] *= keep;
        m[h][r] = peak;
      }
    }
  }

  /// A matrix of 8 x 8 numbers of 16 bits, transposed over the warp.
  __device__ static unsigned transposed(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
  }

  __device__ void add_values(const uint4 (&v)[kValuePieces][4], const float (&s)[kHeadTiles][4]) {
    unsigned low[kHeadTiles], high[kHeadTiles];
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h)
      low[h] = transposed(pack<T>(s[h][0], s[h][1])), high[h] = transposed(pack<T>(s[h][2], s[h][3]));
#pragma unroll
    for (int j = 0; j < kValuePieces; ++j) {
      const unsigned x[4][4] = {{v[j][0].x, v[j][0].y, v[j][0].z, v[j][0].w},
                                {v[j][1].x, v[j][1].y, v[j][1].z, v[j][1].w},
                                {v[j][2].x, v[j][2].y, v[j][2].z, v[j][2].w},
                                {v[j][3].x, v[j][3].y, v[j][3].z, v[j][3].w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned a[4] = {__byte_perm(x[0][i], x[1][i], 0x5410), __byte_perm(x[0][i], x[1][i], 0x7632),
                               __byte_perm(x[2][i], x[3][i], 0x5410), __byte_perm(x[2][i], x[3][i], 0x7632)};
#pragma unroll
        for (int h = 0; h < kHeadTiles; ++h) multiply<T>(o[h][j * 4 + i], a, low[h], high[h]);
      }
    }
  }

  /// A tile that has come: that which begins with key `at`.
  __device__ __forceinline__ void attend_tile(unsigned stage, int at) {
    float s[kHeadTiles][4] = {};
    score(stage, s);
    weigh(stage, at, s);
  }
  /// The values of that tile, whose scores are there.
  __device__ __forceinline__ void weigh(unsigned stage, int at, float (&s)[kHeadTiles][4]) {
    const unsigned values = stage + 2 * kKeyPieces * 512 + threadIdx.x % 32 * 16;
    uint4 v[kValuePieces][4];
#pragma unroll
    for (int j = 0; j < kValuePieces; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[j][i] = piece(values + (i * kValuePieces + j) * 512);
    }
    soften(at, s);
    add_values(v, s);
  }

  /// The state of no keys.
  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int i = 0; i < kValuePieces * 4; ++i) o[h][i][0] = o[h][i][1] = o[h][i][2] = o[h][i][3] = 0.0f;
      m[h][0] = m[h][1] = -INFINITY, l[h][0] = l[h][1] = 0.0f;
    }
  }

  /// For the keys or values that were asked for first, of kStages tiles under way.
  __device__ __forceinline__ static void wait_for_oldest() {
    asm volatile("cp.async.wait_group %0;" ::"n"(2 * kStages - 1) : "memory");
    __syncwarp();
  }
  /// The rows of the first two tiles; those behind them go to rows_behind.
  __device__ __forceinline__ int ask_rows() {
    const int rows = row_of(0);
    rows_behind = row_of(1);
    return rows;
  }
  /// Starts to fetch the first tiles, of the rows that ask_rows gave.
  __device__ __forceinline__ void begin(int rows) {
    places = place_of(arrived(rows, 0));
#pragma unroll 1
    for (int tile = 0; tile < kStages; ++tile) fetch_keys(tile), fetch_values(tile);
  }
  /// The walk, once begun. Keys of a tile are scored before its values are there, and those of a later one
  /// are fetched as soon as there is room for them; so are values.
  __device__ __forceinline__ void walk_on() {
#pragma unroll 1
    for (int tile = 0; tile < mine; ++tile) {
      const unsigned stage = ring + tile % kStages * kStageBytes;
      float s[kHeadTiles][4] = {};
      wait_for_oldest();
      score(stage, s);
      __syncwarp();  // all have read the keys before the next fetch overwrites them
      fetch_keys(tile + kStages);
      wait_for_oldest();
      weigh(stage, first + tile * kStep, s);
      __syncwarp();
      fetch_values(tile + kStages);
    }
    asm volatile("cp.async.wait_all;");
  }
  /// The lanes' sums together.
  __device__ void finish() {
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        l[h][0] += __shfl_xor_sync(0xffffffffu, l[h][0], offset);
        l[h][1] += __shfl_xor_sync(0xffffffffu, l[h][1], offset);
      }
    }
  }

  /// The warp's state of some heads: o [heads][kWidth] from a column on, then m and l [heads][2].
  __device__ void store(float* to, int heads, int first_head = 0, int column = 0) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = 8 * h + 2 * t + r - first_head;
        if (head < 0 || head >= heads) continue;
#pragma unroll
        for (int j = 0; j < kValuePieces; ++j) {
          if ((j * 8 + g) * 8 >= D) continue;
          float4* const at = reinterpret_cast<float4*>(to + head * kWidth + column + (j * 8 + g) * 8);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float(&x)[4] = o[h][j * 4 + 2 * i];
            const float(&y)[4] = o[h][j * 4 + 2 * i + 1];
            at[i] = {x[r], x[2 + r], y[r], y[2 + r]};
          }
        }
        if (g == 0) *reinterpret_cast<float2*>(to + heads * kWidth + head * 2) = {m[h][r], l[h][r]};
      }
    }
  }
};

}  // namespace lode::cuda
