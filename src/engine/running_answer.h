// SPDX-License-Identifier: Apache-2.0
// One request from its prompt to its answer, step by step: what it wants in the next step, and what it makes of its
// logits. Every answer is given here: a scheduler runs those of branches together, answer_in_place() one at the end of
// a context.
//
// An exact request alternates: steps of one token draft under the method; then the sequence is rolled back to
// where it was, and one dense step verifies the draft as rows of generation, whose bits do not depend on how many
// come at once. So what is accepted has full attention's keys and values.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/answer_mass.h"
#include "engine/batch.h"
#include "engine/draft.h"
#include "engine/next_token.h"
#include "lodestone/scheduler.h"

namespace lode {

/// Tokens of a prompt in one step: enough for products of matrices, few enough that others do not wait long.
inline constexpr std::int64_t kPromptChunk = 256;

class RunningAnswer {
 public:
  /// `chunk`: tokens of the prompt in one step, unless the method wants more together.
  RunningAnswer(Request request, std::int64_t chunk);
  /// In place, by a method of the context; neither `document` nor `attention` of the request is used.
  RunningAnswer(Request request, Context::Impl& context, MethodId method);
  ~RunningAnswer();
  RunningAnswer(const RunningAnswer&) = delete;
  RunningAnswer& operator=(const RunningAnswer&) = delete;

  Sequence& sequence() const { return *sequence_; }
  /// Whether there is nothing left to run: the prompt was read before, and its first token is the last.
  bool complete() const { return complete_; }
  /// The next row for a batch; what it points to lives until `take`.
  BatchRow next();
  bool prompting() const { return piece_ < pieces_.size(); }
  /// Whether the next row is of tokens that are there already: of the prompt, or of an answer that is read once more.
  bool reading() const { return rereading_ || prompting(); }
  std::int64_t next_tokens() const {
    return rereading_ ? std::ssize(reread_) : prompting() ? pieces_[piece_].count : 1;
  }
  /// Takes in a row that ran; true when the answer is complete. Rethrows the row's error and what on_text throws.
  bool take(BatchRow& row);
  /// The answer as far as it is.
  Answer finish(Ending ending);
  Ending ending() const { return ending_; }
  /// Tokens of the answer so far.
  std::int64_t generated() const { return std::ssize(answer_.generation.tokens); }
  TokenId last() const { return last_; }  ///< of these; 0 when there is none
  /// The sequence of an answer of no tokens, for other answers to the same prompt.
  ReadPrompt release();

  /// Tokens of its own that a request may come to.
  static std::int64_t room_of(const Request& request);

 private:
  RunningAnswer(Request request, std::unique_ptr<Sequence> sequence, std::int64_t chunk);
  /// A part of the prompt that is one row.
  struct Piece {
    std::int64_t begin = 0, count = 0;
    bool sparse = true, hooked = false;
  };
  void plan(std::int64_t chunk);
  void add_pieces(std::int64_t begin, std::int64_t end, bool sparse, std::int64_t chunk);
  void begin();
  bool take_next(std::span<float> logits);
  TokenId forced();
  std::string remark_on_host() const;
  const Model& model() const { return *sequence_->context().model; }
  std::int64_t max_tokens() const { return sequence_->context().options.max_tokens; }
  bool exact() const { return request_.exact && sequence_->method() != nullptr; }
  /// Tokens of the text, the prompt and the answer but for its last: what full attention's sequence holds.
  std::int64_t held() const;
  BatchRow next_exact();
  const ForwardHooks* hooks(bool sources) const;
  std::function<void()> forget_seen();
  bool wants_largest() const;
  bool take_step(BatchRow& row);
  bool take_exact(BatchRow& row);
  bool start_rereading();
  BatchRow reread();
  void leave_sources(const std::exception_ptr& error);
  void take_drafted(BatchRow& row);
  bool verify(std::span<float> logits);
  void start_draft();
  bool filtered(std::span<float> logits, std::span<const TokenId> draft);
  bool add(TokenId token);
  bool add_text(TokenId token);
  void start_audit();
  void collect_sources();
  void count_sources();
  void report(const BatchRow& row);

  Request request_;
  std::unique_ptr<Sequence> sequence_;
  Sampler sampler_;
  std::optional<TextCollector> text_;  ///< none for a model without a tokenizer
  std::vector<TokenId> said_;          ///< tokens of the answer without thoughts, where a filter wants them
  std::int64_t answer_from_ = 0;       ///< of the answer's tokens: thoughts come before it
  std::int64_t thought_tokens_ = 0;    ///< marks apart
  std::vector<TokenId> closing_;       ///< what is left of the tokens that end thoughts, the next one last
  std::vector<Piece> pieces_;
  std::size_t piece_ = 0;
  bool told_ = false;  ///< the method's selectors hear the prompt and choose by it
  bool complete_ = false;
  std::vector<float> logits_;  ///< [V] of the prompt's last token, of an answer of no tokens
  std::size_t on_host_ = 0;    ///< what ran on the host of a context on a GPU before
  TokenId last_ = 0;           ///< the token that was generated last
  TokenDraft draft_;
  std::vector<TokenId> to_verify_;  ///< of the running dense step
  DraftLength draft_length_;
  bool drafting_helps_ = true;  ///< the method leaves keys out

  /// Attention of a query of the running step: it counts once its token does.
  struct Seen {
    Position query = 0, row = 0;
    float mass = 0;
  };
  std::vector<Seen> seen_;
  AnswerMass attended_;  ///< of the tokens that count
  // On a GPU, whose steps tell nobody what they attend to, the complete answer is read once more by full attention.
  bool rereads_ = false, rereading_ = false;
  std::string sources_failed_;   ///< why there are none
  std::vector<TokenId> reread_;  ///< the prompt's last token and the answer but for its last
  std::optional<Audit> audit_;
  WorkReport audited_;
  ForwardHooks hooks_;        ///< of tokens whose sources are looked for, and audited
  ForwardHooks audit_hooks_;  ///< of others that are audited
  std::chrono::steady_clock::time_point start_, prompted_;
  Answer answer_;
  Ending ending_ = Ending::length;
};

/// Answers at the end of a context, which then holds the prompt and the answer but for its last token. For what is
/// no branch: contexts on a GPU, whose batch knows neither sources nor audits, and a context that goes on growing.
Answer answer_in_place(Context::Impl& context, MethodId method, Request request);

/// Reads a prompt behind a document, or at the end of a context, with full attention: Request::read.
std::shared_ptr<const ReadPrompt> read_prompt(std::shared_ptr<const Document> document,
                                              std::vector<TokenId> prompt);
std::shared_ptr<const ReadPrompt> read_prompt(Context::Impl& context, std::vector<TokenId> prompt);

}  // namespace lode
