// SPDX-License-Identifier: Apache-2.0
// Where a context's text comes from, as sections of its file: sources (JSON) and places [marks] of PlaceMark.
#pragma once

#include <filesystem>
#include <string_view>

#include "io/container.h"
#include "lodestone/documents.h"

namespace lode {

struct StoredSource {
  SourceText source;
  std::int64_t first_token = 0;
};

/// Adds the text, and where it comes from if that is known.
void add_source(ContainerWriter& out, std::string_view text, const SourceText* source,
                std::int64_t first_token);
/// InputError naming the section when it is malformed or does not fit the text.
StoredSource read_source(const ContainerReader& file, const std::filesystem::path& path);

}  // namespace lode
