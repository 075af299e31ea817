// SPDX-License-Identifier: Apache-2.0
// A text that ranks read together.
//
// Every chunk is cut into one piece a rank, whose products, keys and values that rank makes. A rank keeps the rows of
// its pieces, so that at any time each has as many keys as the others, and attends to them for the queries of the whole
// chunk; the states merge where the query's piece is, in the order of the ranks. In every second chunk the pieces go
// to the ranks in reverse: a piece sees those before it in its chunk, and so the first rank does not always do most.
// When all is read, rows move to the ranks whose share of the text they are.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "base/communicator.h"
#include "engine/context.h"

namespace lode {

/// Who reads what.
struct PrefillPlan {
  std::int64_t tokens = 0, chunk = 0;  ///< of the text; of a chunk and rank, about
  int ranks = 1;

  std::int64_t chunks() const;
  Share chunk_at(std::int64_t index) const;
  /// At least one token.
  Share piece_of(std::int64_t chunk, int rank) const;
};

/// Who is told how far a reading is, on all ranks at the same places.
struct PrefillWatch {
  std::function<void(std::int64_t tokens)> chunk_done = {};  ///< with the tokens that are read
  std::function<void()> layer_done = {};                     ///< of a chunk
};

/// A context of the text in which this rank has its share of the rows (token_share) and of the methods' indexes.
/// InputError for a text of fewer tokens than ranks, and for models and methods that ranks cannot share.
Context read_over_ranks(std::shared_ptr<const Model> model, const ContextOptions& options,
                        std::span<const TokenId> tokens, std::span<const Spec> methods, Communicator& ranks,
                        const PrefillWatch& watch = {});

/// InputError for a method by which ranks cannot ask any text, whoever indexed it.
void expect_asked_over_ranks(const std::shared_ptr<const Model>& model, const Spec& method);
/// InputError for those, too, and for a method whose keys ranks cannot choose together in a text that they read.
void expect_shared_method(const std::shared_ptr<const Model>& model, const Spec& method);

}  // namespace lode
