// SPDX-License-Identifier: Apache-2.0
// Decode attention where lists have more pieces together than there are blocks at once: lists of each query
// head, or of several tokens, or short stretches of keys of many tokens, without lists.
//
// Work map: as many blocks as run at once share out the pieces of all lists, those of a list beside one
// another, by the tiles that they have. A block's warps walk from piece to piece without a pause: keys of the
// next piece are on their way while the last ones of this are attended. A piece that holds nothing but sink
// or window is walked once for all lists of a KV head, where these are of equal length, since then they are
// cut alike.
//
// Which pieces there are, which tiles of a piece make up a state and in which order states are merged is as
// in attend.cu, so outputs have the same bits: those of a list do not depend on how many there are.
//
//   piece -> four sequences of tiles, each by another warp -> states in shared memory -> who comes last
//   merges the four and posts -> the blocks that started last merge what was posted, of all lists
//
// The shares depend on all lengths, so they are worked out before the kernel in front has ended, from the
// lengths that are there then: those of the step before as a rule, and they stay. Where one has changed, all
// of it is done again.
//
// A block waits for others only when all of its own pieces are posted, and no more than half of those that
// run at once do so before all have started: the others find room, also beside a second stream's that wait.
// In further streams only the block that started last waits (sm_count.h).
#include <algorithm>

#include "kernels/cuda/attend/attend_finish.cuh"
#include "kernels/cuda/attend/attend_many.h"
#include "kernels/cuda/attend/split_plan.h"
#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/device/sm_count.h"

namespace lode::cuda {

namespace {

constexpr int kMostGroup = 8;   // query heads of a KV head
constexpr int kItems = 32;      // pieces that a block knows of at a time
constexpr int kPieceTiles = 2;  // what a piece costs besides its tiles

struct ManyParams {
  Params attend;
  int units = 0;         ///< query tokens x KV heads
  int units_of_row = 0;  ///< that a row of the grid takes
  int mergers = 1;       ///< blocks of a row that merge
  unsigned step = 0;     ///< 2^32 / blocks of a row
};

/// A piece of a list, or of all lists of a KV head.
struct Item {
  Keys keys;
  const char* base;  // of sequence, layer and KV head
  int begin, end;    // of the keys
  int unit, first_head, heads;
  int part, parts;
};

/// Pieces beside one another that a thread knows of: those of a list, or what all lists of a unit share.
struct Stretch {
  Keys keys;
  const char* base = nullptr;
  int unit = 0, which = 0, first_head = 0, heads = 0;  ///< number `which` of the unit
  int piece = 0, parts = 1;
  int items = 0, front = 0, skipped = 0;  ///< parts front, front + 1, ... are numbered skipped higher

  __device__ int part(int i) const { return i < front ? i : i + skipped; }
  __device__ int weight() const { return piece / kTile + kPieceTiles; }
  __device__ Item item(int i) const {
    const int at = part(i), begin = at * piece;
    return {.keys = keys,
            .base = base,
            .begin = begin,
            .end = min(keys.count, begin + piece),
            .unit = unit,
            .first_head = first_head,
            .heads = heads,
            .part = at,
            .parts = parts};
  }
};

/// Stretches of a unit: its list, or what its lists share and each of them.
__device__ __forceinline__ int stretches_of_unit(const Params& p) {
  return p.lists_per_head == 1 ? 1 : p.lists_per_head + 1;
}

struct Shared {
  Item items[kItems];
  int parts[kThreads], listed[kThreads];  // of each stretch: its list's pieces and far keys
  int2 of_warps[kWarps];
  int range[2];  // the block's items
  unsigned ticket;
  SharedBarrier full, empty;  // states of a piece are there; their place is free
};

/// a / b, where that is below 2^20.
__device__ __forceinline__ int divided(int a, int b) {
  int q = __float2int_rz(__int2float_rz(a) * __frcp_rn(__int2float_rz(b)));
  const int rest = a - q * b;
  q += rest >= b ? 1 : 0;
  return q - (rest < 0 ? 1 : 0);
}

template <class T, int D>
class Many {
 public:
  using W = TileLoop<T, D, false>;
  static constexpr int kRing = W::kStages * W::kStageBytes;
  static constexpr int kStep = kWarps * kTile;

  /// Of a warp's state of so many heads, in shared memory.
  __host__ __device__ static int state_bytes(int heads) { return (heads * (D + 2) * 4 + 15) / 16 * 16; }

  __device__ Many(const ManyParams& params, Shared& shared, char* memory, Keys& keys, W& walk)
      : p_(params.attend),
        many_(params),
        s_(shared),
        slots_(memory + kWarps * kRing),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        keys_(keys),
        walk_(walk) {
    walk_.ring = shared_address(memory) + warp_ * kRing;
  }

