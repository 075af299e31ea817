// SPDX-License-Identifier: Apache-2.0
// What an earlier file already holds of a text that is to be indexed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "lodestone/engine.h"

namespace lode {

/// Tokens that both begin with, cut at a whole chunk unless they are the same.
std::int64_t kept_tokens(std::span<const TokenId> stored, std::span<const TokenId> wanted,
                         std::int64_t chunk);

/// Keeps the longest beginning of `tokens` that the context at `path` holds, cut at a whole prefill chunk, so
/// that reading on gives the keys that one reading of all gives, to the bit. `specs` are attached; their
/// indexes are the file's where most of the text is kept and it has them, and else built anew. Nothing, and
/// `why`, where nothing can be kept: another model or setting, another beginning, or a method that learns
/// from the prefill and is not in the file.
std::optional<Context> reuse_context(const std::filesystem::path& path, std::shared_ptr<const Model> model,
                                     const ContextOptions& options, std::span<const TokenId> tokens,
                                     std::span<const Spec> specs, std::string& why);

}  // namespace lode
