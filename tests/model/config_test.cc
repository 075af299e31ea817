// SPDX-License-Identifier: Apache-2.0
// config.json: what is read in its old and new forms, and what is refused by name.
#include "model/config.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "support/refusal.h"

namespace lode {
namespace {

using test::expect_refused;
using test::TestFolder;

Json good() {
  return Json::parse(R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "bfloat16"})");
}

ModelConfig parsed(const Json& json) {
  return parse_config(json.dump(), "config.json");
}

Json with(const char* key, const Json& value) {
  Json json = good();
  json[key] = value;
  return json;
}

Json without(const char* key) {
  Json json = good();
  json.erase(key);
  return json;
}

TEST(Config, FieldsAndDefaults) {
  const ModelConfig c = parsed(good());
  EXPECT_EQ(c.hidden, 64);
  EXPECT_EQ(c.intermediate, 96);
  EXPECT_EQ(c.layers, 2);
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_EQ(c.group(), 2);
  EXPECT_EQ(c.rope_theta, 500000.0);
  EXPECT_EQ(c.rope_scaling.kind, RopeScaling::Kind::none);
  EXPECT_EQ(c.bos, std::vector<TokenId>{1});
  EXPECT_EQ(c.eos, (std::vector<TokenId>{2, 3}));
  EXPECT_FALSE(c.tied_embeddings);
  EXPECT_FALSE(c.plan.q_bias);
  EXPECT_EQ(parsed(with("head_dim", 40)).head_dim, 40);
  EXPECT_EQ(parsed(without("num_key_value_heads")).kv_heads, 4);
  EXPECT_EQ(parsed(without("rope_theta")).rope_theta, 10000.0);
  EXPECT_TRUE(parsed(with("tie_word_embeddings", true)).tied_embeddings);
  EXPECT_TRUE(parsed(with("eos_token_id", nullptr)).eos.empty());
  EXPECT_EQ(parsed(with("architectures", {"MistralForCausalLM"})).architecture, "MistralForCausalLM");
  EXPECT_NO_THROW(parsed(with("sliding_window", nullptr)));
}

TEST(Config, WidthOfWhatAModelHas) {
  Json json = good();
  json.update({{"architectures", {"Qwen3MoeForCausalLM"}},
               {"num_experts", 4},
               {"num_experts_per_tok", 2},
               {"moe_intermediate_size", 32}});
  EXPECT_EQ(parsed(json).intermediate, 96);
  for (const bool removed : {false, true}) {
    json["intermediate_size"] = nullptr;
    if (removed) json.erase("intermediate_size");
    json["shared_expert_intermediate_size"] = 48;
    EXPECT_EQ(parsed(json).intermediate, 48);
    json.erase("shared_expert_intermediate_size");
    EXPECT_EQ(parsed(json).intermediate, 32);
    EXPECT_EQ(parsed(json).plan.experts.width, 32);
  }
  json.erase("moe_intermediate_size");
  expect_refused("'intermediate_size'", [&] { parsed(json); });
}

TEST(Config, ScalingInItsOldAndNewForm) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    for (const char* kind : {"type", "rope_type"}) {
      const RopeScaling s = parsed(with(key, {{kind, "linear"}, {"factor", 4.0}})).rope_scaling;
      EXPECT_EQ(s.kind, RopeScaling::Kind::linear);
      EXPECT_EQ(s.factor, 4.0);
    }
  }
  EXPECT_EQ(parsed(with("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 7.0}})).rope_theta, 7.0);
  EXPECT_EQ(parsed(with("rope_scaling", nullptr)).rope_scaling.kind, RopeScaling::Kind::none);
  const RopeScaling yarn =
      parsed(with("rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}, {"beta_fast", 24}})).rope_scaling;
  EXPECT_EQ(yarn.original_max_positions, 4096);
  EXPECT_EQ(yarn.beta_fast, 24.0);
  EXPECT_EQ(yarn.beta_slow, 1.0);
}

TEST(Config, WhatIsNotSupportedIsNamed) {
  for (const char* name : {"GPT2LMHeadModel", "FalconForCausalLM", "GPT2LMHeadModel", ""}) {
    expect_refused(name, [&] { parsed(with("architectures", {name})); });
  }
  for (const Json& wrong : {Json(), Json::array(), Json("LlamaForCausalLM"), Json{1}}) {
    expect_refused("architectures", [&] { parsed(with("architectures", wrong)); });
  }
  expect_refused("sliding_window", [] { parsed(with("sliding_window", 4096)); });
  expect_refused("quantization_config", [] { parsed(with("quantization_config", {{"bits", 4}})); });
  expect_refused("gelu", [] { parsed(with("hidden_act", "gelu")); });
  expect_refused("partial_rotary_factor", [] { parsed(with("partial_rotary_factor", 0.5)); });
  expect_refused("original_max_position_embeddings", [] {
    parsed(with("rope_scaling", {{"rope_type", "longrope"}, {"factor", 4.0}}));
  });
}

TEST(Config, EveryNumberHasItsRange) {
  const std::vector<Json> never = {Json("64"), Json(true), Json::array({64}), Json(-1),
                                   Json(0),    Json(1.5),  Json(1LL << 62),   Json(UINT64_MAX)};
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                          "num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"}) {
    for (const Json& value : never) expect_refused(key, [&] { parsed(with(key, value)); });
  }
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                          "vocab_size", "max_position_embeddings"}) {
    expect_refused(key, [&] { parsed(without(key)); });
  }
  for (const Json& value : {Json("1e-5"), Json(-1e-5), Json(0), Json(2)}) {
    expect_refused("rms_norm_eps", [&] { parsed(with("rms_norm_eps", value)); });
  }
  for (const Json& value : {Json("x"), Json(0), Json(-1), Json(1e300)}) {
    expect_refused("rope_theta", [&] { parsed(with("rope_theta", value)); });
  }
  expect_refused("config.json", [] {
    parse_config(R"({"architectures": ["LlamaForCausalLM"], "rope_theta": 1e400})", "config.json");
  });
}

