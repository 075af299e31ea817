// SPDX-License-Identifier: Apache-2.0
// Training of SAAP: the rows of A H_k against plain loops in double, export, balance, runs that go on from a
// checkpoint to the same bits, and an artefact that beats chance on prompts it never saw.
#include "support/saap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <optional>
#include <thread>

#include "ann/balance.h"
#include "base/cancel.h"
#include "base/file.h"
#include "eval/tiny_model.h"
#include "kernels/rope.h"
#include "lab/train/checkpoint.h"
#include "lab/train/saap/classifier.h"
#include "lab/train/saap/examples.h"
#include "lab/train/saap/trainer.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"
#include "support/saap_training.h"
#include "support/world.h"

namespace lode::test {
namespace {

TEST(SaapFilter, FarKeysOfAQuery) {
  const SaapFilter causal = {.sink = 2, .window = 10, .causal = true};
  const auto early = causal.far(11, 100), first = causal.far(12, 100), late = causal.far(99, 100);
  EXPECT_TRUE(early.empty());
  EXPECT_EQ(first.first_end, 3);  // key 2 is 10 tokens away: one behind the window of 10
  EXPECT_EQ(late.begin, 2);
  EXPECT_EQ(late.first_end, 90);
  EXPECT_GE(late.second_begin, late.end);
  const SaapFilter both = {.sink = 2, .window = 10};
  EXPECT_EQ(both.far(50, 100).second_begin, 60);
  EXPECT_FALSE(both.far(0, 100).empty());
  EXPECT_TRUE(both.far(5, 12).empty());
  EXPECT_TRUE(both.far(0, 1).empty());
  const SaapFilter none = {.sink = 1, .window = 10, .pairs = false, .causal = true};
  EXPECT_EQ(none.far(50, 100).first_end, 51);
}

// Equation 1's target, in double, for every filter.
TEST(SaapExamples, AreTheShareOfAttentionInEachBucket) {
  World world({.kv_heads = 1, .group = 1, .d = 64, .dense = {1, 16}});
  world.write(200);
  const SaapHead head = random_saap_head({.kv_heads = 1, .clusters = 9}, 1);
  const KvRows kv = world.store().layer(0).heads[0];
  const SaapKeys keys = read_saap_keys(kv, world.rope(), head.keys, 1);
  EXPECT_EQ(std::accumulate(keys.counts.begin(), keys.counts.end(), std::int64_t{0}), 199);
  const QueryBlock block = world.block(0, 200);
  SaapCandidates candidates;
  std::vector<float> rotated;  // [n, d] as far from the keys as they are scored
  for (const Position p : {3, 17, 40, 77, 120, 150, 199, 60}) {
    const auto q = block.q_unrotated.subspan(static_cast<std::size_t>(p) * 64, 64);
    candidates.q.insert(candidates.q.end(), q.begin(), q.end());
    candidates.positions.push_back(p);
    candidates.further.push_back(p % 2 == 0 ? 5000 : 0);
    rotated.insert(rotated.end(), q.begin(), q.end());
    world.rope().rotate(std::span(rotated).last(64), p + candidates.further.back());
  }
  const float scale = 1.0f / 8;
  for (const bool causal : {false, true}) {
    for (const bool pairs : {false, true}) {
      for (const bool queries : {false, true}) {
        const SaapFilter filter = {
            .sink = 1, .window = 30, .distance = 25, .pairs = pairs, .queries = queries, .causal = causal};
        SaapExamples examples(64, 9);
        EXPECT_EQ(add_saap_examples(candidates, keys, world.rope(), scale, filter, 100, examples), 8);
        std::int64_t next = 0;
        for (std::size_t c = 0; c < candidates.positions.size(); ++c) {
          const Position p = candidates.positions[c];
          std::vector<double> target(9, 0.0), scores(200);
          double best = -1e30, most = -1e30, total = 0;
          std::int64_t nearest = -1;
          const auto far = [&](std::int64_t k) {
            return k >= 1 && (!pairs || std::abs(k - p) >= 30) && (!causal || k <= p);
          };
          for (std::int64_t k = 1; k < 200; ++k) {
            for (std::size_t i = 0; i < 64; ++i)
              scores[static_cast<std::size_t>(k)] +=
                  0.125 * rotated[c * 64 + i] *
                  static_cast<double>(keys.rotated[static_cast<std::size_t>(k) * 64 + i]);
            const double s = scores[static_cast<std::size_t>(k)];
            if ((!causal || k <= p) && s > best) {
              best = s;
              nearest = k;
            }
            if (far(k)) most = std::max(most, s);
          }
          bool any = false;
          for (std::int64_t k = 1; k < 200; ++k) any = any || far(k);
          if (!any || (queries && std::abs(nearest - p) <= 25)) continue;
          for (std::int64_t k = 1; k < 200; ++k) {
            if (!far(k)) continue;
            const double w = std::exp(scores[static_cast<std::size_t>(k)] - most);
            target[static_cast<std::size_t>(keys.labels[static_cast<std::size_t>(k)])] += w;
            total += w;
          }
          ASSERT_LT(next, examples.count());
          std::vector<float> q(64), found(9);
          examples.read(next++, q, found);
          EXPECT_EQ(q[5], block.q_unrotated[static_cast<std::size_t>(p) * 64 + 5]);
          for (std::size_t b = 0; b < 9; ++b) EXPECT_NEAR(found[b], target[b] / total, 1e-3);
        }
        EXPECT_EQ(next, examples.count());
      }
    }
  }
  SaapExamples few(64, 9);
  add_saap_examples(candidates, keys, world.rope(), scale, {.sink = 1, .window = 16, .queries = false}, 3,
                    few);
  EXPECT_EQ(few.count(), 3);
}

TEST(SaapClassifier, ExportFoldsTheBatchNorm) {
  for (const bool residual : {false, true}) {
    SaapClassifier classifier(8, 20, 6, residual, 3);
    std::vector<float> y(50 * 6);
    for (int step = 0; step < 30; ++step) {
      std::vector<float> x = random_floats(50 * 8, static_cast<std::uint64_t>(step), 5.0);
      classifier.module().forward({x.data(), 50, 8}, {y.data(), 50, 6}, true);
    }
    const std::vector<float> x = random_floats(50 * 8, 99, 5.0);
    classifier.module().forward({x.data(), 50, 8}, {y.data(), 50, 6}, false);
    const BucketNet net = classifier.exported(DType::f32);
    EXPECT_EQ(net.linear_weight.empty(), !residual);
    std::vector<float> scratch, scores(y.size());
    net.scores(x.data(), 50, scratch, scores.data());
    for (std::size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(scores[i], y[i], 1e-4 * (1 + std::abs(y[i])));
    // Taken up again, it is the same function.
    SaapClassifier again(net);
    std::vector<float> same(y.size());
    again.module().forward({x.data(), 50, 8}, {same.data(), 50, 6}, false);
    for (std::size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(same[i], scores[i], 1e-4 * (1 + std::abs(y[i])));
  }
}

TEST(Balance, EvensSkewedClustersWithoutDependingOnThreads) {
  const std::int64_t n = 3000, d = 16, clusters = 12;
  std::vector<float> x = random_floats(n * d, 1, 1.0), centroids = random_floats(clusters * d, 2, 0.3);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < d; ++j)
      x[static_cast<std::size_t>(i * d + j)] += 2 * centroids[static_cast<std::size_t>(3 * d + j)];
  }
  const auto imbalance = [&](const std::vector<float>& offsets) {
    const BucketNet net(d, clusters, {{}, {}, {}, centroids, offsets}, DType::f32);
    std::vector<std::int32_t> labels(static_cast<std::size_t>(n));
    net.label({x.data(), n, d}, labels);
    std::vector<std::int64_t> counts(static_cast<std::size_t>(clusters), 0);
    for (const std::int32_t label : labels) ++counts[static_cast<std::size_t>(label)];
    return imbalance_of(counts);
  };
  ThreadPool one(1), three(3);
  const auto full = balanced_offsets({x.data(), n, d}, centroids, 1.0, one);
  EXPECT_EQ(full, balanced_offsets({x.data(), n, d}, centroids, 1.0, three));
  const double plain = imbalance({}),
               half = imbalance(balanced_offsets({x.data(), n, d}, centroids, 0.5, one));
  EXPECT_GT(plain, 1.5);
  EXPECT_LT(half, plain);
  EXPECT_LT(imbalance(full), 1.05);
  EXPECT_EQ(balanced_offsets({x.data(), n, d}, centroids, 0.0, one), std::vector<float>(12, 0.0f));
}

TEST(SaapTraining, LearnsAndServesTheEngine) {
  const std::filesystem::path checkpoint = temporary("learn"), artefact = temporary("learn.safetensors");
  const Small small;
  int told = 0;
  const SaapResult result = small.train(checkpoint, [&](const SaapHeadReport&) { ++told; });
  EXPECT_EQ(told, 4);
  ASSERT_EQ(result.heads.size(), 4u);
  for (const SaapHeadReport& head : result.heads) {
    EXPECT_GT(head.examples, 100);
    EXPECT_GT(head.held_out, 20);
    EXPECT_LT(head.loss, 0.7 * std::log(12.0));
    EXPECT_GT(head.mass, head.selectivity);
    EXPECT_GE(head.best_mass, head.mass);
    EXPECT_GT(head.imbalance, 0.9);
  }
  write_saap(artefact, result.layers, tiny_model()->fingerprint(), {{.from = 0, .training = "{}"}});
  const Spec spec = parse_spec("saap:probes=4,window=32,dense_layers=0,weights=" + artefact.string());
  Context context(tiny_model(), {.kv_type = DType::f32, .max_tokens = 600});
  const MethodId method = context.attach(spec);
  context.prefill(small.prompts.back().tokens);
  context.build_indexes();
  WorkReport work;
  const std::vector<TokenId> question = {5, 6, 7, 8};
  const auto logits = context.forward(question, method, &work);
  EXPECT_EQ(work.sparse_tokens, 8);
  EXPECT_LT(work.selectivity(), 0.7);
  EXPECT_EQ(work.notice, "");
  // The same question token by token: chunks change nothing.
  context.roll_back(context.indexed_tokens());
  std::vector<float> one_by_one;
  for (const TokenId token : question) {
    const auto row = context.forward({&token, 1}, method);
    one_by_one.insert(one_by_one.end(), row.begin(), row.end());
  }
  ASSERT_EQ(one_by_one.size(), logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) EXPECT_NEAR(one_by_one[i], logits[i], 1e-3);
  // Without `weights` the artefact in the model's folder is taken.
  const std::filesystem::path shipped = tiny_model()->path() / "saap.safetensors";
  const Spec bare = parse_spec("saap:probes=4,window=32,dense_layers=0");
  EXPECT_THROW(context.attach(bare), InputError);
  std::filesystem::copy_file(artefact, shipped);
  const MethodId same = context.attach(bare);
  EXPECT_EQ(context.methods().back().str(), bare.str());
  context.roll_back(context.indexed_tokens());
  context.build_indexes();
  EXPECT_EQ(context.forward(question, same), logits);
  std::filesystem::remove(shipped);
  std::filesystem::remove(artefact);
  std::filesystem::remove(checkpoint);
}

/// Heads that a checkpoint leaves in the midst of the steps whose losses are averaged.
std::int64_t heads_within_last_losses(const std::filesystem::path& checkpoint) {
  if (!std::filesystem::exists(checkpoint)) return 0;
  const Checkpoint found = Checkpoint::read(checkpoint);
  return std::count_if(found.arrays.begin(), found.arrays.end(), [](const auto& entry) {
    return entry.first.ends_with("losses") && !entry.second.empty() && entry.second.size() < 100;
  });
}

// Interrupted ever later until it is done.
TEST(SaapTraining, TellsTheSameLossHoweverOftenInterrupted) {
  using Clock = std::chrono::steady_clock;
  const std::filesystem::path whole = temporary("whole-loss"), stopped = temporary("stopped-loss");
  Small small;
  small.settings.hidden = 128;
  small.settings.steps = 160;
  const Clock::time_point start = Clock::now();
  const SaapResult expected = small.train(whole);
  const Clock::duration step = (Clock::now() - start) / 16;
  std::int64_t within = 0;
  for (int round = 0; round < 20 && within == 0; ++round) {
    std::filesystem::remove(stopped);
    std::optional<SaapResult> found;
    for (Clock::duration wait = 2 * step; !found; wait += step) {
      std::thread timer([&] {
        std::this_thread::sleep_for(wait);
        set_cancel(true);
      });
      try {
        found = small.train(stopped);
      } catch (const Interrupted&) {
        within += heads_within_last_losses(stopped);
      }
      timer.join();
      set_cancel(false);
    }
    ASSERT_EQ(found->heads.size(), expected.heads.size());
    for (std::size_t i = 0; i < expected.heads.size(); ++i)
      EXPECT_EQ(found->heads[i].train_loss, expected.heads[i].train_loss);
  }
  EXPECT_GT(within, 0);
  for (const auto& path : {whole, stopped}) std::filesystem::remove(path);
}

TEST(SaapTraining, IsTheSameAfterAnInterruptionAndInSmallGroups) {
  const Small small;
  const std::filesystem::path whole = temporary("whole"), stopped = temporary("stopped"),
                              grouped = temporary("grouped");
  const std::string expected = bytes_of_artefact(small.train(whole), "a");
  int heads = 0;
  EXPECT_THROW(small.train(stopped,
                           [&](const SaapHeadReport&) {
                             if (++heads == 2) set_cancel(true);
                           }),
               Interrupted);
  set_cancel(false);
  EXPECT_TRUE(std::filesystem::exists(stopped));
  EXPECT_EQ(bytes_of_artefact(small.train(stopped), "b"), expected);
  EXPECT_EQ(bytes_of_artefact(small.train(stopped), "c"), expected);  // all heads from the checkpoint
  // An array that lacks numbers, or is not there, is said, whichever it is.
  for (const char* name : {"load", "imbalance", "selectivity", "done.0.weight"}) {
    Checkpoint damaged = Checkpoint::read(stopped);
    const auto found = std::find_if(damaged.arrays.begin(), damaged.arrays.end(),
                                    [&](const auto& entry) { return entry.first.ends_with(name); });
    ASSERT_NE(found, damaged.arrays.end()) << name;
    found->second.clear();
    damaged.write(stopped);
    EXPECT_THROW(small.train(stopped), InputError) << name;
    damaged.arrays.erase(found);
    damaged.write(stopped);
    EXPECT_THROW(small.train(stopped), InputError) << name;
    std::filesystem::copy_file(whole, stopped, std::filesystem::copy_options::overwrite_existing);
  }
  Small few = small;
  few.settings.memory = saap_bytes_of_head(few.settings, std::ssize(few.prompts), 8);  // head after head
  EXPECT_EQ(bytes_of_artefact(few.train(grouped), "d"), expected);
  // Another run's checkpoint is refused.
  Small other = small;
  other.settings.seed = 5;
  EXPECT_THROW(other.train(whole), InputError);
  for (const auto& path : {whole, stopped, grouped}) std::filesystem::remove(path);
}

TEST(SaapTraining, VariantsTrain) {
  const std::filesystem::path checkpoint = temporary("variant"), base = temporary("base.safetensors");
  Small small;
  small.settings.steps = 10;
  small.settings.balance = 1.0;
  small.settings.residual = true;
  small.settings.filter.causal = true;
  const SaapResult balanced = small.train(checkpoint);
  std::filesystem::remove(checkpoint);
  EXPECT_FALSE(balanced.layers.at(0)[0].keys.bias.empty());
  EXPECT_FALSE(balanced.layers.at(1)[1].networks[0].queries.linear_weight.empty());
  write_saap(base, balanced.layers, tiny_model()->fingerprint(), {{.from = 0, .training = "{}"}});
  small.settings.from = base;
  const SaapResult further = small.train(checkpoint);
  std::filesystem::remove(checkpoint);
  EXPECT_EQ(further.layers.at(0)[0].keys.linear_weight, balanced.layers.at(0)[0].keys.linear_weight);
  EXPECT_LT(further.heads[0].train_loss, balanced.heads[0].train_loss);
  std::filesystem::remove(base);
}

TEST(SaapTraining, AddsANetworkForLongerContextsOverTheSameBuckets) {
  const std::filesystem::path checkpoint = temporary("added"), base = temporary("near.safetensors"),
                              stopped = temporary("added-stopped");
  Small small;
  small.settings.steps = 10;
  small.settings.residual = true;
  const SaapResult near = small.train(checkpoint);
  std::filesystem::remove(checkpoint);
  write_saap(base, near.layers, tiny_model()->fingerprint(), {{0, "{}"}});
  small.settings.from = base;
  small.settings.add_network = true;
  small.settings.shift = 2000;
  small.settings.shifted = 1.0;
  small.settings.hidden = 16;
  small.settings.type = DType::q8;
  const SaapResult both = small.train(checkpoint);
  for (int layer = 0; layer < 2; ++layer) {
    for (std::size_t h = 0; h < 2; ++h) {
      const SaapHead &before = near.layers.at(layer)[h], &after = both.layers.at(layer)[h];
      ASSERT_EQ(after.networks.size(), 2u);
      EXPECT_EQ(after.keys.linear_weight, before.keys.linear_weight);
      EXPECT_EQ(after.load, before.load);
      EXPECT_EQ(after.networks[0].queries.output_weight,
                before.networks[0].queries.rounded_to_8_bits().output_weight);
      EXPECT_EQ(after.networks[1].queries.hidden, 16);
      EXPECT_NE(after.networks[1].selectivity, before.networks[0].selectivity);
    }
  }
  // The same after an interruption, and from the checkpoint alone.
  const auto bytes = [&](const SaapResult& result) {
    const std::filesystem::path path = temporary("added.safetensors");
    write_saap(path, result.layers, tiny_model()->fingerprint(), {{0, "{}"}, {900, "{}"}});
    std::string raw = read_file(path);
    std::filesystem::remove(path);
    return raw;
  };
  int heads = 0;
  EXPECT_THROW(small.train(stopped,
                           [&](const SaapHeadReport&) {
                             if (++heads == 2) set_cancel(true);
                           }),
               Interrupted);
  set_cancel(false);
  EXPECT_EQ(bytes(small.train(stopped)), bytes(both));
  EXPECT_EQ(bytes(small.train(checkpoint)), bytes(both));
  // The last of several is replaced by one that is trained anew, on what the first left.
  write_saap(base, both.layers, tiny_model()->fingerprint(), {{0, "{}"}, {900, "{}"}});
  for (const auto& path : {checkpoint, stopped}) std::filesystem::remove(path);
  small.settings.replace_network = true;
  const SaapResult replaced = small.train(checkpoint);
  EXPECT_EQ(bytes(replaced), bytes(both));
  std::filesystem::remove(checkpoint);
  write_saap(base, near.layers, tiny_model()->fingerprint(), {{0, "{}"}});
  EXPECT_THROW(small.train(checkpoint), InputError);  // the only one
  small.settings.replace_network = false;
  // A network of several cannot be trained further, another one can be added.
  write_saap(base, both.layers, tiny_model()->fingerprint(), {{0, "{}"}, {900, "{}"}});
  for (const auto& path : {checkpoint, stopped}) std::filesystem::remove(path);
  EXPECT_EQ(small.train(checkpoint).layers.at(1)[0].networks.size(), 3u);
  std::filesystem::remove(checkpoint);
  small.settings.add_network = false;
  EXPECT_THROW(small.train(checkpoint), InputError);
  for (const auto& path : {checkpoint, base}) std::filesystem::remove(path);
}

TEST(SaapTraining, RefusesAnotherArtefactInTheOnesPlaceAndOneWhoseLayersWouldBeLost) {
  const std::filesystem::path checkpoint = temporary("place"), base = temporary("place.safetensors");
  Small small;
  small.settings.steps = 10;
  const auto make = [&](std::uint64_t seed) {
    Small other;
    other.settings.steps = 10;
    other.settings.seed = seed;
    write_saap(base, other.train(temporary("place-other")).layers, tiny_model()->fingerprint(), {{0, "{}"}});
    std::filesystem::remove(temporary("place-other"));
  };
  make(1);
  small.settings.from = base;
  small.settings.add_network = true;
  int heads = 0;
  EXPECT_THROW(small.train(checkpoint,
                           [&](const SaapHeadReport&) {
                             if (++heads == 1) set_cancel(true);
                           }),
               Interrupted);
  set_cancel(false);
  make(2);
  EXPECT_THROW(small.train(checkpoint), InputError);
  make(1);
  EXPECT_EQ(small.train(checkpoint).layers.at(1)[0].networks.size(), 2u);
  std::filesystem::remove(checkpoint);
  small.settings.dense_layers = 1;
  EXPECT_THROW(small.train(checkpoint), InputError);
  for (const auto& path : {checkpoint, base}) std::filesystem::remove(path);
}

/// `distance` and this random model: the best key of some head is never far.
TEST(SaapTraining, AHeadThatNothingTeachesAttendsNearAndTheOthersAreTrained) {
  const std::filesystem::path checkpoint = temporary("starved"), path = temporary("starved.safetensors");
  Small small;
  small.settings.steps = 4;
  std::int64_t near_only = 0, trained = 0;
  SaapResult result;
  for (small.settings.filter.distance = 200; small.settings.filter.distance < 400;
       small.settings.filter.distance += 8) {
    std::filesystem::remove(checkpoint);
    near_only = trained = 0;
    try {
      result = small.train(checkpoint);
    } catch (const InputError&) {
      break;  // nobody learns any more
    }
    for (const SaapHeadReport& head : result.heads) (head.near_only ? near_only : trained) += 1;
    if (near_only > 0) break;
  }
  if (near_only == 0 || trained == 0)
    GTEST_SKIP() << "no distance at which some heads starve and others do not";
  const std::string bytes = bytes_of_artefact(result, "sa");
  EXPECT_EQ(bytes_of_artefact(small.train(checkpoint), "sb"), bytes) << "from the checkpoint, too";
  write_saap(path, result.layers, tiny_model()->fingerprint(), {{0, "{}"}});
  for (const auto& [layer, heads] : result.layers) {
    const LayerGeometry geometry = {.layer = layer,
                                    .query_heads = tiny_model()->config().query_heads,
                                    .kv_heads = tiny_model()->config().kv_heads,
                                    .head_dim = 8};
    const SaapLayer read = read_saap(path, geometry, tiny_model()->fingerprint());
    for (std::size_t h = 0; h < heads.size(); ++h) EXPECT_EQ(read.heads[h].near_only, heads[h].near_only);
  }
  // Each far key is one that a trained head chose.
  Context context(tiny_model(), {.kv_type = DType::f32, .max_tokens = 700});
  const MethodId method =
      context.attach(parse_spec("saap:window=32,dense_layers=0,probes=11,weights=" + path.string()));
  context.prefill(std::vector<TokenId>(600, 40));
  context.build_indexes();
  WorkReport work;
  context.forward(std::vector<TokenId>{50, 60}, method, &work);
  const double share = static_cast<double>(trained) / static_cast<double>(trained + near_only);
  EXPECT_LE(work.selectivity(), share + 1e-9);
  EXPECT_GT(work.selectivity(), 0.0);
  for (const auto& file : {checkpoint, path}) std::filesystem::remove(file);
}

TEST(SaapTraining, RefusesWhatCannotBeTrained) {
  const std::filesystem::path checkpoint = temporary("refused");
  Small one;
  one.prompts.resize(1);
  EXPECT_THROW(one.train(checkpoint), InputError);
  Small near;
  near.settings.filter.window = 500;
  EXPECT_THROW(near.train(checkpoint), InputError);
  EXPECT_FALSE(std::filesystem::exists(checkpoint))
      << "nothing was learnt, and other settings may teach something";
  Small tight;
  tight.settings.memory = saap_bytes_of_head(tight.settings, std::ssize(tight.prompts), 8) - 1;
  EXPECT_THROW(tight.train(checkpoint), InputError);
  Small many;
  many.settings.clusters = 5000;
  EXPECT_THROW(many.train(checkpoint), InputError);
  Small dense;
  dense.settings.dense_layers = 2;
  EXPECT_THROW(dense.train(checkpoint), InputError);
  std::filesystem::remove(checkpoint);
}

}  // namespace
}  // namespace lode::test
