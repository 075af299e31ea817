// SPDX-License-Identifier: Apache-2.0
// A key classifier learned jointly with one of queries: what it learns from against plain loops in double,
// runs that go on from a checkpoint to the same bits, and an artefact whose keys it assigns. Besides: the
// other variants of section 6.5, and what is measured of all.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/cancel.h"
#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "lab/train/checkpoint.h"
#include "lab/train/saap/keys.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"
#include "support/saap.h"
#include "support/saap_training.h"
#include "support/world.h"

namespace lode::test {
namespace {

constexpr std::int64_t kTokens = 200, kDim = 64;

/// Keys of one head and queries all over its text.
struct Text {
  World world{{.kv_heads = 1, .group = 1, .d = kDim, .dense = {1, 16}}};
  SaapRows rows;
  SaapCandidates candidates;
  SaapFilter filter = {.sink = 1, .window = 30, .distance = 25, .queries = false, .causal = true};
  Text() {
    world.write(kTokens);
    rows = read_saap_rows(world.store().layer(0).heads[0], world.rope());
    const QueryBlock block = world.block(0, kTokens);
    for (Position p = 5; p < kTokens; p += 5) {
      const auto q = block.q_unrotated.subspan(static_cast<std::size_t>(p) * kDim, kDim);
      candidates.q.insert(candidates.q.end(), q.begin(), q.end());
      candidates.positions.push_back(p);
      candidates.further.push_back(0);
    }
  }
  SaapKeySample sample(std::int64_t keys, std::uint64_t seed) const {
    Rng rng(seed);
    return sample_saap_keys(candidates, rows, world.rope(), 0.125f, filter, 20, keys, rng);
  }
  /// Attention of a candidate on each key, in double; none on near ones.
  std::vector<double> attention(std::size_t candidate) const {
    const Position p = candidates.positions[candidate];
    std::vector<float> q(candidates.q.begin() + static_cast<std::ptrdiff_t>(candidate * kDim),
                         candidates.q.begin() + static_cast<std::ptrdiff_t>((candidate + 1) * kDim));
    world.rope().rotate(q, p);
    std::vector<double> weights(kTokens, 0.0);
    double sum = 0;
    for (std::size_t k = 1; k + 30 <= static_cast<std::size_t>(p); ++k) {
      double s = 0;
      for (std::size_t i = 0; i < kDim; ++i)
        s += 0.125 * q[i] * static_cast<double>(rows.rotated[k * kDim + i]);
      sum += weights[k] = std::exp(s);
    }
    for (double& w : weights) w /= sum;
    return weights;
  }
};

std::vector<float> row_of(const SaapKeySample& sample, std::size_t query) {
  const std::size_t n = sample.stands_for.size();
  std::vector<float> row(n);
  kernels().widen(sample.attention.data() + query * n, DType::f16, static_cast<std::int64_t>(n), row.data());
  return row;
}

TEST(SaapKeySample, OfAllKeysIsTheAttentionOnThem) {
  const Text text;
  const SaapKeySample all = text.sample(2 * kTokens, 1);
  ASSERT_EQ(std::ssize(all.stands_for), kTokens - 1);  // without the sink
  for (const float w : all.stands_for) EXPECT_EQ(w, 1.0f);
  EXPECT_EQ(all.k, std::vector<float>(text.rows.plain.begin() + kDim, text.rows.plain.end()));
  std::size_t query = 0;
  for (std::size_t c = 0; c < text.candidates.positions.size() && query < 20; ++c) {
    if (text.candidates.positions[c] < 31) continue;  // no far key
    EXPECT_EQ(all.q[query * kDim], text.candidates.q[c * kDim]);
    const std::vector<float> row = row_of(all, query++);
    const std::vector<double> expected = text.attention(c);
    for (std::size_t k = 0; k < row.size(); ++k) ASSERT_NEAR(row[k], expected[k + 1], 1e-3);
  }
  EXPECT_EQ(all.queries(kDim), 20);
}

// Over many draws the keys stand for all of them, and what is attended of them for what is attended of all.
TEST(SaapKeySample, OfSomeKeysStandsForAllOfThem) {
  const Text text;
  constexpr int kDraws = 400;
  constexpr std::size_t kParts = 4, kFar = 100;  // of the twentieth query with a far key, which is at 130
  const std::vector<double> attention = text.attention(25);
  double keys = 0, drawn = 0;
  std::vector<double> share(kParts, 0.0), expected(kParts, 0.0);  // of stretches of its far keys
  for (std::size_t k = 1; k <= kFar; ++k) expected[(k - 1) * kParts / kFar] += attention[k];
  for (int draw = 0; draw < kDraws; ++draw) {
    const SaapKeySample some = text.sample(40, static_cast<std::uint64_t>(draw));
    keys += std::accumulate(some.stands_for.begin(), some.stands_for.end(), 0.0) / kDraws;
    drawn += static_cast<double>(some.stands_for.size()) / kDraws;
    const std::vector<float> row = row_of(some, 19);
    std::size_t key = 0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      while (text.rows.plain[key * kDim] != some.k[i * kDim]) ++key;  // in their order
      if (row[i] > 0.0f) share.at((key - 1) * kParts / kFar) += static_cast<double>(row[i]) / kDraws;
    }
    for (const float w : some.stands_for) EXPECT_LE(w, 2.0f * (kTokens - 1) / 40 + 1e-3f);
  }
  EXPECT_NEAR(keys, kTokens - 1, 4);
  EXPECT_NEAR(drawn, 40, 4);
  for (std::size_t part = 0; part < kParts; ++part) EXPECT_NEAR(share[part], expected[part], 0.03) << part;
}

// Queries that attend keys by a rule that no centroid follows: f_k and f_q find it together.
TEST(SaapKeyTrainer, FindsWhatIsAttendedTogether) {
  constexpr std::int64_t kKeys = 240, kQueries = 60, kBuckets = 6;
  Rng rng(4);
  SaapKeySample sample;
  sample.k = random_floats(kKeys * 16, 1, 1.0);
  sample.q = random_floats(kQueries * 16, 2, 0.3);
  sample.stands_for.assign(kKeys, 1.0f);
  std::vector<std::int64_t> topic_of_key(kKeys);
  for (std::int64_t k = 0; k < kKeys; ++k) {  // a key's topic is in one small coordinate
    topic_of_key[static_cast<std::size_t>(k)] = k % kBuckets;
    sample.k[static_cast<std::size_t>(k * 16)] = 0.5f * static_cast<float>(k % kBuckets);
  }
  std::vector<float> row(kKeys);
  sample.attention.resize(static_cast<std::size_t>(kQueries * kKeys));
  for (std::int64_t q = 0; q < kQueries; ++q) {
    sample.q[static_cast<std::size_t>(q * 16 + q % kBuckets)] += 4.0f;
    for (std::int64_t k = 0; k < kKeys; ++k)
      row[static_cast<std::size_t>(k)] =
          k % kBuckets == q % kBuckets ? static_cast<float>(kBuckets) / kKeys : 0.0f;
    kernels().narrow(row.data(), kKeys, DType::f16, sample.attention.data() + q * kKeys);
  }
  SaapKeyTrainer trainer({.d = 16, .hidden = 32, .buckets = kBuckets}, random_floats(kBuckets * 16, 3, 0.2),
                         1e-2, 5);
  std::vector<std::int32_t> all(kQueries);
  std::iota(all.begin(), all.end(), 0);
  const double first = trainer.step(sample, all, 1.0);
  double last = first;
  for (int step = 0; step < 400; ++step) last = trainer.step(sample, all, 1.0);
  EXPECT_GT(first, -0.4);
  EXPECT_LT(last, -1.2);  // at best -log 6 = -1.79, less the key that every bucket is counted as having more
  std::vector<std::int32_t> labels(kKeys);
  trainer.exported(DType::f32).label({sample.k.data(), kKeys, 16}, labels);
  std::vector<std::int64_t> together(kBuckets * kBuckets, 0);
  for (std::int64_t k = 0; k < kKeys; ++k)
    ++together[static_cast<std::size_t>(labels[static_cast<std::size_t>(k)] * kBuckets + k % kBuckets)];
  std::int64_t right = 0;
  for (std::int64_t b = 0; b < kBuckets; ++b)
    right += *std::max_element(together.begin() + b * kBuckets, together.begin() + (b + 1) * kBuckets);
  EXPECT_GT(right, kKeys * 2 / 3);  // by chance a fifth
}

TEST(SaapMeasures, CapturedAtSharesOfTheKeys) {
  // 100 keys in five buckets; the best is taken whole at 2 %, the second in part.
  const std::vector<float> scores = {0.1f, 0.9f, 0.5f, 0.7f, 0.8f}, target = {0.05f, 0.3f, 0.4f, 0.25f, 0.0f};
  const std::vector<std::int64_t> counts = {87, 1, 8, 4, 0};  // the fifth has no keys and costs nothing
  const SaapCaptured captured = captured_at_shares(scores, target, counts);
  EXPECT_NEAR(captured[0], 0.3 + 0.25 / 4, 1e-6);
  EXPECT_NEAR(captured[1], 0.3 + 0.25, 1e-6);
  EXPECT_NEAR(captured[2], 0.3 + 0.25 + 0.4 * 5 / 8, 1e-6);
  const SaapCaptured one =
      captured_at_shares(std::vector<float>{1.0f}, std::vector<float>{1.0f}, std::vector<std::int64_t>{50});
  EXPECT_NEAR(one[2], 0.1, 1e-6);
}

struct SmallKeys : Small {
  SmallKeys() {
    settings.train_keys = true;
    settings.key_hidden = 16;
    settings.key_steps = 40;
    settings.key_sample = 120;
    settings.key_queries = 60;
    settings.steps = 40;
  }
};

TEST(SaapTraining, OfKeysServesTheEngine) {
  const std::filesystem::path checkpoint = temporary("keys"), artefact = temporary("keys.safetensors");
  const SmallKeys small;
  const SaapResult result = small.train(checkpoint);
  for (const SaapHeadReport& head : result.heads) {
    EXPECT_GT(head.gain, 0.0);
    EXPECT_GT(head.captured[2], 0.1);
    EXPECT_GE(head.best_captured[1] + 1e-6, head.captured[1]);
    EXPECT_EQ(head.kmeans_mass, 0.0);  // there are no centroids to ask
  }
  const SaapHead& head = result.layers.at(1)[0];
  EXPECT_EQ(head.keys.hidden, 16);
  EXPECT_EQ(head.keys.type, DType::f16);
  EXPECT_EQ(head.networks[0].queries.hidden, 24);
  write_saap(artefact, result.layers, tiny_model()->fingerprint(), {{.from = 0, .training = "{}"}});
  const LayerGeometry geometry = {.layer = 1,
                                  .query_heads = tiny_model()->config().query_heads,
                                  .kv_heads = tiny_model()->config().kv_heads,
                                  .head_dim = tiny_model()->config().head_dim};
  const SaapLayer read = read_saap(artefact, geometry, tiny_model()->fingerprint());
  EXPECT_EQ(read.heads[0].keys.hidden_weight, head.keys.hidden_weight);
  EXPECT_EQ(read.heads[0].keys.hidden_bias, head.keys.hidden_bias);
  EXPECT_EQ(read.heads[0].keys.output_weight, head.keys.output_weight);
  EXPECT_EQ(read.heads[0].keys.linear_weight, head.keys.linear_weight);
  EXPECT_EQ(read.heads[0].keys.bias, head.keys.bias);

  // Keys that join token by token are where one build puts them; a context keeps its index over a file.
  const Spec spec = parse_spec("saap:probes=3,window=32,dense_layers=0,weights=" + artefact.string());
  const std::vector<TokenId>& tokens = small.prompts.back().tokens;
  const std::span<const TokenId> text(tokens), first = text.first(200);
  const std::vector<TokenId> question = {5, 6, 7, 8};
  Context grown(tiny_model(), {.kv_type = DType::f32, .max_tokens = 600}),
      built(tiny_model(), {.kv_type = DType::f32, .max_tokens = 600});
  const MethodId by_grown = grown.attach(spec), by_built = built.attach(spec);
  grown.prefill(first);
  grown.build_indexes();
  for (const TokenId token : text.subspan(200)) grown.prefill({&token, 1});
  built.prefill(text);
  built.build_indexes();
  const std::vector<float> expected = built.forward(question, by_built);
  const std::vector<float> found = grown.forward(question, by_grown);
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-3);
  std::filesystem::remove(artefact);
  std::filesystem::remove(checkpoint);
}

