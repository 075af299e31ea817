// SPDX-License-Identifier: Apache-2.0
// Decode attention over stored rows, bound by the bytes of keys and values.
//
// Work map: grid (splits, KV heads x lists, query tokens), kWarps warps a block. The keys of a list (sink,
// rows, window, in that order) are cut into `splits` pieces that depend on their number alone; a block owns
// one piece, its warps take tiles of 16 keys in turn. A tile is read once by cp.async, each lane into a place
// of its own, in the order in which the lane's registers want it, so there are no barriers, no bank
// conflicts, and any order of rows costs the same:
//
//   S[16 heads, 16 keys] = Q K^T     mma.m16n8k16: a lane's 16 bytes of a key serve as its k-indices, Q is
//   laid out alike P = exp2(S - m)                  running maximum and sum per head and warp O[16 heads, d]
//   += P V            P's accumulators are the next product's operand; V's 16 bytes of two keys interleaved
//
// The group's heads are the rows of the matrices, padded to 16. Warps merge in order through shared memory;
// pieces merge in order, by the block that comes last, in two levels when there are many.
#include "kernels/cuda/attend.h"
#include "kernels/cuda/attend_generic.h"
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/matrix.cuh"

namespace lode::cuda {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kTile = 16;        // keys
constexpr int kPieces = 264;     // of all KV heads of one query: two blocks on each of an H200's processors
constexpr int kLeastKeys = 256;  // of a piece
constexpr int kFan = 32;         // pieces that one block merges
constexpr int kCounters = 1 << 16;
constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;

int most_splits(int kv_heads) {
  return kPieces / kv_heads > 1 ? kPieces / kv_heads : 1;
}

struct Params {
  Queries queries;
  RowLists lists;
  bool has_lists = false;
  int most_splits = 1;
  float* partial = nullptr;     // [N, Hq, most_splits + fans, d + 4]: pieces, then fans of pieces
  unsigned* arrived = nullptr;  // [N, Hkv, lists, fans + 1]
};

__host__ __device__ constexpr int fans(int splits) {
  return (splits + kFan - 1) / kFan;
}

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
  unsigned next = kNone;  // where the key `lane % 16` of the next tile to fetch lies, in 16 bytes from base

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

  __device__ void find(int tile) {
    const int key = first + tile * kWarps * kTile + threadIdx.x % kTile;
    next = kNone;
    if (tile >= mine || key >= end) return;
    const int row = keys.row(key);
    next = static_cast<unsigned>((row / kBlockTokens * p.queries.layout.block_stride()) >> 4) +
           static_cast<unsigned>(row % kBlockTokens) * (D * 2 / 16);
  }

  /// Place of chunk t of a key's piece j for lane 4 g + t, in bytes from the half tile's start. Odd pieces
  /// are swapped by halves of 128 bytes, so that the eight lanes that copy a line write to different banks.
  __device__ static unsigned key_place(int j, int g, int t) {
    return j * 512 + (((g ^ (j & 1)) * 4 + t) * 16);
  }

