// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/experts/grouped_product.h"
#include "kernels/cuda/latent/latent.h"
#include "kernels/cuda/linear/linear_kernels.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

std::int64_t rounded_up(std::int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// ---- Few tokens.

constexpr int kEach = 4;  // rows of a matrix that a warp reads at once

/// A block has some rows of one head's matrix, a warp kEach of them at a time.
template <class W>
__global__ __launch_bounds__(kThreads) void few_kernel(const HeadProduct p, int rows, bool packed) {
  extern __shared__ __align__(16) float x[];  // [tokens, cols]
  const int head = static_cast<int>(blockIdx.y), cols = static_cast<int>(p.w.cols),
            tokens = static_cast<int>(p.tokens), lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < tokens * cols; i += kThreads)
    x[i] = p.input.x[(std::int64_t{i / cols} * p.heads + head) * p.input.stride + p.input.place(i % cols)];
  __syncthreads();
  const int first = (static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) * kEach;
  const W* const w = static_cast<const W*>(p.w.data) + std::int64_t{head} * rows * cols;
  float sums[kEach][kFewRows] = {};
  const auto add = [&](int k, const auto& values, int count) {
    for (int t = 0; t < kFewRows; ++t) {
      if (t >= tokens) break;
      for (int i = 0; i < count; ++i) {
        const float input = x[t * cols + k + i];
#pragma unroll
        for (int r = 0; r < kEach; ++r) sums[r][t] = fmaf(input, values[r][i], sums[r][t]);
      }
    }
  };
  const auto at = [&](int r) { return w + std::int64_t{min(first + r, rows - 1)} * cols; };
  if (packed) {
    for (int k = lane * kPack<W>; k < cols; k += 32 * kPack<W>) {
      float values[kEach][kPack<W>];
#pragma unroll
      for (int r = 0; r < kEach; ++r)
        widen_pack<W>(__ldcs(reinterpret_cast<const uint4*>(at(r) + k)), values[r]);
      add(k, values, kPack<W>);
    }
  } else {
    for (int k = lane; k < cols; k += 32) {
      float values[kEach][1];
#pragma unroll
      for (int r = 0; r < kEach; ++r) values[r][0] = widen(at(r)[k]);
      add(k, values, 1);
    }
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
#pragma unroll
    for (int t = 0; t < kFewRows; ++t) {
      if (t >= tokens) break;
      const float sum = sum_of_warp(sums[r][t]);
      if (lane == 0 && first + r < rows) p.y[(std::int64_t{t} * p.heads + head) * rows + first + r] = sum;
    }
  }
}

void launch_few(const HeadProduct& p, StreamHandle stream) {
  const auto rows = static_cast<int>(p.rows());
  const auto shared = static_cast<std::size_t>(p.tokens * p.w.cols) * sizeof(float);
  const dim3 grid(static_cast<unsigned>((rows + kWarps * kEach - 1) / (kWarps * kEach)),
                  static_cast<unsigned>(p.heads));
  with_type(p.w.type, [&](auto* type) {
    using W = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
    const bool packed = p.w.cols % kPack<W> == 0 && reinterpret_cast<std::uintptr_t>(p.w.data) % 16 == 0;
    Launch(grid, kThreads, shared, stream)(few_kernel<W>, p, rows, packed);
  });
}

// ---- Many tokens: the product of experts, each head one that all tokens go through. Slot t * heads + h is head h of
// token t.

struct Slots {
  void* x = nullptr;     // [slots, cols]
  int* order = nullptr;  // [slots] head after head
  int* begin = nullptr;  // [heads + 1]
};
Slots slots_in(void* scratch, std::int64_t tokens, int heads, std::int64_t cols) {
  char* at = static_cast<char*>(scratch);
  Slots s;
  s.x = at;
  at += rounded_up(tokens * heads * cols * std::int64_t{sizeof(float)});
  s.order = reinterpret_cast<int*>(at);
  s.begin = reinterpret_cast<int*>(at + rounded_up(tokens * heads * std::int64_t{sizeof(int)}));
  return s;
}

__global__ __launch_bounds__(kThreads) void gather_kernel(const HeadProduct p, const Slots to, DType type) {
  const std::int64_t slots = p.tokens * p.heads, slot = blockIdx.x;
  for (int c = static_cast<int>(threadIdx.x); c < p.w.cols; c += kThreads)
    store_as(to.x, type, slot * p.w.cols + c, p.input.x[slot * p.input.stride + p.input.place(c)]);
  if (threadIdx.x > 0) return;
  to.order[slot % p.heads * p.tokens + slot / p.heads] = static_cast<int>(slot);
  if (slot < p.heads) to.begin[slot] = static_cast<int>(slot * p.tokens);
  if (slot == 0) to.begin[p.heads] = static_cast<int>(slots);
}

// ---- Queries and rows.

