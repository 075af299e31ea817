// SPDX-License-Identifier: Apache-2.0
// A model whose rows have the published size, 512 latent numbers and 64 that turn, and whose 32 query heads are two KV
// heads of the kernels with the same rows. Its weights are random.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "support/family_folder.h"
#include "support/hash_file.h"
#include "support/random_folder.h"

namespace lode::test {

/// Removed when this goes; tests may write files into it.
class LatentFolder {
 public:
  LatentFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "lode-latent-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw RunError("no folder for a model with latent rows");
    path_ = pattern;
    const Json config = {{"architectures", {"DeepseekV3ForCausalLM"}},
                         {"hidden_size", 48},
                         {"intermediate_size", 64},
                         {"num_hidden_layers", 2},
                         {"num_attention_heads", 32},
                         {"head_dim", 64},
                         {"vocab_size", 64},
                         {"max_position_embeddings", 4096},
                         {"q_lora_rank", 40},
                         {"kv_lora_rank", 512},
                         {"qk_rope_head_dim", 64},
                         {"qk_nope_head_dim", 16},
                         {"v_head_dim", 12}};
    write_random_folder(path_, config, shapes());
    std::ofstream(path_ / "tokenizer.json") << letters_tokenizer().dump();
  }
  ~LatentFolder() { std::filesystem::remove_all(path_); }
  LatentFolder(const LatentFolder&) = delete;
  LatentFolder& operator=(const LatentFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::shared_ptr<const Model> load() const { return Model::load(path_, 2); }
  /// Untrained signatures of every layer.
  std::filesystem::path signatures(const Model& model) const {
    const ModelConfig& c = model.config();
    std::vector<HashWeights> layers;
    for (int i = 0; i < c.layers; ++i)
      layers.push_back(random_hash_weights(
          {.layer = i, .query_heads = c.query_heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim}, {}));
    const auto path = path_ / "signatures.safetensors";
    write_hash_weights(path, layers, model.fingerprint(), {});
    return path;
  }

 private:
  static std::vector<NamedShape> shapes() {
    std::vector<NamedShape> all = {
        {"model.embed_tokens.weight", {64, 48}}, {"model.norm.weight", {48}}, {"lm_head.weight", {64, 48}}};
    for (int i = 0; i < 2; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      for (const NamedShape& one : std::vector<NamedShape>{{"input_layernorm", {48}},
                                                           {"post_attention_layernorm", {48}},
                                                           {"self_attn.q_a_proj", {40, 48}},
                                                           {"self_attn.q_a_layernorm", {40}},
                                                           {"self_attn.q_b_proj", {32 * 80, 40}},
                                                           {"self_attn.kv_a_proj_with_mqa", {576, 48}},
                                                           {"self_attn.kv_a_layernorm", {512}},
                                                           {"self_attn.kv_b_proj", {32 * 28, 512}},
                                                           {"self_attn.o_proj", {48, 32 * 12}},
                                                           {"mlp.gate_proj", {64, 48}},
                                                           {"mlp.up_proj", {64, 48}},
                                                           {"mlp.down_proj", {48, 64}}})
        all.emplace_back(layer + one.first + ".weight", one.second);
    }
    return all;
  }
  std::filesystem::path path_;
};

}  // namespace lode::test
