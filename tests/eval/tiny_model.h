// SPDX-License-Identifier: Apache-2.0
// A random model of two layers in a temporary folder, with a tokenizer whose tokens are bytes.
#pragma once

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/rng.h"
#include "io/safetensors.h"
#include "lodestone/engine.h"
#include "support/refusal.h"

namespace lode {

/// GPT-2's way to write bytes as printable characters: byte b as code point b where that is printable, else
/// 256 + n.
inline std::string written_byte(int byte) {
  const auto printable = [](int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

inline void write_tokenizer(const std::filesystem::path& folder) {
  Json vocab;
  for (int b = 0; b < 256; ++b) vocab[written_byte(b)] = b + 2;
  const auto special = [](int id, const char* name) {
    return Json{{"id", id},        {"content", name},     {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", true}};
  };
  const Json bos = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}};
  const Json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const Json tokenizer = {
      {"version", "1.0"},
      {"added_tokens", {special(0, "<s>"), special(1, "</s>")}},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {bos, text}},
        {"pair", {bos, text}},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {0}}, {"tokens", {"<s>"}}}}}}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"vocab", vocab},
        {"merges", Json::array()}}}};
  std::ofstream(folder / "tokenizer.json") << tokenizer.dump();
}

struct TinyTensor {
  std::string name;
  std::vector<std::int64_t> shape;
};

/// Normal numbers in f32; norms are ones.
inline void write_weights(const std::filesystem::path& folder, const std::vector<TinyTensor>& tensors) {
  Rng rng(5);
  std::vector<std::vector<float>> values;
  std::vector<TensorToWrite> written;
  for (const TinyTensor& tensor : tensors) {
    std::int64_t count = 1;
    for (const std::int64_t n : tensor.shape) count *= n;
    values.emplace_back(static_cast<std::size_t>(count), 1.0f);
    if (tensor.shape.size() > 1) {
      for (float& x : values.back()) x = static_cast<float>(0.3 * rng.normal());
    }
    written.push_back({tensor.name, DType::f32, tensor.shape, std::as_bytes(std::span(values.back()))});
  }
  write_safetensors(folder / "model.safetensors", written, {});
}

/// L2, 4 query heads, 2 KV heads, d 8, 2048 positions.
inline std::shared_ptr<const Model> tiny_model() {
  static const std::shared_ptr<const Model> model = [] {
    static const test::TestFolder kept;  // each process its own, until it ends
    const std::filesystem::path& folder = kept.path();
    const Json config = {{"architectures", {"LlamaForCausalLM"}},
                         {"model_type", "llama"},
                         {"hidden_act", "silu"},
                         {"hidden_size", 32},
                         {"intermediate_size", 48},
                         {"num_hidden_layers", 2},
                         {"num_attention_heads", 4},
                         {"num_key_value_heads", 2},
                         {"head_dim", 8},
                         {"max_position_embeddings", 2048},
                         {"rms_norm_eps", 1e-5},
                         {"rope_theta", 10000.0},
                         {"tie_word_embeddings", true},
                         {"vocab_size", 258},
                         {"bos_token_id", 0},
                         {"eos_token_id", 1},
                         {"torch_dtype", "float32"}};
    std::ofstream(folder / "config.json") << config.dump();
    write_tokenizer(folder);
    std::vector<TinyTensor> tensors = {{"model.embed_tokens.weight", {258, 32}}, {"model.norm.weight", {32}}};
    for (int l = 0; l < 2; ++l) {
      const std::string p = "model.layers." + std::to_string(l) + ".";
      for (const auto& [name, shape] : std::vector<TinyTensor>{{"input_layernorm", {32}},
                                                               {"post_attention_layernorm", {32}},
                                                               {"self_attn.q_proj", {32, 32}},
                                                               {"self_attn.k_proj", {16, 32}},
                                                               {"self_attn.v_proj", {16, 32}},
                                                               {"self_attn.o_proj", {32, 32}},
                                                               {"mlp.gate_proj", {48, 32}},
                                                               {"mlp.up_proj", {48, 32}},
                                                               {"mlp.down_proj", {32, 48}}}) {
        tensors.push_back({p + name + ".weight", shape});
      }
    }
    write_weights(folder, tensors);
    return Model::load(folder, 2);
  }();
  return model;
}

}  // namespace lode
