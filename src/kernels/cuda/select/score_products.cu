// SPDX-License-Identifier: Apache-2.0
// Scores of every far key on the matrix unit, sixteen keys by eight columns at a time, without loss: a query
// is the sum of three numbers of the keys' type, each of which has a column of its own, and products are
// added in float32. Channels may come in any order as long as both sides agree, so a lane reads sixteen bytes
// of a row at once, and four lanes a whole sector and more.
//
// Work map of products_kernel: grid (pieces of kKeysOfSum keys, KV heads x chunks of their heads, query
// tokens); a warp has one block of the store a piece, lane 4 r + c of it rows r and r + 8 of each tile, and
// of these the numbers 8 (4 j + c) to 8 (4 j + c) + 7 for all j.
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/matrix.cuh"
#include "kernels/cuda/select/exponential_sum.cuh"
#include "kernels/cuda/select/score_products.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kTileKeys = 16, kTiles = kBlockTokens / kTileKeys;
constexpr int kChannels = 8;  // of a lane's read
constexpr int kParts = 3;     // numbers of a query's number
static_assert(kKeysOfSum == kWarps * kBlockTokens);

struct Params {
  Queries queries;
  int chunks = 1;  ///< of the heads of a KV head
  std::int64_t sink = 0, window = 0, max_tokens = 0;
  float* scores = nullptr;
  ExponentialSum* sums = nullptr;
};

/// 2^power, power in [-126, 127].
__device__ __forceinline__ float power_of_two(int power) {
  return __uint_as_float(static_cast<unsigned>(127 + power) << 23);
}
/// The power of two that brings the largest of a column's numbers near the largest half, so that three halves
/// hold all of a float; bf16 has a float's range by itself.
__device__ __forceinline__ int power_for(float largest) {
  if (!(largest > 0.0f) || isinf(largest)) return 0;
  constexpr int kNear = 13, kMost = 100;
  return kNear - max(-kMost, min(kMost, ilogbf(largest)));
}

/// The columns that keys are multiplied with, in shared memory. Of eight, head h has 2 h and 2 h + 1, in two
/// products, or column h in three; what is left over is zero.
template <class T, int kReads, int kHeads>
struct Columns {
  static constexpr int kProducts = kHeads == 4 ? 2 : kParts;  // into the same sixteen by eight scores
  uint4 of[kProducts][kReads][32];                            // of a lane
  int power[8];                                               // of a column

  __device__ static float number(const float* q, float scale, int d, int at) {
    return q != nullptr && at < d ? q[at] * scale : 0.0f;
  }
  /// By a whole warp: its share of what the lane's column has of the head q (null: zeros).
  __device__ void take(const float* q, float scale, int d, int warp, int lane) {
    const int c = lane % 4, column = lane / 4;
    int own_power = 0;
    if constexpr (!std::is_same_v<T, __nv_bfloat16>) {
      float largest = 0.0f;
      for (int at = c; at < d; at += 4) largest = fmaxf(largest, fabsf(number(q, scale, d, at)));
#pragma unroll
      for (int o = 1; o < 4; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
      own_power = power_for(largest);
    }
    if (warp == 0 && c == 0) power[column] = own_power;
    const float factor = power_of_two(own_power);
    for (int j = warp; j < kReads; j += kWarps) {
      unsigned parts[kParts][4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int at = kChannels * (4 * j + c) + 2 * pair;
        float low = number(q, scale, d, at) * factor, high = number(q, scale, d, at + 1) * factor;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          T first, second;
          narrow(low, &first), narrow(high, &second);
          parts[part][pair] = pack<T>(low, high);
          low -= widen(first), high -= widen(second);
        }
      }
      const auto all = [&](int part) {
        return uint4{parts[part][0], parts[part][1], parts[part][2], parts[part][3]};
      };
      if constexpr (kHeads == 4) {
        of[0][j][lane] = column % 2 == 0 ? all(0) : all(1);
        of[1][j][lane] = column % 2 == 0 ? all(2) : uint4{};
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) of[part][j][lane] = all(part);
      }
    }
  }
};

/// The lane's numbers of two rows.
template <int kReads>
struct Rows {
  uint4 of[2][kReads];

  __device__ __forceinline__ void load(const char* block /*[kBlockTokens, d] from number 8 c on*/,
                                       int row_bytes, int row, std::int64_t there, int c, int d) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = row + 8 * i;
#pragma unroll
      for (int j = 0; j < kReads; ++j) {
        if (at < there && kChannels * (4 * j + c) < d)
          of[i][j] = *reinterpret_cast<const uint4*>(block + at * row_bytes + j * 64);
        else
          of[i][j] = {};
      }
    }
  }
};

/// Blocks of a processor that registers leave room for.
constexpr int blocks_at_once(int reads, int heads) {
  if (reads > 4) return 2;
  return heads == 4 ? 4 : 3;
}

