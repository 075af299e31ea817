// SPDX-License-Identifier: Apache-2.0
// Models on a GPU whose layers have heads of different sizes, rows of earlier layers, numbers of their own for each token
// or experts that stand apart (Gemma 4): the CPU's answers from contexts, files and branches, with full attention and with
// methods; and bits that do not depend on company.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "engine/context.h"
#include "engine/document.h"
#include "lodestone/error.h"
#include "lodestone/scheduler.h"
#include "support/gpu.h"
#include "support/interrupted_reading.h"
#include "support/random_folder.h"
#include "support/refusal.h"
#include "support/tiny_family.h"

namespace lode {
namespace {

class GpuUnlikeLayers : public testing::TestWithParam<std::string>, protected test::TinyFamily {
 protected:
  GpuUnlikeLayers() : TinyFamily(GetParam()) {}
  static Spec spec(const std::string& method) {
    return parse_spec(method + (method.find(':') != std::string::npos ? "," : ":") +
                      "sink=1,window=16,dense_layers=0");
  }
  /// Documents of `tokens` tokens, with indexes for sparse questions.
  std::shared_ptr<const Document> document(Device device, std::int64_t tokens) const {
    return Document::read(model_, ids(0, tokens), "",
                          {.specs = {spec("streaming"), spec("quest:budget=24")},
                           .kv_type = DType::f32,
                           .device = device,
                           .chunk = 16,
                           .max_tokens = 256});
  }
};

TEST_P(GpuUnlikeLayers, ContextsAnswerAsTheCpus) {
  NEEDS_GPU();
  expect_contexts_answer_as_the_cpus();
}

/// Some of these take their keys in as they come, others build an index; some choose on the GPU, others on the host.
TEST_P(GpuUnlikeLayers, MethodsChooseWhatTheyChooseOnTheCpu) {
  NEEDS_GPU();
  const std::vector<std::string> specs = {"streaming",
                                          "topk:k=8",
                                          "quest:budget=24",
                                          "pqcache:budget=24",
                                          "double-sparsity:bits=16,channels=4,budget=24",
                                          "ivf:nlist=8,nprobe=2,k=20",
                                          "snapkv:window_size=8,max_capacity_prompt=24",
                                          "kmeans:clusters=8,probes=2"};
  for (const std::string& method : specs) {
    std::vector<float> logits[2];
    for (const Device device : {Device::cpu, Device::cuda}) {
      Context c = context(device);
      const MethodId id = c.attach(spec(method));
      c.prefill(ids(0, 150));
      c.build_indexes();
      WorkReport work;
      logits[device == Device::cuda] = c.forward(ids(150, 10), id, &work);
      EXPECT_GT(work.sparse_tokens, 0) << method;
    }
    EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-3f) << method;
  }
}

TEST_P(GpuUnlikeLayers, SavedDocumentsAreAskedOnEitherDevice) {
  NEEDS_GPU();
  const auto file = folder_.path() / "document.lode";
  Context c = context();
  const MethodId method = c.attach(spec("quest:budget=24"));
  c.prefill(ids(0, 120));
  c.build_indexes();
  c.save(file, "");
  const std::vector<float> logits = c.forward(ids(120, 30), kDense);
  c.roll_back(120);
  const std::vector<float> sparse = c.forward(ids(120, 30), method);
  for (const Device device : {Device::cpu, Device::cuda}) {
    Context loaded = Context::load(file, model_, {.device = device, .chunk = 16});
    EXPECT_EQ(loaded.tokens(), 120);
    const std::vector<float> found = loaded.forward(ids(120, 30), kDense);
    loaded.roll_back(120);
    const std::vector<float> chosen = loaded.forward(ids(120, 30), 0);
    if (device == Device::cuda) {
      EXPECT_EQ(found, logits) << "no bit is lost, and no token read again";
      EXPECT_EQ(chosen, sparse);
      continue;
    }
    EXPECT_LT(relative_difference(found, logits), 2e-4f);
    EXPECT_LT(relative_difference(chosen, sparse), 2e-4f);
  }
}

TEST_P(GpuUnlikeLayers, AnInterruptedReadingGoesOn) {
  NEEDS_GPU();
  test::expect_an_interrupted_reading_goes_on([&] { return context(); }, ids_, folder_.path());
}

TEST_P(GpuUnlikeLayers, BranchesAnswerAsTheCpusInAnyCompany) {
  NEEDS_GPU();
  const std::vector<Spec> specs = {parse_spec("full"), spec("streaming"), spec("quest:budget=24")};
  std::vector<std::vector<TokenId>> answers[2];
  for (const Device device : {Device::cpu, Device::cuda}) {
    const auto about = document(device, 150);
    const auto request = [&](std::size_t i) {
      return Request{.document = about,
                     .prompt = {ids_.begin() + 150 + static_cast<std::ptrdiff_t>(i), ids_.begin() + 160},
                     .attention = specs[i % specs.size()],
                     .options = {.max_new_tokens = 10, .stop_at_eos = false},
                     .exact = false};
    };
    Scheduler together(model_, {.max_sequences = 6});
    std::vector<Ticket<Answer>> tickets;
    for (std::size_t i = 0; i < 6; ++i) tickets.push_back(together.submit(request(i)));
    for (auto& ticket : tickets)
      answers[device == Device::cuda].push_back(ticket.result.get().generation.tokens);
    if (device == Device::cpu) continue;
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_EQ(Scheduler(model_, {.max_sequences = 1}).submit(request(i)).result.get().generation.tokens,
                answers[1][i]);
  }
  EXPECT_EQ(answers[1][0], answers[0][0]);
  EXPECT_EQ(answers[1][3], answers[0][3]);
}

TEST_P(GpuUnlikeLayers, BitsOfABranchDoNotDependOnCompany) {
  NEEDS_GPU();
  const auto first = document(Device::cuda, 150), second = document(Device::cuda, 77);
  const Spec specs[] = {parse_spec("full"), spec("streaming"), spec("quest:budget=24")};
  expect_bits_without_company(
      [&](int i) { return std::make_unique<Sequence>(i % 2 == 0 ? first : second, specs[i % 3], 60); });
}

TEST_P(GpuUnlikeLayers, WhatIsNotThereIsRefused) {
  NEEDS_GPU();
  test::expect_refused("heads of different sizes", [&] { context_with({.kv_type = DType::q8}); });
  test::expect_refused("heads of different sizes",
                       [&] { context_with({.kv_type = DType::f32, .kv_tier = KvTier::host}); });
  Context c = context();
  c.prefill(ids(0, 20));
  EXPECT_THROW(c.forward(std::vector<TokenId>{999}, kDense), InputError);
}

INSTANTIATE_TEST_SUITE_P(Models, GpuUnlikeLayers, testing::Values("gemma4", "gemma4-moe"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

/// Heads as large as those of the published models: 512 numbers, 256 in layers with a window; a KV head of eight query
/// heads; two layers that attend to the rows of the first two.
class GpuLargeHeads : public testing::Test {
 protected:
  static constexpr std::int64_t kHidden = 48, kWidth = 16, kLayers = 4;

  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "lode-heads-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
    const Json config = {
        {"architectures", {"Gemma4ForCausalLM"}},
        {"hidden_size", kHidden},
        {"intermediate_size", 64},
        {"num_hidden_layers", kLayers},
        {"num_attention_heads", 8},
        {"num_key_value_heads", 1},
        {"head_dim", 256},
        {"global_head_dim", 512},
        {"vocab_size", 64},
        {"vocab_size_per_layer_input", 64},
        {"max_position_embeddings", 4096},
        {"sliding_window", 40},
        {"tie_word_embeddings", true},
        {"num_kv_shared_layers", 2},
        {"hidden_size_per_layer_input", kWidth},
        {"layer_types", {"sliding_attention", "full_attention", "sliding_attention", "full_attention"}}};
    test::write_random_folder(dir_, config, shapes());
    std::ofstream(dir_ / "tokenizer.json") << letters_tokenizer().dump();
    model_ = Model::load(dir_, 2);
    for (TokenId i = 0; i < 200; ++i) ids_.push_back((i * i + 5 * i + i / 9) % 64);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  static std::vector<test::NamedShape> shapes() {
    std::vector<test::NamedShape> all = {
        {"model.embed_tokens.weight", {64, kHidden}},
        {"model.norm.weight", {kHidden}},
        {"model.embed_tokens_per_layer.weight", {64, kLayers * kWidth}},
        {"model.per_layer_model_projection.weight", {kLayers * kWidth, kHidden}},
        {"model.per_layer_projection_norm.weight", {kWidth}}};
    for (int i = 0; i < kLayers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      const std::int64_t d = i % 2 == 0 ? 256 : 512;
      std::vector<test::NamedShape> own = {{"self_attn.q_proj", {8 * d, kHidden}},
                                           {"self_attn.q_norm", {d}},
                                           {"self_attn.o_proj", {kHidden, 8 * d}},
                                           {"mlp.gate_proj", {64, kHidden}},
                                           {"mlp.up_proj", {64, kHidden}},
                                           {"mlp.down_proj", {kHidden, 64}},
                                           {"per_layer_input_gate", {kWidth, kHidden}},
                                           {"per_layer_projection", {kHidden, kWidth}}};
      for (const char* norm : {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                               "post_feedforward_layernorm", "post_per_layer_input_norm"})
        own.push_back({norm, {kHidden}});
      if (i < 2)
        own.insert(own.end(), {{"self_attn.k_proj", {d, kHidden}},
                               {"self_attn.v_proj", {d, kHidden}},
                               {"self_attn.k_norm", {d}}});
      for (const test::NamedShape& one : own) all.emplace_back(layer + one.first + ".weight", one.second);
      all.emplace_back(layer + "layer_scalar", std::vector<std::int64_t>{1});
    }
    return all;
  }
  std::span<const TokenId> ids(std::size_t begin, std::size_t count) const {
    return std::span(ids_).subspan(begin, count);
  }
  Context context(Device device, DType type) const {
    return Context(model_, {.kv_type = type, .device = device, .max_tokens = 256, .chunk = 128});
  }
  std::filesystem::path dir_;
  std::shared_ptr<const Model> model_;
  std::vector<TokenId> ids_;
};

TEST_F(GpuLargeHeads, AnswerAsTheCpus) {
  NEEDS_GPU();
  for (const DType type : {DType::f32, DType::bf16}) {
    std::vector<float> logits[2];
    for (const Device device : {Device::cpu, Device::cuda}) {
      Context c = context(device, type);
      c.prefill(ids(0, 150));
      logits[device == Device::cuda] = c.forward(ids(150, 12), kDense);
      for (std::size_t at = 162; at < 166; ++at) {
        const std::vector<float> one = c.forward(ids(at, 1), kDense);
        logits[device == Device::cuda].insert(logits[device == Device::cuda].end(), one.begin(), one.end());
      }
    }
    EXPECT_LT(relative_difference(logits[1], logits[0]), type == DType::f32 ? 1e-3f : 0.15f) << name_of(type);
  }
}

/// Whoever chooses, on the GPU or on the host: a method that lists every key gives what full attention gives.
TEST_F(GpuLargeHeads, MethodsThatListEverythingAreFullAttention) {
  NEEDS_GPU();
  for (const DType type : {DType::f32, DType::bf16}) {
    Context c = context(Device::cuda, type);
    std::vector<MethodId> methods;
    for (const char* spec : {"topk:k=500", "quest:budget=500", "pqcache:budget=500",
                             "double-sparsity:bits=4,channels=16,budget=500", "ivf:nlist=4,nprobe=4,k=500",
                             "kmeans:clusters=8,probes=8", "squeezed:sparsity=0", "hyperplanes:budget=1.0"})
      methods.push_back(c.attach(parse_spec(spec + std::string(",sink=1,window=31,dense_layers=0"))));
    c.prefill(ids(0, 150));
    c.build_indexes();
    const std::vector<float> expected = c.forward(ids(150, 4), kDense);
    for (const MethodId method : methods) {
      c.roll_back(150);
      WorkReport work;
      EXPECT_LT(relative_difference(c.forward(ids(150, 4), method, &work), expected),
                type == DType::f32 ? 1e-3f : 0.1f)
          << method;
      EXPECT_GT(work.sparse_tokens, 0) << method;
    }
  }
}

}  // namespace
}  // namespace lode
