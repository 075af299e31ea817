// SPDX-License-Identifier: Apache-2.0
// The step that finishes queries, keys and values, from what a forward pass asks for.
#pragma once

#include "kernels/cuda/linear/linear_steps.cuh"

namespace lode::cuda {

QkvStep<float> qkv_step_of(const Linear::QkvArguments& arguments, const Queries& where);

}  // namespace lode::cuda