  /// Starts to fetch a tile whose rows were found; finds those of the tile behind it. Memory serves requests
  /// of 128 bytes as fast as smaller ones, so eight lanes copy a whole line of a key, each to where the lane
  /// that will use it looks.
  __device__ void fetch_tile(int tile) {
    if (tile < mine) {
      const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      const unsigned stage = ring + tile % kStages * kStageBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 4 * i + lane / 8;
        const unsigned at = __shfl_sync(0xffffffffu, next, key);
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
        const unsigned at = __shfl_sync(0xffffffffu, next, 2 * t + i % 2 + i / 2 * 8);
        const char* const row = base + p.queries.layout.value_offset() + std::uint64_t{at} * 16;
#pragma unroll
        for (int j = 0; j < kValuePieces; ++j, to += 512)
          fetch(to, at == kNone ? base : row + (j * 8 + g) * 16, at != kNone && (j * 8 + g) * 8 < D);
      }
      find(tile + 1);
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

  __device__ void run() {
#pragma unroll
    for (int i = 0; i < kValuePieces * 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
    find(0);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch_tile(s);
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

  /// The warp's state, laid out as state_floats says.
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

/// Floats of one state of `heads` heads: o [heads][D], then m and l [heads][2], padded to whole float4.
template <int D>
__host__ __device__ constexpr std::int64_t state_floats(int heads) {
  return (heads * (D + 2) + 3) / 4 * 4;
}

/// Merges `count` states in order into `to`, which may be the first of them. `scale` is shared memory,
/// [heads][count]. All threads of the block take part.
template <int D>
__device__ void merge_states(const float* from, int count, int heads, float* scale, float* to) {
  const std::int64_t state = state_floats<D>(heads);
  __syncthreads();
  for (int i = threadIdx.x; i < heads * count; i += kThreads)
    scale[i] = from[i % count * state + heads * D + i / count * 2];
  __syncthreads();
  float sum_of_head = 0.0f, peak = -INFINITY;
  if (threadIdx.x < heads) {
    for (int i = 0; i < count; ++i) peak = fmaxf(peak, scale[threadIdx.x * count + i]);
    for (int i = 0; i < count; ++i) {
      const float keep = decay(scale[threadIdx.x * count + i], peak);
      scale[threadIdx.x * count + i] = keep;
    }
#pragma unroll 4
    for (int i = 0; i < count; ++i)
      sum_of_head += scale[threadIdx.x * count + i] * from[i * state + heads * D + threadIdx.x * 2 + 1];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * D / 4; i += kThreads) {
    const float* const factors = scale + i * 4 / D * count;
    float4 sum = {};
#pragma unroll 16
    for (int s = 0; s < count; ++s) {
      const float4 x = *reinterpret_cast<const float4*>(from + s * state + i * 4);
      const float f = factors[s];
      sum.x += f * x.x, sum.y += f * x.y, sum.z += f * x.z, sum.w += f * x.w;
    }
    *reinterpret_cast<float4*>(to + i * 4) = sum;
  }
  __syncthreads();
  if (threadIdx.x < heads) {
    to[heads * D + threadIdx.x * 2] = peak;
    to[heads * D + threadIdx.x * 2 + 1] = sum_of_head;
  }
  __syncthreads();
}

/// A merged state to its place: normalised, the tail merged last.
template <int D>
__device__ void write_result(const Params& p, const float* state, std::int64_t first_row, int heads) {
  for (int i = threadIdx.x; i < heads * D; i += kThreads) {
    const int head = i / D;
    const std::int64_t row = first_row + head;
    const float m = state[heads * D + head * 2], l = state[heads * D + head * 2 + 1];
    float lse = l == 0.0f ? -INFINITY : (m == -INFINITY ? 0.0f : m) * kLn2 + logf(l);
    float x = l == 0.0f ? 0.0f : state[i] / l;
    if (p.lists.tail_lse != nullptr && p.lists.tail_lse[row] != -INFINITY) {
      const float tail = p.lists.tail_lse[row], peak = fmaxf(lse, tail);
      const float mine = lse == -INFINITY ? 0.0f : expf(lse - peak), theirs = expf(tail - peak);
      x = (x * mine + p.lists.tail_output[row * D + i % D] * theirs) / (mine + theirs);
      lse = peak + logf(mine + theirs);
    }
    p.queries.o[row * D + i % D] = x;
    if (p.queries.lse != nullptr && i % D == 0) p.queries.lse[row] = lse;
  }
}

/// True in the one block that arrives last of `expected`; leaves the counter zeroed.
__device__ bool last_to_arrive(unsigned* counter, unsigned expected) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == expected - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

template <class T, int D, bool kWide>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ Params p) {
  using W = Walk<T, D, kWide>;
  extern __shared__ __align__(16) char shared[];
  const int kv_heads = p.queries.layout.kv_heads, group = p.queries.query_heads / kv_heads;
  const int per_head = p.has_lists ? p.lists.lists_per_head : 1;
  const int query = blockIdx.z, kv_head = blockIdx.y / per_head;
  const int heads = per_head > 1 ? 1 : group;
  const std::int64_t first_row =
      std::int64_t{query} * p.queries.query_heads + kv_head * group + blockIdx.y % per_head;
  const QueryToken token = p.queries.tokens[query];
  const std::int64_t list = std::int64_t{query} * gridDim.y + blockIdx.y;
  const Keys keys(p, token.position, list);

  // Pieces depend on the number of keys alone.
  const int wanted = max(1, min(p.most_splits, (keys.count + kLeastKeys - 1) / kLeastKeys));
  const int piece = ((keys.count + wanted - 1) / wanted + kTile - 1) / kTile * kTile;
  const int splits = max(1, piece == 0 ? 1 : (keys.count + piece - 1) / piece), split = blockIdx.x;
  if (split >= splits) return;

  W walk(p, keys);
  const int warp = threadIdx.x / 32, begin = split * piece;
  walk.base =
      p.queries.bases[token.sequence] + p.queries.layer_offset + kv_head * p.queries.layout.head_stride();
  walk.end = min(keys.count, begin + piece);
  walk.first = begin + warp * kTile;
  walk.mine = max(0, (walk.end - walk.first + kWarps * kTile - 1) / (kWarps * kTile));
  walk.ring = shared_address(shared) + warp * (W::kStages * W::kStageBytes);
  walk.load_queries(p.queries.q + first_row * D, heads);
  walk.run();

  // Warps, then pieces, then fans of pieces.
  float* const states = reinterpret_cast<float*>(shared);  // [kWarps][heads][D + 2]
  const std::int64_t state = state_floats<D>(heads);
  float* const scale = states + kWarps * state;  // [heads][kFan]
  __syncthreads();
  walk.store(states + warp * state, heads);
  if (splits == 1) {
    merge_states<D>(states, kWarps, heads, scale, states);
    return write_result<D>(p, states, first_row, heads);
  }
  const int slots = p.most_splits + fans(p.most_splits);
  float* const partial = p.partial + first_row * slots * state_floats<D>(1);
  merge_states<D>(states, kWarps, heads, scale, partial + split * state);
  unsigned* const arrived = p.arrived + list * (fans(p.most_splits) + 1);
  const int fan = split / kFan, in_fan = min(kFan, splits - fan * kFan);
  if (!last_to_arrive(arrived + fan, in_fan)) return;
  if (splits <= kFan) {
    merge_states<D>(partial, splits, heads, scale, states);
    return write_result<D>(p, states, first_row, heads);
  }
  float* const of_fans = partial + p.most_splits * state;
  merge_states<D>(partial + fan * kFan * state, in_fan, heads, scale, of_fans + fan * state);
  if (!last_to_arrive(arrived + fans(p.most_splits), fans(splits))) return;
  merge_states<D>(of_fans, fans(splits), heads, scale, states);
  write_result<D>(p, states, first_row, heads);
}

template <class T, int D, bool kWide>
void launch(const Params& p, StreamHandle stream) {
  using W = Walk<T, D, kWide>;
  constexpr int kShared = kWarps * W::kStages * W::kStageBytes;
  static_assert(kShared >= (kWarps * state_floats<D>(16) + 16 * kFan) * 4);
  static const bool raised = [] {
    LODE_CUDA(cudaFuncSetAttribute(attend_kernel<T, D, kWide>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kShared));
    return true;
  }();
  static_cast<void>(raised);
  const int lists = p.queries.layout.kv_heads * (p.has_lists ? p.lists.lists_per_head : 1);
  const dim3 grid(static_cast<unsigned>(p.most_splits), static_cast<unsigned>(lists),
                  static_cast<unsigned>(p.queries.count));
  attend_kernel<T, D, kWide><<<grid, kThreads, kShared, stream>>>(p);
  LODE_LAUNCHED();
}

template <class T, bool kWide>
bool launch_for_dim(const Params& p, StreamHandle stream) {
  switch (p.queries.layout.head_dim) {
    case 64:
      return launch<T, 64, kWide>(p, stream), true;
    case 80:
      return launch<T, 80, kWide>(p, stream), true;
    case 96:
      return launch<T, 96, kWide>(p, stream), true;
    case 128:
      return launch<T, 128, kWide>(p, stream), true;
    case 256:
      return launch<T, 256, kWide>(p, stream), true;
    default:
      return false;
  }
}

template <class T>
bool launch_for(const Params& p, StreamHandle stream) {
  const bool wide =
      p.queries.query_heads / p.queries.layout.kv_heads > 8 && (!p.has_lists || p.lists.lists_per_head == 1);
  return wide ? launch_for_dim<T, true>(p, stream) : launch_for_dim<T, false>(p, stream);
}

void attend(const Queries& queries, const RowLists* lists, void* workspace, StreamHandle stream) {
  if (queries.count == 0) return;
  Params p = {
      .queries = queries, .has_lists = lists != nullptr, .most_splits = most_splits(queries.layout.kv_heads)};
  if (lists != nullptr) p.lists = *lists;
  const std::int64_t counters = std::int64_t{queries.count} * queries.query_heads * (fans(p.most_splits) + 1);
  if (counters > kCounters)
    throw RunError("expected at most " + std::to_string(kCounters) +
                   " counters of attention, found a need for " + std::to_string(counters));
  // The counters come first, in a region of fixed size: they stay zero whatever calls came before.
  p.arrived = static_cast<unsigned*>(workspace);
  p.partial = static_cast<float*>(workspace) + kCounters;
  const bool fits = queries.query_heads / queries.layout.kv_heads <= 16;
  if (fits && queries.layout.type == DType::bf16 && launch_for<__nv_bfloat16>(p, stream)) return;
  if (fits && queries.layout.type == DType::f16 && launch_for<__half>(p, stream)) return;
  attend_generic(queries, lists, stream);
}

}  // namespace

std::int64_t decode_workspace_bytes(int queries, int query_heads, int head_dim, std::int64_t) {
  // One KV head has the most pieces.
  const std::int64_t slots = kPieces + fans(kPieces) + 1;
  return (kCounters + std::int64_t{queries} * query_heads * slots * (head_dim + 4)) * 4;
}

void attend_full_decode(const Queries& queries, std::int64_t, void* workspace, StreamHandle stream) {
  attend(queries, nullptr, workspace, stream);
}

void attend_rows_decode(const Queries& queries, const RowLists& lists, std::int64_t, void* workspace,
                        StreamHandle stream) {
  attend(queries, &lists, workspace, stream);
}

}  // namespace lode::cuda