TEST(Config, NumbersThatDoNotFitTogether) {
  expect_refused("num_key_value_heads", [] { parsed(with("num_key_value_heads", 3)); });
  expect_refused("num_key_value_heads", [] { parsed(with("num_key_value_heads", 8)); });
  expect_refused("hidden_size", [] { parsed(with("hidden_size", 66)); });
  expect_refused("even", [] { parsed(with("head_dim", 15)); });
  expect_refused("even", [] { parsed(with("head_dim", 2)); });
  expect_refused("eos_token_id", [] { parsed(with("eos_token_id", 128)); });
  expect_refused("eos_token_id", [] { parsed(with("eos_token_id", {2, -1})); });
  expect_refused("bos_token_id", [] { parsed(with("bos_token_id", "<s>")); });
}

TEST(Config, ScalingsThatLackSomething) {
  const Json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  EXPECT_NO_THROW(parsed(with("rope_scaling", llama3)));
  for (const auto& [key, value] : llama3.items()) {
    Json damaged = llama3;
    damaged.erase(key);
    expect_refused(key == "rope_type" ? "type" : key, [&] { parsed(with("rope_scaling", damaged)); });
    for (const Json& wrong : {Json(0), Json(-1), Json("8"), Json(1e300)}) {
      if (key == "rope_type") continue;
      damaged[key] = wrong;
      expect_refused(key, [&] { parsed(with("rope_scaling", damaged)); });
    }
  }
  Json crossed = llama3;
  crossed["low_freq_factor"] = 4.0;
  expect_refused("low_freq_factor", [&] { parsed(with("rope_scaling", crossed)); });
  for (const Json& wrong : {Json("linear"), Json::array(), Json(2), Json::object()}) {
    test::refusal([&] { parsed(with("rope_scaling", wrong)); });
  }
}

TEST(Config, GenerationConfigHasTheLastWordOnEos) {
  const TestFolder folder;
  folder.write("config.json", good().dump());
  EXPECT_EQ(read_config(folder.path()).eos, (std::vector<TokenId>{2, 3}));
  folder.write("generation_config.json", R"({"eos_token_id": 9})");
  EXPECT_EQ(read_config(folder.path()).eos, std::vector<TokenId>{9});
  folder.write("generation_config.json", R"({"temperature": 1})");
  EXPECT_EQ(read_config(folder.path()).eos, (std::vector<TokenId>{2, 3}));
  folder.write("generation_config.json", R"({"eos_token_id": 900})");
  expect_refused("generation_config.json", [&] { read_config(folder.path()); });
  folder.write("generation_config.json", "{");
  expect_refused("generation_config.json", [&] { read_config(folder.path()); });
}

TEST(Config, FoldersThatAreNone) {
  const TestFolder folder;
  expect_refused("config.json", [&] { read_config(folder.path()); });
  expect_refused("none", [&] { read_config(folder / "none"); });
  expect_refused("folder", [&] { read_config(folder.write("file", "x")); });
}

TEST(NamedShapes, KnownAndSpelledOut) {
  const ModelConfig llama = named_shape("llama-3.1-8b");
  EXPECT_EQ(llama.layers, 32);
  EXPECT_EQ(llama.group(), 4);
  EXPECT_EQ(llama.hidden, 4096);
  EXPECT_EQ(named_shape("llama-2-7b").group(), 1);
  EXPECT_EQ(named_shape("llama-3.2-1b").head_dim, 64);
  EXPECT_TRUE(named_shape("pocket").tied_embeddings);
  EXPECT_EQ(named_shape("olmoe-1b-7b").plan.experts.used, 8);
  EXPECT_EQ(named_shape("qwen3-30b-a3b").plan.experts.count, 128);
  EXPECT_EQ(named_shape("qwen3.6-35b-a3b").plan.recurrent_floats().front(), 3 * 8192 + 128 * 4096);
  EXPECT_TRUE(named_shape("gpt-oss-20b").plan.sinks);
  const ModelConfig c = named_shape("L3q12kv4d96");
  EXPECT_EQ(c.layers, 3);
  EXPECT_EQ(c.query_heads, 12);
  EXPECT_EQ(c.kv_heads, 4);
  EXPECT_EQ(c.head_dim, 96);
  for (const char* wrong :
       {"", "llama", "L0q1kv1d64", "L1q3kv2d64", "L1q4kv2d63", "L1q4kv2", "L1q4kv2d64x", "L-1q4kv2d64",
        "L1q32kv1d64", "L9999999999999q4kv2d64", "l1q4kv2d64", " L1q4kv2d64"}) {
    expect_refused("llama-3.1-8b", [&] { named_shape(wrong); });
  }
}

}  // namespace
}  // namespace lode