  /// What of this is read before the wait is read again behind it.
  __device__ __forceinline__ void run() {
    find_unit();
    if (threadIdx.x == 0) s_.full.init(kWarps), s_.empty.init(1);
    unsigned ticket = 0;
    int listed = listed_now(), now = listed;
#pragma unroll 1
    for (bool waited = false;;) {
      find_stretch(listed);
      share_out_items();
      fill_table(s_.range[0]);
      if (!waited) {
        wait_for_predecessor();
        release_successor();
        waited = true;
        if (threadIdx.x == 0) ticket = take_ticket(p_, blockIdx.y);
        now = listed_now();
      }
      start_walk(s_.range[0]);
      if (__syncthreads_or(now != listed ? 1 : 0) == 0) break;
      listed = now;
    }
    int from = s_.range[0];
    while (count_ > 0) {
      walk_over();
      __syncthreads();
      from += kItems;
      if (from >= s_.range[1]) break;
      fill_table(from);
      start_walk(from);
    }
    if (threadIdx.x == 0) s_.ticket = ticket;
    __syncthreads();
    merge(static_cast<int>(gridDim.x - 1 - s_.ticket));
  }

 private:
  __device__ int first_unit() const {
    return static_cast<int>(blockIdx.y) * many_.units_of_row;
  }
  __device__ int units() const {
    return min(many_.units_of_row, many_.units - first_unit());
  }

  /// The unit of this thread's stretch, and where its keys lie: nothing of it changes in a step.
  __device__ __forceinline__ void find_unit() {
    const int each = stretches_of_unit(p_), of_row = static_cast<int>(threadIdx.x) / each;
    if (of_row >= units()) return;
    const int kv_heads = p_.queries.layout.kv_heads;
    own_.unit = first_unit() + of_row;
    own_.which = static_cast<int>(threadIdx.x) - of_row * each;
    own_.heads = own_.which == 0 ? p_.group : 1;
    own_.first_head = max(0, own_.which - 1);
    const QueryToken token = p_.queries.tokens[own_.unit / kv_heads];
    position_ = token.position;
    own_.base = load_here(p_.queries.bases + token.sequence) + p_.queries.layer_offset +
                own_.unit % kv_heads * p_.queries.layout.head_stride();
  }

  /// How many keys the list of this thread's stretch has now; before the wait that may be any number.
  __device__ __forceinline__ int listed_now() const {
    if (own_.base == nullptr || !p_.has_lists) return 0;
    const int count = __ldcg(p_.lists.counts + std::int64_t{own_.unit} * p_.lists_per_head + own_.first_head);
    return max(0, min(count, static_cast<int>(p_.lists.capacity)));
  }

  __device__ __forceinline__ void find_stretch(int listed) {
    const int each = stretches_of_unit(p_);
    s_.listed[threadIdx.x] = listed;
    __syncthreads();
    if (own_.base == nullptr) return;
    const bool shared = each > 1 && own_.which == 0;
    bool alike = each > 1;
    const int* const of_unit = s_.listed + threadIdx.x - own_.which;
#pragma unroll 1
    for (int i = 1; i < each; ++i) alike = alike && of_unit[i] == listed;
    own_.keys = Keys(p_, position_, std::int64_t{own_.unit} * p_.lists_per_head + own_.first_head, listed);
    const int count = own_.keys.count;
    own_.piece = piece_of(count, p_.reciprocal, p_.blocks);
    own_.parts = max(1, divided(count + own_.piece - 1, own_.piece));
    // Parts [begin, end) are of this list alone.
    const int begin = alike ? divided(own_.keys.sink, own_.piece) : 0,
              end = alike ? divided(own_.keys.sink + listed + own_.piece - 1, own_.piece) : own_.parts;
    own_.front = shared ? begin : 0, own_.skipped = shared ? end - begin : begin;
    own_.items = shared ? own_.parts - (end - begin) : end - begin;
    s_.parts[threadIdx.x] = own_.parts;
  }

