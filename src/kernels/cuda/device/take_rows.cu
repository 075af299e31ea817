// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/take_rows.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 4096;

int blocks_for(std::int64_t items) {
  return static_cast<int>(std::min(kMostBlocks, (items + kThreads - 1) / kThreads));
}

/// A thread a word, head by head: a row's key, then its value.
template <class Word>
__global__ void take_kernel(StridedKv from, KvLayout layout, char* layer, std::int64_t begin,
                            std::int64_t count) {
  const std::int64_t words = layout.row_bytes() / static_cast<std::int64_t>(sizeof(Word)),
                     all = 2 * words * count * layout.kv_heads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t word = i % words, row = i / words / 2 % count + begin;
    const bool is_value = i / words % 2 == 1;
    const int head = static_cast<int>(i / words / 2 / count);
    const char* const source = is_value ? from.value(head, row) : from.key(head, row);
    char* const to = layer + layout.key_offset(head, row) + (is_value ? layout.value_offset() : 0);
    reinterpret_cast<Word*>(to)[word] = reinterpret_cast<const Word*>(source)[word];
  }
}

template <class Word>
bool fits(const StridedKv& from, const KvLayout& layout) {
  constexpr std::int64_t kBytes = sizeof(Word);
  const auto divides = [&](std::int64_t bytes) { return bytes % kBytes == 0; };
  return divides(reinterpret_cast<std::int64_t>(from.k)) && divides(reinterpret_cast<std::int64_t>(from.v)) &&
         divides(from.k_head) && divides(from.v_head) && divides(from.k_row) && divides(from.v_row) &&
         divides(layout.row_bytes());
}

template <class Word>
void launch_take(const StridedKv& from, const KvLayout& layout, char* layer, std::int64_t begin,
                 std::int64_t count, StreamHandle stream) {
  const std::int64_t words =
      2 * layout.row_bytes() / static_cast<std::int64_t>(sizeof(Word)) * count * layout.kv_heads;
  take_kernel<Word><<<blocks_for(words), kThreads, 0, stream>>>(from, layout, layer, begin, count);
  LODE_LAUNCHED();
}

/// A thread a pair.
__global__ void unrotate_kernel(TurnedVectors from, float* to) {
  const std::int64_t half = from.d / 2, all = from.tokens * from.heads * half;
  for (std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; at < all;
       at += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t i = at % half, row = at / half, place = row * from.d + i;
    float a = from.x[place], b = from.x[place + half];
    if (i < from.turning) {
      const auto position = static_cast<float>(from.begin + row / from.heads);
      float sine, cosine;
      sincosf(__fmul_rn(-position, from.frequencies[i]), &sine, &cosine);
      sine /= from.attention_scaling, cosine /= from.attention_scaling;
      const float turned = a * cosine - b * sine;
      b = b * cosine + a * sine;
      a = turned;
    }
    to[place] = a;
    to[place + half] = b;
  }
}

}  // namespace

void take_rows(const StridedKv& from, const KvLayout& layout, char* layer, std::int64_t begin,
               std::int64_t end, StreamHandle stream) {
  if (begin >= end) return;
  const std::int64_t count = end - begin;
  if (fits<uint4>(from, layout)) return launch_take<uint4>(from, layout, layer, begin, count, stream);
  if (fits<std::uint32_t>(from, layout))
    return launch_take<std::uint32_t>(from, layout, layer, begin, count, stream);
  launch_take<std::uint16_t>(from, layout, layer, begin, count, stream);
}

void unrotate_rows(const TurnedVectors& from, float* to, StreamHandle stream) {
  const std::int64_t pairs = from.tokens * from.heads * (from.d / 2);
  if (pairs == 0) return;
  unrotate_kernel<<<blocks_for(pairs), kThreads, 0, stream>>>(from, to);
  LODE_LAUNCHED();
}

}  // namespace lode::cuda
