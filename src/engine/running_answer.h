// SPDX-License-Identifier: Apache-2.0
// One request from its prompt to its answer, step by step: what it wants in the next batch, and what it makes of
// its logits.
//
// An exact request alternates: steps of one token draft under the method; then the sequence is rolled back to
// where it was, and one dense step verifies the draft as rows of generation, whose bits do not depend on how many
// come at once. So what is accepted has full attention's keys and values.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "engine/batch.h"
#include "engine/draft.h"
#include "engine/next_token.h"
#include "lodestone/scheduler.h"

namespace lode {

class RunningAnswer {
 public:
  /// `chunk`: tokens of the prompt in one step, unless the method wants more together.
  RunningAnswer(Request request, std::int64_t chunk);
  RunningAnswer(const RunningAnswer&) = delete;
  RunningAnswer& operator=(const RunningAnswer&) = delete;

  /// The next row for a batch; what it points to lives until `take`.
  BatchRow next();
  bool prompting() const { return piece_ < pieces_.size(); }
  std::int64_t next_tokens() const { return prompting() ? pieces_[piece_].count : 1; }
  /// Takes in a row that ran; true when the answer is complete. Rethrows the row's error and what on_text throws.
  bool take(BatchRow& row);
  /// The answer as far as it is.
  Answer finish(Ending ending);
  Ending ending() const { return ending_; }
  /// Tokens of the answer so far.
  std::int64_t generated() const { return std::ssize(answer_.generation.tokens); }

  /// Tokens of its own that a request may come to.
  static std::int64_t room_of(const Request& request);

 private:
  /// A part of the prompt that is one row.
  struct Piece {
    std::int64_t begin = 0, count = 0;
    bool sparse = true, hooked = false;
  };
  void plan(std::int64_t chunk);
  void add_pieces(std::int64_t begin, std::int64_t end, bool sparse, std::int64_t chunk);
  bool exact() const { return request_.exact && sequence_.method() != nullptr; }
  /// Tokens of the document, the prompt and the answer but for its last: what full attention's sequence holds.
  std::int64_t held() const;
  BatchRow next_exact();
  const ForwardHooks* hooks(bool sources) const;
  bool wants_largest() const;
  bool take_exact(BatchRow& row);
  void take_drafted(BatchRow& row);
  bool verify(std::span<float> logits);
  void start_draft();
  bool filtered(std::span<float> logits, std::span<const TokenId> draft);
  bool add(TokenId token);
  void start_audit();
  void collect_sources();
  void count_sources(Position end);
  void report(const BatchRow& row);

  Request request_;
  Sequence sequence_;
  Sampler sampler_;
  std::optional<TextCollector> text_;  ///< none for a model without a tokenizer
  std::vector<Piece> pieces_;
  std::size_t piece_ = 0;
  TokenId last_ = 0;  ///< the token that was generated last
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
  std::optional<Audit> audit_;
  WorkReport audited_;
  ForwardHooks hooks_;        ///< of tokens whose sources are looked for, and audited
  ForwardHooks audit_hooks_;  ///< of others that are audited
  std::chrono::steady_clock::time_point start_, prompted_;
  Answer answer_;
  Ending ending_ = Ending::length;
};

}  // namespace lode