TEST(SaapTraining, OfKeysIsTheSameAfterInterruptionsAndInSmallGroups) {
  const SmallKeys small;
  const std::filesystem::path whole = temporary("keys-whole"), stopped = temporary("keys-stopped"),
                              grouped = temporary("keys-grouped");
  const std::string expected = bytes_of_artefact(small.train(whole), "ka");
  int heads = 0;
  EXPECT_THROW(small.train(stopped,
                           [&](const SaapHeadReport&) {
                             if (++heads == 2) set_cancel(true);
                           }),
               Interrupted);
  set_cancel(false);
  EXPECT_EQ(bytes_of_artefact(small.train(stopped), "kb"), expected);
  EXPECT_EQ(bytes_of_artefact(small.train(stopped), "kc"), expected);  // all from the checkpoint
  Checkpoint damaged = Checkpoint::read(stopped);
  damaged.arrays["layer.0.head.0.keys.projection.weight"].pop_back();
  damaged.write(stopped);
  EXPECT_THROW(small.train(stopped), InputError);
  SmallKeys few = small;
  few.settings.memory = saap_bytes_of_head(few.settings, std::ssize(few.prompts), 8);  // head after head
  EXPECT_EQ(bytes_of_artefact(few.train(grouped), "kd"), expected);
  SmallKeys other = small;
  other.settings.key_steps = 41;
  EXPECT_THROW(other.train(whole), InputError);
  for (const auto& path : {whole, stopped, grouped}) std::filesystem::remove(path);
}

