// SPDX-License-Identifier: Apache-2.0
// Any text as JSON: refused, or the same after writing and reading again.
#include "base/json.h"

#include "fuzz/target.h"

LODE_FUZZ_TARGET(json) {
  const lode::Json json = lode::parse_json(input, "fuzz");
  LODE_ASSERT(lode::parse_json(json.dump(), "fuzz") == json);
}
