// SPDX-License-Identifier: Apache-2.0
#include "engine/reuse.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/context.h"
#include "engine/context_file.h"
#include "io/container.h"
#include "lodestone/error.h"
#include "model/config.h"

namespace lode {

namespace {

bool holds(const ContextMeta& meta, std::span<const Spec> specs) {
  std::vector<std::string> wanted;
  for (const Spec& spec : specs) wanted.push_back(spec.str());
  std::vector<std::string> stored = meta.methods;
  std::sort(wanted.begin(), wanted.end());
  std::sort(stored.begin(), stored.end());
  return wanted == stored;
}

/// Why keys of the file are not those that a reading with these options gives; empty when they are.
std::string differs(const ContextMeta& meta, const Model& model, const ContextOptions& options) {
  if (meta.model_fingerprint != model.fingerprint() ||
      meta.tokenizer_fingerprint != model.tokenizer().fingerprint())
    return "it was made with another model";
  if (meta.kv_type != options.kv_type) return fmt::format("its keys are stored as {}", name_of(meta.kv_type));
  if (std::max(meta.rope_factor, 1.0) != options.rope_factor.value_or(1.0))
    return "its --rope-factor differs";
  if (model.config().rope_scaling.kind == RopeScaling::Kind::dynamic && meta.rope_tokens < options.max_tokens)
    return "its keys were rotated for a shorter context";
  return {};
}

/// Tokens that both begin with, cut at a whole chunk unless they are the same.
std::int64_t common_tokens(std::span<const TokenId> stored, std::span<const TokenId> wanted,
                           std::int64_t chunk) {
  const auto parted = std::mismatch(stored.begin(), stored.end(), wanted.begin(), wanted.end());
  const std::int64_t common = parted.first - stored.begin();
  const bool all = common == std::ssize(stored) && common == std::ssize(wanted);
  return all ? common : common / chunk * chunk;
}

}  // namespace

std::int64_t reusable_tokens(const ContextMeta& meta, std::span<const TokenId> stored, const Model& model,
                             const ContextOptions& options, std::span<const TokenId> tokens,
                             std::string& why) {
  why = differs(meta, model, options);
  if (!meta.shards.empty()) why = "its keys lie in shards, to which nothing can be added";
  if (!why.empty()) return 0;
  const std::int64_t chunk = prefill_chunk(options), kept = common_tokens(stored, tokens, chunk);
  if (kept == 0)
    why = std::ssize(stored) < chunk ? fmt::format("a text of fewer than {} tokens is read anew", chunk)
                                     : fmt::format("its first {} tokens differ", chunk);
  return kept;
}

std::optional<Context> reuse_context(const std::filesystem::path& path, std::shared_ptr<const Model> model,
                                     const ContextOptions& options, std::span<const TokenId> tokens,
                                     std::span<const Spec> specs, std::string& why) {
  const ContainerReader file(path);
  const ContextMeta meta = read_context_meta(file, path);
  const auto stored = SectionReader(file, "").values<TokenId>("tokens");
  const std::int64_t kept = reusable_tokens(meta, stored, *model, options, tokens, why);
  if (kept == 0) return std::nullopt;
  const bool same = holds(meta, specs);
  const bool grow = same && 2 * kept >= std::ssize(tokens);
  try {
    std::optional<Context> context =
        load_context(path, model, options, grow ? LoadIndexes::all : LoadIndexes::none);
    if (!grow)
      for (const Spec& spec : specs) context->attach(spec);  // refused where one listens to the prefill
    if (kept < context->tokens()) context->roll_back(kept);
    return context;
  } catch (const InputError& error) {
    if (!grow && same) {  // those that listen have heard the beginning
      std::optional<Context> context = load_context(path, model, options, LoadIndexes::all);
      if (kept < context->tokens()) context->roll_back(kept);
      return context;
    }
    why = error.what();
    return std::nullopt;
  }
}

}  // namespace lode
