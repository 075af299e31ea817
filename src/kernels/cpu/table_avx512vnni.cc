// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512 with VNNI: decode attention over rows of q8 of its own, everything else as for AVX-512.
#include "kernels/cpu/simd/vec_avx512.h"
// What this table takes from that of AVX-512 is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/simd/exp-inl.h"
#include "kernels/cpu/simd/quads_avx512.h"
//
#include "kernels/cpu/attend-inl.h"
//
#include "kernels/cpu/attend_q8-inl.h"

namespace lode {

extern const KernelTable kAvx512Kernels;

namespace {

void attend_run_vnni(const float* q, int queries, const KvRows& kv, std::int64_t begin, std::int64_t end,
                     const SoftmaxState& state) noexcept {
  if (kv.type != DType::q8) return kAvx512Kernels.attend_run(q, queries, kv, begin, end, state);
  attend_q8(q, queries, kv, RunRows{begin}, nullptr, end - begin, state);
}
void attend_rows_vnni(const float* q, int queries, const KvRows& kv, const Position* rows,
                      const float* log_weights, std::int64_t count, const SoftmaxState& state) noexcept {
  if (kv.type != DType::q8)
    return kAvx512Kernels.attend_rows(q, queries, kv, rows, log_weights, count, state);
  attend_q8(q, queries, kv, ListRows{rows}, log_weights, count, state);
}

}  // namespace

const KernelTable& avx512vnni_kernels() {
  static const KernelTable table = [] {
    KernelTable t = kAvx512Kernels;
    t.name = "avx512vnni";
    t.attend_run = attend_run_vnni;
    t.attend_rows = attend_rows_vnni;
    return t;
  }();
  return table;
}

}  // namespace lode
