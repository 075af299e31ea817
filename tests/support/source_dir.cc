// SPDX-License-Identifier: Apache-2.0
#include "support/source_dir.h"

namespace lode {

std::filesystem::path source_dir() {
  return LODESTONE_SOURCE_DIR;
}

}  // namespace lode