__device__ float sum_of_block(float x) {
  __shared__ float partial[kWarps];
  x = sum_of_warp(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
  for (const float p : partial) sum += p;
  return sum;
}

/// A block has one query head of one token, the last ones of a token its row.
__global__ __launch_bounds__(kThreads) void put_kernel(const LatentRows in, const Queries where) {
  const LatentShape s = in.shape;
  const int head = static_cast<int>(blockIdx.x), half = s.row() / 2, turning = s.rope / 2;
  const std::int64_t token = blockIdx.y, kv_heads = where.layout.kv_heads;
  const bool query = head < where.query_heads;
  const QueryToken at = where.tokens[token];
  const std::int64_t row = token * where.query_heads + head;
  const float* const latent = query ? in.folded + row * s.kv_rank : in.kv + token * s.row();
  const float* const turns = query ? in.q + row * (s.nope + s.rope) + s.nope : latent + s.kv_rank;
  const Vector gain = {in.kv_norm.data, in.kv_norm.type};
  float inverse = 1.0f;
  if (!query) {
    float squares = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < s.kv_rank; i += kThreads)
      squares = fmaf(latent[i], latent[i], squares);
    inverse = 1.0f / sqrtf(sum_of_block(squares) / static_cast<float>(s.kv_rank) + in.eps);
  }
  const auto value = [&](int i) { return query ? latent[i] : latent[i] * inverse * gain[i]; };
  char* const stored = const_cast<char*>(where.bases[at.sequence]) + where.layer_offset +
                       where.layout.key_offset(0, at.position);
  for (int pair = static_cast<int>(threadIdx.x); pair < half; pair += kThreads) {
    const auto put = [&](float* to, float a, float b) {
      if (to == nullptr) return;
      for (std::int64_t h = 0; h < (query ? 1 : kv_heads); ++h) {
        float* const place = to + (query ? row : token * kv_heads + h) * s.row() + pair;
        place[0] = a, place[half] = b;
      }
    };
    float a, b;
    if (pair < turning) {
      a = turns[s.interleaved ? 2 * pair : pair];
      b = turns[s.interleaved ? 2 * pair + 1 : pair + turning];
    } else {
      a = value(pair - turning);
      b = value(pair - turning + s.in_half());
    }
    put(query ? in.q_unrotated : in.k_unrotated, a, b);
    if (pair < turning) {
      // The angle is a float32 product and is not fused into anything, as in the reference model.
      float sine, cosine;
      sincosf(__fmul_rn(static_cast<float>(at.position), in.frequencies[pair]), &sine, &cosine);
      sine = __fmul_rn(sine, in.rope_scale), cosine = __fmul_rn(cosine, in.rope_scale);
      const float turned = fmaf(a, cosine, -__fmul_rn(b, sine));
      b = fmaf(b, cosine, __fmul_rn(a, sine));
      a = turned;
    }
    put(query ? in.q_out : in.k_out, a, b);
    if (query) continue;
    put(in.v_out, a, b);
    store_as(stored, where.layout.type, pair, a);
    store_as(stored, where.layout.type, pair + half, b);
  }
}

}  // namespace

void multiply_heads_few(const HeadProduct& product, StreamHandle stream) {
  for (std::int64_t first = 0; first < product.tokens; first += kFewRows) {
    HeadProduct some = product;
    some.tokens = std::min<std::int64_t>(kFewRows, product.tokens - first);
    some.input.x += first * product.heads * product.input.stride;
    some.y += first * product.w.rows;
    launch_few(some, stream);
  }
}

std::int64_t heads_scratch_bytes(std::int64_t tokens, int heads, std::int64_t most_cols) {
  return rounded_up(tokens * heads * most_cols * std::int64_t{sizeof(float)}) +
         rounded_up(tokens * heads * std::int64_t{sizeof(int)}) +
         rounded_up((heads + 1) * std::int64_t{sizeof(int)});
}

void multiply_heads(const HeadProduct& p, Precision precision, void* scratch, StreamHandle stream) {
  if (p.tokens == 0) return;
  const std::int64_t slots = p.tokens * p.heads;
  const Slots to = slots_in(scratch, p.tokens, p.heads, p.w.cols);
  const DType type = precision == Precision::exact ? DType::f32 : p.w.type;
  Launch(static_cast<unsigned>(slots), kThreads, 0, stream)(gather_kernel, p, to, type);
  GroupedProduct product = {.slots = slots,
                            .x = to.x,
                            .x_type = type,
                            .by_slot = true,
                            .w = p.w.data,
                            .w_type = p.w.type,
                            .rows = p.rows(),
                            .cols = p.w.cols,
                            .experts = p.heads,
                            .y = p.y};
  product.routing.order = to.order;
  product.routing.begin = to.begin;
  multiply_grouped(product, stream);
}

void put_latent_rows(const LatentRows& rows, const Queries& where, StreamHandle stream) {
  if (where.count == 0) return;
  const dim3 grid(static_cast<unsigned>(where.query_heads + 1), static_cast<unsigned>(where.count));
  Launch(grid, kThreads, 0, stream)(put_kernel, rows, where);
}

}  // namespace lode::cuda
