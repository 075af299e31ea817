// SPDX-License-Identifier: Apache-2.0
// The bodies of all kernels, after one vec_*.h and before the table that names them. Each table_*.cc includes
// it once and is compiled with its own flags; internal linkage keeps the copies apart.
#pragma once

#include "kernels/cpu/simd/exp-inl.h"
//
#include "kernels/cpu/attend-inl.h"
//
#include "kernels/cpu/gemv-inl.h"
#include "kernels/cpu/tile-inl.h"

#define LODE_KERNEL_TABLE(table_name)                                                                        \
  {                                                                                                          \
    .name = table_name, .attend_run = attend_run, .attend_rows = attend_rows, .score_run = score_run,        \
    .score_attended = score_run, .score_rows = score_rows, .attend_causal = attend_causal,                   \
    .causal_scratch = causal_scratch, .causal_rows = 4 * kPanel, .gemv = gemv, .dot = dot, .assign = assign, \
    .widen = widen, .read = read_bytes, .narrow = narrow                                                     \
  }
