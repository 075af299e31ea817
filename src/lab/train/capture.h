// SPDX-License-Identifier: Apache-2.0
// Queries, keys and values of a frozen model, as its layers make them while it reads a text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lodestone/engine.h"

namespace lode {

class KvStore;
class Rope;

/// A stretch of one text that the model reads by itself.
struct Prompt {
  std::string source;           ///< the text's name
  std::vector<TokenId> tokens;  ///< begins as the tokenizer's template says (BOS)
};

/// Cuts a text into prompts of `tokens` tokens; a rest of less than half of that is dropped, unless it is
/// all there is.
std::vector<Prompt> cut_into_prompts(const Model& model, const std::string& source, std::string_view text,
                                     std::int64_t tokens);

/// Reads prompts one after the other. What a layer projects is handed out chunk by chunk and then forgotten;
/// only the running prompt's KV cache is held.
class Capture {
 public:
  /// `options.max_tokens` bounds the prompts' length; `options.device` reads them.
  Capture(std::shared_ptr<const Model> model, const ContextOptions& options);
  ~Capture();

  /// Queries, keys and values of one chunk of tokens in one layer: before RoPE, after it, and the values.
  using Sink = std::function<void(int layer, const KvWrite& chunk)>;
  /// Reads a prompt densely with the cache emptied first; afterwards kv() holds the whole prompt.
  void read(const Prompt& prompt, const Sink& sink,
            const std::function<void(std::int64_t tokens)>& progress = {});

  const KvStore& kv() const;
  const Rope& rope() const;

 private:
  class Listener;
  std::vector<std::unique_ptr<Listener>> listeners_;  // [L]
  const Sink* sink_ = nullptr;                        // of the running read
  Context context_;
};

}  // namespace lode
