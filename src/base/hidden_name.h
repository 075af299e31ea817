// SPDX-License-Identifier: Apache-2.0
// Files that a program keeps beside the one that it makes, and that it finds again by its name.
#pragma once

#include <climits>
#include <filesystem>
#include <string>

#include "base/hash.h"

namespace lode {

/// ".NAME.KIND" beside the file. Names that are nearly as long as a name may be are hashed.
inline std::filesystem::path hidden_beside(const std::filesystem::path& file, const std::string& kind) {
  const std::string name = file.filename().string();
  const std::string whole = "." + name + "." + kind;
  return file.parent_path() / (whole.size() <= NAME_MAX ? whole : "." + hash_hex(name) + "." + kind);
}

}  // namespace lode
