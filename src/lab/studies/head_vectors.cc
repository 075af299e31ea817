// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/head_vectors.h"

#include <algorithm>

#include "base/cancel.h"
#include "engine/model.h"
#include "lodestone/tokenizer.h"

namespace lode {

namespace {

/// The first head's d numbers of each token's `heads` x d.
void add_first_head(std::span<const float> from /*[T, heads, d]*/, std::int64_t tokens, std::int64_t heads,
                    std::int64_t d, std::vector<float>& to) {
  for (std::int64_t t = 0; t < tokens; ++t)
    to.insert(to.end(), from.begin() + t * heads * d, from.begin() + t * heads * d + d);
}

}  // namespace

std::vector<int> usual_layers(const Model& model) {
  const int layers = model.config().layers;
  std::vector<int> wanted = {0, layers / 2, layers - 1};
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  return wanted;
}

std::vector<HeadVectors> read_head_vectors(Capture& capture, const Model& model, std::string_view text,
                                           const std::vector<int>& layers, std::int64_t tokens) {
  const ModelConfig& config = model.config();
  expect_like_layers(config, "a study of heads");
  std::vector<HeadVectors> heads;
  for (const int layer : layers) heads.push_back({.layer = layer});
  Prompt prompt = {"text", model.tokenizer().encode(text, Tokenizer::Bos::as_template)};
  if (tokens > 0 && std::ssize(prompt.tokens) > tokens)
    prompt.tokens.resize(static_cast<std::size_t>(tokens));
  capture.read(
      prompt,
      [&](int layer, const KvWrite& chunk) {
        for (HeadVectors& head : heads) {
          if (head.layer != layer) continue;
          add_first_head(chunk.k, chunk.tokens, config.kv_heads, config.head_dim, head.keys);
          add_first_head(chunk.k_unrotated, chunk.tokens, config.kv_heads, config.head_dim, head.plain_keys);
          add_first_head(chunk.q, chunk.tokens, config.query_heads, config.head_dim, head.queries);
          add_first_head(chunk.q_unrotated, chunk.tokens, config.query_heads, config.head_dim,
                         head.plain_queries);
        }
      },
      [](std::int64_t) { check_cancel(); });
  return heads;
}

}  // namespace lode
