// SPDX-License-Identifier: Apache-2.0
// What a `.lode` file says about itself, readable without its model.
//
// A text that ranks have indexed together is several files: the one that is named holds all but keys, values and
// indexes, and lists its shards, which lie beside it and hold these by token range.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/communicator.h"
#include "io/container.h"
#include "kv/store.h"
#include "lodestone/document.h"
#include "lodestone/types.h"

namespace lode {

/// The largest --rope-factor; the least is 1.
inline constexpr double kMostRopeFactor = 1024;

/// Where a part of a text's keys and values lies.
struct Shard {
  std::string file;  ///< beside the file that lists it
  Share tokens;
};
struct ShardSet {
  std::string id;  ///< which all files of one writing share
  std::vector<Shard> shards;
  bool empty() const { return shards.empty(); }
};

struct ContextMeta {
  std::string model_path;  ///< as it was when the text was indexed
  std::string model_fingerprint, tokenizer_fingerprint;
  int layers = 0, kv_heads = 0, head_dim = 0;
  DType kv_type = DType::f16;
  std::int64_t tokens = 0;
  std::vector<std::int64_t> recurrent;  ///< [layers] floats of the states of layers without rows; empty: none
  bool shared_rows = false;             ///< latent rows, held once for all heads
  std::vector<KvLayerShape>
      by_layer;  ///< [layers] whose heads differ, or whose rows are another's; empty: none
  std::vector<std::int64_t> states;  ///< tokens that there are states of, rising
  std::int64_t rope_tokens = 0;      ///< the context length for which RoPE's frequencies were made
  double rope_factor = 0;            ///< yarn asked for by the user; 0 = none
  std::int64_t max_positions = 0;    ///< the model's context then, which rope_factor stretches; 0 = not said
  std::uint64_t seed = 0;
  std::vector<std::string> methods;                ///< specs whose indexes are in the file
  std::vector<std::filesystem::path> folders;      ///< where the files may be that these name (Spec::folders)
  std::vector<std::string> attachments, required;  ///< names; `required` are those that answers depend on
  ShardSet shards;  ///< by rising tokens, which cover all; none: rows and indexes are in the file itself
  std::int64_t token_bytes() const;
  std::int64_t kv_bytes() const { return tokens * token_bytes(); }
};

/// InputError naming the field when the section is missing, malformed or inconsistent.
ContextMeta read_context_meta(const ContainerReader& file, const std::filesystem::path& path);
/// Those that save_context wrote; InputError when the file says otherwise of itself.
Attachments read_attachments(const ContainerReader& file, const std::filesystem::path& path);
/// Context::load; with `none`, no method of the file is attached, and what is attached is indexed anew.
enum class LoadIndexes { all, none };
/// Of a text in shards each of `ranks` verifies its share of the rows alone, and its methods choose over ranks where
/// they can (Context::Impl::share); indexes that were made for as many ranks are the file's, others are to be built.
/// A text in one file is read whole by every rank.
Context load_context(const std::filesystem::path& path, std::shared_ptr<const Model> model,
                     const ContextOptions& asked, LoadIndexes indexes, Communicator* ranks = nullptr);
/// Context::save with attachments; of a text in shards, the file that lists them.
void save_context(const Context& context, const std::filesystem::path& path, std::string_view text,
                  const Attachments& attachments, const ShardSet& shards = {});

/// An id for the shards of a text that is written now.
std::string new_shard_id(const std::filesystem::path& path);
bool is_shard_id(std::string_view text);
/// A shard that the text at `path` lists; InputError that names it when it is missing.
ContainerReader open_shard(const std::filesystem::path& path, const ShardSet& set, std::size_t index);
/// The shards that so many ranks write of a text.
ShardSet shards_for(const std::filesystem::path& path, const std::string& id, std::int64_t tokens, int ranks);
/// Rows and indexes of one of them, which this process has.
void save_shard(const Context& context, const std::filesystem::path& path, const ShardSet& shards,
                std::size_t index);
/// Removes shards of the text at `path`, finished or not, and says how many: all but those of the writing `id`, or those
/// alone.
enum class RemovedShards { all_others, these };
std::size_t remove_shards(const std::filesystem::path& path, const std::string& id, RemovedShards which);

}  // namespace lode
