// SPDX-License-Identifier: Apache-2.0
// A source of its own: every commit compiles it anew.
#include "commit.h"

#include "lodestone_commit.h"

namespace lode::cli {

std::string built_commit() {
  return LODESTONE_COMMIT;
}

}  // namespace lode::cli
