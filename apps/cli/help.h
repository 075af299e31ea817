// SPDX-License-Identifier: Apache-2.0
// How --help looks, and what is said of words that are no verb or flag.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>

namespace lode::cli {

/// The words in lines as wide as the terminal (80 columns elsewhere), all but the first behind `indent`
/// blanks; the first goes on in that column.
std::string wrapped(std::string_view words, std::size_t indent);

/// Every option shows its default. To be called before verbs are added, which inherit it.
void set_help_style(CLI::App& app);

/// The one sentence for arguments that could not be parsed: what was expected, what was found, and a guess.
std::string usage_error(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv);

}  // namespace lode::cli
