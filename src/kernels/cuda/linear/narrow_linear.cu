// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/linear/linear_cublaslt.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/narrow_linear.h"
#include "kernels/cuda/linear/qkv_step.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 1024, kBothRows = 2 * kNarrowRows;
constexpr int kMostFours = 8;  // columns of a row, in 4 * kThreads
using Half = __nv_bfloat16;

__device__ __forceinline__ void take_four(const float* from, float (&to)[4]) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

/// A product [kBothRows, stride] whose rows i and kNarrowRows + i are the two halves of row i.
struct Halves {
  const float* y = nullptr;
  std::int64_t stride = 0;

  __device__ __forceinline__ float at(std::int64_t row, std::int64_t column) const {
    const float* const from = y + row * stride + column;
    return from[0] + from[kNarrowRows * stride];
  }
  /// Four of them; column and stride are multiples of four.
  __device__ __forceinline__ void four(std::int64_t row, std::int64_t column, float (&to)[4]) const {
    const float* const from = y + row * stride + column;
    float low[4];
    take_four(from, to), take_four(from + kNarrowRows * stride, low);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] += low[i];
  }
};

__device__ __forceinline__ void put_halves(float x, std::int64_t row, std::int64_t cols, std::int64_t i,
                                           Half* to) {
  const Half high = __float2bfloat16_rn(x);
  to[row * cols + i] = high;
  to[(row + kNarrowRows) * cols + i] = __float2bfloat16_rn(x - __bfloat162float(high));
}

/// Of four columns from `i` on, a multiple of four as is cols.
__device__ __forceinline__ void put_four_halves(const float (&x)[4], std::int64_t row, std::int64_t cols,
                                                std::int64_t i, Half* to) {
  __align__(8) Half high[4], low[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    high[k] = __float2bfloat16_rn(x[k]);
    low[k] = __float2bfloat16_rn(x[k] - __bfloat162float(high[k]));
  }
  *reinterpret_cast<uint2*>(to + row * cols + i) = *reinterpret_cast<const uint2*>(high);
  *reinterpret_cast<uint2*>(to + (row + kNarrowRows) * cols + i) = *reinterpret_cast<const uint2*>(low);
}

/// A row in the registers of a block: every thread has four columns of each kThreads * 4.
template <int kFours>
struct RowInBlock {
  float x[kFours][4];
  std::int64_t cols;

  __device__ static std::int64_t column(int k) { return (std::int64_t{k} * kThreads + threadIdx.x) * 4; }
  /// f(column, number in the row) for each of this thread's.
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column(k) + i < cols) f(column(k) + i, x[k][i]);
    }
  }
  /// f(column, four numbers) for each four of this thread's; cols is a multiple of four.
  template <class F>
  __device__ __forceinline__ void for_each_four(const F& f) {
#pragma unroll
    for (int k = 0; k < kFours; ++k)
      if (column(k) < cols) f(column(k), x[k]);
  }
  /// Multiplies by gain / root mean square, by the whole block.
  __device__ __forceinline__ void normalise(const Vector& gain, float eps) {
    RowInBlock gains = {{}, cols};
    gains.take_gain(gain);
    normalise(gains, eps);
  }
  __device__ __forceinline__ void take_gain(const Vector& gain) {
    for_each([&](std::int64_t i, float& value) { value = gain[i]; });
  }
  __device__ __forceinline__ void normalise(const RowInBlock& gains, float eps) {
    __shared__ float partial[kThreads / 32];
    __shared__ float inverse_of_all;
    float sum = 0.0f;
    for_each([&](std::int64_t, float& value) { sum = fmaf(value, value, sum); });
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    __syncthreads();  // it may be in use by a norm before
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {  // all warps would share the few units for double
      double all = 0;
#pragma unroll
      for (const float p : partial) all += static_cast<double>(p);
      if (threadIdx.x == 0)
        inverse_of_all =
            static_cast<float>(1.0 / sqrt(all / static_cast<double>(cols) + static_cast<double>(eps)));
    }
    __syncthreads();
    const float inverse = inverse_of_all;
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[k][i] = x[k][i] * inverse * gains.x[k][i];
    }
  }
};

/// A block a row; zeros for rows that are not there.
template <int kFours>
__global__ __launch_bounds__(kThreads) void split_kernel(const StepInput in, Half* to) {
  release_successor();
  wait_for_predecessor();
  const std::int64_t row = blockIdx.x;
  RowInBlock<kFours> of = {{}, in.cols};
  if (row < in.n) {
    of.for_each([&](std::int64_t i, float& value) { value = in.x[row * in.cols + i]; });
    if (in.gain.data != nullptr) of.normalise(in.gain, in.eps);
  }
  of.for_each([&](std::int64_t i, float& value) { put_halves(value, row, in.cols, i, to); });
}

