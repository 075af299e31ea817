// SPDX-License-Identifier: Apache-2.0
// usage: llama_cpp_answers MODEL.gguf TOKENS < prompts     (prompts end in a zero byte each; compiled by llama_cpp_answers.py)
//
// llama.cpp's greedy answer to each prompt: one line a token, "GAP HEX" with GAP the difference of the two largest logits where
// the token was chosen and HEX its bytes; an empty line ends an answer.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "llama.h"

namespace {

using Tokens = std::vector<llama_token>;

Tokens tokens_of(const llama_vocab* vocab, const std::string& text) {
  Tokens tokens(text.size() + 16);
  const auto bytes = static_cast<std::int32_t>(text.size()), room = static_cast<std::int32_t>(tokens.size());
  tokens.resize(static_cast<std::size_t>(
      llama_tokenize(vocab, text.data(), bytes, tokens.data(), room, /*add_special=*/false, /*parse_special=*/true)));
  return tokens;
}

void print_token(const llama_vocab* vocab, llama_token token, float gap) {
  char piece[256];
  const int n = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, /*special=*/false);
  std::printf("%.4f ", static_cast<double>(gap));
  for (int i = 0; i < n; ++i) std::printf("%02x", static_cast<unsigned char>(piece[i]));
  std::printf("\n");
}

float second_of(const float* begin, const float* best, const float* end) {
  float second = -std::numeric_limits<float>::infinity();
  for (const float* at = begin; at != end; ++at)
    if (at != best) second = std::max(second, *at);
  return second;
}

void answer(llama_context* context, const llama_vocab* vocab, const std::string& prompt, int most) {
  llama_memory_clear(llama_get_memory(context), true);
  Tokens next = tokens_of(vocab, prompt);
  for (int step = 0; step < most; ++step) {
    if (llama_decode(context, llama_batch_get_one(next.data(), static_cast<std::int32_t>(next.size()))) != 0) break;
    const float* logits = llama_get_logits_ith(context, -1);
    const float* end = logits + llama_vocab_n_tokens(vocab);
    const float* best = std::max_element(logits, end);
    const float second = second_of(logits, best, end);
    const auto token = static_cast<llama_token>(best - logits);
    print_token(vocab, token, *best - second);
    if (llama_vocab_is_eog(vocab, token)) break;
    next = {token};
  }
  std::printf("\n");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model* model = llama_model_load_from_file(arguments[1], llama_model_default_params());
  if (model == nullptr) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 4096;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) return 1;
  for (std::string prompt; std::getline(std::cin, prompt, '\0');)
    answer(context, llama_model_get_vocab(model), prompt, std::stoi(arguments[2]));
  llama_free(context);
  llama_model_free(model);
}