template <class T, int kReads, int kHeads>
__global__ void __launch_bounds__(kThreads, blocks_at_once(kReads, kHeads))
    products_kernel(const __grid_constant__ Params p) {
  using Own = Columns<T, kReads, kHeads>;
  constexpr int kEach = kHeads / 4;  // heads whose scores a lane gets
  __shared__ __align__(16) Own columns;
  const Queries& in = p.queries;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            c = lane % 4, r = lane / 4, d = in.layout.head_dim;
  const int group = in.query_heads / in.layout.kv_heads, query = static_cast<int>(blockIdx.z),
            kv_head = static_cast<int>(blockIdx.y) / p.chunks,
            first_head = static_cast<int>(blockIdx.y) % p.chunks * kHeads;
  const QueryToken token = in.tokens[query];
  const std::int64_t end = token.position + 1 - p.window;
  const auto row_bytes = static_cast<int>(in.layout.row_bytes());
  const char* const keys =
      in.bases[token.sequence] + in.layer_offset + kv_head * in.layout.head_stride() + c * kChannels * 2;
  wait_for_predecessor();
  release_successor();
  const std::int64_t block = std::int64_t{blockIdx.x} * kWarps + warp;
  if (blockIdx.x * kKeysOfSum >= end) return;
  const std::int64_t first_row = std::int64_t{query} * in.query_heads + kv_head * group + first_head;
  Rows<kReads> next;
  const auto load = [&](int tile) {
    next.load(keys + block * in.layout.block_stride(), row_bytes, tile * kTileKeys + r,
              end - block * kBlockTokens, c, d);
  };
  load(0);
  const int own = kHeads == 4 ? r / 2 : r;  // head of the lane's column
  columns.take(first_head + own < group ? in.q + (first_row + own) * d : nullptr, in.scale, d, warp, lane);
  __syncthreads();
  float factor[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) factor[e] = power_of_two(-columns.power[kHeads == 4 ? 2 * c : 2 * c + e]);
  ExponentialSum of[kEach];
#pragma unroll 1
  for (int tile = 0; tile < kTiles; ++tile) {
    const Rows<kReads> now = next;
    if (tile + 1 < kTiles) load(tile + 1);
    float sums[Own::kProducts][4] = {};
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const unsigned low[4] = {now.of[0][j].x, now.of[1][j].x, now.of[0][j].y, now.of[1][j].y};
      const unsigned high[4] = {now.of[0][j].z, now.of[1][j].z, now.of[0][j].w, now.of[1][j].w};
#pragma unroll
      for (int t = 0; t < Own::kProducts; ++t) {
        const uint4 column = columns.of[t][j][lane];
        multiply<T>(sums[t], low, column.x, column.y);
        multiply<T>(sums[t], high, column.z, column.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t key = block * kBlockTokens + tile * kTileKeys + r + 8 * i;
      float both[2] = {};
#pragma unroll
      for (int t = Own::kProducts; t-- > 0;) both[0] += sums[t][2 * i], both[1] += sums[t][2 * i + 1];
      if constexpr (kHeads == 4) both[0] += both[1];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int head = kEach * c + e;
        if (key >= end || first_head + head >= group) continue;
        // What an infinite number of a key makes of the lower parts says nothing: the first part has its
        // sign.
        const float leading = sums[0][2 * i + e], sum = fabsf(leading) < INFINITY ? both[e] : leading;
        const float score = key < p.sink ? -INFINITY : sum * factor[e];
        p.scores[(first_row + head) * p.max_tokens + key] = score;
        if (p.sums != nullptr) add_to(of[e], score);
      }
    }
  }
  if (p.sums == nullptr) return;
  const std::int64_t stride = sums_of_keys(p.max_tokens);
  post_sums<kThreads, 4, kEach>(of, group - first_head, p.sums + first_row * stride + blockIdx.x, stride);
}

template <class T, int kReads, int kHeads>
void launch(Params p, StreamHandle stream) {
  const int group = p.queries.query_heads / p.queries.layout.kv_heads;
  p.chunks = (group + kHeads - 1) / kHeads;
  const dim3 grid = scorer_grid(p.queries, p.max_tokens - p.window, p.chunks);
  EarlyLaunch(grid, kThreads, 0, 1, stream)(products_kernel<T, kReads, kHeads>, p);
}

template <class T>
void launch_for_shape(const Params& p, StreamHandle stream) {
  const int group = p.queries.query_heads / p.queries.layout.kv_heads, d = p.queries.layout.head_dim;
  const auto for_dim = [&]<int kHeads>() {
    if (d <= 64) return launch<T, 2, kHeads>(p, stream);
    if (d <= 128) return launch<T, 4, kHeads>(p, stream);
    launch<T, 8, kHeads>(p, stream);
  };
  if (group <= 4) return for_dim.template operator()<4>();
  for_dim.template operator()<8>();
}

}  // namespace

bool score_products(const Queries& queries, std::int64_t sink, std::int64_t window, std::int64_t max_tokens,
                    float* scores, ExponentialSum* sums, StreamHandle stream) {
  const KvLayout& layout = queries.layout;
  if (layout.type == DType::f32 || layout.head_dim % kChannels != 0 || layout.head_dim > 256) return false;
  const Params p = {.queries = queries,
                    .sink = sink,
                    .window = window,
                    .max_tokens = max_tokens,
                    .scores = scores,
                    .sums = sums};
  if (layout.type == DType::f16)
    launch_for_shape<__half>(p, stream);
  else
    launch_for_shape<__nv_bfloat16>(p, stream);
  return true;
}

}  // namespace lode::cuda
