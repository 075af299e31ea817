// SPDX-License-Identifier: Apache-2.0
// Matrix-vector products for bf16 weights at the speed of memory. A block takes tiles of 16 weight rows (8
// pairs); its warps share the columns. The matrix unit multiplies: a tile's 16 rows x 16 columns are the left
// operand, as they come from memory with 16-byte loads (the order of the columns inside a product is free, if
// both sides agree), up to 8 input rows the right one. An input number x is the sum of two bf16, x = high +
// low, so 16 bits of it count. The scale of a norm multiplies at the end: rms_norm(x) w = (x gain w) /
// rms(x).
//
// A kernel starts while its predecessor still runs (programmatic dependent launch): it fills its registers
// with weights, which nobody writes, and only then waits for its input.
#include <algorithm>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/linear_kernels.h"

namespace lode::cuda {

namespace {

#ifndef LODE_WARPS
#define LODE_WARPS 8
#endif
#ifndef LODE_DEPTH
#define LODE_DEPTH 4
#endif
#ifndef LODE_RESIDENT
#define LODE_RESIDENT 2
#endif
#ifndef LODE_GRID
#define LODE_GRID 1
#endif
#ifndef LODE_LOAD
#define LODE_LOAD ""
#endif
constexpr int kWarps = LODE_WARPS, kThreads = kWarps * 32;
constexpr int kPairs = 8;                 // of rows, a tile
constexpr int kColumns = 64;              // a warp takes at once: 128 bytes of each row
constexpr int kDepth = LODE_DEPTH;        // such pieces of a warp under way: 2 KiB each
constexpr int kResident = LODE_RESIDENT;  // blocks an SM holds: one at work, one filling its registers
constexpr int kRowPad = 32;               // bf16 numbers after a row of inputs: rows start in other banks

__device__ __forceinline__ uint4 load_weights(const __nv_bfloat16* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate" LODE_LOAD ".v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

/// sums += 16 x 16 weights times 16 x 8 inputs
__device__ __forceinline__ void multiply(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                         unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// 64 columns of rows a and b of this lane's pair; lane 4 g + t holds columns 8 t to 8 t + 7 of either half.
struct Piece {
  uint4 a[2] = {}, b[2] = {};
};

/// Where a launch keeps what in shared memory, and how it cuts the columns.
struct Plan {
  int turns = 0;         ///< pieces that a warp takes of one tile
  int staged_turns = 0;  ///< as many as one stage of inputs is good for
  int row_stride = 0;    ///< bf16 numbers from one staged input row to the next
};

template <int N>
struct Shared {
  float4 partial[2][kWarps][32];
  float squares[N][kWarps];
  float inverse[N];
  // then: high parts [N, row_stride], low parts [N, row_stride], bf16
};

template <int N, class Step>
class Streamer {
 public:
  __device__ Streamer(const Step& step, const StepInput& in, const Plan& plan, Shared<N>& shared)
      : step_(step),
        in_(in),
        plan_(plan),
        shared_(shared),
        high_(reinterpret_cast<__nv_bfloat16*>(&shared + 1)),
        low_(high_ + N * plan.row_stride),
        warp_(threadIdx.x / 32),
        g_(threadIdx.x % 32 / 4),
        t_(threadIdx.x % 4) {
    const int tiles = static_cast<int>((step.pairs() + kPairs - 1) / kPairs);
    mine_ = tiles > static_cast<int>(blockIdx.x)
                ? (tiles - static_cast<int>(blockIdx.x) - 1) / static_cast<int>(gridDim.x) + 1
                : 0;
    pieces_ = static_cast<int>(in.cols / kColumns);
    point_at_tile();
  }

  __device__ void run() {
    Piece ring[kDepth];
#pragma unroll
    for (int u = 0; u < kDepth; ++u) load(ring[u]);
    wait_for_predecessor();
    const bool once = plan_.staged_turns >= plan_.turns;
    if (once) stage(0);
    const int total = mine_ * plan_.turns;
    for (int at = 0; at < total; at += kDepth) {
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        if (at + u >= total) break;
        if (!once && turn_ % plan_.staged_turns == 0) stage(turn_);
        multiply_piece(ring[u]);
        load(ring[u]);
        if (++turn_ == plan_.turns) finish_tile();
      }
    }
  }

 private:
  __device__ void point_at_tile() {
    const std::int64_t pair = (std::int64_t{blockIdx.x} + std::int64_t{load_tile_} * gridDim.x) * kPairs + g_;
    RowPair<__nv_bfloat16> rows;
    if (load_tile_ < mine_ && pair < step_.pairs()) rows = step_.pair(pair);
    a_ = rows.a;
    b_ = rows.b;
  }

  /// The next piece of this warp, of the next tile after a tile's last.
  __device__ void load(Piece& to) {
    const int piece = load_turn_ * kWarps + warp_;
    const std::int64_t at = std::int64_t{piece} * kColumns + t_ * 8;
    to = Piece{};
    if (piece < pieces_ && a_ != nullptr) {
      to.a[0] = load_weights(a_ + at);
      to.a[1] = load_weights(a_ + at + 32);
      if (b_ != nullptr) {
        to.b[0] = load_weights(b_ + at);
        to.b[1] = load_weights(b_ + at + 32);
      }
    }
    if (++load_turn_ == plan_.turns) {
      load_turn_ = 0;
      ++load_tile_;
      point_at_tile();
    }
  }

  /// Splits the inputs of `staged_turns` turns into shared memory; sums squares while the first tile is made.
  __device__ void stage(int turn) {
    const int begin = turn * kWarps * kColumns;
    const int end = min(static_cast<int>(in_.cols), begin + plan_.staged_turns * kWarps * kColumns);
    __syncthreads();
#pragma unroll(N > 2 ? 1 : 4)
    for (int k = begin + static_cast<int>(threadIdx.x) * 4; k < end; k += kThreads * 4) {
      float gain[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      if (in_.gain.data) {
#pragma unroll
        for (int i = 0; i < 4; ++i) gain[i] = in_.gain[k + i];
      }
#pragma unroll
      for (int r = 0; r < N; ++r) {
        float4 raw = {};
        if (r < in_.n) raw = *reinterpret_cast<const float4*>(in_.x + r * in_.cols + k);
        const float x[4] = {raw.x, raw.y, raw.z, raw.w};
        __nv_bfloat16 high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          squares_[r] = fmaf(x[i], x[i], squares_[r]);
          const float h = x[i] * gain[i];
          high[i] = __float2bfloat16_rn(h);
          low[i] = __float2bfloat16_rn(h - __bfloat162float(high[i]));
        }
        *reinterpret_cast<uint2*>(high_ + r * plan_.row_stride + k - begin) = *reinterpret_cast<uint2*>(high);
        *reinterpret_cast<uint2*>(low_ + r * plan_.row_stride + k - begin) = *reinterpret_cast<uint2*>(low);
      }
    }
    staged_piece_ = turn * kWarps;
    if (in_.gain.data && tile_ == 0 && end == in_.cols) sum_squares();
    __syncthreads();
  }

  __device__ void sum_squares() {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      float sum = squares_[r];
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (threadIdx.x % 32 == 0) shared_.squares[r][warp_] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= N) return;
    double sum = 0;
    for (const float s : shared_.squares[threadIdx.x]) sum += static_cast<double>(s);
    shared_.inverse[threadIdx.x] =
        static_cast<float>(1.0 / sqrt(sum / static_cast<double>(in_.cols) + static_cast<double>(in_.eps)));
  }

  __device__ void multiply_piece(const Piece& w) {
    const int piece = turn_ * kWarps + warp_;
    if (piece >= pieces_) return;
    const int at = g_ * plan_.row_stride + (piece - staged_piece_) * kColumns + t_ * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 high = {}, low = {};
      if (g_ < N) {
        high = *reinterpret_cast<const uint4*>(high_ + at + half * 32);
        low = *reinterpret_cast<const uint4*>(low_ + at + half * 32);
      }
      const uint4 a = w.a[half], b = w.b[half];
      multiply(sums_high_, a.x, b.x, a.y, b.y, high.x, high.y);
      multiply(sums_low_, a.x, b.x, a.y, b.y, low.x, low.y);
      multiply(sums_high_, a.z, b.z, a.w, b.w, high.z, high.w);
      multiply(sums_low_, a.z, b.z, a.w, b.w, low.z, low.w);
    }
  }

