// SPDX-License-Identifier: Apache-2.0
// A warp chooses for a token, over scores in shared memory. Of few rows a block makes each logit, and the last one to
// come chooses for all and sorts; many are sorted by a block an expert, which looks through all slots twice: for how
// many lie in front of its own, and for its own.
#include <algorithm>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/experts/routing.h"
#include "kernels/cuda/linear/linear_steps.cuh"

namespace lode::cuda {

namespace {

constexpr int kWarps = kFewRows, kThreads = kWarps * 32;
static_assert(kThreads == kFewSlots);

/// Orders as numbers do: NaN last, above what is taken already.
constexpr unsigned kTaken = 0, kNan = 1;
__device__ __forceinline__ unsigned order_of(float x) {
  if (x != x) return kNan;
  const unsigned bits = __float_as_uint(x + 0.0f);  // a negative zero is a zero
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float largest_of_warp(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

/// Scores of `count` logits, in place.
__device__ void score(bool sigmoid, float* x, int count, int lane) {
  if (sigmoid) {
    for (int i = lane; i < count; i += 32) x[i] = 1.0f / (1.0f + expf(-x[i]));
    return __syncwarp();
  }
  float most = -INFINITY, sum = 0.0f;
  for (int i = lane; i < count; i += 32) most = fmaxf(most, x[i]);
  most = largest_of_warp(most);
  for (int i = lane; i < count; i += 32) sum += x[i] = expf(x[i] - most);
  sum = sum_of_warp(sum);
  for (int i = lane; i < count; i += 32) x[i] /= sum;
  __syncwarp();
}

/// The place of the largest of `count` keys, the lowest of equals; it is taken then.
__device__ int take_largest(unsigned* keys, int count, int lane) {
  unsigned most = 0;
  for (int i = lane; i < count; i += 32) most = max(most, keys[i]);
  most = __reduce_max_sync(~0u, most);
  unsigned at = ~0u;
  for (int i = lane; i < count && at == ~0u; i += 32)
    if (keys[i] == most) at = static_cast<unsigned>(i);
  at = __reduce_min_sync(~0u, at);
  __syncwarp();
  if (lane == 0) keys[at] = kTaken;
  __syncwarp();
  return static_cast<int>(at);
}

/// Experts outside of the best groups come behind all others. `best` [groups] is scratch.
__device__ void keep_best_groups(const RouterPlan& plan, unsigned* keys, const float* ranked, unsigned* best,
                                 int lane) {
  if (plan.groups_used == plan.groups) return;
  const int size = plan.count / plan.groups;
  for (int g = lane; g < plan.groups; g += 32) {
    float sum = 0.0f;
    unsigned below = ~0u;
    int behind = -1;  // the last one of the same key that was added
    for (int k = 0; k < plan.group_best; ++k) {
      unsigned most = 0;
      int at = -1;
      for (int i = 0; i < size; ++i) {
        const unsigned key = order_of(ranked[g * size + i]);
        const bool next = key < below || (key == below && i > behind);
        if (next && (at < 0 || key > most)) most = key, at = i;
      }
      if (at < 0) break;
      sum += ranked[g * size + at];
      below = most, behind = at;
    }
    best[g] = order_of(sum);
  }
  __syncwarp();
  for (int k = 0; k < plan.groups_used; ++k) take_largest(best, plan.groups, lane);
  for (int i = lane; i < plan.count; i += 32)
    if (best[i / size] != kTaken) keys[i] = order_of(-INFINITY);
  __syncwarp();
}

struct Choices {
  int* expert;    // [used]
  float* weight;  // [used]
};

/// Scratch of a warp: scores, then ranked scores, then keys, each [E]; keys of groups; weights of the chosen.
__host__ __device__ int scratch_words(const RouterPlan& plan) {
  return 3 * plan.count + plan.groups + plan.used;
}

__device__ void choose(const RouterPlan& plan, const RouterInput& in, std::int64_t token, float* scratch,
                       const Choices& to, int lane) {
  float *const scores = scratch, *const ranked = scores + plan.count;
  auto* const keys = reinterpret_cast<unsigned*>(ranked + plan.count);
  unsigned* const best = keys + plan.count;
  auto* const weights = reinterpret_cast<float*>(best + plan.groups);
  for (int i = lane; i < plan.count; i += 32)
    scores[i] = __ldcg(in.logits + token * plan.count + i) + (in.bias != nullptr ? in.bias[i] : 0.0f);
  __syncwarp();
  if (!plan.score_chosen) score(plan.sigmoid, scores, plan.count, lane);
  for (int i = lane; i < plan.count; i += 32) {
    ranked[i] = scores[i] + (in.choice_bias != nullptr ? in.choice_bias[i] : 0.0f);
    keys[i] = order_of(ranked[i]);
  }
  __syncwarp();
  keep_best_groups(plan, keys, ranked, best, lane);
  for (int j = 0; j < plan.used; ++j) {
    const int at = take_largest(keys, plan.count, lane);
    if (lane == 0) to.expert[j] = at, weights[j] = scores[at];
  }
  __syncwarp();
  if (plan.score_chosen) score(plan.sigmoid, weights, plan.used, lane);
  float sum = 0.0f;
  for (int j = 0; j < plan.used; ++j) sum += weights[j];
  const float divisor = plan.normalise ? sum + 1e-20f : 1.0f;
  for (int j = lane; j < plan.used; j += 32) {
    const float weight = weights[j] / divisor * plan.scale;
    to.weight[j] = in.factors != nullptr ? weight * in.factors[to.expert[j]] : weight;
  }
}

/// Sorts up to kFewSlots slots by expert and lists the experts; each thread has a slot.
__device__ void sort_few(const int* chosen, int slots, const Routing& to) {
  __shared__ int expert[kFewSlots];
  __shared__ bool first[kFewSlots];
  const int i = static_cast<int>(threadIdx.x), own = i < slots ? chosen[i] : 0;
  expert[i] = own;
  __syncthreads();
  int before = 0;
  bool leads = i < slots;
  for (int j = 0; j < slots; ++j) {
    const bool equal = expert[j] == own && j < i;
    before += expert[j] < own || equal ? 1 : 0;
    leads = leads && !equal;
  }
  first[i] = leads;
  __syncthreads();
  int group = 0, all = 0;
  for (int j = 0; j < slots; ++j) {
    group += first[j] && expert[j] < own ? 1 : 0;
    all += first[j] ? 1 : 0;
  }
  if (i < slots) to.order[before] = i;
  if (leads) to.expert[group] = own, to.begin[group] = before;
  if (i == 0) *to.groups = all, to.begin[all] = slots;
}

/// Two sums of a block, in a fixed order, in every thread.
__device__ float2 sums_of_block(float2 x, float2* shared /*[kWarps]*/) {
  x = {sum_of_warp(x.x), sum_of_warp(x.y)};
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float2 sum = {};
  for (int w = 0; w < kWarps; ++w) sum = {sum.x + shared[w].x, sum.y + shared[w].y};
  return sum;
}

/// Whether this block is the last one of the grid to come here: then it sees what the first threads of all others wrote
/// before.
__device__ bool is_last(unsigned* arrived) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    last = before + 1 == gridDim.x * gridDim.y;
    if (last) *arrived = 0;
  }
  __syncthreads();
  return last;
}

/// What a thread multiplies a row of the stream by: columns threadIdx.x + kThreads i. The first ones are fetched before the
/// row is there.
class RouterColumns {
 public:
  __device__ RouterColumns(const RouterRows& in, const float* w /*[D]*/)
      : gain_{in.norm.data, in.norm.type}, w_(w), hidden_(in.norm.cols) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (column(i) < hidden_) held_gain_[i] = gain_[column(i)], held_[i] = w_[column(i)];
  }
  /// This thread's sums of products and of squares.
  __device__ float2 sums(const float* x /*[D]*/) const {
    float2 sums = {};
    const auto add = [&](float x, float gain, float w) {
      sums = {fmaf(x * gain, w, sums.x), fmaf(x, x, sums.y)};
    };
    float of_held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (column(i) < hidden_) of_held[i] = x[column(i)];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (column(i) < hidden_) add(of_held[i], held_gain_[i], held_[i]);
    for (std::int64_t at = column(kHeld); at < hidden_; at += kThreads) add(x[at], gain_[at], w_[at]);
    return sums;
  }

