// SPDX-License-Identifier: Apache-2.0
// Work map: pivotal keys and losses are one block a query; the list of a head's keys is one block a head;
// slopes are one block for 32 columns of kPartLength rows; the rest is one thread a number.
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/ordered.cuh"
#include "kernels/cuda/device/over_block.cuh"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/hash/train.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kListThreads = 1024;
constexpr int kColumns = 32, kRowThreads = 8;

unsigned blocks(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// ---- Which keys ------------------------------------------------------------------------------------------

__device__ __forceinline__ void mark(const HashMarks& marks, std::int64_t head, int key) {
  atomicOr(marks.words + head * marks.width() + key / 32, 1u << (key % 32));  // in any order: the same bits
}

/// The place of a marked key in the list, or of the next marked one.
__device__ __forceinline__ int place(const HashMarks& marks, std::int64_t head, int key) {
  const std::int64_t at = head * marks.width() + key / 32;
  return marks.before[at] + __popc(marks.words[at] & ((1u << (key % 32)) - 1u));
}

__global__ void mark_kernel(const HashMarks marks, const std::int32_t* keys, const std::int32_t* counts,
                            std::int64_t most) {
  const std::int64_t head = blockIdx.y, i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < counts[head]) mark(marks, head, keys[head * most + i]);
}

/// The sum over a block of kThreads, and of the threads in front of this one.
__device__ __forceinline__ int sum_before(int mine, int* total) {
  __shared__ int of_warps[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int up_to = sum_up_to(mine, lane);
  __syncthreads();
  if (lane == 31) of_warps[warp] = up_to;
  __syncthreads();
  int before = up_to - mine, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warps[w];
    all += of_warps[w];
  }
  *total = all;
  return before;
}

/// The key of the wanted-th largest of n numbers: `wanted` becomes how many with just that key are wanted.
/// Radix selection, eight bits a pass; `ties` gets how many there are.
template <class KeyOf>
__device__ __forceinline__ unsigned kth_largest(int n, KeyOf key_of, int& wanted, int& ties) {
  __shared__ unsigned histogram[256];
  __shared__ int digit[3];  // the digit, how many are wanted of it, how many have it
  unsigned prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram[threadIdx.x] = 0;
    __syncthreads();
    const unsigned settled = shift == 24 ? 0u : ~0u << (shift + 8);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
      const unsigned key = key_of(i);
      if ((key & settled) == prefix) atomicAdd(histogram + (key >> shift & 255u), 1u);
    }
    __syncthreads();
    // From the highest digit down: thread t has digit 255 - t.
    const int own = static_cast<int>(histogram[255 - threadIdx.x]);
    int all = 0;
    const int above = sum_before(own, &all);
    if (above < wanted && wanted <= above + own)
      digit[0] = 255 - static_cast<int>(threadIdx.x), digit[1] = wanted - above, digit[2] = own;
    __syncthreads();
    prefix |= static_cast<unsigned>(digit[0]) << shift;
    wanted = digit[1], ties = digit[2];
    __syncthreads();
  }
  return prefix;
}

__global__ __launch_bounds__(kThreads) void pivotal_kernel(const HashMarks marks, const HashQueries queries,
                                                           const float* scores, const float* log_norms,
                                                           std::int64_t top, std::int32_t* pivotal) {
  const std::int64_t head = blockIdx.y, rows = queries.rows(), row = head * rows + blockIdx.x;
  const int far = queries.far_ends[blockIdx.x % queries.tokens];
  scores += row * marks.keys;
  pivotal += row * top;
  const float* norms = log_norms == nullptr ? nullptr : log_norms + head * marks.keys;
  if (top >= far) {
    for (int i = static_cast<int>(threadIdx.x); i < far; i += kThreads) {
      pivotal[i] = i;
      mark(marks, head, i);
    }
    return;
  }
  const auto key_of = [&](int i) {
    const float score = scores[i] + (norms == nullptr ? 0.0f : norms[i]);
    return score > -INFINITY ? ordered(score) : 0u;  // as kernels/score_order.h has it
  };
  int wanted = static_cast<int>(top), ties = 0;
  const unsigned least = kth_largest(far, key_of, wanted, ties);
  const int left_out = ties - wanted;  // the first ones
  int taken = 0, tied = 0;
  for (int first = 0; first < far; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const unsigned key = i < far ? key_of(i) : 0u;
    const bool equal = i < far && key == least;
    int all_equal = 0, all_taken = 0;
    const int rank = tied + sum_before(equal ? 1 : 0, &all_equal);
    const bool chosen = i < far && (key > least || (equal && rank >= left_out));
    const int at = taken + sum_before(chosen ? 1 : 0, &all_taken);
    if (chosen) {
      pivotal[at] = i;
      mark(marks, head, i);
    }
    tied += all_equal, taken += all_taken;
  }
}

