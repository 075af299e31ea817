// SPDX-License-Identifier: Apache-2.0
// The work map, the pieces and the order of merging are those of attend.cu; what differs is where rows lie and
// that nothing is fetched early.
#include <algorithm>
#include <limits>

#include "kernels/cuda/attend/attend_finish.cuh"
#include "kernels/cuda/attend/attend_generic.h"
#include "kernels/cuda/attend/attend_strided.h"
#include "kernels/cuda/attend/prefill.h"
#include "kernels/cuda/attend/split_plan.h"
#include "kernels/cuda/device/launch.cuh"

namespace lode::cuda {

namespace {

/// A list as TileLoop sees it.
struct StridedKeys {
  static constexpr bool kArriving = false;
  const std::int32_t* rows;
  const float* log_weights;
  int count;

  __device__ explicit StridedKeys(const StridedList& list)
      : rows(list.rows), log_weights(list.log_weights), count(list.count) {}
  __device__ int row(int key) const { return rows == nullptr ? key : rows[key]; }
  __device__ float weight(int key) const { return log_weights[key]; }
};

/// Rows of a head in a caller's arrays, whose keys and values have equal strides.
struct InArrays {
  static constexpr int kWidth = 0, kTurns = kWarps;  // heads are walked over whole
  unsigned row_places = 0;                           ///< from one row to the next, in 16 bytes
  std::int64_t to_values = 0;                        ///< bytes from a key to its value

