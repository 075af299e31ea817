// SPDX-License-Identifier: Apache-2.0
// Attention on the GPU. Everything is enqueued on a stream, needs no host plan, reads its counts on the
// device, and so can be captured in a graph once and replayed while sequences grow. Deterministic: the bits
// of one query depend on that query and its keys alone, not on the batch, its neighbours or the position in
// it.
#pragma once

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/layout.h"

namespace lode::cuda {

/// How a forward pass computes: exact = float32 everywhere (parity with the CPU's float32 path); fast = on
/// the matrix unit with float32 accumulation. There the inputs of up to kFusedRows rows keep 16 bits of
/// mantissa; those of more are rounded to the type of the weights (to TF32 where that is f32).
enum class Precision { exact, fast };

/// Where one query token stands. Device memory.
struct QueryToken {
  std::int32_t sequence = 0;  ///< index into `bases`
  std::int32_t position = 0;  ///< its own key and value are at this row; keys [0, position] exist
};

/// Query tokens of any sequences, and the KV of one layer; device memory. Decode reads `tokens`, `bases` and
/// earlier steps' keys before kernels in front have ended: a copy or plain launch wrote them or came since.
struct Queries {
  const QueryToken* tokens = nullptr;  // [N]
  const char* const* bases = nullptr;  // [sequences] first byte of each sequence's range
  std::int64_t layer_offset = 0;       ///< bytes from a base to this layer
  KvLayout layout;
  int count = 0;             // N
  int query_heads = 0;       // Hq; group of 1 to 16
  float scale = 1.0f;        ///< of q.k
  const float* q = nullptr;  // [N, Hq, d] after RoPE
  float* o = nullptr;        // [N, Hq, d]
  float* lse = nullptr;      // [N, Hq], null when not wanted
};

/// Far keys chosen on the device: for each list, counts[list] rows. Lists are ordered [N, Hkv,
/// lists_per_head]; with lists_per_head = G every query head has its own, with 1 the group shares one.
struct RowLists {
  const std::int32_t* rows =
      nullptr;  // [lists, capacity] unique, in any order; where they stand decides the last bits
  const std::int32_t* counts = nullptr;  // [lists], at most capacity
  const float* log_weights = nullptr;    // [lists, capacity] added to the scores, or null
  std::int64_t capacity = 0;
  int lists_per_head = 1;
  std::int64_t sink = 0, window = 0;   ///< attended besides: [0, sink) and (position - window, position]
  const float* tail_output = nullptr;  // [N, Hq, d] merged last, or null
  const float* tail_lse = nullptr;     // [N, Hq]
};

/// Device memory that one call needs for partial results; zeroed once by its owner, left zeroed by every call
/// (a place says by itself whether its number has come).
std::int64_t decode_workspace_bytes(int queries, int query_heads, int kv_heads, int head_dim);

/// Every query attends all of its keys [0, position]. `max_tokens` bounds position + 1 over the life of a
/// graph: grids are made for it, the work is cut by the counts on the device. (More keys than that are
/// attended too, by too few blocks and with other last bits.)
void attend_full_decode(const Queries& queries, std::int64_t max_tokens, void* workspace,
                        StreamHandle stream);

/// Every query attends sink, its lists and its window. The same kernel and splits as attend_full_decode when
/// a list holds every far key, so gives its bits.
void attend_rows_decode(const Queries& queries, const RowLists& lists, std::int64_t max_tokens,
                        void* workspace, StreamHandle stream);

/// Far keys of one query token for every KV head, attended while the kernel in front still writes them: so
/// many as the budget and the far keys of the query allow. All places hold bytes of kEmptyPlaces at first,
/// and are left so by every call.
struct ArrivingRows {
  std::int32_t* rows = nullptr;           // [Hkv, capacity]
  const std::int32_t* budgets = nullptr;  // of the token; written by copies and plain launches
  std::int64_t capacity = 0, sink = 0, window = 0;
};
inline constexpr unsigned kEmptyPlaces = 0x80;

/// The query attends sink, its lists and its window, with the bits of attend_rows_decode. To be launched
/// directly behind the kernel that writes the lists, which must have waited for what was in front of it
/// before it let this one start. For one token, and only where can_attend_arriving says so.
bool can_attend_arriving(const Queries& queries);
void attend_arriving_decode(const Queries& queries, const ArrivingRows& rows, std::int64_t max_tokens,
                            void* workspace, StreamHandle stream);

/// Dense causal attention of `count` consecutive tokens of one sequence, the first at `position`, for
/// prefill. q, o as in Queries (float32 in and out). Fast and a store of bf16 or f16: on the matrix unit with
/// operands of the store's type; else float32 arithmetic.
void attend_prefill(const Queries& queries, std::int32_t position, StreamHandle stream,
                    Precision precision = Precision::fast);

}  // namespace lode::cuda
