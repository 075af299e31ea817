// SPDX-License-Identifier: Apache-2.0
// Matrix-vector products for bf16 weights at the speed of memory. A block takes tiles of 16 weight rows (8
// pairs); its warps share the columns. Every warp keeps a ring of pieces (16 rows x 64 columns) under way
// from memory to shared memory, and multiplies them on the matrix unit by up to 8 input rows. An input number
// x is the sum of two bf16, x = high + low, so 16 bits of it count. The scale of a norm multiplies at the
// end: rms_norm(x) w = (x gain w) / rms(x).
//
// A kernel starts while its predecessor still runs (programmatic dependent launch): it requests half of what its rings
// hold, weights, which nobody writes, and then waits for its input. The other half is requested behind the loads of the
// input, which would queue behind it.
#include <algorithm>

#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/matrix.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/linear/linear_kernels.h"

namespace lode::cuda {

namespace {

constexpr int kWarps = 16, kThreads = kWarps * 32;  // that multiply; one warp more finishes the rows
constexpr int kPairs = 8;                           // of rows, a tile
constexpr int kColumns = 64;                        // of a piece: 128 bytes of each row
constexpr int kPieceBytes = 16 * kColumns * 2;
constexpr int kRowPad = 32;  // bf16 numbers after a row of inputs: rows start in other banks
constexpr int kBuffers = 4;  // tiles whose sums may wait to be finished

/// Pieces in a warp's ring: as many as leave room for the inputs.
template <int N>
constexpr int kDepth = N <= 4 ? 4 : 2;
constexpr int kSmallDepth = 2;  // where shared memory is smaller than Hopper's

/// 16 bytes to shared memory, or zeros where there is no source.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const auto at = shared_address(to);
  const int bytes = from != nullptr ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most Newer groups of this thread are under way.
template <int Newer>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newer) : "memory");
}

/// How a launch cuts the columns.
struct Plan {
  int turns = 0;         ///< pieces that a warp takes of one tile
  int staged_turns = 0;  ///< as many as one stage of inputs is good for
  int row_stride = 0;    ///< bf16 numbers from one staged input row to the next
};

template <int N>
struct Shared {
  float partial[kBuffers][kWarps][N][16];
  SharedBarrier full[kBuffers], empty[kBuffers];
  float squares[N][kWarps];
  float inverse[N];
  // then, at multiples of 128 bytes: rings [kWarps, Depth]; high parts, low parts [N, row_stride], bf16
};
template <int N>
constexpr int kHeadBytes = (static_cast<int>(sizeof(Shared<N>)) + 127) / 128 * 128;

template <int N, int Depth>
std::size_t shared_bytes(const Plan& plan) {
  return static_cast<std::size_t>(kHeadBytes<N> + kWarps * Depth * kPieceBytes + 4 * N * plan.row_stride);
}

