// SPDX-License-Identifier: Apache-2.0
// A text that ranks have read together, written by all of them.
#pragma once

#include <filesystem>

#include "base/communicator.h"
#include "lodestone/document.h"
#include "lodestone/engine.h"

namespace lode {

/// Each rank writes its shard; when all are there, rank 0 writes the file that lists them, with the text of the context
/// and `attachments`, which it alone need have. Until then nothing has changed for who opens it, and what was written
/// goes again if that fails. Shards of an earlier text of that name go when the new list stands.
void save_shards(const Context& context, const std::filesystem::path& path, const Attachments& attachments,
                 Communicator& ranks);

/// Removes shards that no text lists since the ranks that wrote them were killed, and says how many. Shards that are
/// being written stay, and so do those of which it cannot be known.
std::size_t remove_dead_shards(const std::filesystem::path& folder);

}  // namespace lode
