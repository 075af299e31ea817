// SPDX-License-Identifier: Apache-2.0
// Any text as an attention spec: refused, or a spec whose canonical form means the same.
#include "lodestone/spec.h"

#include "fuzz/target.h"

LODE_FUZZ_TARGET(spec) {
  const lode::Spec spec = lode::parse_spec(input);
  const lode::Spec again = lode::parse_spec(spec.str());
  LODE_ASSERT(again.str() == spec.str() && again.dense_layers == spec.dense_layers);
  LODE_ASSERT(spec.dense.window >= 1);
}