template <int N, int Depth, class Step>
class Streamer {
 public:
  __device__ Streamer(const Step& step, const StepInput& in, const Plan& plan, char* memory)
      : step_(step),
        in_(in),
        plan_(plan),
        shared_(*reinterpret_cast<Shared<N>*>(memory)),
        ring_(memory + kHeadBytes<N> + static_cast<int>(threadIdx.x / 32) * Depth * kPieceBytes),
        high_(reinterpret_cast<__nv_bfloat16*>(memory + kHeadBytes<N> + kWarps * Depth * kPieceBytes)),
        low_(high_ + N * plan.row_stride),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    const int tiles = static_cast<int>((step.pairs() + kPairs - 1) / kPairs),
              first = static_cast<int>(blockIdx.x);
    mine_ = tiles > first ? (tiles - first - 1) / static_cast<int>(gridDim.x) + 1 : 0;
    pieces_ = static_cast<int>(in.cols / kColumns);
  }

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kBuffers; ++i) {
        shared_.full[i].init(kWarps);
        shared_.empty[i].init(1);
      }
    }
    if (warp_ == kWarps) {
      release_successor();
      __syncthreads();
      wait_for_predecessor();
      for (int tile = 0; tile < mine_; ++tile) finish_tile(tile);
      return;
    }
    point_at_tile();
    for (; asked_ < Depth / 2; ++asked_) load(asked_);
    fetch_gain();
    release_successor();
    __syncthreads();
    wait_for_predecessor();
    const bool once = plan_.staged_turns >= plan_.turns;
    if (once) stage(0);
    int slot = 0;
    for (int tile = 0; tile < mine_; ++tile) {
      for (turn_ = 0; turn_ < plan_.turns; ++turn_) {
        if (!once && turn_ % plan_.staged_turns == 0) stage(turn_);
        wait_for_copies<Depth - 1>();
        __syncwarp();
        multiply_piece(slot);
        if (++slot == Depth) slot = 0;
      }
      leave_sums(tile);
    }
  }

 private:
  /// This lane loads columns 8 (lane % 8) to + 7 of rows lane / 8 and lane / 8 + 4 of both rows of the pairs.
  __device__ void point_at_tile() {
    const std::int64_t pair =
        (std::int64_t{blockIdx.x} + std::int64_t{load_tile_} * gridDim.x) * kPairs + lane_ / 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      RowPair<__nv_bfloat16> rows;
      if (load_tile_ < mine_ && pair + 4 * i < step_.pairs()) rows = step_.pair(pair + 4 * i);
      a_[i] = rows.a;
      b_[i] = rows.b;
    }
  }

  /// Rows a of the eight pairs, then rows b; 128 bytes each, the halves of odd rows exchanged, so that
  /// neither the copies nor the reads of eight lanes meet in a bank.
  __device__ void load(int slot) {
    const int piece = load_turn_ * kWarps + warp_, row = lane_ / 8, chunk = lane_ % 8;
    char* to = ring_ + slot * kPieceBytes + row * 128 + (chunk ^ (row % 2 * 4)) * 16;
    const std::int64_t at = std::int64_t{piece} * kColumns + chunk * 8;
    const bool inside = piece < pieces_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_async(to + i * 512, inside && a_[i] != nullptr ? a_[i] + at : nullptr);
      copy_async(to + 1024 + i * 512, inside && b_[i] != nullptr ? b_[i] + at : nullptr);
    }
    commit_copies();
    if (++load_turn_ == plan_.turns) {
      load_turn_ = 0;
      ++load_tile_;
      point_at_tile();
    }
  }

  /// The gain comes from memory, unlike the input, which was just written: it is called into the cache in
  /// time.
  __device__ void fetch_gain() const {
    if (in_.gain.data == nullptr) return;
    const std::int64_t bytes = in_.cols * (in_.gain.type == DType::f32 ? 4 : 2);
    for (std::int64_t at = std::int64_t{threadIdx.x} * 128; at < bytes; at += kThreads * 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(in_.gain.data) + at));
  }
  /// Meets the other multiplying warps.
  __device__ static void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  }

  /// Splits the inputs of `staged_turns` turns into shared memory; sums squares while the first tile is made.
  __device__ void stage(int turn) {
    const int begin = turn * kWarps * kColumns;
    const int end = min(static_cast<int>(in_.cols), begin + plan_.staged_turns * kWarps * kColumns);
    constexpr int kBatch = N == 1 ? 2 : 1;
    meet();
    for (int first = begin + static_cast<int>(threadIdx.x) * 4; first < end; first += kThreads * 4 * kBatch) {
      float4 gains[kBatch], xs[kBatch][N];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int k = first + i * kThreads * 4;
        gains[i] = {1.0f, 1.0f, 1.0f, 1.0f};
        if (in_.gain.data != nullptr && k < end) gains[i] = in_.gain.four(k);
#pragma unroll
        for (int r = 0; r < N; ++r) {
          xs[i][r] = {};
          if (r < in_.n && k < end) xs[i][r] = *reinterpret_cast<const float4*>(in_.x + r * in_.cols + k);
        }
      }
      ask_for_rest();
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * kThreads * 4 < end) stage_four(first + i * kThreads * 4 - begin, gains[i], xs[i]);
      }
    }
    ask_for_rest();  // where this thread had nothing to stage
    staged_piece_ = turn * kWarps;
    if (in_.gain.data && !summed_ && end == in_.cols) sum_squares();
    meet();
  }
  __device__ __forceinline__ void ask_for_rest() {
    for (; asked_ < Depth; ++asked_) load(asked_);
  }
  __device__ __forceinline__ void stage_four(int at, const float4& gains, const float4 (&xs)[N]) {
    const float gain[4] = {gains.x, gains.y, gains.z, gains.w};
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const float x[4] = {xs[r].x, xs[r].y, xs[r].z, xs[r].w};
      __align__(8) __nv_bfloat16 high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        squares_[r] = fmaf(x[i], x[i], squares_[r]);
        const float h = x[i] * gain[i];
        high[i] = __float2bfloat16_rn(h);
        low[i] = __float2bfloat16_rn(h - __bfloat162float(high[i]));
      }
      *reinterpret_cast<uint2*>(high_ + r * plan_.row_stride + at) = *reinterpret_cast<const uint2*>(high);
      *reinterpret_cast<uint2*>(low_ + r * plan_.row_stride + at) = *reinterpret_cast<const uint2*>(low);
    }
  }

  __device__ void sum_squares() {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      float sum = squares_[r];
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane_ == 0) shared_.squares[r][warp_] = sum;
    }
    meet();
    summed_ = true;
    if (threadIdx.x >= N) return;
    double sum = 0;
    for (const float s : shared_.squares[threadIdx.x]) sum += static_cast<double>(s);
    shared_.inverse[threadIdx.x] =
        static_cast<float>(1.0 / sqrt(sum / static_cast<double>(in_.cols) + static_cast<double>(in_.eps)));
  }

  /// Lane 4 g + t holds columns 8 t to 8 t + 7 of either half of pair g's rows, and of input row g. The order
  /// of the columns inside a product is free as long as both sides have the same.
  __device__ void multiply_piece(int slot) {
    const int g = lane_ / 4, t = lane_ % 4;
    const char* from = ring_ + slot * kPieceBytes + g * 128;
    uint4 a[2], b[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = (4 * half + t) ^ (g % 2 * 4);
      a[half] = *reinterpret_cast<const uint4*>(from + chunk * 16);
      b[half] = *reinterpret_cast<const uint4*>(from + 1024 + chunk * 16);
    }
    __syncwarp();
    load(slot);
    const int piece = turn_ * kWarps + warp_;
    if (piece >= pieces_) return;
    const int at = g * plan_.row_stride + (piece - staged_piece_) * kColumns + t * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 high = {}, low = {};
      if (g < N) {
        high = *reinterpret_cast<const uint4*>(high_ + at + half * 32);
        low = *reinterpret_cast<const uint4*>(low_ + at + half * 32);
      }
      const unsigned left[4] = {a[half].x, b[half].x, a[half].y, b[half].y},
                     right[4] = {a[half].z, b[half].z, a[half].w, b[half].w};
      multiply<__nv_bfloat16>(sums_high_, left, high.x, high.y);
      multiply<__nv_bfloat16>(sums_low_, left, low.x, low.y);
      multiply<__nv_bfloat16>(sums_high_, right, high.z, high.w);
      multiply<__nv_bfloat16>(sums_low_, right, low.z, low.w);
    }
  }

  /// Leaves this warp's sums of a tile to the finishing warp.
  __device__ void leave_sums(int tile) {
    const int g = lane_ / 4, t = lane_ % 4, buffer = tile % kBuffers;
    shared_.empty[buffer].wait(tile / kBuffers % 2 ^ 1);  // the phase before the first counts as over
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 2 * t + i % 2;
      if (row < N) shared_.partial[buffer][warp_][row][g + i / 2 * 8] = sums_high_[i] + sums_low_[i];
      sums_high_[i] = sums_low_[i] = 0.0f;
    }
    __syncwarp();
    if (lane_ == 0) shared_.full[buffer].arrive();
  }

  /// Adds the warps' sums in their order and finishes the rows. What a step needs besides is fetched before.
  __device__ void finish_tile(int tile) {
    constexpr int kEach = (kPairs * N + 31) / 32;  // pairs that a lane finishes
    const int buffer = tile % kBuffers;
    const std::int64_t first = (std::int64_t{blockIdx.x} + std::int64_t{tile} * gridDim.x) * kPairs;
    typename Step::Before before[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int which = lane_ + 32 * i;
      if (which / kPairs < in_.n && first + which % kPairs < step_.pairs())
        before[i] = step_.before(first + which % kPairs, which / kPairs);
    }
    shared_.full[buffer].wait(tile / kBuffers % 2);
    float a[kEach] = {}, b[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = (lane_ + 32 * i) / kPairs, g = lane_ % kPairs;
      if (row >= N) continue;
#pragma unroll 4
      for (int w = 0; w < kWarps; ++w) {
        a[i] += shared_.partial[buffer][w][row][g];
        b[i] += shared_.partial[buffer][w][row][g + 8];
      }
    }
    __syncwarp();
    if (lane_ == 0) shared_.empty[buffer].arrive();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int which = lane_ + 32 * i, row = which / kPairs;
      if (row >= in_.n || first + which % kPairs >= step_.pairs()) continue;
      const float scale = in_.gain.data ? shared_.inverse[row] : 1.0f;
      step_.finish(first + which % kPairs, row, a[i] * scale, b[i] * scale, before[i]);
    }
  }

  const Step& step_;
  const StepInput& in_;
  const Plan& plan_;
  Shared<N>& shared_;
  char* ring_;
  __nv_bfloat16 *high_, *low_;
  const int warp_, lane_;
  int mine_, pieces_;                  // tiles of this block; pieces of a row
  int load_tile_ = 0, load_turn_ = 0;  // what is loaded next
  int asked_ = 0;                      // slots of the ring that have been requested once
  int turn_ = 0, staged_piece_ = 0;    // what is multiplied next
  bool summed_ = false;                // the squares of the inputs
  const __nv_bfloat16 *a_[2], *b_[2];  // the rows that this lane loads
  float sums_high_[4] = {}, sums_low_[4] = {}, squares_[N] = {};
};

