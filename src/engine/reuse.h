// SPDX-License-Identifier: Apache-2.0
// What an earlier file already holds of a text that is to be indexed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "engine/context_file.h"
#include "lodestone/engine.h"

namespace lode {

/// How many of `tokens` need not be read again where a file has this meta and these tokens: those that both begin with,
/// cut at a whole prefill chunk unless they are the same. 0, and `why`, where nothing can be kept.
std::int64_t reusable_tokens(const ContextMeta& meta, std::span<const TokenId> stored, const Model& model,
                             const ContextOptions& options, std::span<const TokenId> tokens,
                             std::string& why);

/// Keeps the longest beginning of `tokens` that the context at `path` holds, cut at a whole prefill chunk, so
/// that reading on gives the keys that one reading of all gives, to the bit. `specs` are attached; their
/// indexes are the file's where most of the text is kept and it has them, and else built anew. Nothing, and
/// `why`, where nothing can be kept: another model or setting, another beginning, or a method that learns
/// from the prefill and is not in the file.
std::optional<Context> reuse_context(const std::filesystem::path& path, std::shared_ptr<const Model> model,
                                     const ContextOptions& options, std::span<const TokenId> tokens,
                                     std::span<const Spec> specs, std::string& why);

}  // namespace lode
