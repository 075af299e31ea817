// SPDX-License-Identifier: Apache-2.0
// What writers leave behind that were killed while they wrote.
#pragma once

#include <filesystem>
#include <string_view>

namespace lode {

/// Removes the temporaries of dead writers (AtomicFile) of files that end in `extension`, such as ".lode". Those of
/// writers that are alive stay, and so does everything else.
void remove_leftovers(const std::filesystem::path& folder, std::string_view extension);
/// The same of one temporary; true when it has been removed.
bool remove_if_dead(const std::filesystem::path& path);

}  // namespace lode
