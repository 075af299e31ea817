// SPDX-License-Identifier: Apache-2.0
// What `eval` asks over several ranks: each context is read by all of them, and answered as `ask` answers.
#pragma once

#include <memory>

#include "lab/eval/eval.h"
#include "lodestone/scheduler.h"

namespace lode::cli {

class RankReader final : public EvalReader {
 public:
  explicit RankReader(std::shared_ptr<const Model> model);
  void read(std::span<const TokenId> context, std::span<const Spec> methods, const ContextOptions& options,
            const std::function<void(std::int64_t)>& progress) override;
  Generation ask(std::span<const TokenId> question, const Spec& attention,
                 const GenerateOptions& options) override;

 private:
  std::shared_ptr<const Model> model_;
  std::unique_ptr<Scheduler> scheduler_;
  std::shared_ptr<const Document> document_;
};

}  // namespace lode::cli