  /// Numbers of this block's items in range[], and of this thread's first one.
  __device__ __forceinline__ void share_out_items() {
    int2 sum = {own_.items, own_.items * own_.weight()};
    const int items = sum.x, weights = sum.y;
    sum = {sum_up_to(sum.x, lane_), sum_up_to(sum.y, lane_)};
    if (lane_ == 31) s_.of_warps[warp_] = sum;
    __syncthreads();
    int2 all = {};
    sum.x -= items, sum.y -= weights;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int2 other = s_.of_warps[w];
      if (w < warp_) sum.x += other.x, sum.y += other.y;
      all.x += other.x, all.y += other.y;
    }
    before_ = sum.x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool to_end = blockIdx.x + i == gridDim.x;
      const int bound =
          static_cast<int>(__umulhi(static_cast<unsigned>(all.y), (blockIdx.x + i) * many_.step));
      const int ahead = bound - sum.y;
      if (to_end && threadIdx.x == 0) s_.range[i] = all.x;
      if (!to_end && ahead >= 0 && ahead < weights)
        s_.range[i] = sum.x + divided(ahead + own_.weight() - 1, own_.weight());
    }
    __syncthreads();
  }

  /// The block's items from number `from` of the row on, as many as there is room for.
  __device__ __forceinline__ void fill_table(int from) {
    const int end = min(min(from + kItems, s_.range[1]), before_ + own_.items);
#pragma unroll 1
    for (int i = max(from, before_); i < end; ++i) s_.items[i - from] = own_.item(i - before_);
    __syncthreads();
  }

  /// Warps take turns with the four sequences of tiles, since the first may be a tile longer than the last.
  __device__ int turn(int item) const {
    return (warp_ + before_chunk_ + item) % kWarps;
  }
  __device__ int first_key(int item) const {
    return s_.items[item].begin + turn(item) * kTile;
  }
  /// The next item in which this warp has a tile.
  __device__ __forceinline__ int busy(int item) const {
#pragma unroll 1
    while (item < count_ && first_key(item) >= s_.items[item].end) ++item;
    return item;
  }

  /// The rows of the next two tiles, as TileLoop::row_of has them; pairs end with their item.
  __device__ __forceinline__ int look_up() {
    if (looked_ == count_) return -1;
    const Item& item = s_.items[looked_];
    const int key = looked_key_ + lane_ / kTile * kStep + lane_ % kTile;
    const int row = key < item.end ? item.keys.row(key) : -1;
    looked_key_ += 2 * kStep;
    if (looked_key_ >= item.end) {
      looked_ = busy(looked_ + 1);
      if (looked_ < count_) looked_key_ = first_key(looked_);
    }
    return row;
  }

  __device__ __forceinline__ void fetch_next() {
    if (fetched_ < count_) {
      const Item& item = s_.items[fetched_];
      walk_.base = item.base;
      if (!odd_) walk_.places = walk_.place_of(rows_);
      walk_.copy_tile(walk_.ring + tiles_ % W::kStages * W::kStageBytes, odd_ ? kTile : 0);
      ++tiles_;
      fetched_key_ += kStep;
      const bool over = fetched_key_ >= item.end;
      if (odd_ || over) rows_ = walk_.rows_behind, walk_.rows_behind = look_up();
      odd_ = !odd_ && !over;
      if (over) {
        fetched_ = busy(fetched_ + 1);
        if (fetched_ < count_) fetched_key_ = first_key(fetched_);
      }
    }
    asm volatile("cp.async.commit_group;");
  }

  /// Returns this warp's first key of the item.
  __device__ __forceinline__ int begin(int at) {
    const Item& item = s_.items[at];
    if (item.unit != unit_) {
      unit_ = item.unit;
      typename W::RawQueries raw;
      W::ask_queries(W::queries_at(p_.queries.q + std::int64_t{unit_} * p_.group * D), p_.group, raw);
      walk_.pack_queries(raw);
    }
    keys_ = item.keys;
    walk_.end = item.end;
    walk_.clear();
    return first_key(at);
  }

