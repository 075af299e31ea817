// SPDX-License-Identifier: Apache-2.0
// Work map: as decode attention over lists (attend.cu), piece by piece and with the same bits, over lists
// that the kernel in front still writes. Blocks that find room beside it attend the rows that have come, so
// that memory is not idle while a choice is counted out; the others follow as its blocks end. Blocks of all
// lists lie side by side in the grid: it is the beginning of each list that is attended first.
#include <algorithm>

#include "kernels/cuda/attend/attend_finish.cuh"
#include "kernels/cuda/attend/split_plan.h"
#include "kernels/cuda/device/hopper.cuh"

namespace lode::cuda {

namespace {

constexpr int kDim = 128;  // what lists are written for early

struct ArrivingParams {
  Params attend;
  ArrivingRows lists;
};

struct ArrivingKeys {
  static constexpr bool kArriving = true;
  static constexpr const float* log_weights = nullptr;
  std::int32_t* rows = nullptr;
  int sink = 0, listed = 0, window_begin = 0, count = 0;

  __device__ ArrivingKeys(const ArrivingRows& lists, const QueryToken& token, int list) {
    const int all = token.position + 1;
    sink = static_cast<int>(min(lists.sink, std::int64_t{all}));
    window_begin = static_cast<int>(max(std::int64_t{sink}, all - lists.window));
    const int far = min(load_here(lists.budgets), window_begin - sink);
    listed = max(0, static_cast<int>(min(std::int64_t{far}, lists.capacity)));
    count = sink + listed + (all - window_begin);
    rows = lists.rows + std::int64_t{list} * lists.capacity - sink;
  }
  __device__ bool in_list(int key) const { return key >= sink && key < sink + listed; }
  __device__ int row(int key) const {
    if (in_list(key)) return ask_row(rows + key);
    return key < sink ? key : key - sink - listed + window_begin;
  }
  __device__ void leave(int key) const {
    if (in_list(key)) rows[key] = kNotYet;
  }
  __device__ static float weight(int) { return 0.0f; }
};

template <class T>
__global__ void __launch_bounds__(kThreads, blocks_at_once(kDim))
    attend_arriving_kernel(const __grid_constant__ ArrivingParams a) {
  using W = TileLoop<T, kDim, false, ArrivingKeys, tiles_of_list(kDim, false)>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  extern __shared__ __align__(16) char shared[];
  const Params& p = a.attend;
  const int kv_head = blockIdx.x, part = blockIdx.y;
  release_successor();
  const QueryToken token = p.queries.tokens[0];
  const int heads = p.group, warp = threadIdx.x / 32;
  const std::int64_t first_row = std::int64_t{kv_head} * heads;
  const ArrivingKeys keys(a.lists, token, kv_head);
  const Share share(p, keys.count, blockIdx.y, gridDim.y);
  if (share.has_none(keys.count)) return;
  W walk(p, keys);
  typename W::RawQueries raw;
  W::template ask_queries<true>(W::queries_at(p.queries.q + first_row * kDim), heads, raw);
  walk.base = load_here(p.queries.bases + token.sequence) + p.queries.layer_offset +
              kv_head * p.queries.layout.head_stride();
  walk.take(share.begin, share.end(keys.count));
  walk.ring = shared_address(shared) + warp * kRing;
  unsigned ticket = 0;
  if (keys.count > share.piece && threadIdx.x == 0) ticket = take_ticket(p, kv_head);
  walk.begin(walk.ask_rows());
  walk.pack_queries(raw);  // while the first tiles are under way
  Ending<kDim> ending(p, kv_head, first_row, heads, part, shared);
  walk.clear();
  ending.draw(ticket, share.parts(keys.count));
  walk.walk_on();
  walk.finish();

  wait_for_predecessor();  // who waits for this kernel waits for that one, too
  walk.store(reinterpret_cast<float*>(shared + warp * kRing), heads);
  __syncthreads();
  ending.template run<kRing>();
}

template <class T>
void launch(const ArrivingParams& a, StreamHandle stream) {
  using W = TileLoop<T, kDim, false, ArrivingKeys, tiles_of_list(kDim, false)>;
  constexpr int kShared = kWarps * W::kStages * W::kStageBytes;
  constexpr auto kernel = attend_arriving_kernel<T>;
  reserve_once<kernel>(kShared, kShared, blocks_at_once(kDim));
  const Queries& queries = a.attend.queries;
  const dim3 grid(static_cast<unsigned>(queries.layout.kv_heads), static_cast<unsigned>(a.attend.blocks));
  EarlyLaunch(grid, kThreads, kShared, 1, stream)(kernel, a);
}

}  // namespace

bool can_attend_arriving(const Queries& queries) {
  const KvLayout& layout = queries.layout;
  const bool narrow = layout.type == DType::bf16 || layout.type == DType::f16;
  return has_clusters() && queries.count == 1 && narrow && !layout.shared_rows && layout.head_dim == kDim &&
         queries.query_heads / layout.kv_heads <= 8;
}

void attend_arriving_decode(const Queries& queries, const ArrivingRows& rows, std::int64_t max_tokens,
                            void* workspace, StreamHandle stream) {
  ArrivingParams a = {.attend = {.queries = queries}, .lists = rows};
  share_out(a.attend, std::min(max_tokens, rows.sink + rows.capacity + rows.window), workspace, stream);
  queries.layout.type == DType::bf16 ? launch<__nv_bfloat16>(a, stream) : launch<__half>(a, stream);
}

}  // namespace lode::cuda