__global__ void finish_qkv_kernel(const QkvStep<float> step, std::int64_t n, const Halves y) {
  release_successor();
  wait_for_predecessor();
  const std::int64_t pairs = step.pairs(), at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= n * pairs) return;
  const std::int64_t row = at / pairs, p = at % pairs, column = p / step.half * 2 * step.half + p % step.half;
  step.finish(p, row, y.at(row, column), y.at(row, column + step.half), step.before(p, row));
}

/// to[n, cols] = the product's columns from `first` on.
__global__ void join_kernel(const Halves y, std::int64_t n, std::int64_t first, std::int64_t cols,
                            float* to) {
  release_successor();
  wait_for_predecessor();
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < n * cols) to[at] = y.at(at / cols, first + at % cols);
}

/// The two halves of activation(gate) * up, of n rows; zeros for the others.
__global__ void activate_kernel(const Halves y, std::int64_t n, std::int64_t cols, const Vector gate_bias,
                                const Vector up_bias, const Activation activation, Half* to) {
  release_successor();
  wait_for_predecessor();
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= kNarrowRows * cols) return;
  const std::int64_t row = at / cols, i = at % cols;
  float act = 0.0f;
  if (row < n) {
    const float a = y.at(row, i) + gate_bias.or_zero(i), b = y.at(row, cols + i) + up_bias.or_zero(i);
    act = activate(activation, a, b);
  }
  put_halves(act, row, cols, i, to);
}

/// What becomes of a product that is added to the stream.
struct AddStep {
  std::int64_t cols = 0;
  Vector bias, gain;
  float eps = 0.0f, multiplier = 1.0f, factor = 1.0f;
  float* x = nullptr;
  Vector next;  ///< of the norm of the sum, whose halves go to next_to
  Half* next_to = nullptr;
};

/// x = (x + multiplier * norm(y + bias)) * factor, then the halves of norm(x) where there is a next one; a block a row.
template <int kFours>
__global__ __launch_bounds__(kThreads) void add_kernel(const Halves y, const AddStep step) {
  release_successor();
  const std::int64_t row = blockIdx.x;
  float* const x = step.x + row * step.cols;
  RowInBlock<kFours> of = {{}, step.cols}, sum = {{}, step.cols}, gains = {{}, step.cols};
  if (step.next.data != nullptr) gains.take_gain(step.next);  // weights: there since the model was loaded
  wait_for_predecessor();
  of.for_each_four([&](std::int64_t i, float(&value)[4]) { y.four(row, i, value); });
  sum.for_each_four([&](std::int64_t i, float(&value)[4]) { take_four(x + i, value); });
  if (step.bias.data != nullptr) of.for_each([&](std::int64_t i, float& value) { value += step.bias[i]; });
  if (step.gain.data != nullptr) of.normalise(step.gain, step.eps);
#pragma unroll
  for (int k = 0; k < kFours; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum.x[k][i] = __fmul_rn(__fadd_rn(sum.x[k][i], __fmul_rn(of.x[k][i], step.multiplier)), step.factor);
  }
  sum.for_each_four([&](std::int64_t i, const float(&value)[4]) {
    *reinterpret_cast<float4*>(x + i) = {value[0], value[1], value[2], value[3]};
  });
  if (step.next.data == nullptr) return;
  sum.normalise(gains, step.eps);
  sum.for_each_four([&](std::int64_t i, const float(&value)[4]) {
    put_four_halves(value, row, step.cols, i, step.next_to);
  });
}

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

std::int64_t rounded_up(std::int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}
std::int64_t operand_bytes(const NarrowLinear::Sizes& s) {
  return rounded_up(kBothRows * std::max({s.hidden, s.intermediate, s.q_cols}) * 2);
}
std::int64_t product_bytes(const NarrowLinear::Sizes& s) {
  return rounded_up(kBothRows * std::max({s.q_cols + 2 * s.kv_cols, 2 * s.intermediate, s.hidden, s.vocab}) *
                    4);
}

/// Where a step's pointers stand for rows from `first` on.
Linear::QkvArguments moved(Linear::QkvArguments a, std::int64_t first, std::int64_t hidden,
                           std::int64_t q_cols, std::int64_t kv_cols) {
  const auto move = [&](float*& to, std::int64_t cols) {
    if (to != nullptr) to += first * cols;
  };
  a.x += first * hidden;
  for (float** to : {&a.q_out, &a.q_unrotated}) move(*to, q_cols);
  for (float** to : {&a.k_out, &a.k_unrotated, &a.v_out}) move(*to, kv_cols);
  return a;
}

}  // namespace