  /// Asks for the first rows of the items in the table, which begins with number `from` of the row.
  __device__ __forceinline__ void start_walk(int from) {
    count_ = min(kItems, s_.range[1] - from), before_chunk_ = from - s_.range[0];
    odd_ = false, tiles_ = 0, unit_ = -1;
    looked_ = fetched_ = busy(0);
    if (looked_ < count_) looked_key_ = fetched_key_ = first_key(looked_);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) rows_ = walk_.rows_behind, walk_.rows_behind = look_up();
  }

  __device__ __forceinline__ void walk_over() {
    int item = -1, key = 0;
    walk_.end = 0;
#pragma unroll 1
    for (int tile = -1;; ++tile) {
      fetch_next();
      if (tile < 0) continue;
#pragma unroll 1
      while (key >= walk_.end) {
        if (item >= 0) finish(item);
        if (++item == count_) break;
        key = begin(item);
      }
      if (item == count_) break;
      asm volatile("cp.async.wait_group %0;" ::"n"(W::kStages - 1) : "memory");
      __syncwarp();
      walk_.attend_tile(walk_.ring + tile % W::kStages * W::kStageBytes, key);
      key += kStep;
      __syncwarp();  // all have read the stage before the next fetch overwrites it
    }
    asm volatile("cp.async.wait_all;");
  }

  /// The warp's state of an item to shared memory; who comes last merges the four.
  __device__ __forceinline__ void finish(int at) {
    const Item& item = s_.items[at];
    const int number = before_chunk_ + at;
    walk_.finish();
    const int heads = item.heads, stride = state_bytes(heads);
    char* const states = slots_;
    if (number > 0) s_.empty.wait((number - 1) % 2);
    walk_.store(reinterpret_cast<float*>(states + turn(at) * stride), heads, item.first_head);
    __syncwarp();  // lane 0 arrives for all of them, which racecheck takes for a race
    unsigned missing = 0;
    if (lane_ == 0) missing = s_.full.arrive_and_count();
    if (__shfl_sync(~0u, missing, 0) != 1) return;
    s_.full.wait(number % 2);
    const int columns = heads * D / 4;
    if (item.parts == 1) {
#pragma unroll 1
      for (int column = lane_; column < columns; column += 32)
        write_result<D>(p_, std::int64_t{item.unit} * p_.group, item.first_head * D / 4 + column,
                        merge_warps(StateAt<D>(states, heads, column), stride));
      __syncwarp();
      if (lane_ == 0) s_.empty.arrive();
    } else if (columns <= 32) {
      post<1>(item, states, 0);
    } else {
#pragma unroll 1
      for (int column = 0; column < columns; column += 4 * 32) post<4>(item, states, column);
    }
  }
  /// Columns from `first` on, kAtOnce of each lane; with the last of them their place is free.
  template <int kAtOnce>
  __device__ __forceinline__ void post(const Item& item, const char* states, int first) {
    const int columns = item.heads * D / 4, stride = state_bytes(item.heads);
    Record sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      sum[i] = merge_warps(StateAt<D>(states, item.heads, min(first + 32 * i + lane_, columns - 1)), stride);
    __syncwarp();
    if (lane_ == 0 && first + 32 * kAtOnce >= columns) s_.empty.arrive();
    const Posted posted = posted_of(item.unit);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int column = first + 32 * i + lane_;
      if (column < columns) posted.place(item.first_head * D / 4 + column, item.part).post(sum[i]);
    }
  }
  __device__ __forceinline__ Posted posted_of(int unit) const {
    return {p_.posted + std::int64_t{unit} * (p_.group * D / 16) * p_.most_parts * 6, p_.most_parts};
  }

  __device__ int parts_of(int of_row, int group) const {
    const int each = stretches_of_unit(p_);
    return s_.parts[of_row * each + (each > 1 ? 1 + group * 16 / D : 0)];
  }
  /// What blocks of this row posted; `to_come` of them started later than this one.
  __device__ __forceinline__ void merge(int to_come) const {
    if (to_come >= many_.mergers) return;
    if (to_come == 0 && threadIdx.x == 0) p_.tickets[blockIdx.y] = 0;
    if (p_.most_parts <= kSubs * kFew)
      merge_apart_of_warps<kFew>(to_come);
    else
      merge_apart_of_warps<kAhead>(to_come);
    if (p_.blocks <= kMostApart) return;
    const int groups = p_.group * D / 16;
    for (int i = to_come; i < units() * groups; i += many_.mergers) {
      const int unit = first_unit() + i / groups, parts = parts_of(i / groups, i % groups);
      if (parts > kMostApart)
        merge_jointly<D>(p_, posted_of(unit).of(i % groups, sub_of_block()), std::int64_t{unit} * p_.group,
                         i % groups, parts);
    }
  }
  /// Where a warp merges by itself: it asks for the records of the next group of columns before it has those
  /// of this.
  template <int kMost>
  __device__ __forceinline__ void merge_apart_of_warps(int to_come) const {
    const int groups = p_.group * D / 16, all = units() * groups, step = many_.mergers * kWarps;
    Taking<kMost> next;
#pragma unroll 1
    for (int at = to_come * kWarps + warp_ - step; at < all; at += step) {
      Taking<kMost> taking = next;
      next = {};
      if (at + step < all) {
        const int of_row = (at + step) / groups, group = at + step - of_row * groups,
                  parts = parts_of(of_row, group);
        if (parts > 1 && parts <= kMostApart) {
          next.start(posted_of(first_unit() + of_row).of(group, sub_of_warp()), parts, sub_of_warp(), kSubs);
          next.ask();
        }
      }
      if (taking.first == nullptr) continue;
      taking.look();
      while (taking.missing != 0) taking.ask(), taking.look();
      __syncwarp();  // all four columns have the m and l
      const Record sum = taking.take();
      const int of_row = at / groups;
      if (lane_ < 4)
        write_result<D>(p_, std::int64_t{first_unit() + of_row} * p_.group,
                        (at - of_row * groups) * 4 + lane_, sum);
    }
  }

  const Params& p_;
  const ManyParams& many_;
  Shared& s_;
  char* const slots_;
  const int warp_, lane_;
  Keys& keys_;  ///< of the item that is attended
  W& walk_;
  Stretch own_;
  int position_ = 0, before_ = 0;
  int count_ = 0, before_chunk_ = 0;  ///< items in the table, and before them
  int looked_ = 0, looked_key_ = 0;   ///< the item and tile whose rows are asked for next
  int fetched_ = 0, fetched_key_ = 0, tiles_ = 0;
  int rows_ = -1;     ///< of the pair that is fetched
  bool odd_ = false;  ///< the second of a pair is fetched next
  int unit_ = -1;     ///< whose queries the registers hold
};

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 2) attend_many_kernel(const __grid_constant__ ManyParams p) {
  extern __shared__ __align__(16) char memory[];
  __shared__ __align__(16) char shared[sizeof(Shared)];
  Keys keys;
  typename Many<T, D>::W walk(p.attend, keys);
  Many<T, D>(p, *reinterpret_cast<Shared*>(shared), memory, keys, walk).run();
}

