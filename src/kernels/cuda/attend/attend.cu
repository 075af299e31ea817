// SPDX-License-Identifier: Apache-2.0
// Decode attention over stored rows, bound by the bytes of keys and values.
//
// Work map: grid (blocks that share a list, KV heads x lists, query tokens), kWarps warps a block. The keys
// of a list (sink, rows, window, in that order) are cut into pieces that depend on their number alone; a
// block owns one, its warps take tiles of 16 keys in turn (tile_loop.cuh). A block merges the states of its
// warps in shared memory and posts the result; the blocks of the list that started last merge what all have
// posted (attend_merge.cuh). The order of merging is fixed. Many lists go to blocks that take several pieces
// (attend_many.cu), with the same bits.
//
// The block that started last waits only for blocks that run already; those a few places before it may wait
// for some that have not started, but they are never more than half as many as there are processors, in all
// lists together, so that the others find room, also beside a second stream's that wait. In further streams
// no block waits so (sm_count.h).
//
// Launched while the kernel in front still runs: where tokens and keys stand is looked up at once. Keys that
// no list names are fetched, but for the newest one, which this step writes; where several tokens come with a
// step, the first ones are brought into the second-level cache alone, where writes meet, so that nothing
// stale can come of it. Everything else is read once the kernel in front has ended. The kernel behind may
// start then, or at once where there are many short pieces.
#include <algorithm>

#include "kernels/cuda/attend/attend_beside.h"
#include "kernels/cuda/attend/attend_finish.cuh"
#include "kernels/cuda/attend/attend_generic.h"
#include "kernels/cuda/attend/attend_large.h"
#include "kernels/cuda/attend/attend_latent.h"
#include "kernels/cuda/attend/attend_many.h"
#include "kernels/cuda/attend/split_plan.h"
#include "kernels/cuda/device/hopper.cuh"

namespace lode::cuda {

namespace {

/// Brings the first tile of each of the block's warps into the second-level cache, where all keys are
/// attended.
template <int D>
__device__ __forceinline__ void prefetch_first(const Params& p, const char* from, int keys) {
  constexpr int kLine = 128, kLines = (D * 2 + kLine - 1) / kLine;  // of a row; rows need not start a line
  const int begin = Share(p, keys, blockIdx.x, gridDim.x).begin, end = min(keys, begin + kLeastKeys);
  for (int i = threadIdx.x; i < kLeastKeys * kLines; i += kThreads) {
    const int key = begin + i / kLines;
    if (key >= end) break;
    const char* const at = from + key / kBlockTokens * p.queries.layout.block_stride() +
                           key % kBlockTokens * (D * 2) + i % kLines * kLine;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at + p.queries.layout.value_offset()));
  }
}

/// Many short pieces, of lists of so many keys, in blocks that leave room for as many of the kernel behind.
/// What that one fetches early would hold up this one's records, unless it comes while this one itself still
/// waits.
__device__ __forceinline__ bool are_many_short(const Params& p, int keys) {
  constexpr int kFewBlocks = 64;
  return keys <= p.beside && std::int64_t{keys} * gridDim.y > kFewBlocks * kLeastKeys;
}

/// Where the newest key of a token is among the first tiles of a warp, which are fetched before it is there.
template <class W>
struct Newest {
  int tile, key;
  bool here;

