// SPDX-License-Identifier: Apache-2.0
// The pocket model, short documents of a story with its fact, and requests about them.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "lodestone/document.h"
#include "lodestone/scheduler.h"
#include "support/lisbon.h"
#include "support/source_dir.h"

namespace lode::test {

inline std::shared_ptr<const Model> load_pocket(int threads) {
  return Model::load(source_dir() / "models/pocket", threads);
}
inline std::shared_ptr<const Model> pocket() {
  static const auto model = load_pocket(2);
  return model;
}

inline std::vector<TokenId> tokens_of(const std::string& text, Tokenizer::Bos bos = Tokenizer::Bos::none) {
  return pocket()->tokenizer().encode(text, bos);
}

/// Every method, with a window that leaves keys for it to choose from.
inline const std::vector<std::string> kMethods = {"streaming:window=64",
                                                  "topk:k=32,window=64",
                                                  "ideal:sparsity=0.9,window=64",
                                                  "random:fraction=0.1,window=64",
                                                  "kmeans:probes=4,window=64",
                                                  "saap:window=64",
                                                  "hash:window=64",
                                                  "squeezed:window=64",
                                                  "retrieval:k=32,window=64",
                                                  "quest:window=64",
                                                  "double-sparsity:window=64",
                                                  "infllm:window=64",
                                                  "pqcache:window=64",
                                                  "magicpig:window=64",
                                                  "kdeformer:window=64",
                                                  "reformer:window=64",
                                                  "hyperplanes:window=64",
                                                  "h2o:window=64",
                                                  "snapkv:window=64",
                                                  "ivf:window=64",
                                                  "hnsw:k=32,window=64"};

inline std::vector<Spec> specs_of(const std::vector<std::string>& texts) {
  std::vector<Spec> specs;
  for (const std::string& text : texts) specs.push_back(parse_spec(text));
  return specs;
}

/// A text of some 800 tokens with its fact in it.
inline std::string lisbon(int begin) {
  return lisbon_text(begin, begin + 45);
}

inline std::shared_ptr<const Document> read(const std::shared_ptr<const Model>& model,
                                            const std::string& text, const std::vector<std::string>& methods,
                                            DType type = DType::bf16) {
  const DocumentOptions options = {.specs = specs_of(methods), .kv_type = type, .max_tokens = 16384};
  return Document::read(model, tokens_of(text, Tokenizer::Bos::as_template), text, options);
}

inline const std::vector<std::string> kQuestions = {
    kLisbonQuestion, "\n\nQuestion: Where did the carter go?\nAnswer:",
    "\n\nQuestion: What did he speak of when he came to the mill in "
    "the grey of the morning, and to whom?\nAnswer:"};

inline Request ask(std::shared_ptr<const Document> document, const Spec& spec, std::size_t question,
                   std::int64_t tokens = 12) {
  return {.document = std::move(document),
          .prompt = tokens_of(kQuestions[question % kQuestions.size()]),
          .attention = spec,
          .options = {.max_new_tokens = tokens, .stop_at_eos = false}};
}

/// Logits of the last prompt token and of each token of a fixed continuation, [13, V].
inline std::vector<float> logits_alone(const std::shared_ptr<const Model>& model,
                                       const std::shared_ptr<const Document>& document, const Spec& spec,
                                       const std::vector<TokenId>& prompt,
                                       const std::vector<TokenId>& answer) {
  BatchRunner runner(model);
  Sequence sequence(document, spec, 1024);
  std::vector<float> all;
  std::vector<BatchRow> rows = {{.sequence = &sequence, .tokens = prompt, .phase = Phase::question}};
  runner.run(rows);
  all.insert(all.end(), rows[0].logits.begin(), rows[0].logits.end());
  for (const TokenId& token : answer) {
    rows = {{.sequence = &sequence, .tokens = {&token, 1}}};
    runner.run(rows);
    all.insert(all.end(), rows[0].logits.begin(), rows[0].logits.end());
  }
  return all;
}

}  // namespace lode::test
