// SPDX-License-Identifier: Apache-2.0
// Weights in one file and in shards; every tensor checked against the config; what is damaged is named.
#include "model/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/json.h"
#include "base/threads.h"
#include "io/safetensors.h"
#include "support/refusal.h"
#include "support/source_dir.h"

namespace lode {
namespace {

using test::bytes_of_file;
using test::expect_refused;
using test::TestFolder;

const std::filesystem::path kModels = source_dir() / "tests/golden/models";

/// A copy of a golden model that may be damaged.
struct Copy {
  explicit Copy(const char* name) : config(read_config(kModels / name)) {
    for (const auto& entry : std::filesystem::directory_iterator(kModels / name)) {
      if (entry.path().filename() != "golden.safetensors") std::filesystem::copy(entry.path(), folder.path());
    }
  }
  ModelWeights read(bool check_finite = true) const {
    return ModelWeights::read(folder.path(), config, check_finite);
  }
  ModelWeights read(ThreadPool& pool) const {
    return ModelWeights::read(open_weight_files(folder.path()), config, /*check_finite=*/true, &pool);
  }
  TestFolder folder;
  ModelConfig config;
};

float first_of(const Weight& w) {
  if (w.type == WeightType::f32) {
    float value;
    std::memcpy(&value, w.data, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, w.data, sizeof bits);
  return w.type == WeightType::f16 ? to_float(f16{bits}) : to_float(bf16{bits});
}

TEST(Weights, OneFileOfEachType) {
  float values[3];
  int i = 0;
  for (const auto& [name, type] :
       {std::pair{"gqa-f32", DType::f32}, {"gqa-f16", DType::f16}, {"gqa-bf16", DType::bf16}}) {
    const Copy copy(name);
    const ModelWeights w = copy.read();
    EXPECT_EQ(w.layers.size(), 2u);
    EXPECT_EQ(w.layers[1].q.type, weight_type_of(type));
    EXPECT_EQ(w.layers[1].q.rows, 32);
    EXPECT_EQ(w.layers[1].k.rows, 16);
    EXPECT_EQ(w.layers[0].q_bias.data, nullptr);
    EXPECT_EQ(w.output.data, w.embedding.data) << "tied";
    EXPECT_GT(w.bytes, 30000);
    values[i++] = first_of(w.layers[0].attention_norm);
  }
  for (const float value : values) EXPECT_TRUE(std::isfinite(value) && value != 0);
}

TEST(Weights, ShardsAndBiases) {
  const Copy copy("mha-untied-bias");
  const ModelWeights w = copy.read();
  EXPECT_NE(w.output.data, w.embedding.data);
  for (const Weight* bias :
       {&w.layers[1].q_bias, &w.layers[1].o_bias, &w.layers[1].gate_bias, &w.layers[1].down_bias}) {
    EXPECT_NE(bias->data, nullptr);
  }
}

TEST(Weights, FingerprintTellsModelsApart) {
  const std::string one = Copy("gqa-f32").read().fingerprint;
  EXPECT_EQ(one, Copy("gqa-f32").read().fingerprint);
  EXPECT_EQ(one.size(), 32u);
  EXPECT_NE(one, Copy("mistral").read().fingerprint);
  EXPECT_NE(one, Copy("gqa-f16").read().fingerprint);
}

/// A header of odd length is legal; the weights are then copied to where they can be read as numbers.
TEST(Weights, OddAddressesAreMadeEven) {
  const Copy copy("gqa-f32");
  const auto path = copy.folder / "model.safetensors";
  const ModelWeights before = copy.read();
  std::string bytes = bytes_of_file(path);
  std::uint64_t length;
  std::memcpy(&length, bytes.data(), 8);
  bytes.insert(8 + length, " ");
  ++length;
  std::memcpy(bytes.data(), &length, 8);
  copy.folder.write("model.safetensors", bytes);
  const ModelWeights after = copy.read();
  EXPECT_EQ(before.fingerprint, after.fingerprint);
  EXPECT_EQ(after.output.data, after.embedding.data);
  for (const Weight* w : {&after.embedding, &after.layers[0].q, &after.layers[1].down, &after.final_norm}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(w->data) % 4, 0u);
  }
}

/// Replaces the text of the header, keeping its length.
void replace_in_header(const Copy& copy, const std::string& old_text, const std::string& new_text) {
  ASSERT_EQ(old_text.size(), new_text.size());
  std::string bytes = bytes_of_file(copy.folder / "model.safetensors");
  const std::size_t at = bytes.find(old_text);
  ASSERT_NE(at, std::string::npos);
  copy.folder.write("model.safetensors", bytes.replace(at, old_text.size(), new_text));
}

TEST(Weights, MissingUnknownAndMisshapenTensors) {
  {
    const Copy copy("gqa-f32");
    replace_in_header(copy, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.UP_proj.weight");
    expect_refused("model.layers.1.mlp.up_proj.weight", [&] { copy.read(); });
  }
  {
    Copy copy("gqa-f32");
    copy.config.layers = 1;
    expect_refused("model.layers.1.", [&] { copy.read(); });
    copy.config.layers = 3;
    expect_refused("model.layers.2.", [&] { copy.read(); });
  }
  for (const auto& change : std::vector<void (*)(ModelConfig&)>{
           [](ModelConfig& c) { c.hidden = 64; }, [](ModelConfig& c) { c.vocab = 65; },
           [](ModelConfig& c) { c.head_dim = 4; }, [](ModelConfig& c) { c.kv_heads = 4; },
           [](ModelConfig& c) { c.intermediate = 47; }}) {
    Copy copy("gqa-f32");
    change(copy.config);
    expect_refused("expected shape", [&] { copy.read(); });
  }
  Copy copy("gqa-f32");
  copy.config.tied_embeddings = false;
  expect_refused("lm_head.weight", [&] { copy.read(); });
  copy.config.tied_embeddings = true;
  copy.config.plan.q_bias = copy.config.plan.k_bias = copy.config.plan.v_bias = copy.config.plan.o_bias =
      true;
  expect_refused("bias", [&] { copy.read(); });
}

TEST(Weights, OldRotaryTablesAreTolerated) {
  const Copy copy("gqa-f32");
  const MappedFile file(copy.folder / "model.safetensors");
  std::vector<TensorToWrite> tensors;
  for (const auto& [name, t] : parse_safetensors(file.bytes(), "x"))
    tensors.push_back({name, DType::f32, t.shape, t.bytes});
  const std::vector<float> table(4, 1.0f);
  tensors.push_back(
      {"model.layers.0.self_attn.rotary_emb.inv_freq", DType::f32, {4}, std::as_bytes(std::span(table))});
  TestFolder folder;
  write_safetensors(folder / "model.safetensors", tensors, {});
  EXPECT_NO_THROW(ModelWeights::read(folder.path(), copy.config));
  tensors.back().name = "model.layers.0.self_attn.q_proj.qweight";
  write_safetensors(folder / "model.safetensors", tensors, {});
  expect_refused("q_proj.qweight", [&] { ModelWeights::read(folder.path(), copy.config); });
}

TEST(Weights, NotANumber) {
  ThreadPool threads(3);
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {nan, -nan, infinity, -infinity}) {
    const Copy copy("gqa-f32");
    std::string bytes = bytes_of_file(copy.folder / "model.safetensors");
    std::memcpy(bytes.data() + bytes.size() - 4, &bad, 4);
    copy.folder.write("model.safetensors", bytes);
    expect_refused("NaN or an infinity", [&] { copy.read(); });
    expect_refused("NaN or an infinity", [&] { copy.read(threads); });
    EXPECT_NO_THROW(copy.read(/*check_finite=*/false));
  }
  for (const auto& [name, bits] :
       {std::pair{"gqa-f16", 0x7c00}, {"gqa-f16", 0xfe00}, {"gqa-bf16", 0x7f80}, {"gqa-bf16", 0xffff}}) {
    const Copy copy(name);
    std::string bytes = bytes_of_file(copy.folder / "model.safetensors");
    const auto half = static_cast<std::uint16_t>(bits);
    std::memcpy(bytes.data() + bytes.size() - 2, &half, 2);
    copy.folder.write("model.safetensors", bytes);
    expect_refused("NaN or an infinity", [&] { copy.read(); });
  }
  const Copy copy("gqa-f32");  // the largest number and the smallest are numbers
  std::string bytes = bytes_of_file(copy.folder / "model.safetensors");
  for (const float good : {std::numeric_limits<float>::max(), -std::numeric_limits<float>::denorm_min()}) {
    std::memcpy(bytes.data() + bytes.size() - 4, &good, 4);
    copy.folder.write("model.safetensors", bytes);
    EXPECT_NO_THROW(copy.read());
    EXPECT_NO_THROW(copy.read(threads));
  }
}

TEST(Weights, TheFirstDamagedWeightIsNamedWhoeverFindsOne) {
  const Copy copy("gqa-f32");
  ThreadPool threads(3);
  std::vector<TensorToWrite> tensors;
  const MappedFile file(copy.folder / "model.safetensors");
  const std::vector<float> bad(std::size_t{1} << 16, std::numeric_limits<float>::infinity());
  for (const auto& [name, t] : parse_safetensors(file.bytes(), "x")) {
    const bool damaged = name.find("layers.1.mlp") != name.npos;
    tensors.push_back(
        {name, DType::f32, t.shape, damaged ? std::as_bytes(std::span(bad)).first(t.bytes.size()) : t.bytes});
  }
  TestFolder folder;
  write_safetensors(folder / "model.safetensors", tensors, {});
  for (ThreadPool* const pool : {static_cast<ThreadPool*>(nullptr), &threads})
    expect_refused("'layer 1 gate'", [&] {
      ModelWeights::read(open_weight_files(folder.path()), copy.config, /*check_finite=*/true, pool);
    });
}

TEST(Weights, ShardsThatAreMissingDoubledOrElsewhere) {
  const Copy copy("mha-untied-bias");
  const std::string index = "model.safetensors.index.json", shard = "model-00002-of-00003.safetensors";
  const Json good = parse_json(bytes_of_file(copy.folder / index), "index");
  std::filesystem::rename(copy.folder / shard, copy.folder / "elsewhere");
  expect_refused(shard, [&] { copy.read(); });
  std::filesystem::copy(copy.folder / "model-00001-of-00003.safetensors", copy.folder / shard);
  expect_refused("another shard", [&] { copy.read(); });
  std::filesystem::remove(copy.folder / shard);
  std::filesystem::rename(copy.folder / "elsewhere", copy.folder / shard);
  EXPECT_NO_THROW(copy.read());
  for (const Json& outside :
       {Json("../x.safetensors"), Json("/tmp/x.safetensors"), Json("a/b.safetensors"), Json(".safetensors"),
        Json(""), Json("config.json"), Json(3), Json(), Json("x.bin")}) {
    Json bad = good;
    bad["weight_map"]["model.norm.weight"] = outside;
    copy.folder.write(index, bad.dump());
    expect_refused("plain name", [&] { copy.read(); });
  }
  for (const char* bad : {"", "{}", "[]", "{\"weight_map\": []}", "{\"weight_map\": {\"a\":1,\"a\":1}}"}) {
    copy.folder.write(index, bad);
    expect_refused(index, [&] { copy.read(); });
  }
}

TEST(Weights, WhatPeopleHaveInsteadOfWeights) {
  const Copy copy("gqa-f32");
  copy.folder.write("model.safetensors",
                    "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n");
  expect_refused("Git LFS", [&] { copy.read(); });
  std::filesystem::remove(copy.folder / "model.safetensors");
  expect_refused("neither", [&] { copy.read(); });
  copy.folder.write("pytorch_model.bin", "PK\x03\x04");
  expect_refused("pickle", [&] { copy.read(); });
}

TEST(RandomWeights, SeededAndOfTheRightScale) {
  const ModelConfig config = named_shape("L2q4kv2d16");
  const ModelWeights a = ModelWeights::random(config, DType::f32, 1),
                     b = ModelWeights::random(config, DType::f32, 1),
                     c = ModelWeights::random(config, DType::f32, 2);
  EXPECT_EQ(a.fingerprint, b.fingerprint);
  EXPECT_NE(a.fingerprint, c.fingerprint);
  const Weight& w = a.layers[1].down;
  std::vector<float> values(static_cast<std::size_t>(w.rows * w.cols));
  std::memcpy(values.data(), w.data, values.size() * 4);
  double square = 0;
  for (const float x : values) square += static_cast<double>(x) * x;
  EXPECT_NEAR(square / static_cast<double>(w.rows), 1.0, 0.1)
      << "a row of unit length keeps activations as large as they are";
  for (const DType type : {DType::f16, DType::bf16})
    EXPECT_EQ(ModelWeights::random(config, type, 1).bytes, a.bytes / 2);
}

}  // namespace
}  // namespace lode
