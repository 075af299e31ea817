// SPDX-License-Identifier: Apache-2.0
// One request from its prompt to its answer, step by step: what it wants in the next batch, and what it makes of
// its logits.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "engine/batch.h"
#include "engine/next_token.h"
#include "lodestone/scheduler.h"

namespace lode {

class Answering {
 public:
  /// `chunk`: tokens of the prompt in one step, unless the method wants more together.
  Answering(Request request, std::int64_t chunk);
  Answering(const Answering&) = delete;
  Answering& operator=(const Answering&) = delete;

  /// The next row for a batch; what it points to lives until `take`.
  BatchRow next();
  bool prompting() const { return piece_ < pieces_.size(); }
  std::int64_t next_tokens() const { return prompting() ? pieces_[piece_].count : 1; }
  /// Takes in a row that ran; true when the answer is complete. Rethrows the row's error and what on_text throws.
  bool take(BatchRow& row);
  /// The answer as far as it is.
  Answer finish(Ending ending);
  Ending ending() const { return ending_; }

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
  bool generate(std::span<float> logits);
  void collect_sources();
  void report(const BatchRow& row);

  Request request_;
  Sequence sequence_;
  Sampler sampler_;
  std::optional<TextCollector> text_;  ///< none for a model without a tokenizer
  std::vector<Piece> pieces_;
  std::size_t piece_ = 0;
  TokenId last_ = 0;  ///< the token that was generated last
  ForwardHooks hooks_;
  std::chrono::steady_clock::time_point start_, prompted_;
  Answer answer_;
  Ending ending_ = Ending::length;
};

}  // namespace lode
