// SPDX-License-Identifier: Apache-2.0
// Coded products on any machine.
#include "kernels/cpu/select/int8_dot-inl.h"

namespace lode {

extern const Int8DotKernels kScalarInt8Dot;
constinit const Int8DotKernels kScalarInt8Dot = {"scalar", score_coded};

}  // namespace lode