__global__ __launch_bounds__(kListThreads) void list_kernel(const HashMarks marks, const HashQueries queries,
                                                            std::int64_t most, std::int32_t* listed,
                                                            std::int32_t* counts, std::int32_t* far_counts) {
  __shared__ int of_warps[kListThreads / 32];
  const std::int64_t head = blockIdx.x, width = marks.width();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int before = 0;
  for (std::int64_t first = 0; first < width; first += kListThreads) {
    const std::int64_t at = first + threadIdx.x;
    unsigned word = at < width ? marks.words[head * width + at] : 0u;
    const int up_to = sum_up_to(__popc(word), lane);
    __syncthreads();
    if (lane == 31) of_warps[warp] = up_to;
    __syncthreads();
    int place = before + up_to - __popc(word);
    for (int w = 0; w < kListThreads / 32; ++w) {
      if (w < warp) place += of_warps[w];
      before += of_warps[w];
    }
    if (at >= width) continue;
    marks.before[head * width + at] = place;
    for (; word != 0; word &= word - 1)
      listed[head * most + place++] = static_cast<std::int32_t>(32 * at + __ffs(static_cast<int>(word)) - 1);
  }
  if (threadIdx.x == 0) counts[head] = before;
  __syncthreads();
  for (std::int64_t t = threadIdx.x; t < queries.tokens; t += kListThreads) {
    const int end = queries.far_ends[t];
    far_counts[head * queries.tokens + t] = end >= marks.keys ? before : place(marks, head, end);
  }
}

__global__ void label_kernel(const HashMarks marks, const HashQueries queries, const std::int32_t* pivotal,
                             std::int64_t top, std::int64_t most, std::uint8_t* labels) {
  const std::int64_t head = blockIdx.y, i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t in_head = i / top, row = head * queries.rows() + in_head;
  if (in_head >= queries.rows() || i % top >= queries.far_ends[in_head % queries.tokens]) return;
  labels[row * most + place(marks, head, pivotal[row * top + i % top])] = 1;
}

__global__ void gather_kernel(const HashGather g, float* x) {
  const std::int64_t head = blockIdx.y;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, row = i / g.width;
  const int col = static_cast<int>(i % g.width), half = static_cast<int>(g.head_dim) / 2;
  if (row >= g.counts[head]) return;
  const float* from = g.inputs + (head * g.keys + g.listed[head * g.most + row]) * g.width;
  const float* turns = g.turns + head * g.head_dim;
  float value = from[col];
  if (col < half)
    value = value * turns[col] - from[col + half] * turns[half + col];
  else if (col < 2 * half)
    value = value * turns[col - half] + from[col - half] * turns[col];
  x[(head * g.most + row) * g.width + col] = value;
}

// ---- Networks --------------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

__global__ void activate_kernel(HashActivation activation, const HashRows shape,
                                const ManyMatrices<const float> bias, float* x, float* y) {
  const std::int64_t head = blockIdx.y / shape.functions, function = blockIdx.y % shape.functions;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t rows = shape.counts != nullptr ? shape.counts[head] : shape.rows;
  if (i >= rows * shape.width) return;
  const std::int64_t at = blockIdx.y * shape.rows * shape.width + i;
  const float in = x[at] + bias.data[head * bias.outer + function * bias.inner + i % shape.width];
  x[at] = in;
  y[at] = activation == HashActivation::relu   ? (in < 0.0f ? 0.0f : in)  // a NaN stays one
          : activation == HashActivation::silu ? in * sigmoid(in)
                                               : tanhf(in);
}

__device__ __forceinline__ float slope_of(HashActivation activation, float saved) {
  if (activation == HashActivation::tanh) return 1.0f - saved * saved;
  if (activation == HashActivation::relu) return saved > 0.0f ? 1.0f : 0.0f;
  const float s = sigmoid(saved);
  return s * (1.0f + saved * (1.0f - s));
}

