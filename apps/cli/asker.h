// SPDX-License-Identifier: Apache-2.0
// Who answers `ask`: on the CPU a scheduler, as in the server; on a GPU the context itself.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "asking.h"
#include "base/communicator.h"
#include "engine/context.h"
#include "lodestone/scheduler.h"
#include "lodestone/sources.h"

namespace lode::cli {

class Asker {
 public:
  /// `text` has the indexes that will be asked for. `audit_limit` as for Request.
  Asker(AskedText text, std::optional<double> audit_limit);

  struct Question {
    std::vector<TokenId> prompt;
    MethodId method = kDense;
    GenerateOptions options;
    bool exact = false, want_sources = false;
  };
  /// Its `queued_seconds` and `ending` are not set.
  Answer ask(const Question& question);
  std::vector<Citation> sources(const Answer& answer, MethodId method, std::size_t count);
  /// A question that asks for nothing, which sources() takes off.
  void set_neutral(std::vector<TokenId> prompt);

  const Context& context() const { return *context_; }
  /// What all ranks told each other for the last answer, and how much of it to choose keys.
  struct Told {
    Traffic all, selection;
  };
  const Told& told() const { return told_; }
  /// What ran on the host though a GPU was asked for.
  const std::vector<std::string>& on_host() const { return context_->impl().on_host; }

 private:
  Answer ask_scheduler(const Question& question);
  Answer ask_context(const Question& question);

  std::optional<AskedText> text_;             // on a GPU
  std::shared_ptr<const Document> document_;  // else
  std::unique_ptr<Scheduler> scheduler_;
  const Context* context_ = nullptr;  // of one of them
  std::optional<double> audit_limit_;
  Told told_;
  std::optional<SourceFinder> finder_;
};

}  // namespace lode::cli