 private:
  static constexpr int kHeld = 12;
  __device__ static std::int64_t column(int i) {
    return std::int64_t{threadIdx.x} + kThreads * i;
  }
  const Vector gain_;
  const float* const w_;
  const std::int64_t hidden_;
  float held_gain_[kHeld], held_[kHeld];
};

/// A block makes the logit of one expert for one row, those behind all experts that of the shared gate; the last one to
/// come chooses for all rows and sorts.
__global__ __launch_bounds__(kThreads) void route_few_kernel(const RouterPlan plan, const RouterRows in,
                                                             const Routing to) {
  extern __shared__ float scratch[];
  __shared__ float2 shared[kWarps];
  __shared__ int chosen[kFewSlots];
  const std::int64_t hidden = in.norm.cols, expert = blockIdx.x, row = blockIdx.y;
  const bool is_expert = expert < plan.count;
  release_successor();
  const RouterColumns columns(in, is_expert ? in.w + expert * hidden : in.shared_gate);
  wait_for_predecessor();
  const float2 sums = sums_of_block(columns.sums(in.x + row * hidden), shared);
  if (threadIdx.x == 0) {
    float* const to = is_expert ? in.input.logits + row * plan.count + expert : in.shared_logits + row;
    *to = sums.x / sqrtf(sums.y / static_cast<float>(hidden) + in.eps);
  }
  if (!is_last(to.arrived)) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, n = static_cast<int>(gridDim.y);
  if (warp < n) {
    const int first = warp * plan.used;
    choose(plan, in.input, warp, scratch + warp * scratch_words(plan),
           {chosen + first, to.slot_weight + first}, static_cast<int>(threadIdx.x) % 32);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < n * plan.used; i += kThreads) to.slot_expert[i] = chosen[i];
  sort_few(chosen, n * plan.used, to);
}

__global__ __launch_bounds__(32) void choose_kernel(const RouterPlan plan, const RouterInput in,
                                                    const Routing to) {
  extern __shared__ float scratch[];
  const std::int64_t first = std::int64_t{blockIdx.x} * plan.used;
  choose(plan, in, blockIdx.x, scratch, {to.slot_expert + first, to.slot_weight + first},
         static_cast<int>(threadIdx.x));
}

/// How many threads of the block in front of this one say yes, and how many of all.
__device__ int2 count_yes(bool yes, int* shared /*[kWarps]*/) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned all = __ballot_sync(~0u, yes);
  if (lane == 0) shared[warp] = __popc(all);
  __syncthreads();
  int2 count = {__popc(all & ((1u << lane) - 1)), 0};
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) count.x += shared[w];
    count.y += shared[w];
  }
  __syncthreads();
  return count;
}