__global__ __launch_bounds__(kColumns* kRowThreads) void slopes_kernel(HashActivation activation,
                                                                       const HashRows shape,
                                                                       const HashSlopes s) {
  __shared__ double sums[kRowThreads][kColumns + 1];
  const std::int64_t head = blockIdx.z / shape.functions, function = blockIdx.z % shape.functions,
                     part = blockIdx.y, col = std::int64_t{blockIdx.x} * kColumns + threadIdx.x;
  const std::int64_t rows = shape.counts != nullptr ? shape.counts[head] : shape.rows,
                     end = min(rows, (part + 1) * kPartLength);
  double sum = 0.0;
  if (col < shape.width) {
#pragma unroll 4
    for (std::int64_t row = part * kPartLength + threadIdx.y; row < end; row += kRowThreads) {
      const std::int64_t at = (blockIdx.z * shape.rows + row) * shape.width + col;
      float dy = s.dy[at];
      for (std::int64_t p = 1; p < s.parts; ++p) dy += s.dy[at + p * s.part];
      const float dx = dy * slope_of(activation, s.saved[at]);
      s.dx[at] = dx;
      sum += dx;
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= shape.width) return;
  for (int other = 1; other < kRowThreads; ++other) sum += sums[other][threadIdx.x];
  s.bias.data[part * s.bias_part + head * s.bias.outer + function * s.bias.inner + col] =
      static_cast<float>(sum);
}

// ---- The loss --------------------------------------------------------------------------------------------

/// log(1 + e^x) and the logistic function of x, without overflow.
struct Softplus {
  __device__ __forceinline__ explicit Softplus(float x) {
    const float e = expf(-fabsf(x));
    value = fmaxf(x, 0.0f) + log1pf(e);
    slope = (x >= 0.0f ? 1.0f : e) / (1.0f + e);
  }
  float value, slope;
};

__global__ __launch_bounds__(kThreads) void bce_kernel(const HashLoss l, const std::int32_t* counts, float* z,
                                                       double* row_losses) {
  const std::int64_t head = blockIdx.y, row = head * l.group * l.tokens + blockIdx.x;
  const std::int32_t* const far_counts = l.far_counts + head * l.tokens;
  const int far = far_counts[blockIdx.x % l.tokens], n = counts[head];
  double counted = 0.0;  // pairs of a query and a key that take part, of one query head
  for (std::int64_t t = threadIdx.x; t < l.tokens; t += kThreads) counted += far_counts[t];
  counted = fmax(over_block<kWarps>(counted, Sum()), 1.0);
  const auto share = static_cast<float>(1.0 / (counted * static_cast<double>(l.group)));
  double sum = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    float& own = z[row * l.most + i];
    if (i >= far) {
      own = 0.0f;
      continue;
    }
    const float x = own, y = l.labels[row * l.most + i] != 0 ? 1.0f : 0.0f;
    const float weight = y > 0.0f ? l.class1_weight : 1.0f;
    const Softplus softplus(x);
    sum += static_cast<double>(weight * (softplus.value - y * x));
    own = weight * (softplus.slope - y) * share;
  }
  sum = over_block<kWarps>(sum, Sum());
  if (threadIdx.x == 0) row_losses[row] = sum / counted;
}

__global__ __launch_bounds__(kThreads) void softmax_kernel(const HashLoss l, const std::int32_t* counts,
                                                           float* z, double* row_losses) {
  const std::int64_t head = blockIdx.y, row = head * l.group * l.tokens + blockIdx.x;
  const int far = l.far_counts[head * l.tokens + blockIdx.x % l.tokens], n = counts[head];
  float* const own = z + row * l.most;
  const std::uint8_t* const labels = l.labels + row * l.most;
  double peak = -1e30, pivotal = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < far; i += kThreads) {
    peak = fmax(peak, static_cast<double>(own[i]));
    pivotal += labels[i];
  }
  peak = over_block<kWarps>(peak, Max());
  pivotal = over_block<kWarps>(pivotal, Sum());
  double total = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < far; i += kThreads) total += exp(own[i] - peak);
  total = over_block<kWarps>(total, Sum());
  const double log_total = log(total), rows = static_cast<double>(l.tokens);
  double sum = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const bool takes_part = i < far && pivotal > 0.0;
    const double target = takes_part && labels[i] != 0 ? 1.0 / pivotal : 0.0;
    const double log_share = static_cast<double>(own[i]) - peak - log_total;
    if (takes_part) sum -= target * log_share / rows;
    own[i] = takes_part
                 ? static_cast<float>((exp(log_share) - target) / (rows * static_cast<double>(l.group)))
                 : 0.0f;
  }
  sum = over_block<kWarps>(sum, Sum());
  if (threadIdx.x == 0) row_losses[row] = sum;
}

