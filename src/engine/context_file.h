// SPDX-License-Identifier: Apache-2.0
// What a `.lode` file says about itself, readable without its model.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/container.h"
#include "lodestone/document.h"
#include "lodestone/types.h"

namespace lode {

/// The largest --rope-factor; the least is 1.
inline constexpr double kMostRopeFactor = 1024;

struct ContextMeta {
  std::string model_path;  ///< as it was when the text was indexed
  std::string model_fingerprint, tokenizer_fingerprint;
  int layers = 0, kv_heads = 0, head_dim = 0;
  DType kv_type = DType::f16;
  std::int64_t tokens = 0;
  std::vector<std::int64_t> recurrent;  ///< [layers] floats of the states of layers without rows; empty: none
  bool shared_rows = false;             ///< latent rows, held once for all heads
  std::vector<std::int64_t> states;     ///< tokens that there are states of, rising
  std::int64_t rope_tokens = 0;         ///< the context length for which RoPE's frequencies were made
  double rope_factor = 0;               ///< yarn asked for by the user; 0 = none
  std::int64_t max_positions = 0;  ///< the model's context then, which rope_factor stretches; 0 = not said
  std::uint64_t seed = 0;
  std::vector<std::string> methods;                ///< specs whose indexes are in the file
  std::vector<std::string> attachments, required;  ///< names; `required` are those that answers depend on
  std::int64_t token_bytes() const;
  std::int64_t kv_bytes() const { return tokens * token_bytes(); }
};

/// InputError naming the field when the section is missing, malformed or inconsistent.
ContextMeta read_context_meta(const ContainerReader& file, const std::filesystem::path& path);
/// Those that save_context wrote; InputError when the file says otherwise of itself.
Attachments read_attachments(const ContainerReader& file, const std::filesystem::path& path);
/// Context::load; with `none`, no method of the file is attached, and what is attached is indexed anew.
enum class LoadIndexes { all, none };
Context load_context(const std::filesystem::path& path, std::shared_ptr<const Model> model,
                     const ContextOptions& asked, LoadIndexes indexes);
/// Context::save with attachments.
void save_context(const Context& context, const std::filesystem::path& path, std::string_view text,
                  const Attachments& attachments);

}  // namespace lode
