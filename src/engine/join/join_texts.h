// SPDX-License-Identifier: Apache-2.0
// One context of several texts that were read apart, so that a question attends to all of them at once.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "lodestone/document.h"
#include "lodestone/engine.h"

namespace lode {

struct JoinedTexts {
  Context context;
  Attachments attachments;  ///< of the first file, without what was measured on its text alone
  /// Of each further text: how far its last rows are from those that reading it behind the others gives, measured on
  /// its last kDriftTokens tokens: |stored - read| / |read| of keys and values, mean over layers.
  std::vector<double> drift;
};
inline constexpr std::int64_t kDriftTokens = 64;

/// The texts of `.lode` files, one behind the other. The first file's rows stay as they are. Of each further one the
/// tokens in front of the text (a BOS, a chat template's head) are left out, and the keys of the others are un-rotated
/// from where they stood and rotated to where they stand. No text has attended to those in front of it, so that keys
/// and values above the first layer differ from those of one reading of all: `drift`. No method is attached.
/// With `asked.max_tokens` 0 there is room for questions, as far as the model goes. InputError where the texts cannot
/// be joined. On the CPU.
JoinedTexts join_texts(std::span<const std::filesystem::path> paths, std::shared_ptr<const Model> model,
                       const ContextOptions& asked);

}  // namespace lode
