// SPDX-License-Identifier: Apache-2.0
// Products of many rows in bf16 for AMX.
#include "kernels/cpu/simd/amx_tiles.h"
#include "kernels/cpu/simd/codes_avx512.h"
#include "kernels/cpu/simd/transpose_avx512.h"
//
#include "kernels/cpu/simd/bf16_avx512.h"
// What other kernels take from these headers is not used here.
#pragma GCC diagnostic ignored "-Wunused-function"
//
#include "kernels/cpu/bf16_product-inl.h"

namespace lode {

extern const Bf16ProductKernels kAmxBf16Products;
constinit const Bf16ProductKernels kAmxBf16Products = {
    pack_input_tiles,
    pack_weight_tiles,
    {nullptr, nullptr, nullptr, unpack_tile<WeightType::q8_0>, unpack_tile<WeightType::q4_0>,
     unpack_tile<WeightType::q4_1>, unpack_tile<WeightType::q5_0>, unpack_tile<WeightType::q5_1>,
     unpack_tile<WeightType::q2_k>, unpack_tile<WeightType::q3_k>, unpack_tile<WeightType::q4_k>,
     unpack_tile<WeightType::q5_k>, unpack_tile<WeightType::q6_k>, unpack_tile<WeightType::iq4_nl>,
     unpack_tile<WeightType::iq4_xs>, unpack_tile<WeightType::iq3_s>, unpack_tile<WeightType::iq3_xxs>,
     unpack_tile<WeightType::mxfp4>},
    multiply_panels};

}  // namespace lode