// In the midst of the joint steps: trained in two pieces, through a checkpoint, to the same bits.
TEST(SaapKeyTrainer, GoesOnFromACheckpointToTheSameBits) {
  const Text text;
  const SaapKeySample sample = text.sample(100, 3);
  const SaapKeyTrainer::Shape shape = {.d = kDim, .hidden = 12, .buckets = 5};
  const std::vector<float> centroids = random_floats(5 * kDim, 8, 0.1);
  const auto steps = [&](SaapKeyTrainer& trainer, int count) {
    for (int i = 0; i < count; ++i)
      trainer.step(
          sample, std::vector<std::int32_t>{0, 3, 5, 7, 11, static_cast<std::int32_t>(trainer.steps())}, 0.5);
  };
  SaapKeyTrainer whole(shape, centroids, 1e-2, 6), before(shape, centroids, 1e-2, 6),
      after(shape, centroids, 1e-2, 6);
  steps(whole, 14);
  steps(before, 9);
  Checkpoint checkpoint;
  before.put(checkpoint, "joint.");
  after.get(checkpoint, "joint.", "test");
  EXPECT_EQ(after.steps(), 9);
  steps(after, 5);
  EXPECT_EQ(after.exported(DType::f32).output_weight, whole.exported(DType::f32).output_weight);
  EXPECT_EQ(after.exported(DType::f32).hidden_weight, whole.exported(DType::f32).hidden_weight);
  EXPECT_EQ(after.exported(DType::f32).linear_weight, whole.exported(DType::f32).linear_weight);
}

