// SPDX-License-Identifier: Apache-2.0
// lodestone chat, as main.cc registers it.
#pragma once

#include <CLI/CLI.hpp>

namespace lode::cli {

void add_chat(CLI::App& app);

}  // namespace lode::cli
