// SPDX-License-Identifier: Apache-2.0
// Training of HashAttention's functions: gradients against finite differences, a start that is what it says,
// signatures that tell pivotal keys apart, runs that resume to the bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "base/rng.h"
#include "eval/tiny_model.h"
#include "lab/studies/recall.h"
#include "lab/train/hash/start.h"
#include "lab/train/hash/trainer.h"
#include "lodestone/error.h"
#include "support/hash_training.h"
#include "support/normals.h"

namespace lode::test {
namespace {

HashExamples random_examples(const HashHead::Shape& shape, std::int64_t tokens, std::int64_t keys) {
  HashExamples examples = {.tokens = tokens, .keys = keys, .queries = {}, .key_inputs = {}, .labels = {}};
  const std::int64_t inputs = shape.scheme.key_inputs(shape.head_dim);
  examples.key_inputs = normals(keys * inputs, 1);
  Rng rng(2);
  for (int g = 0; g < shape.group; ++g) {
    examples.queries.push_back(normals(tokens * shape.head_dim, hash_seed(3, g)));
    std::vector<std::uint8_t>& labels = examples.labels.emplace_back();
    for (std::int64_t i = 0; i < tokens * keys; ++i)
      labels.push_back(static_cast<std::uint8_t>(rng.below(5) == 0 ? 1 : rng.below(4) == 0 ? 2 : 0));
  }
  return examples;
}

TEST(HashHead, GradientsAreThoseOfTheLoss) {
  for (const auto kind : {PivotalLoss::bce, PivotalLoss::softmax}) {
    for (const bool per_query_head : {false, true}) {
      for (const auto activation : {HashNet::Activation::silu, HashNet::Activation::relu}) {
        const HashHead::Shape shape = {.group = 2,
                                       .head_dim = 6,
                                       .scheme = {.bits = 32,
                                                  .per_query_head = per_query_head,
                                                  .values = HashScheme::Values::norm,
                                                  .activation = activation},
                                       .widths = {7},
                                       .loss = kind,
                                       .adam = {},
                                       .seed = 5};
        HashHead head(shape);
        const HashExamples examples = random_examples(shape, 3, 11);
        head.loss(examples, 20.0);
        std::vector<std::pair<Parameter*, std::vector<float>>>
            kept;  // every call of loss() adds to gradients
        for (auto* functions : {&head.queries(), &head.keys()}) {
          for (HashFunction& function : *functions) {
            function.module().visit(
                "", [&](const std::string&, Parameter& p) { kept.emplace_back(&p, p.gradient); });
          }
        }
        for (auto& [p, gradient] : kept) {
          for (std::size_t i = 0; i < p->value.size(); i += 5) {
            // A shorter step where the slope has kinks.
            const float step = activation == HashNet::Activation::relu ? 3e-4f : 2e-3f;
            const float before = p->value[i];
            p->value[i] = before + step;
            const double above = head.loss(examples, 20.0);
            p->value[i] = before - step;
            const double below = head.loss(examples, 20.0);
            p->value[i] = before;
            EXPECT_NEAR(gradient[i], (above - below) / (2.0 * step), 4e-3 + 0.02 * std::abs(gradient[i]));
          }
        }
      }
    }
  }
}

// Large products do not overflow, queries without pivotal or without any keys count nothing.
TEST(HashHead, ExtremeExamples) {
  for (const auto kind : {PivotalLoss::bce, PivotalLoss::softmax}) {
    const HashHead::Shape shape = {.group = 1,
                                   .head_dim = 4,
                                   .scheme = {.bits = 128},
                                   .widths = {},
                                   .loss = kind,
                                   .adam = {},
                                   .seed = 5};
    HashHead head(shape);
    HashExamples examples = random_examples(shape, 2, 5);
    for (float& x : examples.key_inputs) x *= 1e6f;
    for (float& x : examples.queries[0]) x *= 1e6f;
    EXPECT_TRUE(std::isfinite(head.step(examples, 20.0, 1.0)));
    for (const auto label : {HashExamples::kOther, HashExamples::kLeftOut}) {
      std::fill(examples.labels[0].begin(), examples.labels[0].end(), label);
      EXPECT_TRUE(std::isfinite(head.step(examples, 20.0, 1.0)));
    }
    HashExamples bad = random_examples(shape, 4, 20);
    bad.key_inputs[0] = std::nanf("");
    EXPECT_THROW(head.step(bad, 20.0, 1.0), RunError);
  }
}

TEST(LinearStart, EigenvectorsOfASymmetricMatrix) {
  constexpr std::int64_t n = 24;
  const std::vector<float> x = normals(n * n, 4);
  std::vector<double> a(n * n);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) a[i * n + j] = x[i * n + j] + x[j * n + i];
  }
  const Eigen eigen = symmetric_eigen(a, n);
  EXPECT_TRUE(std::is_sorted(eigen.values.rbegin(), eigen.values.rend()));
  for (std::size_t v = 0; v < n; ++v) {
    for (std::size_t i = 0; i < n; ++i) {
      double product = 0;
      for (std::size_t j = 0; j < n; ++j) product += a[i * n + j] * eigen.vectors[v * n + j];
      EXPECT_NEAR(product, eigen.values[v] * eigen.vectors[v * n + i], 1e-9);
    }
  }
}

