// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/device/arrivals.h"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 4096;

/// Words of the rows, a key's, then its value's, head by head; one of them.
template <class Word>
__device__ void copy_word(const TakenRows& rows, std::int64_t i) {
  const KvLayout& layout = rows.layout;
  const std::int64_t words = layout.row_bytes() / static_cast<std::int64_t>(sizeof(Word)),
                     count = rows.end - rows.begin;
  const std::int64_t word = i % words, row = i / words / 2 % count + rows.begin;
  const bool is_value = i / words % 2 == 1;
  const int head = static_cast<int>(i / words / 2 / count);
  const char* const source =
      is_value ? rows.from.value(head, row - rows.first) : rows.from.key(head, row - rows.first);
  char* const to = rows.layer + layout.key_offset(head, row) + (is_value ? layout.value_offset() : 0);
  reinterpret_cast<Word*>(to)[word] = reinterpret_cast<const Word*>(source)[word];
}

/// A pair in float32, and as it was before RoPE.
__device__ void take_pair(const TurnedQueries& queries, std::int64_t pair) {
  const std::int64_t half = queries.d / 2, i = pair % half, row = pair / half, place = row * queries.d + i;
  const Vector q = {queries.q, queries.type};
  float a = q[place], b = q[place + half];
  if (queries.widened != nullptr) {
    queries.widened[place] = a;
    queries.widened[place + half] = b;
  }
  if (queries.plain == nullptr) return;
  if (i < queries.turning) {
    const auto position = static_cast<float>(queries.begin + row / queries.heads);
    float sine, cosine;
    sincosf(__fmul_rn(-position, queries.frequencies[i]), &sine, &cosine);
    sine /= queries.attention_scaling, cosine /= queries.attention_scaling;
    const float turned = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = turned;
  }
  queries.plain[place] = a;
  queries.plain[place + half] = b;
}

/// A thread a word of the rows, a pair of the queries, or a token's place.
template <class Word>
__global__ void arrive_kernel(TakenRows rows, TurnedQueries queries, std::int64_t words, std::int64_t pairs,
                              std::int64_t places) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words + pairs + places;
       i += std::int64_t{gridDim.x} * kThreads) {
    if (i < pairs) {  // they take longest
      take_pair(queries, i);
    } else if (i < pairs + words) {
      copy_word<Word>(rows, i - pairs);
    } else {
      const std::int64_t token = i - pairs - words;
      queries.places[token] = {0, static_cast<std::int32_t>(queries.begin + token)};
    }
  }
  __threadfence();  // for kernels that look places up before their wait (hopper.cuh)
}

__global__ void depart_kernel(const float* from, std::int64_t count, void* to, DType type) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads)
    store_as(to, type, i, from[i]);
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
void launch_arrive(const TakenRows& rows, const TurnedQueries& queries, StreamHandle stream) {
  const std::int64_t row_words = 2 * rows.layout.row_bytes() / static_cast<std::int64_t>(sizeof(Word)),
                     words =
                         row_words * std::max<std::int64_t>(0, rows.end - rows.begin) * rows.layout.kv_heads,
                     pairs = queries.plain == nullptr && queries.widened == nullptr
                                 ? 0
                                 : queries.tokens * queries.heads * (queries.d / 2),
                     places = queries.places == nullptr ? 0 : queries.tokens;
  const std::int64_t all = words + pairs + places;
  if (all == 0) return;
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (all + kThreads - 1) / kThreads));
  Launch(blocks, kThreads, 0, stream)(arrive_kernel<Word>, rows, queries, words, pairs, places);
}

}  // namespace

void arrive(const TakenRows& rows, const TurnedQueries& queries, StreamHandle stream) {
  if (fits<uint4>(rows.from, rows.layout)) return launch_arrive<uint4>(rows, queries, stream);
  if (fits<std::uint32_t>(rows.from, rows.layout)) return launch_arrive<std::uint32_t>(rows, queries, stream);
  launch_arrive<std::uint16_t>(rows, queries, stream);
}

void depart(const float* from, std::int64_t count, void* to, DType type, StreamHandle stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (count + kThreads - 1) / kThreads));
  Launch(blocks, kThreads, 0, stream)(depart_kernel, from, count, to, type);
}

}  // namespace lode::cuda
