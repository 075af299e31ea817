// SPDX-License-Identifier: Apache-2.0
#include "gpu/shard.h"

#include <fmt/format.h>

#include "lodestone/error.h"

namespace lode {

namespace {

/// Rows of the output matrix go to a GPU in whole groups of so many: tiles of quantised weights have eight.
constexpr std::int64_t kOutputRows = 32;

/// Rows [part / parts) of a matrix. Parts that the model does not have stay empty.
Weight rows_of(const Weight& whole, const ModelShare& share) {
  Weight part = whole;
  part.tiles = nullptr;
  part.rows = whole.rows / share.ranks;
  if (whole.data != nullptr)
    part.data = whole.data + share.rank * part.rows * bytes_of(whole.type, whole.cols);
  return part;
}
/// Of a vector [1, n], or the columns of a matrix.
Weight columns_of(const Weight& whole, const ModelShare& share) {
  Weight part = whole;
  part.tiles = nullptr;
  part.cols = whole.cols / share.ranks;
  if (whole.data != nullptr) part.data = whole.data + bytes_of(whole.type, share.rank * part.cols);
  return part;
}

void expect_blocks(const Weight& whole, const char* name, int ranks) {
  const std::int64_t block = layout_of(whole.type).block, columns = whole.cols / ranks;
  if (whole.cols % ranks == 0 && columns % block == 0) return;
  throw InputError(
      fmt::format("--tensor-parallel: expected columns of {} in whole blocks of {} ({}) for each GPU, found "
                  "{} columns for {} GPUs",
                  name, block, name_of(whole.type), whole.cols, ranks));
}

}  // namespace

void expect_shares(const ModelConfig& config, const ModelWeights& weights, int ranks) {
  if (ranks < 1 || config.kv_heads % ranks != 0)
    throw InputError(fmt::format(
        "--tensor-parallel: expected a number of GPUs that divides the model's {} KV heads, found {}",
        config.kv_heads, ranks));
  if (config.intermediate % ranks != 0)
    throw InputError(fmt::format(
        "--tensor-parallel: expected a number of GPUs that divides the feed-forward's {} rows, found {}",
        config.intermediate, ranks));
  if (config.vocab < kOutputRows * ranks)
    throw InputError(fmt::format("--tensor-parallel: expected a vocabulary of at least {} tokens, found {}",
                                 kOutputRows * ranks, config.vocab));
  for (const LayerWeights& layer : weights.layers) {
    expect_blocks(layer.o, "o_proj", ranks);
    expect_blocks(layer.down, "down_proj", ranks);
    if (layer.q_norm.cols > config.head_dim || layer.k_norm.cols > config.head_dim)
      throw InputError(
          "--tensor-parallel: expected norms of queries and keys by head, found one over all heads");
  }
}

ModelConfig share_of(const ModelConfig& config, int ranks) {
  ModelConfig part = config;
  part.query_heads /= ranks;
  part.kv_heads /= ranks;
  part.intermediate /= ranks;
  return part;
}

ModelWeights share_of(const ModelWeights& weights, const ModelConfig& config, const ModelShare& share) {
  ModelWeights part;  // what a GPU takes; the files stay with the whole
  part.embedding = weights.embedding;
  part.layers = weights.layers;
  part.final_norm = weights.final_norm;
  part.output = weights.output;
  for (LayerWeights& w : part.layers) {
    for (Weight* const matrix : {&w.q, &w.k, &w.v, &w.gate, &w.up}) *matrix = rows_of(*matrix, share);
    for (Weight* const other : {&w.o, &w.down, &w.q_bias, &w.k_bias, &w.v_bias, &w.gate_bias, &w.up_bias})
      *other = columns_of(*other, share);
    if (share.rank > 0) w.o_bias = w.down_bias = {};
  }
  if (config.tied_embeddings) return part;
  const OutputRows rows = output_rows(config.vocab, share);
  part.output.tiles = nullptr;
  part.output.rows = rows.end - rows.first;
  if (part.output.data != nullptr)
    part.output.data += rows.first * bytes_of(part.output.type, part.output.cols);
  return part;
}

OutputRows output_rows(std::int64_t vocab, const ModelShare& share) {
  const auto begin = [&](std::int64_t rank) {
    return rank == share.ranks ? vocab : vocab * rank / share.ranks / kOutputRows * kOutputRows;
  };
  return {begin(share.rank), begin(share.rank + 1)};
}

}  // namespace lode
