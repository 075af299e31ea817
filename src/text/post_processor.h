// SPDX-License-Identifier: Apache-2.0
// The "post_processor" of tokenizer.json, as far as a decoder-only model needs it: which tokens stand before
// a text.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "lodestone/types.h"

namespace lode {

/// `json` may be null. InputError names a component that is unknown or that puts tokens elsewhere.
std::vector<TokenId> read_prefix(const Json& json, const std::string& where);

}  // namespace lode