  __device__ unsigned place(const Params&, int row) const { return static_cast<unsigned>(row) * row_places; }
  __device__ std::int64_t value_offset() const { return to_values; }
};

struct StridedParams {
  Params attend;
  StridedKv kv;
  StridedLists lists;
  InArrays in;
};

template <class T, int D, bool kWide>
__global__ void __launch_bounds__(kThreads, blocks_at_once(D))
    attend_strided_kernel(const __grid_constant__ StridedParams s) {
  using W = TileLoop<T, D, kWide, StridedKeys, tiles_of_list(D, kWide), InArrays>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  static_assert(kRing >= (kWide ? 16 : 8) * (D + 2) * 4);
  extern __shared__ __align__(16) char shared[];
  const Params& p = s.attend;
  const int query = blockIdx.z, part = blockIdx.x, warp = threadIdx.x / 32;
  const int heads = p.lists_per_head == 1 ? p.group : 1, head = blockIdx.y * heads;
  const std::int64_t first_row = std::int64_t{query} * p.queries.query_heads + head;
  const std::int64_t list = std::int64_t{query} * gridDim.y + blockIdx.y;
  const StridedKeys keys(s.lists.list(query, head, p.queries.query_heads, s.kv.rows - p.queries.count + 1));
  const Share share(p, keys.count, blockIdx.x, gridDim.x);
  if (share.has_none(keys.count)) return;
  W walk(p, keys);
  walk.rows_in = s.in;
  walk.base = s.kv.key(head / p.group, 0);
  walk.ring = shared_address(shared) + warp * kRing;
  walk.take(share.begin, share.end(keys.count));
  const int rows = walk.ask_rows();
  typename W::RawQueries raw;
  W::ask_queries(W::queries_at(p.queries.q + first_row * D), heads, raw);
  unsigned ticket = 0;
  if (keys.count > share.piece && threadIdx.x == 0) ticket = take_ticket(p, list);
  walk.begin(rows);
  walk.pack_queries(raw);
  Ending<D> ending(p, list, first_row, heads, part, shared);  // while tiles are under way
  walk.clear();
  ending.draw(ticket, share.parts(keys.count));
  walk.walk_on();
  walk.finish();
  walk.store(reinterpret_cast<float*>(shared + warp * kRing), heads);
  __syncthreads();
  ending.template run<kRing>();
}

template <class T, int D, bool kWide>
void launch(const StridedParams& s, StreamHandle stream) {
  using W = TileLoop<T, D, kWide, StridedKeys, tiles_of_list(D, kWide), InArrays>;
  constexpr int kShared = kWarps * W::kStages * W::kStageBytes;
  constexpr auto kernel = attend_strided_kernel<T, D, kWide>;
  reserve_once<kernel>(kShared, kShared, blocks_at_once(D));
  const Params& p = s.attend;
  const dim3 grid(static_cast<unsigned>(p.blocks),
                  static_cast<unsigned>(p.queries.layout.kv_heads * p.lists_per_head),
                  static_cast<unsigned>(p.queries.count));
  Launch(grid, kThreads, kShared, stream)(kernel, s);
}

template <class T, bool kWide>
bool launch_for_dim(const StridedParams& s, StreamHandle stream) {
  switch (s.attend.queries.layout.head_dim) {
    case 64:
      return launch<T, 64, kWide>(s, stream), true;
    case 80:
      return launch<T, 80, kWide>(s, stream), true;
    case 96:
      return launch<T, 96, kWide>(s, stream), true;
    case 128:
      return launch<T, 128, kWide>(s, stream), true;
    case 256:
      return launch<T, 256, kWide>(s, stream), true;
    default:
      return false;
  }
}

template <class T>
bool launch_for(const StridedParams& s, StreamHandle stream) {
  const bool wide = s.attend.group > 8 && s.attend.lists_per_head == 1;
  return wide ? launch_for_dim<T, true>(s, stream) : launch_for_dim<T, false>(s, stream);
}

bool aligned(const void* at, std::int64_t bytes = 0) {
  return (reinterpret_cast<std::uintptr_t>(at) | static_cast<std::uintptr_t>(bytes)) % 16 == 0;
}
bool rows_aligned(const StridedKv& kv) {
  return aligned(kv.k, kv.k_head | kv.k_row) && aligned(kv.v, kv.v_head | kv.v_row);
}

/// Whether the walk over tiles can read these arrays: 16 bytes at a time, and a value as far behind its key in
/// every row of a head.
bool takes_tiles(const Queries& queries, const StridedKv& kv) {
  const int group = queries.query_heads / queries.layout.kv_heads;
  const std::int64_t places = kv.rows * (kv.k_row / 16);
  return group <= 16 && kv.k_row == kv.v_row && kv.k_head == kv.v_head && rows_aligned(kv) && kv.k_row >= 0 &&
         places < std::numeric_limits<std::uint32_t>::max() && aligned(queries.q) && aligned(queries.o);
}

/// As many tokens as one launch takes.
void attend_some(const Queries& queries, const StridedKv& kv, const StridedLists& lists, void* workspace,
                 StreamHandle stream) {
  const int kv_heads = queries.layout.kv_heads;
  StridedParams s = {.attend = {.queries = queries}, .kv = kv, .lists = lists};
  s.in = {static_cast<unsigned>(kv.k_row / 16), kv.v - kv.k};
  s.attend.lists_per_head = lists.begins != nullptr ? std::max(1, lists.per_token / kv_heads) : 1;
  // Of others' streams nobody knows how many run at once, nor where a graph is replayed.
  share_out(s.attend, lists.begins != nullptr ? lists.longest : kv.rows, workspace, stream,
            /*may_wait=*/false);
  if (takes_tiles(queries, kv)) {
    if (queries.layout.type == DType::bf16 && launch_for<__nv_bfloat16>(s, stream)) return;
    if (queries.layout.type == DType::f16 && launch_for<__half>(s, stream)) return;
  }
  attend_generic(queries, kv, lists, stream);
}

/// Tokens [first, first + count) of all.
Queries some_of(const Queries& all, int first, int count) {
  const std::int64_t rows = std::int64_t{first} * all.query_heads, numbers = rows * all.layout.head_dim;
  Queries some = all;
  some.count = count;
  some.q += numbers;
  some.o += numbers;
  if (some.lse != nullptr) some.lse += rows;
  return some;
}

}  // namespace

void attend_strided(const Queries& queries, const StridedKv& kv, const StridedLists& lists, void* workspace,
                    StreamHandle stream) {
  for (int first = 0; first < queries.count; first += kMostStrided) {
    const int count = std::min(kMostStrided, queries.count - first);
    StridedKv of = kv;
    StridedLists listed = lists;
    if (lists.begins != nullptr)
      listed.begins += std::int64_t{first} * lists.per_token;
    else
      of.rows -= queries.count - first - count;  // causal: what the last of these tokens sees
    attend_some(some_of(queries, first, count), of, listed, workspace, stream);
  }
}

void attend_strided_prefill(const Queries& queries, const StridedKv& kv, StreamHandle stream) {
  if (queries.count == 0) return;
  const auto position = static_cast<std::int32_t>(kv.rows - queries.count);
  if (rows_aligned(kv) && aligned(queries.q) && aligned(queries.o) &&
      (attend_prefill_hopper(queries, position, {}, stream, &kv) ||
       attend_prefill_mma(queries, position, {}, stream, &kv)))
    return;
  attend_prefill_f32(queries, position, {}, stream, &kv);
}

namespace {

constexpr int kPackThreads = 256;

// A block copies a stretch of one list; where its list begins it finds from the lengths in front.
__global__ void pack_kernel(const __grid_constant__ GivenRows given, int lists, std::int64_t end,
                            std::int64_t* begins, std::int32_t* rows, float* log_weights) {
  const int list = static_cast<int>(blockIdx.y), count = given.counts[list];
  std::int64_t begin = 0;
  for (int i = 0; i < list; ++i) begin += given.counts[i];
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    begins[list] = begin;
    if (list + 1 == lists) begins[lists] = begin + count;
  }
  for (int i = static_cast<int>(blockIdx.x) * kPackThreads + static_cast<int>(threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x) * kPackThreads) {
    const std::int32_t row = given.rows[list][i];
    const bool there = row >= 0 && row < end;
    rows[begin + i] = there ? row : 0;
    log_weights[begin + i] = there ? 0.0f : NAN;
  }
}

}  // namespace

void pack_rows(const GivenRows& given, int lists, std::int64_t end, std::int64_t* begins, std::int32_t* rows,
               float* log_weights, StreamHandle stream) {
  const int longest = *std::max_element(given.counts, given.counts + lists);
  const dim3 grid(static_cast<unsigned>(std::clamp((longest + kPackThreads - 1) / kPackThreads, 1, 64)),
                  static_cast<unsigned>(lists));
  Launch(grid, kPackThreads, 0, stream)(pack_kernel, given, lists, end, begins, rows, log_weights);
}

}  // namespace lode::cuda
