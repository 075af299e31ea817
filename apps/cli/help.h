// SPDX-License-Identifier: Apache-2.0
// How --help looks, and what is said of words that are no verb or flag.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lode::cli {

/// Every option shows its default. To be called before verbs are added, which inherit it.
void set_help_style(CLI::App& app);

/// The one sentence for arguments that could not be parsed: what was expected, what was found, and a guess.
std::string usage_error(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv);

}  // namespace lode::cli