  /// Adds the warps' sums in their order; one warp, another for every tile, finishes the rows.
  __device__ void finish_tile() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    shared_.partial[tile_ % 2][warp_][lane] = {sums_high_[0] + sums_low_[0], sums_high_[1] + sums_low_[1],
                                               sums_high_[2] + sums_low_[2], sums_high_[3] + sums_low_[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) sums_high_[i] = sums_low_[i] = 0.0f;
    __syncthreads();
    if (warp_ == tile_ % kWarps) {
      float4 sum = shared_.partial[tile_ % 2][0][lane];
      for (int w = 1; w < kWarps; ++w) {
        const float4 more = shared_.partial[tile_ % 2][w][lane];
        sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      const std::int64_t pair = (std::int64_t{blockIdx.x} + std::int64_t{tile_} * gridDim.x) * kPairs + g_;
      if (pair < step_.pairs()) {
        finish(pair, 2 * t_, sum.x, sum.z);
        finish(pair, 2 * t_ + 1, sum.y, sum.w);
      }
    }
    turn_ = 0;
    ++tile_;
  }
  __device__ void finish(std::int64_t pair, int row, float a, float b) const {
    if (row >= in_.n) return;
    const float scale = in_.gain.data ? shared_.inverse[row] : 1.0f;
    step_.finish(pair, row, a * scale, b * scale);
  }

  const Step& step_;
  const StepInput& in_;
  const Plan& plan_;
  Shared<N>& shared_;
  __nv_bfloat16 *high_, *low_;
  const int warp_, g_, t_;
  int mine_, pieces_;                                // tiles of this block; pieces of a row
  int load_tile_ = 0, load_turn_ = 0;                // what is loaded next
  int tile_ = 0, turn_ = 0, staged_piece_ = 0;       // what is multiplied next
  const __nv_bfloat16 *a_ = nullptr, *b_ = nullptr;  // the rows to load
  float sums_high_[4] = {}, sums_low_[4] = {}, squares_[N] = {};
};

template <int N, class Step>
__global__ __launch_bounds__(kThreads, kResident) void stream_kernel(const Step step, const StepInput in,
                                                                     const Plan plan) {
  extern __shared__ __align__(16) char memory[];
  Streamer<N, Step>(step, in, plan, *reinterpret_cast<Shared<N>*>(memory)).run();
}

template <int N>
std::size_t shared_bytes(const Plan& plan) {
  return sizeof(Shared<N>) + std::size_t{2} * N * static_cast<std::size_t>(plan.row_stride) * 2;
}

/// All input columns at once where shared memory holds them, else as many as leave room for a second block.
template <int N>
Plan plan_for(const StepInput& input) {
  constexpr int kTurnColumns = kWarps * kColumns;
  constexpr std::size_t kShared = 96 << 10;
  Plan plan;
  plan.turns = static_cast<int>((input.cols + kTurnColumns - 1) / kTurnColumns);
  for (plan.staged_turns = plan.turns;; --plan.staged_turns) {
    plan.row_stride = plan.staged_turns * kTurnColumns + kRowPad;
    const std::size_t limit =
        plan.staged_turns == plan.turns ? static_cast<std::size_t>(device_shape().shared_bytes) : kShared;
    if (plan.staged_turns == 1 || shared_bytes<N>(plan) <= limit) return plan;
  }
}

template <int N, class Step>
void launch(const Step& step, const StepInput& input, StreamHandle stream) {
  const Plan plan = plan_for<N>(input);
  const std::int64_t tiles = (step.pairs() + kPairs - 1) / kPairs;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<std::int64_t>(tiles, LODE_GRID * device_shape().multiprocessors)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes<N>(plan);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = device_shape().major >= 9 ? 1 : 0;
  LODE_CUDA(cudaFuncSetAttribute(stream_kernel<N, Step>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(config.dynamicSmemBytes)));
  LODE_CUDA(cudaLaunchKernelEx(&config, stream_kernel<N, Step>, step, input, plan));
}

bool aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; });
}
using W = __nv_bfloat16;
bool weights_aligned(const PlainStep<W>& s) {
  return aligned({s.w});
}
bool weights_aligned(const GateUpStep<W>& s) {
  return aligned({s.gate, s.up});
}
bool weights_aligned(const QkvStep<W>& s) {
  return aligned({s.q, s.k, s.v});
}

}  // namespace

template <class Step>
bool stream_rows(const Step& step, const StepInput& input, StreamHandle stream) {
  if (input.cols % kColumns != 0 || input.cols == 0 || !aligned({input.x}) || !weights_aligned(step))
    return false;
  if (input.n == 0 || step.pairs() == 0) return true;
  if (input.n == 1)
    launch<1>(step, input, stream);
  else if (input.n == 2)
    launch<2>(step, input, stream);
  else if (input.n <= 4)
    launch<4>(step, input, stream);
  else
    launch<kFusedRows>(step, input, stream);
  return true;
}
template bool stream_rows(const PlainStep<W>&, const StepInput&, StreamHandle);
template bool stream_rows(const GateUpStep<W>&, const StepInput&, StreamHandle);
template bool stream_rows(const QkvStep<W>&, const StepInput&, StreamHandle);

}  // namespace lode::cuda
