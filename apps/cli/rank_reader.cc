// SPDX-License-Identifier: Apache-2.0
#include "rank_reader.h"

#include <limits>
#include <utility>

#include "cluster/rank_prefill.h"
#include "cluster/shard_attention.h"
#include "engine/document.h"
#include "ranks.h"

namespace lode::cli {

RankReader::RankReader(std::shared_ptr<const Model> model)
    : model_(std::move(model)),
      scheduler_(std::make_unique<Scheduler>(
          model_, SchedulerOptions{.max_sequences = 1, .memory = std::numeric_limits<std::int64_t>::max()})) {
}

void RankReader::read(std::span<const TokenId> tokens, std::span<const Spec> methods,
                      const ContextOptions& options, const std::function<void(std::int64_t)>& progress) {
  document_.reset();
  Context context = read_over_ranks(model_, options, tokens, methods, *ranks(), {.chunk_done = progress});
  context.build_indexes();
  document_ = lode::Document::Impl::share(std::move(context), {}, {});
  share_out(*document_, *ranks());
}

Generation RankReader::ask(std::span<const TokenId> question, const Spec& attention,
                           const GenerateOptions& options) {
  return scheduler_
      ->submit({.document = document_,
                .prompt = {question.begin(), question.end()},
                .attention = attention,
                .options = options})
      .result.get()
      .generation;
}

}  // namespace lode::cli