struct NarrowLinear::Impl {
  Linear& linear;
  StreamHandle stream = nullptr;
  std::unique_ptr<CublasLt> lt;
  Buffer scratch;
  Sizes sizes;
  const void* ready =
      nullptr;  ///< the gain of the norm that the operand holds, or a matrix whose input it is

  Half* operand() const { return scratch.as<Half>(); }
  float* products() const { return reinterpret_cast<float*>(scratch.as<char>() + operand_bytes(sizes)); }
  float* joined() const { return products() + product_bytes(sizes) / 4; }

  EarlyLaunch early(unsigned blocks) const { return {dim3(blocks), kThreads, 0, 1, stream}; }
  /// Whether products of these weights are made for all rows together.
  bool together(std::initializer_list<const DeviceWeight*> all) const {
    return lt != nullptr && std::all_of(all.begin(), all.end(), [](const DeviceWeight* w) {
             return !w->tiled() && w->type == DType::bf16 && w->cols % 8 == 0 && w->rows % 8 == 0 &&
                    w->cols <= 4 * kThreads * kMostFours;
           });
  }
  void split(const StepInput& input) const {
    const auto launch = [&](auto kernel) { early(kNarrowRows)(kernel, input, operand()); };
    const std::int64_t fours = (input.cols + 4 * kThreads - 1) / (4 * kThreads);
    fours == 1   ? launch(split_kernel<1>)
    : fours == 2 ? launch(split_kernel<2>)
                 : launch(split_kernel<kMostFours>);
  }
  /// The operand times matrices whose outputs lie side by side; those that lie behind one another are one.
  Halves product(std::initializer_list<const DeviceWeight*> all) const {
    std::int64_t stride = 0;
    for (const DeviceWeight* w : all) stride += w->rows;
    std::int64_t column = 0;
    for (const auto* at = all.begin(); at != all.end();) {
      if ((*at)->rows == 0) {  // not there
        ++at;
        continue;
      }
      Operand w = {(*at)->data, DType::bf16, 0, (*at)->cols};
      const char* end = static_cast<const char*>(w.data);
      for (; at != all.end() && (*at)->data == end; ++at)
        w.rows += (*at)->rows, end += (*at)->rows * w.cols * 2;
      const Operand x = {operand(), DType::bf16, kBothRows, w.cols};
      float* const y = products() + column;
      if (!lt->multiply(x, w, false, y, stream, stride)) gemm_f32(x, w, {}, false, y, stream, stride);
      column += w.rows;
    }
    return {products(), stride};
  }
  void add(const Halves& y, std::int64_t n, const DeviceWeight& w, const DeviceWeight& bias,
           const Addition& addition, float* x, const DeviceWeight& next) {
    const AddStep step = {.cols = w.rows,
                          .bias = vector_of(bias),
                          .gain = vector_of(addition.norm),
                          .eps = addition.eps,
                          .multiplier = addition.multiplier,
                          .factor = addition.factor,
                          .x = x,
                          .next = vector_of(next),
                          .next_to = operand()};
    const auto launch = [&](auto kernel) { early(static_cast<unsigned>(n))(kernel, y, step); };
    const std::int64_t fours = (w.rows + 4 * kThreads - 1) / (4 * kThreads);
    fours == 1 ? launch(add_kernel<1>) : fours == 2 ? launch(add_kernel<2>) : launch(add_kernel<kMostFours>);
    ready = next.data;
  }
  /// The operand is norm(x), made by the step before or now.
  void split_unless_ready(const StepInput& input) {
    if (ready == nullptr || ready != input.gain.data) split(input);
    ready = nullptr;
  }
  void join(const Halves& y, std::int64_t n, std::int64_t first, std::int64_t cols, float* to) const {
    early(blocks_for(n * cols))(join_kernel, y, n, first, cols, to);
  }
};

NarrowLinear::NarrowLinear(Linear& linear, StreamHandle stream, Precision precision)
    : impl_(new Impl{
          .linear = linear, .stream = stream, .lt = nullptr, .scratch = {}, .sizes = {}, .ready = nullptr}) {
  std::string found;
  if (precision == Precision::fast) impl_->lt = CublasLt::open(found);
}
NarrowLinear::~NarrowLinear() = default;

std::int64_t NarrowLinear::scratch_bytes(const Sizes& s) {
  return operand_bytes(s) + product_bytes(s) + rounded_up(kNarrowRows * (s.q_cols + 2 * s.kv_cols) * 4);
}
void NarrowLinear::reserve(const Sizes& sizes) {
  impl_->sizes = sizes;
  impl_->scratch = Buffer(scratch_bytes(sizes), "scratch of a batch");
}

