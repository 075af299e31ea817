// SPDX-License-Identifier: Apache-2.0
// usage: llama_cpp_logits MODEL.gguf OUT ID...: the float32 logits [T, V] that llama.cpp computes for these tokens, with
// float32 keys and values.
#include <llama.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level >= GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_backend_init();
  llama_model* const model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == nullptr) return 1;
  std::vector<llama_token> ids;
  for (int i = 3; i < argc; ++i) ids.push_back(std::atoi(argv[i]));
  const int count = static_cast<int>(ids.size());
  llama_context_params wanted = llama_context_default_params();
  wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = 256;
  wanted.type_k = wanted.type_v = GGML_TYPE_F32;
  wanted.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* const context = llama_init_from_model(model, wanted);
  if (context == nullptr) return 1;
  llama_batch batch = llama_batch_init(count, 0, 1);
  batch.n_tokens = count;
  for (int i = 0; i < count; ++i) {
    batch.token[i] = ids[static_cast<std::size_t>(i)];
    batch.pos[i] = i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  if (llama_decode(context, batch) != 0) return 1;
  std::FILE* const out = std::fopen(argv[2], "wb");
  if (out == nullptr) return 1;
  const auto vocabulary = static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
  for (int i = 0; i < count; ++i)
    std::fwrite(llama_get_logits_ith(context, i), sizeof(float), vocabulary, out);
  return std::fclose(out) == 0 ? 0 : 1;
}