TEST(LinearStart, TheNetworkIsTheLinearFunction) {
  Rng rng(1);
  HashFunction function(10, {64, 70}, 32, HashNet::Activation::silu, {}, rng);
  const std::vector<float> directions = normals(32 * 10, 2), centre = normals(10, 3), x = normals(5 * 10, 4);
  ASSERT_TRUE(function.start_linear({directions.data(), 32, 10}, centre));
  const Matrix<const float> codes = function.forward({x.data(), 5, 10}, false);
  for (std::int64_t r = 0; r < 5; ++r) {
    for (std::int64_t b = 0; b < 32; ++b) {
      double sum = 0;
      for (std::size_t i = 0; i < 10; ++i)
        sum += (x[static_cast<std::size_t>(r) * 10 + i] - centre[i]) *
               static_cast<double>(directions[static_cast<std::size_t>(b) * 10 + i]);
      EXPECT_NEAR(codes[r][static_cast<std::size_t>(b)], std::tanh(sum), 1e-5);
    }
  }
  HashFunction narrow(10, {63}, 32, HashNet::Activation::relu, {}, rng);
  EXPECT_FALSE(narrow.start_linear({directions.data(), 32, 10}, centre));
}

// Keys far from the origin and long in one direction: signatures of the start still follow q . k.
TEST(LinearStart, CodesFollowInnerProducts) {
  constexpr std::int64_t d = 16, n = 400;
  Moments keys(d), queries(d);
  std::vector<float> k = normals(n * d, 1), q = normals(n * d, 2);
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = k[i] * (i % d < 4 ? 3.0f : 0.3f) + 5.0f;
  for (std::int64_t r = 0; r < n; ++r) {
    keys.add(std::span(k).subspan(static_cast<std::size_t>(r * d), d));
    queries.add(std::span(q).subspan(static_cast<std::size_t>(r * d), d));
  }
  Rng rng(3);
  const LinearStart start = linear_start(keys, queries, 32, 0.25, rng);
  double together = 0, squares = 0, products = 0, mean_product = 0;
  std::vector<double> match, product;
  for (std::size_t r = 0; r < n; ++r) {
    double bits = 0, dot = 0;
    for (std::size_t b = 0; b < 32; ++b) {
      double on_k = 0, on_q = 0;
      for (std::size_t i = 0; i < d; ++i) {
        on_k += start.keys[b * d + i] * (k[r * d + i] - start.centre[i]);
        on_q += start.queries[b * d + i] * q[i];
      }
      bits += (on_k > 0) == (on_q > 0) ? 1 : -1;
    }
    for (std::size_t i = 0; i < d; ++i) dot += static_cast<double>(k[r * d + i] - start.centre[i]) * q[i];
    match.push_back(bits);
    product.push_back(dot);
    mean_product += dot / n;
  }
  const double mean_match = std::accumulate(match.begin(), match.end(), 0.0) / n;
  for (std::size_t r = 0; r < n; ++r) {
    together += (match[r] - mean_match) * (product[r] - mean_product);
    squares += (match[r] - mean_match) * (match[r] - mean_match);
    products += (product[r] - mean_product) * (product[r] - mean_product);
  }
  EXPECT_GT(together / std::sqrt(squares * products), 0.7);
}

