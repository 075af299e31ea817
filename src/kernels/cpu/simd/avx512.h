// SPDX-License-Identifier: Apache-2.0
// The intrinsics of AVX-512.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// g++ 12's own headers start some intrinsics from a variable that they leave undefined on purpose, and warn
// of it when inlined here.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
