// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace lode::cli {

/// The commit that this program was built from, with -dirty behind it where its source differed from that;
/// "unknown" where there was no repository (cmake/commit.cmake).
std::string built_commit();

}  // namespace lode::cli