__global__ __launch_bounds__(kThreads) void sort_many_kernel(int slots, const Routing to) {
  __shared__ int shared[kWarps];
  const int own = static_cast<int>(blockIdx.x);
  int begin = 0;
  for (int at = 0; at < slots; at += kThreads) {
    const int i = at + static_cast<int>(threadIdx.x);
    begin += count_yes(i < slots && to.slot_expert[i] < own, shared).y;
  }
  int found = begin;
  for (int at = 0; at < slots; at += kThreads) {
    const int i = at + static_cast<int>(threadIdx.x);
    const bool mine = i < slots && to.slot_expert[i] == own;
    const int2 count = count_yes(mine, shared);
    if (mine) to.order[found + count.x] = i;
    found += count.y;
  }
  if (threadIdx.x > 0) return;
  to.expert[own] = own;
  to.begin[own] = begin;
  if (blockIdx.x + 1 == gridDim.x) to.begin[own + 1] = slots, *to.groups = own + 1;
}

/// Experts that may be listed.
std::int64_t most_listed(const RouterPlan& plan) {
  return std::max(plan.count, kFewSlots);
}

}  // namespace

std::int64_t routing_bytes(std::int64_t rows, const RouterPlan& plan) {
  return 4 * (3 * std::max<std::int64_t>(rows * plan.used, kFewSlots) + 2 * most_listed(plan) + 3);
}

Routing routing_in(void* memory, std::int64_t rows, const RouterPlan& plan) {
  const std::int64_t slots = std::max<std::int64_t>(rows * plan.used, kFewSlots), listed = most_listed(plan);
  // The count of arrivals comes first: there it stays zero whatever numbers of rows other calls had.
  int* const at = static_cast<int*>(memory) + 1;
  return {.slot_expert = at,
          .slot_weight = reinterpret_cast<float*>(at + slots),
          .order = at + 2 * slots,
          .groups = at + 3 * slots + 2 * listed + 1,
          .expert = at + 3 * slots,
          .begin = at + 3 * slots + listed,
          .arrived = static_cast<unsigned*>(memory),
          .used = plan.used};
}

void route(const RouterPlan& plan, const RouterInput& input, std::int64_t n, const Routing& to,
           StreamHandle stream) {
  if (n == 0) return;
  const auto bytes = static_cast<std::size_t>(scratch_words(plan) * 4);
  static PerDevice<bool> prepared;
  prepared.get([] {
    LODE_CUDA(cudaFuncSetAttribute(choose_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 96 * 1024));
    return true;
  });
  Launch(static_cast<unsigned>(n), 32, bytes, stream)(choose_kernel, plan, input, to);
  Launch(static_cast<unsigned>(plan.count), kThreads, 0, stream)(sort_many_kernel,
                                                                 static_cast<int>(n * plan.used), to);
}

void route_few(const RouterPlan& plan, const RouterRows& rows, std::int64_t n, const Routing& to,
               StreamHandle stream) {
  if (n == 0) return;
  LODE_ASSERT(are_few(n, plan));
  static PerDevice<bool> prepared;
  prepared.get([] {
    const RouterPlan largest = {.count = kFewExperts, .used = kFewSlots / kFewRows, .groups = kFewExperts};
    LODE_CUDA(cudaFuncSetAttribute(route_few_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kFewRows * scratch_words(largest) * 4));
    return true;
  });
  const dim3 grid(static_cast<unsigned>(plan.count + (rows.shared_gate != nullptr ? 1 : 0)),
                  static_cast<unsigned>(n));
  EarlyLaunch(grid, kThreads, scratch_words(plan) * 4 * static_cast<int>(n), 1, stream)(route_few_kernel,
                                                                                        plan, rows, to);
}

}  // namespace lode::cuda
