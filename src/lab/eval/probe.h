// SPDX-License-Identifier: Apache-2.0
// How close a method comes to full attention on a text: head by head, and in the loss of the text's last
// tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lab/eval/eval.h"
#include "lab/eval/found_answers.h"
#include "lodestone/engine.h"

namespace lode {

struct ProbeOptions {
  ContextOptions context;   ///< max_tokens 0 = as many as the text has
  std::int64_t last = 512;  ///< tokens at the end whose loss is measured and that attend sparsely
  LocalWindow dense = {.sink = 1, .window = 63};  ///< the same for all methods, whatever their specs say
  std::int64_t top = 64;                          ///< the k of "recall of the top-k keys"
  std::int64_t measured =
      64;  ///< of the last tokens, how many are looked at head by head; 0: rows have no heads
  bool of_far_past = false;  ///< those that are looked at are tokens that need the past, where there are any
  /// Of each head density, read and error alone; recall, mass and bound, which need all scores, stay 0.
  bool errors_alone = false;
  bool kv_error = true;     ///< where keys and values are quantised: reads the text a second time, in 16 bits
  bool divergence = false;  ///< keeps full attention's predictions [last, vocab] in memory to compare with
  double gap = 0.5;  ///< nats by which full must beat streaming for a token to count as needing the past
  /// Probability that full attention must give a token for it to count as found: of those that it is less sure of, a
  /// method that loses nothing turns some over, too. Were it 0, no sparse method would keep 98 % at 128k, where several
  /// lose less than a point of the tasks' scores.
  double sure = 0.5;
  std::optional<AnswerMarks> marks;  ///< where the text's answers stand, if known
  Progress::Mode progress = Progress::Mode::automatic;
  std::string title = "probe";  ///< of the progress
};

/// Means over the measured query tokens of one query head.
struct HeadMeasure {
  int layer = 0, head = 0;
  double density = 0;  ///< keys attended / keys
  double read = 0;     ///< keys that some head of its group attends / keys: those whose bytes are read
  double recall =
      0;  ///< of the `top` far keys with the highest scores, the share that was attended; 1 without far keys
  double mass = 0;   ///< share of full attention's probability that lies on attended keys
  double error = 0;  ///< |output - full attention's output of the same query| / |full attention's output|
  /// What ErrorBound says of the error, over |full attention's output|; infinite where weights are not those
  /// of attention (sampling, tails).
  double bound = 0;
};

struct ProbeRow {
  std::string attention;
  double loss = 0;                  ///< nats per token over the last tokens
  double gap_loss = 0;              ///< over the tokens that need the past; 0 when there are none
  std::optional<double> recovered;  ///< (streaming - this) / (streaming - full) over those tokens
  double agreement = 1;  ///< share of the last tokens whose likeliest next token is full attention's
  /// Of the answers that full attention finds in the far past, the share that stays (FoundAnswers): a token is found when full
  /// attention is sure of it and sink and window alone hold another likelier. No value when there are none.
  std::optional<double> kept;
  /// Kullback-Leibler divergence of the predictions from full attention's, nats per token, if asked for; over
  /// all of the last tokens, and over those that need the past.
  double divergence = 0, gap_divergence = 0;
  double density = 1, selectivity = 1;
  double selector_share = 0;       ///< the part of density that is the selector's own reading
  std::string notice;              ///< what the method says of the text; empty = nothing
  std::vector<HeadMeasure> heads;  ///< [L, Hq] without dense layers; empty for full
  std::int64_t dense_heads = 0;    ///< query heads of dense layers: they attend everything, without error
  HeadMeasure mean() const;        ///< over all heads, those of dense layers too, as density counts them
};

/// What keys and values in few bits cost full attention, beside the same text with keys and values in 16 bits.
struct KvError {
  std::string type;   ///< of the probe's keys and values
  double logits = 0;  ///< |difference| / |those in 16 bits|, as lengths of vectors, mean over the last tokens
  double loss = 0;    ///< in 16 bits, nats per token over the last tokens
  double agreement = 1;  ///< share of the last tokens whose likeliest next token is the same
};

struct ProbeReport {
  std::string model;
  std::int64_t tokens = 0;
  std::int64_t gap_tokens = 0;     ///< of the last ones, those that need the past
  std::int64_t found_answers = 0;  ///< among the last ones, those that full attention finds in the far past
  ProbeOptions options;
  std::vector<ProbeRow> rows;  ///< full, streaming, then the others in the order asked for
  /// The row of each spec asked for: those that are equal with the same sink and window share one.
  std::vector<std::size_t> row_of;
  std::optional<KvError> kv_error;  ///< where keys and values are quantised
  Json json() const;
  Json json_of(const ProbeRow& row) const;
  std::string table(bool with_heads) const;
};

/// The spec with the sink and window that all methods of a probe get.
Spec probe_spec(const Spec& spec, const LocalWindow& dense);

/// InputError, with `where` in front, for a text of too few tokens.
void expect_tokens(std::int64_t tokens, const ProbeOptions& options, std::string_view where);

/// All methods attend with the same sink and window; `full` and `streaming` always run. InputError when the
/// text is shorter than `last` and the window need. `measured` is called with the report so far whenever its
/// last row is complete, so that nothing of it need be lost when a later method does not come to its end.
ProbeReport probe(std::shared_ptr<const Model> model, std::string_view text,
                  const std::vector<NamedSpec>& specs, const ProbeOptions& options,
                  const std::function<void(const ProbeReport&)>& measured = {});

}  // namespace lode
