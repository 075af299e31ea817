// SPDX-License-Identifier: Apache-2.0
// Scores a model on samples under several attention methods, each beside full attention on the same samples.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lab/eval/statistics.h"
#include "lab/tasks/sample_file.h"
#include "lodestone/engine.h"
#include "text/chat_template.h"

namespace lode {

/// Which tokens attend by the method; all others attend densely.
struct Protocol {
  enum class Kind {
    context_dense,  ///< the question's tokens and the generated ones
    decode_sparse,  ///< the generated ones
    last,           ///< the prompt's last `tokens` ones and the generated ones
  };
  Kind kind = Kind::context_dense;
  std::int64_t tokens = 0;

  /// "context-dense", "decode-sparse", "last:N"; InputError otherwise.
  static Protocol parse(std::string_view text, std::string_view where = "--protocol");
  std::string str() const;
};

/// A spec with the text that the user wrote for it, by which results name it.
struct NamedSpec {
  std::string name;
  Spec spec;
  std::string files = {};  ///< files_hash(): answers of a file with other contents are not this spec's
};

/// Who reads contexts and answers in place of this process alone: ranks that do it together.
class EvalReader {
 public:
  virtual ~EvalReader() = default;
  /// Takes the place of what was read before.
  virtual void read(std::span<const TokenId> context, std::span<const Spec> methods,
                    const ContextOptions& options, const std::function<void(std::int64_t)>& progress) = 0;
  virtual Generation ask(std::span<const TokenId> question, const Spec& attention,
                         const GenerateOptions& options) = 0;
};

struct EvalOptions {
  Protocol protocol;
  ContextOptions context;  ///< max_tokens 0 = as many as each sample needs
  std::filesystem::path
      records;  ///< JSON lines of every answer, also read to go on where a run ended; empty = none
  std::string stop = "\n";
  /// Contexts and questions stand in the model's chat template, and answers end with the turn; null: they are given
  /// verbatim, as samples are that ask for it (Sample::verbatim), and answers end at `stop`.
  std::shared_ptr<const DocumentChat> chat;
  /// Which answers to find, of sample, spec and protocol; null = all.
  std::function<bool(const Sample&, const NamedSpec&, const Protocol&)> wanted;
  std::optional<double> audit_limit;  ///< Audit::set_limit
  bool order_rows = false;            ///< order_rows(), of the one method beside `full`
  EvalReader* reader = nullptr;  ///< under context-dense alone, with neither an audit nor an order of rows
  /// Questions about a context that are answered at once, on a GPU four times as many: each then takes its share of the
  /// time of their steps. 1 where the time of a question alone is wanted. On the host answers do not depend on it. On a
  /// GPU one alone is answered in place, where less of the text is near (gpu/batch.h).
  int together = 8;
  Progress::Mode progress = Progress::Mode::automatic;
};

/// One method on one task and length.
struct EvalRow {
  std::string attention, task;
  std::int64_t tokens = 0, n = 0;
  double score = 0;      ///< percent
  double agreement = 0;  ///< share of samples whose output equals full attention's token by token
  double density = 1, selectivity = 1;
  double selector_share = 0;      ///< of the density: bytes read to choose
  Interval difference;            ///< of the score from full attention's on the same samples, percent points
  double seconds = 0;             ///< spent on questions and answers (EvalOptions::together)
  std::string dense_reason;       ///< why nothing was sparse, when nothing was
  std::string notice;             ///< what the method says of a text; empty = nothing
  WorkReport work;                ///< of all answers; audits only of those found in this run
  std::int64_t back_to_full = 0;  ///< samples in which a layer went beyond --audit-limit
};

struct EvalReport {
  std::string model, protocol, device;
  std::vector<EvalRow> rows;  ///< by task, length, then method in the order asked for, `full` first
  /// As interface.md has it, with the paired interval, documents and seconds beside.
  Json json() const;
  std::string table() const;
};

/// Tokens that a chat template adds to a prompt, about.
std::int64_t template_tokens(const Model& model, const DocumentChat& chat);

class Records;

/// One protocol of an evaluation, and the answers under it.
struct EvalPass {
  Protocol protocol;
  Records* records = nullptr;
};

/// What answers depend on besides sample and spec: what the first line of their file says. `chat` as EvalOptions has it.
Json record_settings(const Model& model, const Protocol& protocol, const ContextOptions& context,
                     const DocumentChat* chat);

/// Finds the answers that passes lack. Each context is prefilled once for all of its questions, methods and
/// passes (a pass of `last:N` prefills less of it, and so for itself), and a method is indexed only where it
/// has questions left. Everything given must outlive this.
class Answering {
 public:
  Answering(std::shared_ptr<const Model> model, std::span<const Sample> samples,
            std::span<const NamedSpec> specs, std::span<const EvalPass> passes, const EvalOptions& options);
  ~Answering();
  /// About how many tokens' worth of work is left; 0 = none.
  std::int64_t cost() const;
  /// Adds what is missing to the records; on Interrupted those so far are kept. Progress gets the cost done.
  void run(const std::function<void(std::int64_t)>& progress);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Rows over the samples under one protocol, all of whose answers are in `records`; the first spec is what
/// the others are compared with.
EvalReport summarise(const Model& model, std::span<const Sample> samples, std::span<const NamedSpec> specs,
                     const EvalPass& pass, const ContextOptions& context);

/// Each context is prefilled once for all of its questions and methods. `full` always runs, first. InputError
/// when `records` belongs to another run; on Interrupted the records so far are kept.
EvalReport evaluate(std::shared_ptr<const Model> model, const std::vector<Sample>& samples,
                    std::vector<NamedSpec> specs, const EvalOptions& options);

}  // namespace lode
