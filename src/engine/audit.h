// SPDX-License-Identifier: Apache-2.0
// The run-time check: on a sample of sparse attention calls, the exact output too, and how far apart they
// are.
#pragma once

#include "lodestone/engine.h"
#include "model/llama.h"

namespace lode {

/// Hooks that audit a share `rate` of the sparse calls into `report` and pass everything on to `next` (may be
/// null). Which calls are taken depends on seed, layer and position alone. `report` and `next` outlive the
/// hooks.
ForwardHooks audit_hooks(double rate, std::uint64_t seed, const ForwardHooks* next, WorkReport& report);

/// |a - exact| / |exact| over n numbers; 0 when both are zero.
double relative_error(const float* a, const float* exact, std::int64_t n);

}  // namespace lode
