// SPDX-License-Identifier: Apache-2.0
// Prefill attention on Hopper's matrix unit, for heads of 128: FlashAttention-3 (Shah and others, 2024,
// arXiv:2407.08608, algorithm 1 with its overlap inside a warpgroup, section 3.2). One warpgroup brings tiles
// of 128 keys and values to shared memory; two multiply, 64 rows each (a row is one query head of one token,
// a KV head's group side by side): while the weights of a tile meet its values, the scores of the next are
// made and their softmax taken. Ours are the layout of the store and that copies are plain asynchronous ones,
// because where a sequence lies is known on the device alone. A query's bits depend on its own keys alone,
// not on how the prompt was cut into chunks.
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/matrix.cuh"
#include "kernels/cuda/prefill.h"

namespace lode::cuda {

namespace {

constexpr int kDim = 128, kKeys = 128, kRows = 128, kGroupThreads = 128, kStages = 2;
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

struct Barrier {
  unsigned at;  // in shared memory
  __device__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
  }
  __device__ void arrive() const {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(at) : "memory");
  }
  /// Is the phase of this parity over?
  __device__ bool passed(int parity) const {
    unsigned done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
    return done != 0;
  }
  __device__ void wait(int parity) const {
    while (!passed(parity)) {
    }
  }
};

/// The address of a matrix as the matrix unit wants it: 128-byte swizzle, `leading` and `stride` in bytes.
__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned leading,
                                                         unsigned stride) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
         static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Newer>
__device__ __forceinline__ void wait_for_products(float (&c)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Newer) : "memory");
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

#define LODE_SUMS                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define LODE_SUM_OPERANDS(c)                                                                                \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),           \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
      "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]),            \
      "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),            \
      "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]),            \
      "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]),            \
      "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]),            \
      "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]),            \
      "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])

// c (+)= a b, 64 x 128 x 16. Both from shared memory, columns of a product contiguous; or a from registers
// and b with its rows contiguous.
#define LODE_PRODUCTS(type)                                                                                \
  static __device__ __forceinline__ void scores(float(&c)[64], unsigned long long a, unsigned long long b, \
                                                int add) {                                                 \
    asm volatile(                                                                                          \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type      \
        "." type " " LODE_SUMS ", %64, %65, p, 1, 1, 0, 0;\n}"                                             \
        : LODE_SUM_OPERANDS(c)                                                                             \
        : "l"(a), "l"(b), "r"(add));                                                                       \
  }                                                                                                        \
  static __device__ __forceinline__ void outputs(float(&c)[64], const unsigned(&a)[4],                     \
                                                 unsigned long long b) {                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " LODE_SUMS                \
                 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                \
                 : LODE_SUM_OPERANDS(c)                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
  }

template <class T>
struct Unit;
template <>
struct Unit<__nv_bfloat16> {
  LODE_PRODUCTS("bf16")
};
template <>
struct Unit<__half> {
  LODE_PRODUCTS("f16")
};

template <class T>
class Attention {
 public:
  __device__ Attention(const Queries& in, int position, char* memory)
      : in_(in),
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
    end_ = position + (min(first_ + kRows, rows_) - 1) / group_ + 1;
    tiles_ = (end_ + kKeys - 1) / kKeys;
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

  __device__ int position_of(int row) const { return position_ + min(first_ + row, rows_ - 1) / group_; }
  __device__ std::int64_t query_row(int row) const {
    const int at = first_ + row;
    return std::int64_t{at / group_} * in_.query_heads + kv_head_ * group_ + at % group_;
  }

  /// Keys and values of tile after tile. A tile is announced once the next is under way, or earlier where
  /// there is no room yet for the next.
  __device__ void bring() const {
    const char* layer = in_.bases[in_.tokens[0].sequence] + in_.layer_offset;
    int waiting = -1;
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
      load(layer + in_.layout.key_offset(kv_head_, std::int64_t{tile} * kKeys) +
               n % 2 * in_.layout.value_offset(),
           tile, tile_at(slot));
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
  /// Zeros for rows that no query of the block may see.
  __device__ void load(const char* rows, int tile, unsigned to) const {
    const int chunk = static_cast<int>(threadIdx.x) % 16, row = static_cast<int>(threadIdx.x) / 16;
    to += static_cast<unsigned>(chunk / 8 * kPanel + row * 128 + ((chunk % 8) ^ row) * 16);
    const char* from = rows + row * kDim * 2 + chunk * 16;
    const int left = end_ - tile * kKeys - row;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      const int bytes = 8 * i < left ? 16 : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * 1024),
                   "l"(bytes > 0 ? from + i * 8 * kDim * 2 : nullptr), "r"(bytes)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
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
    if (tile * kKeys + kKeys - 1 > position_of(team_ * 64 + warp_ * 16)) mask(tile, s);
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
  __device__ void mask(int tile, float (&s)[64]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = position_of(team_ * 64 + warp_ * 16 + lane_ / 4 + 8 * half) - tile * kKeys;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (n * 8 + lane_ % 4 * 2 + i > last) s[4 * n + 2 * half + i] = -INFINITY;
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
      float* to = in_.o + query_row(row) * kDim + lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < 16; ++n)
        *reinterpret_cast<float2*>(to + n * 8) = {out_[4 * n + 2 * half] / sum,
                                                  out_[4 * n + 2 * half + 1] / sum};
      if (in_.lse != nullptr && lane_ % 4 == 0)
        in_.lse[query_row(row)] = 0.69314718055994531f * (max_[half] + log2f(sum));
    }
  }

  const Queries& in_;
  const int position_;
  const unsigned base_;  // shared memory: queries, tiles, barriers
  const int group_, kv_head_, first_, rows_, team_, warp_, lane_;
  int end_, tiles_;  // keys that some query of the block sees
  float out_[64] = {}, max_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
};

#endif

template <class T>
__global__ __launch_bounds__(kThreads, 1) void hopper_kernel(const Queries in, int position) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  Attention<T>(in, position, memory).run();
#endif
}

template <class T>
bool launch(const Queries& in, int position, StreamHandle stream) {
  static const bool built = [] {
    cudaFuncAttributes found{};
    LODE_CUDA(cudaFuncGetAttributes(&found, hopper_kernel<T>));
    return found.maxThreadsPerBlock >= kHostThreads;
  }();
  if (!built) return false;
  LODE_CUDA(cudaFuncSetAttribute(hopper_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  const std::int64_t rows = std::int64_t{in.count} * (in.query_heads / in.layout.kv_heads);
  const dim3 grid(static_cast<unsigned>((rows + kRows - 1) / kRows),
                  static_cast<unsigned>(in.layout.kv_heads));
  hopper_kernel<T><<<grid, kHostThreads, kShared, stream>>>(in, position);
  LODE_LAUNCHED();
  return true;
}

}  // namespace

bool attend_prefill_hopper(const Queries& queries, std::int32_t position, StreamHandle stream) {
  static_assert(kBlockTokens % kKeys == 0, "a tile lies in one block of the store");
  if (queries.layout.head_dim != kDim) return false;
  if (queries.layout.type == DType::bf16) return launch<__nv_bfloat16>(queries, position, stream);
  if (queries.layout.type == DType::f16) return launch<__half>(queries, position, stream);
  return false;
}

}  // namespace lode::cuda
