// SPDX-License-Identifier: Apache-2.0
// The models of a server, by ids that clients use.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lodestone/engine.h"

namespace lode::serve {

/// Those that are named; without any, those that the `.lode` files of `contexts` name and that are still there.
/// InputError when there is none.
std::vector<std::string> paths_of_models(const std::vector<std::string>& named,
                                         const std::filesystem::path& contexts);
/// An id is the folder's name.
std::vector<std::pair<std::string, std::shared_ptr<const Model>>> load_models(
    const std::vector<std::string>& paths, int threads);

}  // namespace lode::serve