template <int N, int Depth, class Step>
__global__ __launch_bounds__(kThreads + 32, 1) void stream_kernel(const Step step, const StepInput in,
                                                                  const Plan plan) {
  extern __shared__ __align__(128) char memory[];
  Streamer<N, Depth, Step>(step, in, plan, memory).run();
}

/// All input columns at once where shared memory holds them, else as many as it does.
template <int N, int Depth>
Plan plan_for(const StepInput& input) {
  constexpr int kTurnColumns = kWarps * kColumns;
  Plan plan;
  plan.turns = static_cast<int>((input.cols + kTurnColumns - 1) / kTurnColumns);
  for (plan.staged_turns = plan.turns;; --plan.staged_turns) {
    const std::int64_t columns =
        std::min<std::int64_t>(input.cols, std::int64_t{plan.staged_turns} * kTurnColumns);
    plan.row_stride = static_cast<int>(columns) + kRowPad;
    if (plan.staged_turns == 1 ||
        shared_bytes<N, Depth>(plan) <= static_cast<std::size_t>(device_shape().shared_bytes))
      return plan;
  }
}

template <int N, int Depth, class Step>
void launch_with(const Step& step, const StepInput& input, StreamHandle stream) {
  const Plan plan = plan_for<N, Depth>(input);
  const std::int64_t tiles = (step.pairs() + kPairs - 1) / kPairs;
  const auto kernel = stream_kernel<N, Depth, Step>;
  static PerDevice<bool> prepared;
  prepared.get([=] {  // once, for the widest input
    LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(device_shape().shared_bytes)));
    // One split of shared memory and cache for all, so that a block can follow another kernel's without a
    // wait.
    LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared));
    return true;
  });
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(tiles, device_shape().multiprocessors)));
  EarlyLaunch(grid, kThreads + 32, shared_bytes<N, Depth>(plan), 1, stream)(kernel, step, input, plan);
}
template <int N, class Step>
void launch(const Step& step, const StepInput& input, StreamHandle stream) {
  constexpr int kHopperShared = 227 << 10;
  if (device_shape().shared_bytes >= kHopperShared)
    launch_with<N, kDepth<N>>(step, input, stream);
  else
    launch_with<N, kSmallDepth>(step, input, stream);
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
  if (input.cols % kColumns != 0 || input.cols == 0 || !aligned({input.x, input.gain.data}) ||
      !weights_aligned(step))
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
