// SPDX-License-Identifier: Apache-2.0
// A text of a tiny model that ranks read, write in shards, open and ask: for ranks that are threads, and for those that
// are processes.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/communicator.h"
#include "cluster/rank_prefill.h"
#include "cluster/shard_attention.h"
#include "engine/batch.h"
#include "engine/context_file.h"
#include "engine/document.h"
#include "support/family_folder.h"
#include "support/some_tokens.h"

namespace lode::test {

/// Tokens of the tiny models' vocabulary of 64.
inline std::vector<TokenId> letters(std::int64_t count, std::uint64_t seed) {
  std::vector<TokenId> tokens = some_tokens(count, seed);
  for (TokenId& token : tokens) token %= 64;
  return tokens;
}

class RanksText : public testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 201;
  static constexpr float kTolerance = 2e-4f;  // of logits
  static constexpr const char* kShardId = "0123456789abcdef";

  static ContextOptions options(DType type = DType::f32) {
    return {.kv_type = type, .max_tokens = 256, .chunk = 16};
  }
  Context read(Communicator& ranks, DType type = DType::f32) const {
    return read_over_ranks(model_, options(type), tokens_, methods_, ranks);
  }
  /// Each rank its shard, and rank 0 the file that lists them.
  void save(Context& context, Communicator& ranks, const std::string& id = kShardId) const {
    context.build_indexes();
    const ShardSet set = shards_for(path_, id, kTokens, ranks.size());
    save_shard(context, path_, set, static_cast<std::size_t>(ranks.rank()));
    ranks.barrier();
    if (ranks.rank() == 0) save_context(context, path_, "", {}, set);
    ranks.barrier();
  }
  std::shared_ptr<const Document> open(Communicator* ranks) const {
    Context context = load_context(path_, model_, options(), LoadIndexes::all, ranks);
    context.build_indexes();
    auto document = Document::Impl::share(std::move(context), {}, {});
    if (ranks != nullptr) share_out(*document, *ranks);
    return document;
  }
  /// Of a question and a token behind it.
  std::vector<float> logits(const std::shared_ptr<const Document>& document, const Spec& spec) const {
    BatchRunner runner(model_);
    Sequence sequence(document, spec, 32);
    std::vector<float> all;
    const auto run = [&](std::span<const TokenId> some, Phase phase) {
      BatchRow row = {.sequence = &sequence, .tokens = some, .phase = phase, .rows = LogitRows::all};
      runner.run({&row, 1});
      if (row.error) std::rethrow_exception(row.error);
      all.insert(all.end(), row.logits.begin(), row.logits.end());
    };
    const std::vector<TokenId> question = letters(9, 2), answer = letters(1, 3);
    run(question, Phase::question);
    run(answer, Phase::generation);
    return all;
  }
  void remove_files() const {
    std::filesystem::remove(path_);
    remove_shards(path_, {}, RemovedShards::all_others);
  }

  const FamilyFolder folder_{"qwen3"};  // files are of models that have a tokenizer
  std::shared_ptr<const Model> model_ = folder_.load();
  const std::vector<TokenId> tokens_ = letters(kTokens, 1);
  const std::vector<Spec> methods_ = {parse_spec("topk:k=9,window=20"),
                                      parse_spec("kmeans:clusters=12,probes=3,window=20"),
                                      parse_spec("hyperplanes:budget=20,window=20")};
  std::filesystem::path path_ = std::filesystem::path(testing::TempDir()) / "ranks_text.lode";
};

}  // namespace lode::test
