// SPDX-License-Identifier: Apache-2.0
// JSON schemas as grammars of the texts that meet them: the part of JSON Schema that structured outputs use.
#pragma once

#include <string>
#include <string_view>

#include "serve/schema/grammar.h"

namespace lode::serve {

struct SchemaGrammar {
  Grammar grammar;
  Grammar::Rule start = 0;
};

/// type (also a list), properties (in their order), required, additionalProperties: false, items, minItems, maxItems,
/// minLength, maxLength, enum, const (with a type), anyOf, oneOf (read as anyOf), $ref to #, #/$defs and #/definitions;
/// `{}` = any JSON value. ApiError 400 names another keyword that would constrain the text, one that would not be kept to
/// beside another, and a schema that nothing meets.
SchemaGrammar grammar_of_schema(std::string_view schema);
/// Any JSON object.
SchemaGrammar grammar_of_object();

}  // namespace lode::serve
