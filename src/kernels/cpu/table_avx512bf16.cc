// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512 with bf16 products: attention of its own in prefill, and in decode over rows of
// bf16; everything else as for AVX-512.
#include "kernels/cpu/simd/vec_avx512.h"
// What this table takes from that of AVX-512 is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/simd/bf16_avx512.h"
#include "kernels/cpu/simd/exp-inl.h"
#include "kernels/cpu/simd/transpose_avx512.h"
//
#include "kernels/cpu/attend-inl.h"
#include "kernels/cpu/tile-inl.h"
//
#include "kernels/cpu/attend_causal_bf16-inl.h"
//
#include "kernels/cpu/attend_bf16-inl.h"

namespace lode {

const KernelTable& avx512vnni_kernels();

namespace {

void attend_run_bf16(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                     const SoftmaxState& state) noexcept {
  if (kv.type != DType::bf16) return avx512vnni_kernels().attend_run(q, queries, kv, begin, end, state);
  attend_bf16(q, queries, kv, RunRows{begin}, nullptr, end - begin, state);
}
void attend_rows_bf16(const float* q, int queries, const KvRows& kv, const Position* rows,
                      const float* log_weights, std::int64_t count, const SoftmaxState& state) noexcept {
  if (kv.type != DType::bf16)
    return avx512vnni_kernels().attend_rows(q, queries, kv, rows, log_weights, count, state);
  attend_bf16(q, queries, kv, ListRows{rows}, log_weights, count, state);
}

}  // namespace

const KernelTable& avx512bf16_kernels() {
  static const KernelTable table = [] {
    KernelTable t = avx512vnni_kernels();
    t.name = "avx512bf16";
    t.attend_run = attend_run_bf16;
    t.attend_rows = attend_rows_bf16;
    t.attend_causal = attend_causal_bf16;
    t.causal_scratch = causal_scratch_bf16;
    t.causal_rows = 512;  // over which one transposition of the values is spread
    return t;
  }();
  return table;
}

}  // namespace lode