template <class T, int D>
int shared_bytes(int group) {
  using M = Many<T, D>;
  return kWarps * (M::kRing + M::state_bytes(group));
}

/// The largest group with which a processor holds two blocks. Where it holds one, blocks of two streams that
/// wait could fill all processors, and those that they wait for would never start.
template <class T, int D>
int most_group() {
  static PerDevice<int> most;
  return most.get([] {  // once: streams of other models launch, too
    const auto kernel = attend_many_kernel<T, D>;
    const auto two_fit = [&](int group) {
      const int shared = shared_bytes<T, D>(group);
      int blocks = 0;
      return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) ==
                 cudaSuccess &&
             cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads,
                                                           static_cast<std::size_t>(shared)) == cudaSuccess &&
             blocks >= 2;
    };
    int group = kMostGroup;
    while (group > 0 && !two_fit(group)) --group;
    static_cast<void>(cudaGetLastError());  // more shared memory than there is: an answer
    return group;
  });
}

template <class T, int D>
bool launch(ManyParams m, StreamHandle stream) {
  const auto kernel = attend_many_kernel<T, D>;
  const Params& p = m.attend;
  if (p.group > most_group<T, D>()) return false;
  const int shared = shared_bytes<T, D>(p.group);
  prefer_shared_percent(reinterpret_cast<const void*>(kernel),
                        carveout_for(shared + static_cast<int>(sizeof(Shared)), 2));
  const int each = p.lists_per_head == 1 ? 1 : p.lists_per_head + 1;
  m.units = p.queries.count * p.queries.layout.kv_heads;
  const int most = kThreads / each, rows = (m.units + most - 1) / most;
  m.units_of_row = (m.units + rows - 1) / rows;
  const int blocks = std::max(1, 2 * processors() / rows);
  m.step = blocks == 1 ? 0 : static_cast<unsigned>((std::int64_t{1} << 32) / blocks);
  m.mergers = may_wait_for_room(stream) ? std::min(blocks, std::max(1, processors() / rows)) : 1;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(rows));
  EarlyLaunch(grid, kThreads, shared, 1, stream)(kernel, m);
  return true;
}

template <class T>
bool launch_for_dim(const ManyParams& m, StreamHandle stream) {
  switch (m.attend.queries.layout.head_dim) {
    case 64:
      return launch<T, 64>(m, stream);
    case 128:
      return launch<T, 128>(m, stream);
    default:
      return false;
  }
}

}  // namespace

bool attend_many(const Params& p, StreamHandle stream) {
  const std::int64_t lists = std::int64_t{p.queries.count} * p.queries.layout.kv_heads * p.lists_per_head;
  // Without lists a block for each piece fetches early; only many rounds of blocks cost more than that gains.
  const int least = p.has_lists ? 3 : 12;
  if (p.group > kMostGroup || lists * p.blocks < std::int64_t{least} * processors()) return false;
  const ManyParams m = {.attend = p};
  if (p.queries.layout.type == DType::bf16) return launch_for_dim<__nv_bfloat16>(m, stream);
  if (p.queries.layout.type == DType::f16) return launch_for_dim<__half>(m, stream);
  return false;
}

}  // namespace lode::cuda