TEST(SaapTraining, FineTunesToTheCurrentPromptAlone) {
  const std::filesystem::path checkpoint = temporary("adapt"), base = temporary("adapt.safetensors");
  Small small;
  write_saap(base, small.train(checkpoint).layers, tiny_model()->fingerprint(), {{0, "{}"}});
  std::filesystem::remove(checkpoint);
  Small tuned;
  tuned.settings.from = base;
  tuned.settings.adapt = true;
  tuned.settings.test_as_asked = true;
  tuned.settings.late_tokens = 100;
  EXPECT_THROW(tuned.train(checkpoint), InputError);  // many prompts
  tuned.prompts.erase(tuned.prompts.begin(), tuned.prompts.end() - 1);
  const SaapResult result = tuned.train(checkpoint);
  for (const SaapHeadReport& head : result.heads) {
    EXPECT_GT(head.examples, 20);
    EXPECT_GT(head.held_out, 20);
    EXPECT_GT(head.start_loss, 0.0);
    EXPECT_NE(head.start_loss, head.loss);
  }
  // The artefact's own loss on those queries is what another run of no change says: it does not depend on
  // steps.
  std::filesystem::remove(checkpoint);
  tuned.settings.steps = 1;
  const SaapResult again = tuned.train(checkpoint);
  for (std::size_t h = 0; h < 4; ++h) {
    EXPECT_EQ(again.heads[h].start_loss, result.heads[h].start_loss);
    EXPECT_EQ(again.heads[h].start_captured, result.heads[h].start_captured);
  }
  std::filesystem::remove(checkpoint);
  std::filesystem::remove(base);
}

/// Whatever the filter, variants are tested on the same queries with the same targets.
TEST(SaapTraining, TestsAsAskedWhateverIsTrainedOn) {
  const std::filesystem::path checkpoint = temporary("asked");
  std::vector<double> best;
  for (const bool causal : {false, true}) {
    for (const bool queries : {false, true}) {
      Small small;
      small.settings.steps = 2;
      small.settings.samples = 4000;  // all of them
      small.settings.test_as_asked = true;
      small.settings.filter.causal = causal;
      small.settings.filter.queries = queries;
      const SaapResult result = small.train(checkpoint);
      best.push_back(result.heads[1].best_mass);
      best.push_back(static_cast<double>(result.heads[1].held_out));
      std::filesystem::remove(checkpoint);
    }
  }
  // Which queries are candidates depends on whether any key is far, before or behind.
  for (std::size_t i = 2; i < best.size(); ++i) EXPECT_NEAR(best[i], best[i % 2], 1e-6) << i;
}

TEST(SaapTraining, ShiftEndsWhereItIsTold) {
  const std::filesystem::path checkpoint = temporary("shift-to");
  const auto trained = [&](std::int64_t shift, std::int64_t to) {
    Small small;
    small.settings.steps = 3;
    small.settings.shift = shift;
    small.settings.shift_to = to;
    const SaapResult result = small.train(checkpoint);
    std::filesystem::remove(checkpoint);
    return bytes_of_artefact(result, "shift-to.safetensors");
  };
  const std::string plain = trained(0, 0), far = trained(5000, 0);
  EXPECT_NE(plain, far);
  EXPECT_EQ(trained(5000, 401), plain);  // prompts of 401 tokens end there already
  EXPECT_EQ(trained(5000, 1 << 20), far);
  EXPECT_NE(trained(5000, 1000), far);
}

}  // namespace
}  // namespace lode::test
