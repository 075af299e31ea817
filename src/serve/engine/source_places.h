// SPDX-License-Identifier: Apache-2.0
// Where in a document the passages lie that an answer attended to.
#pragma once

#include <string>
#include <vector>

#include "lodestone/document.h"
#include "lodestone/sources.h"
#include "serve/backend.h"

namespace lode::serve {

/// A text that came as it is: one file of this name, with lines.
SourceText plain_source(std::string text, const std::string& title);
/// Says where a document's text comes from, before anybody else has it.
/// `first_token`: how many tokens stand in front of the text.
void keep_source(const Document& document, SourceText source, std::int64_t first_token);

/// At most `count`, heaviest first. `neutral`: what a question that asks for nothing attends to, which is taken off; may
/// be null.
std::vector<Source> sources_of(const Document& document, const SourceMass& mass, const SourceMass* neutral,
                               std::size_t count);

}  // namespace lode::serve
