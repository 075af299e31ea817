// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

namespace lode {

/// The project's folder. One object file knows it, so that all others are the same wherever the project lies and a compiler
/// cache serves every copy of it.
std::filesystem::path source_dir();

}  // namespace lode
