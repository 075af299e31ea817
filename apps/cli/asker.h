// SPDX-License-Identifier: Apache-2.0
// Who answers `ask` and `chat`: on the CPU a scheduler, as in the server; on a GPU the context itself, whose batch knows
// neither sources nor audits.
#pragma once

#include <functional>
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
    /// What its prompt shares with that of the last such question, and with the answer behind it, is not read again.
    bool goes_on = false;
  };
  /// Its times of steps and queues are not set.
  Answer ask(const Question& question);
  /// The next question that goes on reads all of its prompt.
  void forget();
  /// Lets `change` attach methods and build their indexes. Forgets, too.
  void change(const std::function<void(Context&)>& change);
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
  void open(Context context);
  void find_sources();
  Answer ask_scheduler(const Question& question);
  Answer ask_context(const Question& question);

  Attachments attachments_;
  std::optional<Context> own_;                // on a GPU
  std::shared_ptr<const Document> document_;  // else
  std::unique_ptr<Scheduler> scheduler_;
  std::shared_ptr<SequenceCache> cache_ = std::make_shared<SequenceCache>();
  const Context* context_ = nullptr;  // of one of them
  std::optional<double> audit_limit_;
  Told told_;
  std::vector<TokenId> neutral_;
  std::optional<SourceFinder> finder_;
};

}  // namespace lode::cli