std::vector<std::string> fingerprints(const HashResult& result) {
  std::vector<std::string> all;
  for (const HashWeights& layer : result.layers) all.push_back(layer.fingerprint());
  return all;
}

TEST(HashTrainer, ResumesToTheBitWhateverTheThreads) {
  const auto model = tiny_model();
  const std::vector<Prompt> prompts = letters_for(*model, 600);
  const ContextOptions options = {.kv_type = DType::f32, .max_tokens = 200, .chunk = 32};
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / ("hash-train-" + std::to_string(getpid()));
  HashSettings settings = small_hash_settings();
  settings.draw = HashSettings::Draw::chunk;
  const HashResult whole = train_hash(model, options, settings, prompts, {}, Progress::Mode::quiet);
  EXPECT_GT(whole.steps, 10);
  ASSERT_EQ(whole.layers.size(), 2u);
  EXPECT_EQ(whole.layers[0].query.size(), 4u);
  EXPECT_EQ(whole.layers[0].key.size(), 2u);
  // Another settings' checkpoint is refused; one of this run is gone on from.
  std::filesystem::remove(path);
  const HashResult kept = train_hash(model, options, settings, prompts, path, Progress::Mode::quiet);
  EXPECT_EQ(fingerprints(kept), fingerprints(whole));
  const HashResult again = train_hash(model, options, settings, prompts, path, Progress::Mode::quiet);
  EXPECT_EQ(fingerprints(again), fingerprints(whole));
  HashSettings other = settings;
  other.rate = 0.5;
  EXPECT_THROW(train_hash(model, options, other, prompts, path, Progress::Mode::quiet), InputError);
  std::ofstream(path) << "nothing";
  EXPECT_THROW(train_hash(model, options, settings, prompts, path, Progress::Mode::quiet), InputError);
  std::filesystem::remove(path);
}

// Steps that are drawn over a prompt do not depend on how the prompt is read; late tokens are others.
TEST(HashTrainer, DrawingOverAPromptDoesNotDependOnTheChunk) {
  const auto model = tiny_model();
  const std::vector<Prompt> prompts = letters_for(*model, 600);
  HashSettings settings = small_hash_settings();
  settings.steps = 4;
  settings.late_tokens = 20;
  const auto train = [&](double late, std::int64_t chunk) {
    settings.late = late;
    const ContextOptions options = {.kv_type = DType::f32, .max_tokens = 200, .chunk = chunk};
    return train_hash(model, options, settings, prompts, {}, Progress::Mode::quiet);
  };
  const HashResult whole = train(0.5, 256);
  EXPECT_EQ(whole.steps, 4 * std::ssize(prompts));
  EXPECT_EQ(fingerprints(train(0.5, 256)), fingerprints(whole));
  EXPECT_NE(fingerprints(train(0.0, 256)), fingerprints(whole));
  settings.shift = 1000;
  EXPECT_NE(fingerprints(train(0.5, 256)), fingerprints(whole));
  settings.shift = 0;
  const HashResult chunked = train(0.5, 32);
  ASSERT_EQ(chunked.heads.size(), whole.heads.size());
  for (std::size_t i = 0; i < whole.heads.size(); ++i)
    EXPECT_NEAR(chunked.heads[i].loss, whole.heads[i].loss, 0.02 * whole.heads[i].loss);
}