  __device__ __forceinline__ Newest(const W& walk, int position) {
    const int behind = position - walk.first;
    tile = behind / (kWarps * kTile), key = behind % (kWarps * kTile);
    here = behind >= 0 && tile < W::kStages && key < kTile && position < walk.end;
  }
  /// Of lanes that have the rows of two tiles.
  __device__ bool of_lane() const { return here && static_cast<int>(threadIdx.x) % 32 == tile * kTile + key; }
  __device__ __forceinline__ void bring(const W& walk, int position) const {
    asm volatile("cp.async.wait_all;" ::: "memory");  // zeros in its place, of whichever lane
    __syncwarp();
    walk.copy_key(walk.ring + tile * W::kStageBytes, key, position);
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
};

template <class T, int D, bool kWide, bool kListed>
__global__ void __launch_bounds__(kThreads, blocks_at_once(D))
    attend_kernel(const __grid_constant__ Params p) {
  using W = TileLoop<T, D, kWide, Keys, kListed ? tiles_of_list(D, kWide) : 2>;
  constexpr int kRing = W::kStages * W::kStageBytes;
  static_assert(kRing >= (kWide ? 16 : 8) * (D + 2) * 4);
  // Rows that begin with a cache line: what is fetched of one brings nothing of the next.
  constexpr bool kLinesApart = D % 64 == 0;
  extern __shared__ __align__(16) char shared[];
  const int query = blockIdx.z, part = blockIdx.x, warp = threadIdx.x / 32;
  const QueryToken token = p.queries.tokens[query];
  const int kv_head = p.lists_per_head == 1 ? blockIdx.y : blockIdx.y / p.lists_per_head;
  const int heads = p.lists_per_head == 1 ? p.group : 1;
  const std::int64_t first_row = std::int64_t{query} * p.queries.query_heads + blockIdx.y * heads;
  const std::int64_t list = std::int64_t{query} * gridDim.y + blockIdx.y;
  Keys keys;
  W walk(p, keys);
  walk.base = load_here(p.queries.bases + token.sequence) + p.queries.layer_offset +
              kv_head * p.queries.layout.head_stride();
  walk.ring = shared_address(shared) + warp * kRing;
  Share share;
  const auto take = [&](int listed) {
    keys = Keys(p, token.position, list, listed);
    share = Share(p, keys.count, blockIdx.x, gridDim.x);
    walk.take(share.begin, share.end(keys.count));
  };
  typename W::RawQueries raw;
  const float* queries_at = W::queries_at(p.queries.q + first_row * D);
  unsigned ticket = 0;
  const auto ask_ticket = [&] {
    if (keys.count > share.piece && threadIdx.x == 0) ticket = take_ticket(p, list);
  };
  if constexpr (!kListed) {
    take(0);
    if (share.has_none(keys.count)) return;
    const bool early = kLinesApart && p.queries.count == 1, at_once = early && are_many_short(p, keys.count);
    if (at_once) release_successor();
    const Newest newest(walk, token.position);
    int rows = walk.ask_rows();
    if (early && newest.of_lane()) rows = -1;
    if (early)
      walk.begin(rows);
    else
      prefetch_first<D>(p, walk.base, token.position + 1);
    asm volatile("" : "+l"(queries_at));  // worked out here
    wait_for_predecessor();
    if (!at_once) release_successor();
    W::ask_queries(queries_at, heads, raw), ask_ticket();
    if (!early)
      walk.begin(rows);
    else if (newest.here)
      newest.bring(walk, token.position);
  } else {
    // As if the list were full, until its length is there.
    const auto full = static_cast<int>(p.lists.capacity);
    take(full);
    typename W::RowAt first = walk.row_at(0), second = walk.row_at(1);
    const std::int32_t* count_at = p.lists.counts + list;
    asm volatile("" : "+l"(first.at), "+r"(first.row), "+l"(count_at));  // worked out here
    asm volatile("" : "+l"(second.at), "+r"(second.row), "+l"(queries_at));
    wait_for_predecessor();
    release_successor();
    int rows = first.ask();
    const int listed = load_here(count_at);
    walk.rows_behind = second.ask();
    W::ask_queries(queries_at, heads, raw);
    if (listed != full) take(listed), rows = walk.ask_rows();
    if (share.has_none(keys.count)) return;
    ask_ticket();
    walk.begin(rows);
  }
  walk.pack_queries(raw);
  const int parts = share.parts(keys.count);
  Ending<D> ending(p, list, first_row, heads, part, shared);  // while tiles are under way
  walk.clear();
  if constexpr (kListed) ending.draw(ticket, parts);
  walk.walk_on();
  walk.finish();

  walk.store(reinterpret_cast<float*>(shared + warp * kRing), heads);
  if constexpr (kListed)
    __syncthreads();
  else
    ending.draw(ticket, parts);
  ending.template run<kRing>();
}

template <class T, int D, bool kWide, bool kListed>
void launch(const Params& p, StreamHandle stream) {
  using W = TileLoop<T, D, kWide, Keys, kListed ? tiles_of_list(D, kWide) : 2>;
  constexpr int kShared = kWarps * W::kStages * W::kStageBytes;
  constexpr auto kernel = attend_kernel<T, D, kWide, kListed>;
  reserve_once<kernel>(kShared, kShared, blocks_at_once(D));
  const dim3 grid(static_cast<unsigned>(p.blocks),
                  static_cast<unsigned>(p.queries.layout.kv_heads * p.lists_per_head),
                  static_cast<unsigned>(p.queries.count));
  EarlyLaunch(grid, kThreads, kShared, 1, stream)(kernel, p);
}

template <class T, int D, bool kWide>
void launch(const Params& p, StreamHandle stream) {
  p.has_lists ? launch<T, D, kWide, true>(p, stream) : launch<T, D, kWide, false>(p, stream);
}

template <class T, bool kWide>
bool launch_for_dim(const Params& p, StreamHandle stream) {
  switch (p.queries.layout.head_dim) {
    case 64:
      return launch<T, 64, kWide>(p, stream), true;
    case 80:
      return launch<T, 80, kWide>(p, stream), true;
    case 96:
      return launch<T, 96, kWide>(p, stream), true;
    case 128:
      return launch<T, 128, kWide>(p, stream), true;
    case 256:
      return launch<T, 256, kWide>(p, stream), true;
    default:
      return false;
  }
}

template <class T>
bool launch_for(const Params& p, StreamHandle stream) {
  const bool wide = p.group > 8 && p.lists_per_head == 1;
  return wide ? launch_for_dim<T, true>(p, stream) : launch_for_dim<T, false>(p, stream);
}

/// `may_wait`: blocks may wait for others of their launch that have not started.
void attend(const Queries& queries, const RowLists* lists, std::int64_t max_tokens, void* workspace,
            StreamHandle stream, bool may_wait = true) {
  if (queries.count == 0) return;
  if (queries.layout.shared_rows) {
    if (!attend_latent_decode(queries, lists, max_tokens, workspace, stream))
      attend_generic(queries, lists, stream);
    return;
  }
  Params p = {.queries = queries, .has_lists = lists != nullptr};
  std::int64_t most_keys = max_tokens;
  if (lists != nullptr) {
    p.lists = *lists;
    p.lists_per_head = lists->lists_per_head;
    most_keys = std::min(max_tokens, lists->sink + lists->capacity + lists->window);
  }
  share_out(p, most_keys, workspace, stream, may_wait);
  constexpr std::int64_t kMostShort = 1 << 14;  // keys; pieces of more keep a block of their own busy
  if (may_wait && (lists != nullptr || most_keys <= kMostShort) && attend_many(p, stream)) return;
  if (attend_large(p, stream)) return;
  if (p.group <= 16 && queries.layout.type == DType::bf16 && launch_for<__nv_bfloat16>(p, stream)) return;
  if (p.group <= 16 && queries.layout.type == DType::f16 && launch_for<__half>(p, stream)) return;
  attend_generic(queries, lists, stream);
}

}  // namespace

void attend_full_decode(const Queries& queries, std::int64_t max_tokens, void* workspace,
                        StreamHandle stream) {
  attend(queries, nullptr, max_tokens, workspace, stream);
}

void attend_full_beside(const Queries& queries, std::int64_t max_tokens, void* workspace,
                        StreamHandle stream) {
  attend(queries, nullptr, max_tokens, workspace, stream, /*may_wait=*/false);
}

void attend_rows_decode(const Queries& queries, const RowLists& lists, std::int64_t max_tokens,
                        void* workspace, StreamHandle stream) {
  attend(queries, &lists, max_tokens, workspace, stream);
}

}  // namespace lode::cuda
