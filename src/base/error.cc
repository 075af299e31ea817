// SPDX-License-Identifier: Apache-2.0
#include "lodestone/error.h"

#include <cstdio>
#include <cstdlib>

namespace lode {

void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "lodestone: a bug: %s does not hold at %s:%d\n", condition, file, line);
  std::abort();
}

}  // namespace lode
