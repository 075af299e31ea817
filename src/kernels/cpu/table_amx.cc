// SPDX-License-Identifier: Apache-2.0
// The kernels for AMX (tiles, bf16): prefill attention of its own, everything else as for AVX-512 with bf16.
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
#include "kernels/cpu/amx-inl.h"

namespace lode {

extern const KernelTable kAvx512Kernels;
const KernelTable& avx512bf16_kernels();

namespace {

void attend_causal_amx(const float* q, std::int64_t stride_q, int tokens, int group, Position first,
                       const KvRows& kv, std::int64_t begin, std::int64_t end, const SoftmaxState& state,
                       float* scratch) noexcept {
  const CausalTile tile = {q, stride_q, tokens, group, first};
  switch (kv.type) {
    case DType::f32:  // whoever stores float32 wants float32 arithmetic
      return kAvx512Kernels.attend_causal(q, stride_q, tokens, group, first, kv, begin, end, state, scratch);
    case DType::f16:
      return causal_on_tiles<DType::f16>(tile, kv, begin, end, state, scratch);
    case DType::bf16:
      return causal_on_tiles<DType::bf16>(tile, kv, begin, end, state, scratch);
    case DType::q8:
      return causal_on_tiles<DType::q8>(tile, kv, begin, end, state, scratch);
  }
}

std::int64_t causal_scratch_amx(int d, std::int64_t rows) noexcept {
  const std::int64_t tiles = AmxScratch::floats(d, rows), lanes = kAvx512Kernels.causal_scratch(d, rows);
  return tiles > lanes ? tiles : lanes;
}

}  // namespace

const KernelTable& amx_kernels() {
  static const KernelTable table = [] {
    KernelTable t = avx512bf16_kernels();
    t.name = "amx";
    t.attend_causal = attend_causal_amx;
    t.causal_scratch = causal_scratch_amx;
    t.causal_rows = 512;  // over which one transposition of the values is spread
    return t;
  }();
  return table;
}

}  // namespace lode