__global__ __launch_bounds__(kThreads) void sum_losses_kernel(std::int64_t rows, std::int64_t group,
                                                              const double* row_losses, double* losses) {
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < rows; i += kThreads) sum += row_losses[blockIdx.x * rows + i];
  sum = over_block<kWarps>(sum, Sum());
  if (threadIdx.x == 0) losses[blockIdx.x] = sum / static_cast<double>(group);
}

__global__ void adam_kernel(const HashAdam a, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  float g = a.gradient[i];
  for (std::int64_t p = 1; p < a.parts; ++p) g += a.gradient[i + p * a.part];
  const float first = a.beta1 * a.first[i] + (1.0f - a.beta1) * g,
              second = a.beta2 * a.second[i] + (1.0f - a.beta2) * g * g;
  a.first[i] = first, a.second[i] = second;
  a.value[i] = a.keep * a.value[i] - a.rate * first / (sqrtf(second) + a.epsilon);
}

}  // namespace

void mark_keys(const HashMarks& marks, const std::int32_t* keys, const std::int32_t* counts,
               std::int64_t most, StreamHandle stream) {
  if (most == 0) return;
  const dim3 grid(blocks(most), static_cast<unsigned>(marks.heads));
  Launch(grid, kThreads, 0, stream)(mark_kernel, marks, keys, counts, most);
}

void find_pivotal(const HashMarks& marks, const HashQueries& queries, const float* scores,
                  const float* log_norms, std::int64_t top, std::int32_t* pivotal, StreamHandle stream) {
  const dim3 grid(static_cast<unsigned>(queries.rows()), static_cast<unsigned>(marks.heads));
  Launch(grid, kThreads, 0, stream)(pivotal_kernel, marks, queries, scores, log_norms, top, pivotal);
}

void list_marked(const HashMarks& marks, const HashQueries& queries, std::int64_t most, std::int32_t* listed,
                 std::int32_t* counts, std::int32_t* far_counts, StreamHandle stream) {
  Launch(static_cast<unsigned>(marks.heads), kListThreads, 0, stream)(list_kernel, marks, queries, most,
                                                                      listed, counts, far_counts);
}

void label_pivotal(const HashMarks& marks, const HashQueries& queries, const std::int32_t* pivotal,
                   std::int64_t top, std::int64_t most, std::uint8_t* labels, StreamHandle stream) {
  fill(labels, 0, marks.heads * queries.rows() * most, stream);
  const dim3 grid(blocks(queries.rows() * top), static_cast<unsigned>(marks.heads));
  Launch(grid, kThreads, 0, stream)(label_kernel, marks, queries, pivotal, top, most, labels);
}

void gather_turned(const HashGather& gather, float* x, StreamHandle stream) {
  const dim3 grid(blocks(gather.most * gather.width), static_cast<unsigned>(gather.heads));
  Launch(grid, kThreads, 0, stream)(gather_kernel, gather, x);
}

void activate(HashActivation activation, const HashRows& shape, const ManyMatrices<const float>& bias,
              float* x, float* y, StreamHandle stream) {
  const dim3 grid(blocks(shape.rows * shape.width), static_cast<unsigned>(shape.heads * shape.functions));
  Launch(grid, kThreads, 0, stream)(activate_kernel, activation, shape, bias, x, y);
}

void slopes(HashActivation activation, const HashRows& shape, const HashSlopes& slopes, StreamHandle stream) {
  const dim3 grid(static_cast<unsigned>((shape.width + kColumns - 1) / kColumns),
                  static_cast<unsigned>(parts_of(shape.rows)),
                  static_cast<unsigned>(shape.heads * shape.functions));
  Launch(grid, dim3(kColumns, kRowThreads), 0, stream)(slopes_kernel, activation, shape, slopes);
}

void pivotal_loss(const HashLoss& loss, const std::int32_t* counts, float* z, double* row_losses,
                  StreamHandle stream) {
  const dim3 grid(static_cast<unsigned>(loss.group * loss.tokens), static_cast<unsigned>(loss.heads));
  Launch(grid, kThreads, 0, stream)(loss.softmax ? softmax_kernel : bce_kernel, loss, counts, z, row_losses);
}

void sum_losses(const HashLoss& loss, const double* row_losses, double* losses, StreamHandle stream) {
  Launch(static_cast<unsigned>(loss.heads), kThreads, 0, stream)(sum_losses_kernel, loss.group * loss.tokens,
                                                                 loss.group, row_losses, losses);
}

void adam_of_parts(const HashAdam& adam, std::int64_t count, StreamHandle stream) {
  Launch(blocks(count), kThreads, 0, stream)(adam_kernel, adam, count);
}

}  // namespace lode::cuda