// At rate 0 the functions of a file come out as they went in; at another they are trained further, and
// further away is not where they stand.
TEST(HashTrainer, GoesOnFromAFile) {
  const auto model = tiny_model();
  const std::vector<Prompt> prompts = letters_for(*model, 600);
  const ContextOptions options = {.kv_type = DType::f32, .max_tokens = 200, .chunk = 256};
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / ("hash-from-" + std::to_string(getpid()));
  HashSettings settings = small_hash_settings();
  const auto train = [&] { return train_hash(model, options, settings, prompts, {}, Progress::Mode::quiet); };
  const HashResult first = train();
  write_hash_weights(path, first.layers, model->fingerprint(), {});
  settings.from = path;
  settings.rate = 0;
  EXPECT_EQ(fingerprints(train()), fingerprints(first));
  settings.rate = 1e-2;
  const auto near = fingerprints(train());
  EXPECT_NE(near, fingerprints(first));
  settings.shift = 5000;
  settings.further = 5000;
  settings.apart = 1.0;
  const auto far = fingerprints(train());
  EXPECT_EQ(fingerprints(train()), far);
  settings.apart = 0.0;
  EXPECT_NE(fingerprints(train()), far);
  settings.widths = {32};
  EXPECT_THROW(train(), InputError);
  settings.widths = {64};
  settings.scheme.roped = false;
  EXPECT_THROW(train(), InputError);
  settings.scheme = {.per_query_head = true};
  EXPECT_THROW(train(), InputError);
  std::filesystem::remove(path);
}

TEST(HashTrainer, TextsWithoutFarKeysAreRefused) {
  const auto model = tiny_model();
  const ContextOptions options = {.kv_type = DType::f32, .max_tokens = 200, .chunk = 32};
  std::vector<Prompt> prompts = letters_for(*model, 600);
  for (Prompt& prompt : prompts) prompt.tokens.resize(12);
  EXPECT_THROW(train_hash(model, options, small_hash_settings(), prompts, {}, Progress::Mode::quiet),
               InputError);
}

// The oracle recalls everything, whatever the length; a method's own recall is between its share and that.
TEST(Recall, OfExactSearchIsOneAndOfChanceTheShare) {
  const auto model = tiny_model();
  std::string text;
  Rng rng(8);
  while (text.size() < 400) text += static_cast<char>('a' + rng.below(26));
  RecallOptions options;
  options.context.kv_type = DType::f32;
  options.context.chunk = 64;
  options.lengths = {100, 200, 390};
  options.dense = {.sink = 4, .window = 16};
  options.top = 8;
  options.queries = 4;
  options.progress = Progress::Mode::quiet;
  const std::vector<NamedSpec> specs = {{"exact", parse_spec("topk:k=8")},
                                        {"value", parse_spec("topk:k=8,by=value")},
                                        {"all", parse_spec("hyperplanes:budget=1.0")},
                                        {"some", parse_spec("random:fraction=25%")}};
  const RecallReport report = recall_by_length(model, text, specs, options);
  ASSERT_EQ(report.rows.size(), 12u);
  for (const RecallRow& row : report.rows) {
    const HeadRecall mean = row.mean();
    EXPECT_EQ(row.heads.size(), 8u);
    if (row.attention == "exact") {
      EXPECT_DOUBLE_EQ(mean.by_weight, 1.0);
    }
    if (row.attention == "value") {
      EXPECT_GT(mean.by_value, 0.999);
    }
    if (row.attention == "all") {
      EXPECT_DOUBLE_EQ(mean.chosen, 1.0);
    }
    if (row.attention == "some") {
      EXPECT_NEAR(mean.chosen, 0.25, 0.02);
      EXPECT_NEAR(mean.by_weight, 0.25, 0.15);
    }
  }
  RecallOptions bad = options;
  bad.lengths = {20};
  EXPECT_THROW(recall_by_length(model, text, specs, bad), InputError);
  bad.lengths = {4000};
  EXPECT_THROW(recall_by_length(model, text, specs, bad), InputError);
  EXPECT_THROW(recall_by_length(model, text, {{"full", parse_spec("full")}}, options), InputError);
}

}  // namespace
}  // namespace lode::test
