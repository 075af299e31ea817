// SPDX-License-Identifier: Apache-2.0
// Which files of a folder are read, and in which order.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "lodestone/documents.h"

namespace lode {

struct FolderListing {
  std::vector<std::string> files;   ///< below the folder, with /, in the order in which they are read
  std::vector<UnreadFile> skipped;  ///< links, and what could not be looked into
  std::vector<std::string> remarks;
};

/// The files of a folder and those below it. Of a git repository, those that git knows and those it does not
/// ignore, the ones that changed in many of its last commits behind the others; elsewhere all but hidden ones,
/// in the order of their names, numbers by value. Links are not followed. InputError when there are more than
/// 65,536.
FolderListing list_folder(const std::filesystem::path& folder, const ReadOptions& options);

/// Whether a path below a folder is wanted: by one of `include`, if there are any, and by none of `exclude`.
/// A glob without / goes by the file's name; * takes / too.
bool is_wanted(const std::string& path, const ReadOptions& options);

/// "chapter 2" before "chapter 10".
bool natural_less(std::string_view a, std::string_view b);

}  // namespace lode
