// SPDX-License-Identifier: Apache-2.0
// Messages of a conversation, as every protocol brings them, and the stored document among them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "serve/backend.h"
#include "serve/fields.h"

namespace lode::serve {

/// What a reply says about reuse.
struct Reuse {
  std::string how;  ///< "named", "recognised" or "none"
  std::string why;  ///< why nothing was reused; empty otherwise
};

/// The text of "content": a string, or a list of parts {"type": "text", "text"}; Anthropic's documents of plain text
/// are parts, too. ApiError 400 on others (images, tools).
std::string content_text(const Fields& message, const char* key);

/// The turns of "messages". ApiError 400 when there is none, or the last is not the user's.
std::vector<Turn> read_turns(const Fields& body);

/// Where no context is named: finds a stored document in the turns, takes it out of them, and names it.
Reuse find_document(Backend& backend, Question& question);

/// How much the model is to think: low, medium or high, which stands for what is above it, too; empty: not at all, as
/// minimal says. ApiError 400 on another word.
std::string effort_of(const Fields& fields, const char* key);

/// `context`, `cachedContent`, `attention`, `exact`: fields that are ours, in every protocol.
void read_own_fields(const Fields& body, Question& question);

/// The "lodestone" member of a reply.
Json own_member(const Answer& answer, const Reuse& reuse);
/// The sources that weigh most, in Anthropic's citation shape.
Json citations(const Answer& answer);

}  // namespace lode::serve
