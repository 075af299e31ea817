// SPDX-License-Identifier: Apache-2.0
// How decode attention shares the keys of a list out over blocks, and its workspace over lists.
#pragma once

#include "kernels/cuda/attend/tile_loop.cuh"
#include "kernels/cuda/device/per_device.h"

namespace lode::cuda {

constexpr int kLeastKeys = kWarps * kTile;  // of a piece

/// Heads of so many numbers are walked over in slices (attend_large.cu).
constexpr int kLargeDim = 512;

/// Blocks that a processor works on at once.
constexpr int blocks_at_once(int head_dim) {
  return head_dim <= 128 || head_dim == kLargeDim ? 2 : 1;
}

/// Tiles of a list that a warp has under way. With one, more of a processor's memory is left as cache, where
/// all that is under way has a place first: scattered rows gain more by that than by depth.
constexpr int tiles_of_list(int head_dim, bool wide) {
  return !wide && head_dim >= 128 ? 1 : 2;
}

/// Keys of a piece of a list of so many: whole tiles, a tile for each warp or more.
__device__ __forceinline__ int piece_of(int keys, unsigned reciprocal, int blocks) {
  const unsigned even = __umulhi(static_cast<unsigned>(keys), reciprocal) + 1;
  const int piece = max(kLeastKeys, static_cast<int>((even + kTile - 1) / kTile * kTile));
  // Blocks are enough, unless there are more keys than was said.
  return std::int64_t{piece} * blocks >= keys ? piece : (keys + blocks - 1) / blocks;
}

/// The share of block `part` of `blocks` in a list's keys.
struct Share {
  int piece = 1, begin = 0;

  __device__ Share() {}
  __device__ __forceinline__ Share(const Params& p, int keys, unsigned part, unsigned blocks)
      : piece(piece_of(keys, p.reciprocal, static_cast<int>(blocks))),
        begin(static_cast<int>(part) * piece) {}
  __device__ bool has_none(int keys) const { return begin >= keys && begin > 0; }
  __device__ int end(int keys) const { return min(keys, begin + piece); }
  __device__ int parts(int keys) const { return max(1, (keys + piece - 1) / piece); }
};

/// 2^32 / parts, rounded up, as piece_of takes it.
unsigned reciprocal_of(int parts);

/// Fills in the group, the parts of a list of so many keys at most, how many of its blocks merge in this
/// stream (one unless `may_wait`), and the places of the workspace. RunError where it has none for so many
/// query heads.
void share_out(Params& p, std::int64_t most_keys, void* workspace, StreamHandle stream, bool may_wait = true);

/// Shared memory of a processor, in percent of the most there can be, so that just so many blocks fit: what
/// is left of it is cache, and all bytes under way to shared memory have a place there first.
int carveout_for(int shared, int blocks);

/// Reserves `shared` bytes for a block of this kernel, and room for as many blocks as given of `occupied`
/// bytes (carveout_for).
void reserve_shared(const void* kernel, int shared, int occupied, int blocks);
/// At the first launch of the kernel on a device.
template <auto kKernel>
void reserve_once(int shared, int occupied, int blocks) {
  static PerDevice<bool> reserved;
  reserved.get([=] {
    reserve_shared(reinterpret_cast<const void*>(kKernel), shared, occupied, blocks);
    return true;
  });
}

}  // namespace lode::cuda
