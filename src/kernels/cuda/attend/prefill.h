// SPDX-License-Identifier: Apache-2.0
// The kernels behind attend_prefill and attend_rows_prefill. A block walks over its head's list, then over
// the keys from `near` on, the last of them behind the diagonal.
#pragma once

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/attend_strided.h"

namespace lode::cuda {

/// What queries attend: their head's list, and [near, position]. By default all keys.
struct PrefillKeys {
  const std::int32_t* rows = nullptr;    // [Hkv, capacity] in front of near
  const std::int32_t* counts = nullptr;  // [Hkv], null: no lists
  std::int64_t capacity = 0;
  int sink = 0;  ///< rows [0, sink) come in front of the lists
  int near = 0;
  int window = 0;  ///< of [near, position] the last so many alone; 0 = all
  int all = 0;     ///< every query sees just keys [0, all), which are cut into the parts; 0 = as above
  int parts = 1;  ///< into which lists are cut, so many planes of o and lse; the last one takes near keys too

#ifdef __CUDACC__
  /// The first key from `near` on that a query at this position sees.
  __device__ __forceinline__ int near_of(int position) const {
    return window > 0 ? max(near, position + 1 - window) : near;
  }
  /// The keys behind lists that a part has of those which queries at positions from `first` to `last` see.
  __device__ __forceinline__ int2 near_keys(int part, int first, int last) const {
    if (all > 0) {
      const int each = ((all + 127) / 128 + parts - 1) / parts * 128, begin = min(all, part * each);
      return make_int2(begin, min(all, begin + each));
    }
    return part + 1 < parts ? make_int2(0, 0) : make_int2(near_of(first), last + 1);
  }
  /// Which places of a head's list a part takes, sink included; cut at multiples of 128.
  __device__ __forceinline__ int2 places(int kv_head, int part) const {
    if (counts == nullptr) return make_int2(0, 0);
    const int all = sink + counts[kv_head], each = ((all + 127) / 128 + parts - 1) / parts * 128;
    const int begin = min(all, part * each);
    return make_int2(begin, min(all, begin + each));
  }
  __device__ __forceinline__ int row(int kv_head, int place) const {
    return place < sink ? place : __ldg(rows + kv_head * capacity + place - sink);
  }
#endif
};

#ifdef __CUDACC__
/// Where a kernel finds rows: in the layer of the engine's range that its queries name, or in a caller's arrays.
struct LayerRows {
  const char* layer;
  KvLayout layout;

  /// A key, or with `value` of 1 its value.
  __device__ __forceinline__ const char* at(int kv_head, std::int64_t row, int value) const {
    return layer + layout.key_offset(kv_head, row) + value * layout.value_offset();
  }
};
struct StridedRows {
  StridedKv kv;

  __device__ __forceinline__ const char* at(int kv_head, std::int64_t row, int value) const {
    return value != 0 ? kv.value(kv_head, row) : kv.key(kv_head, row);
  }
};
struct InLayer {
  __device__ __forceinline__ LayerRows rows(const Queries& in) const {
    return {in.bases[in.tokens[0].sequence] + in.layer_offset, in.layout};
  }
};
struct InCallersArrays {
  StridedKv kv;
  __device__ __forceinline__ StridedRows rows(const Queries&) const { return {kv}; }
};
#endif

inline constexpr int kMostPrefillDim = 512;  // of a key's numbers; latent rows may have 640

/// Any store, head dimension up to kMostPrefillDim and group, in float32. Here and below `kv`, if not null, is where keys and
/// values lie in place of the queries' layer.
void attend_prefill_f32(const Queries& queries, std::int32_t position, const PrefillKeys& keys,
                        StreamHandle stream, const StridedKv* kv = nullptr);

/// On the matrix unit, for stores of bf16 and f16 and heads of 64, 80, 96, 128, 256 or 512 numbers; false, and
/// nothing is enqueued, for others and where shared memory is too small.
bool attend_prefill_mma(const Queries& queries, std::int32_t position, const PrefillKeys& keys,
                        StreamHandle stream, const StridedKv* kv = nullptr);

/// The same by Hopper's own instructions, for heads of 128 numbers; false where this is another GPU or
/// another head. Rows of a caller's arrays begin at multiples of 16 bytes.
bool attend_prefill_hopper(const Queries& queries, std::int32_t position, const PrefillKeys& keys,
                           StreamHandle stream, const StridedKv* kv = nullptr);

}  // namespace lode::cuda