void NarrowLinear::qkv(const Linear::QkvArguments& a, const Queries& where) {
  Impl& m = *impl_;
  const std::int64_t n = where.count, q_cols = a.q.rows, kv_cols = a.k.rows;
  if (!m.together({&a.q, &a.k, &a.v})) {
    for (int first = 0; first < n; first += kFusedRows) {
      Queries some = where;
      some.tokens += first;
      some.count = std::min<int>(kFusedRows, where.count - first);
      m.linear.qkv(moved(a, first, a.q.cols, q_cols, kv_cols), some);
    }
    return;
  }
  m.split_unless_ready({a.x, vector_of(a.norm), a.eps, n, a.q.cols});
  const Halves y = m.product({&a.q, &a.k, &a.v});
  const QkvStep<float> step = qkv_step_of(a, where);
  if (!a.finishes_heads()) return m.early(blocks_for(n * step.pairs()))(finish_qkv_kernel, step, n, y);
  const bool own_values = a.v.data != nullptr;
  float *const q = m.joined(), *const k = q + n * q_cols, *const v = own_values ? k + n * kv_cols : k;
  m.join(y, n, 0, q_cols, q);
  if (kv_cols > 0) m.join(y, n, q_cols, kv_cols, k);
  if (own_values) m.join(y, n, q_cols + kv_cols, kv_cols, v);
  finish_heads(step, norms_of(a), n, q, k, v, m.stream);
}

void NarrowLinear::project_out(const float* attention, std::int64_t n, const DeviceWeight& w,
                               const DeviceWeight& bias, float* x, const Addition& addition,
                               const DeviceWeight& next) {
  Impl& m = *impl_;
  if (!m.together({&w})) {
    for (std::int64_t first = 0; first < n; first += kFusedRows)
      m.linear.project_out(attention + first * w.cols, std::min<std::int64_t>(kFusedRows, n - first), w, bias,
                           x + first * w.rows, addition);
    return;
  }
  if (m.ready != w.data) m.split({attention, {}, 0.0f, n, w.cols});
  m.add(m.product({&w}), n, w, bias, addition, x, next);
}

void* NarrowLinear::halves_for(const DeviceWeight& w) {
  Impl& m = *impl_;
  if (!m.together({&w})) return nullptr;
  m.ready = w.data;
  return m.operand();
}

void NarrowLinear::mlp(const Linear::MlpArguments& a, std::int64_t n, float* x, const DeviceWeight& next) {
  Impl& m = *impl_;
  if (!m.together({&a.gate, &a.up, &a.down})) {
    for (std::int64_t first = 0; first < n; first += kFusedRows)
      m.linear.mlp(a, std::min<std::int64_t>(kFusedRows, n - first), x + first * a.gate.cols);
    return;
  }
  m.split_unless_ready({x, vector_of(a.norm), a.eps, n, a.gate.cols});
  const Halves y = m.product({&a.gate, &a.up});
  m.early(blocks_for(kNarrowRows * a.gate.rows))(activate_kernel, y, n, a.gate.rows, vector_of(a.gate_bias),
                                                 vector_of(a.up_bias), a.activation, m.operand());
  m.add(m.product({&a.down}), n, a.down, a.down_bias, a.addition, x, next);
}

void NarrowLinear::multiply(const float* x, std::int64_t n, const DeviceWeight& w, float* y) {
  Impl& m = *impl_;
  if (!m.together({&w})) {
    for (std::int64_t first = 0; first < n; first += kFusedRows)
      m.linear.multiply(x + first * w.cols, std::min<std::int64_t>(kFusedRows, n - first), w, {},
                        y + first * w.rows, false);
    return;
  }
  m.ready = nullptr;
  m.split({x, {}, 0.0f, n, w.cols});
  m.join(m.product({&w}), n, 0, w.rows, y);
}

void NarrowLinear::head(const float* x, std::int64_t n, const DeviceWeight& norm, float eps,
                        const DeviceWeight& output, float* logits) {
  Impl& m = *impl_;
  if (!m.together({&output})) {
    for (std::int64_t first = 0; first < n; first += kFusedRows)
      m.linear.head(x + first * output.cols, std::min<std::int64_t>(kFusedRows, n - first), norm, eps, output,
                    logits + first * output.rows);
    return;
  }
  m.split_unless_ready({x, vector_of(norm), eps, n, output.cols});
  m.join(m.product({&output}), n, 0, output.rows, logits);
}

}  // namespace lode::cuda
