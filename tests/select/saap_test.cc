// SPDX-License-Identifier: Apache-2.0
// SAAP against plain loops in double: which bucket a key is in, which buckets a query attends; and what is
// said, done and refused when artefact or text do not fit.
#include "support/saap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>

#include "base/file.h"
#include "io/container.h"
#include "io/safetensors.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/saap/int8_net.h"
#include "select/shared/bucket_choice.h"
#include "select/shared/stored_keys.h"
#include "select/shared/synthetic_artefact.h"
#include "support/forged_index.h"
#include "support/idle_device.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

std::filesystem::path temporary(const std::string& name) {
  return std::filesystem::path(testing::TempDir()) / ("saap-test-" + std::to_string(getpid()) + "-" + name);
}

/// Scores of a network in double, from its stored (rounded) weights.
std::vector<double> scores_exactly(const BucketNet& net, std::span<const float> x) {
  const auto widened = [&](const std::vector<std::byte>& raw) {
    std::vector<float> out(raw.size() / static_cast<std::size_t>(bytes_of(net.type)));
    kernels().widen(raw.data(), net.type, std::ssize(out), out.data());
    return out;
  };
  const auto w1 = widened(net.hidden_weight), w2 = widened(net.output_weight),
             w3 = widened(net.linear_weight);
  std::vector<double> h(net.hidden_bias.begin(), net.hidden_bias.end());
  for (std::size_t j = 0; j < h.size(); ++j) {
    for (std::size_t i = 0; i < x.size(); ++i) h[j] += static_cast<double>(w1[j * x.size() + i]) * x[i];
    h[j] = std::max(h[j], 0.0);
  }
  std::vector<double> y(static_cast<std::size_t>(net.buckets), 0.0);
  for (std::size_t c = 0; c < y.size(); ++c) {
    if (!net.bias.empty()) y[c] += net.bias[c];
    for (std::size_t j = 0; j < h.size(); ++j) y[c] += w2[c * h.size() + j] * h[j];
    for (std::size_t i = 0; !w3.empty() && i < x.size(); ++i)
      y[c] += static_cast<double>(w3[c * x.size() + i]) * x[i];
  }
  return y;
}

std::vector<double> softmax_exactly(std::vector<double> x) {
  const double most = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& v : x) sum += v = std::exp(v - most);
  for (double& v : x) v /= sum;
  return x;
}

/// Buckets by falling score that hold a far key.
std::vector<int> ranked(const std::vector<double>& scores,
                        const std::vector<std::vector<Position>>& buckets) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](int c) { return buckets[static_cast<std::size_t>(c)].empty(); });
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  return order;
}

class Saap : public testing::TestWithParam<SaapShape> {};
INSTANTIATE_TEST_SUITE_P(Networks, Saap,
                         testing::Values(SaapShape{}, SaapShape{.type = DType::f16},
                                         SaapShape{.type = DType::bf16}, SaapShape{.linear = true},
                                         SaapShape{.key_bias = true}, SaapShape{.key_net = true},
                                         SaapShape{.d = 80, .clusters = 7}));

// Sections 4 and 5, and appendix E.3, in double.
TEST_P(Saap, AttendsTheBucketsThatTheClassifierNames) {
  const SaapShape shape = GetParam();
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 3, .d = shape.d, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string weights = ",weights=" + SaapFiles::of(shape);
  for (const auto& [batched, rank, power] : {std::tuple{true, "mass", 0.0},
                                             {false, "mass", 0.0},
                                             {true, "root", 0.5},
                                             {true, "key", 1.0},
                                             {false, "key", 1.0}}) {
    const auto selector = make(std::string("saap:probes=3,group=") + (batched ? "batched" : "independent") +
                                   ",rank=" + rank + weights,
                               geometry);
    World text({.kv_heads = 2, .group = 3, .d = shape.d, .dense = {1, 16}});
    text.write(150);
    selector->build(0, text.store().layer(0));
    text.write(30);
    const QueryBlock block = text.block(170, 10);
    const std::vector<FarSet> found = select(*selector, block, geometry);
    std::int64_t listed = 0;
    for (std::int64_t t = 0; t < 10; ++t) {
      for (int h = 0; h < 2; ++h) {
        const SaapHead head = random_saap_head(shape, static_cast<std::uint64_t>(h));
        std::vector<std::vector<Position>> buckets(static_cast<std::size_t>(shape.clusters));
        for (Position p = 1; p < block.far_end(t, geometry.dense); ++p) {
          std::vector<float> key = text.key(p, h);
          text.rope().unrotate(key, p);
          const std::vector<double> y = scores_exactly(head.keys, key);
          buckets[static_cast<std::size_t>(std::max_element(y.begin(), y.end()) - y.begin())].push_back(p);
        }
        std::vector<double> sum(static_cast<std::size_t>(shape.clusters), 0.0);
        std::vector<std::vector<double>> own;
        for (int g = 0; g < 3; ++g) {
          const auto q = block.q_unrotated.subspan(static_cast<std::size_t>((t * 6 + h * 3 + g) * shape.d),
                                                   static_cast<std::size_t>(shape.d));
          own.push_back(softmax_exactly(scores_exactly(head.networks[0].queries, q)));
          for (std::size_t c = 0; c < sum.size(); ++c) {
            own.back()[c] /= std::pow(std::max<double>(1.0, static_cast<double>(buckets[c].size())), power);
            sum[c] += own.back()[c];
          }
        }
        for (int g = 0; g < 3; ++g) {
          const std::vector<int> order = ranked(batched ? sum : own[static_cast<std::size_t>(g)], buckets);
          FarSet expected;
          for (std::size_t probe = 0; probe < std::min<std::size_t>(3, order.size()); ++probe) {
            for (const Position p : buckets[static_cast<std::size_t>(order[probe])])
              expected.emplace(p, 0.0f);
          }
          EXPECT_EQ(found[static_cast<std::size_t>(t * 6 + h * 3 + g)], expected);
          if (!batched || g == 0) listed += std::ssize(expected);
        }
      }
    }
    const SelectWork work = selector->take_work();
    const std::int64_t net = random_saap_head(shape, 0).networks[0].queries.bytes();
    EXPECT_EQ(work.bytes, 10 * 2 * net + 4 * listed);
    EXPECT_EQ(work.keys_scored, 10 * 2 * 3 * shape.clusters);
  }
}

/// The network with its weights as whole numbers of 127ths of their row's largest.
BucketNet rounded(const BucketNet& net) {
  const auto round = [&](const std::vector<std::byte>& raw, std::int64_t columns) {
    std::vector<float> w(raw.size() / static_cast<std::size_t>(bytes_of(net.type)));
    kernels().widen(raw.data(), net.type, std::ssize(w), w.data());
    for (std::int64_t row = 0; row < std::ssize(w); row += columns) {
      double most = 0;
      for (std::int64_t i = row; i < row + columns; ++i)
        most = std::max(most, std::abs(static_cast<double>(w[static_cast<std::size_t>(i)])));
      for (std::int64_t i = row; i < row + columns; ++i) {
        float& value = w[static_cast<std::size_t>(i)];
        value = static_cast<float>(std::nearbyint(value * 127 / most) * most / 127);
      }
    }
    return w;
  };
  const auto w1 = round(net.hidden_weight, net.inputs), w2 = round(net.output_weight, net.hidden),
             w3 = round(net.linear_weight, net.inputs);
  return {net.inputs, net.buckets, {w1, net.hidden_bias, w2, w3, net.bias}, DType::f32};
}

/// Of ten vectors, more than a call of the kernels takes; the last one is not a number.
TEST_P(Saap, ScoresOfWeightsIn8Bits) {
  const SaapShape shape = GetParam();
  const BucketNet net = random_saap_head(shape, 5).networks[0].queries;
  const Int8Net coded(net);
  constexpr std::int64_t kVectors = 10;
  const std::vector<float> x = random_floats(kVectors * shape.d, 6, 1.0);
  std::vector<float> bad = x;
  bad.back() = std::numeric_limits<float>::quiet_NaN();
  Int8Net::Scratch scratch;
  std::vector<float> y(static_cast<std::size_t>(kVectors * shape.clusters)), one(y), with_bad(y);
  coded.scores(x.data(), kVectors, scratch, y.data());
  for (std::int64_t i = 0; i < kVectors; ++i) {
    const std::vector<double> exact = scores_exactly(
        rounded(net),
        std::span(x).subspan(static_cast<std::size_t>(i * shape.d), static_cast<std::size_t>(shape.d)));
    for (std::int64_t c = 0; c < shape.clusters; ++c)
      EXPECT_NEAR(y[static_cast<std::size_t>(i * shape.clusters + c)], exact[static_cast<std::size_t>(c)],
                  4e-3);  // vectors enter a layer with 11 bits, twice in a row
    coded.scores(x.data() + i * shape.d, 1, scratch, one.data() + i * shape.clusters);
  }
  EXPECT_EQ(one, y) << "a row does not depend on the others";
  coded.scores(bad.data(), kVectors, scratch, with_bad.data());
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (i < y.size() - static_cast<std::size_t>(shape.clusters)) {
      EXPECT_EQ(with_bad[i], y[i]);
    } else {
      EXPECT_TRUE(std::isnan(with_bad[i]));
    }
  }
  EXPECT_LT(coded.bytes(), net.bytes());
}

// The index is a function of the keys: grown token by token it equals one that was built at once.
TEST_P(Saap, GrownEqualsRebuilt) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .d = GetParam().d, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "saap:probes=2,weights=" + SaapFiles::of(GetParam());
  const auto grown = make(spec, geometry), rebuilt = make(spec, geometry);
  for (int i = 0; i < 200; ++i) {
    world.write(1);
    grown->append(0, world.store().layer(0),
                  static_cast<Position>(std::max<std::int64_t>(1, world.tokens() - 16)));
  }
  rebuilt->build(0, world.store().layer(0));
  EXPECT_EQ(select(*grown, world.block(190, 10), geometry), select(*rebuilt, world.block(190, 10), geometry));
}

/// Labels keys by plain sums in float64.
class LabellingDevice final : public IdleDevice {
 public:
  explicit LabellingDevice(KvLayer kv) : kv_(kv) {}
  int calls = 0;

  bool takes(const KeysOnDevice&, std::int64_t) const override { return true; }
  std::vector<std::int32_t> labels(const KeysOnDevice& keys,
                                   std::span<const std::vector<float>> centroids) override {
    ++calls;
    const auto d = static_cast<std::size_t>(kv_.heads.front().d), n = static_cast<std::size_t>(keys.count());
    std::vector<std::int32_t> labels(centroids.size() * n);  // [heads, keys]
    std::vector<float> row(centroids.size() * d);
    for (std::size_t i = 0; i < n; ++i) {
      read_stored_keys(kv_.heads, keys.begin + static_cast<Position>(i), keys.unrotate_by, row);
      for (std::size_t h = 0; h < centroids.size(); ++h)
        labels[h * n + i] = nearest(std::span(row).subspan(h * d, d), centroids[h]);
    }
    return labels;
  }

 private:
  static std::int32_t nearest(std::span<const float> key, const std::vector<float>& centroids) {
    double best = -std::numeric_limits<double>::infinity();
    std::int32_t label = 0;
    for (std::size_t c = 0; c < centroids.size() / key.size(); ++c) {
      double product = 0;
      for (std::size_t i = 0; i < key.size(); ++i) product += double{key[i]} * centroids[c * key.size() + i];
      if (product > best) best = product, label = static_cast<std::int32_t>(c);
    }
    return label;
  }
  KvLayer kv_;
};

TEST_P(Saap, ADeviceLabelsKeysByCentroidsAlone) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .d = GetParam().d, .dense = {1, 16}});
  world.write(300);
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "saap:probes=2,weights=" + SaapFiles::of(GetParam());
  const auto host = make(spec, geometry), helped = make(spec, geometry);
  LabellingDevice device(world.store().layer(0));
  dynamic_cast<BuiltByDevice&>(*helped).build_by(&device);
  host->build(0, world.store().layer(0));
  helped->build(0, world.store().layer(0));
  EXPECT_EQ(device.calls, GetParam().key_net || GetParam().key_bias ? 0 : 1);
  EXPECT_EQ(select(*host, world.block(290, 10), geometry), select(*helped, world.block(290, 10), geometry));
}

TEST(SaapArtefact, IsReadAsItWasWritten) {
  ThreadPool pool(1);
  World world({.kv_heads = 2, .d = 64});
  for (const SaapShape& shape :
       {SaapShape{.type = DType::f16, .linear = true, .key_bias = true}, SaapShape{.key_net = true}}) {
    const SaapLayer layer = read_saap(SaapFiles::of(shape), world.geometry(pool), "model");
    for (int h = 0; h < 2; ++h) {
      const SaapHead expected = random_saap_head(shape, static_cast<std::uint64_t>(h));
      const SaapHead& found = layer.heads[static_cast<std::size_t>(h)];
      EXPECT_EQ(found.networks[0].queries.hidden_weight, expected.networks[0].queries.hidden_weight);
      EXPECT_EQ(found.networks[0].queries.output_weight, expected.networks[0].queries.output_weight);
      EXPECT_EQ(found.networks[0].queries.linear_weight, expected.networks[0].queries.linear_weight);
      EXPECT_EQ(found.networks[0].queries.bias, expected.networks[0].queries.bias);
      EXPECT_EQ(found.keys.linear_weight, expected.keys.linear_weight);
      EXPECT_EQ(found.keys.hidden_bias, expected.keys.hidden_bias);
      EXPECT_EQ(found.keys.bias, expected.keys.bias);
      EXPECT_EQ(found.load, expected.load);
    }
  }
}

/// Weights that are hard to round: a row of zeros, one too small for 8 bits, ties and the largest floats.
BucketNet net_that_rounds_badly(DType type) {
  constexpr std::int64_t kInputs = 4;
  const std::vector<float> w = {0,     0,    0, 0,      1e-36f, -1e-37f, 0,    1e-36f, 127,   0.5f,
                                -1.5f, 2.5f, 3, -3e38f, 1e30f,  -0.0f,   0.1f, 0.3f,   -0.7f, 0.2f};
  const std::vector<float> kept(w.begin(), type == DType::f32 ? w.end() : w.begin() + 12);
  const std::vector<float> bias(kept.size() / kInputs, 0.25f);
  return {kInputs, std::ssize(bias), {{}, {}, {}, kept, bias}, type};
}

/// Nothing is lost by a file of 8 bits against what scores were computed with anyway.
TEST(SaapArtefact, WeightsIn8BitsMakeTheSame8BitNetwork) {
  const SaapShape shape = {.type = DType::f16, .linear = true};
  for (const BucketNet& net : {random_saap_head(shape, 3).networks[0].queries,
                               net_that_rounds_badly(DType::f32), net_that_rounds_badly(DType::f16)}) {
    const BucketNet once = net.rounded_to_8_bits(), twice = once.rounded_to_8_bits();
    EXPECT_EQ(once.hidden_weight, twice.hidden_weight);
    EXPECT_EQ(once.output_weight, twice.output_weight);
    EXPECT_EQ(once.linear_weight, twice.linear_weight);
    const std::vector<float> x = random_floats(3 * net.inputs, 4, 1.0);
    std::vector<float> before(static_cast<std::size_t>(3 * net.buckets)), after(before);
    Int8Net::Scratch scratch;
    Int8Net(net).scores(x.data(), 3, scratch, before.data());
    Int8Net(once).scores(x.data(), 3, scratch, after.data());
    EXPECT_EQ(before, after);
  }
}

TEST(SaapArtefact, SeveralNetworksAreReadAsTheyWereWritten) {
  ThreadPool pool(1);
  World world({.kv_heads = 2, .d = 64});
  const std::filesystem::path path = temporary("several.safetensors");
  const SaapShape shape = {.type = DType::q8, .linear = true};
  const std::vector<SaapHead> heads = {random_saap_head_of(3, shape, 0), random_saap_head_of(3, shape, 1)};
  const std::vector<SaapStretch> stretches = {
      {0, R"({"prompts":1,"tokens":100})"}, {70, "{}"}, {500, R"({"prompts":1,"tokens":900})"}};
  write_saap(path, {{3, heads}}, "model", stretches);
  const SaapLayer layer = read_saap(path, world.geometry(pool), "model");
  for (std::size_t h = 0; h < 2; ++h) {
    ASSERT_EQ(layer.heads[h].networks.size(), 3u);
    for (std::size_t k = 0; k < 3; ++k) {
      const BucketNet &found = layer.heads[h].networks[k].queries, &expected = heads[h].networks[k].queries;
      EXPECT_TRUE(found.in_8_bits);
      EXPECT_EQ(found.hidden_weight, expected.hidden_weight);
      EXPECT_EQ(found.output_weight, expected.output_weight);
      EXPECT_EQ(found.linear_weight, expected.linear_weight);
      EXPECT_EQ(found.bias, expected.bias);
    }
    EXPECT_EQ(layer.heads[h].keys.linear_weight, heads[h].keys.linear_weight);
  }
  EXPECT_EQ(layer.stretches[2].reach(), 900);
  EXPECT_EQ(layer.stretches[1].reach(), 0);
  const auto reach = [](const char* training) {
    return SaapStretch{.from = 0, .training = training}.reach();
  };
  EXPECT_EQ(reach(R"({"prompts":2,"tokens":1000,"shift":900})"), 1400);
  EXPECT_EQ(reach(R"({"prompts":2,"tokens":1000,"shift":900,"shift_to":800})"), 800);
  EXPECT_EQ(reach(R"({"prompts":2,"tokens":1000,"shift":900,"shift_to":300})"), 500) << "nothing is shifted";
  const auto at = [&](Position query) { return layer.network_for(query); };
  EXPECT_EQ((std::vector{at(0), at(69), at(70), at(499), at(500), at(1 << 30)}),
            (std::vector<std::size_t>{0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(switch_between(16384, 131072), 46340);
  // A third of the bytes of f32: codes, scales and biases.
  write_saap(path, {{3, {random_saap_head({.linear = true}, 0)}}}, "model", {{}});
  const auto wide = std::filesystem::file_size(path);
  write_saap(path, {{3, {random_saap_head(shape, 0)}}}, "model", {{}});
  EXPECT_LT(std::filesystem::file_size(path), wide);
  std::filesystem::remove(path);
}

/// A file of two networks with its metadata and one tensor changed.
void write_damaged(const std::filesystem::path& path,
                   const std::function<void(std::map<std::string, std::string>&)>& metadata,
                   const std::string& tensor = "", std::byte first = {}) {
  const SaapShape shape = {.type = DType::q8, .linear = true};
  write_saap(path, {{3, {random_saap_head_of(2, shape, 0), random_saap_head_of(2, shape, 1)}}}, "model",
             {{0, "{}"}, {70, "{}"}});
  std::string raw = read_file(path);
  std::map<std::string, std::string> said;
  const auto tensors = parse_safetensors(std::as_bytes(std::span(raw)), "test", &said);
  metadata(said);
  std::vector<TensorToWrite> all;
  for (const auto& [name, t] : tensors) {
    if (name == tensor)
      raw[static_cast<std::size_t>(t.bytes.data() - std::as_bytes(std::span(raw)).data())] =
          static_cast<char>(first);
    const DType type = t.type == "I8" ? DType::q8 : float_type(t, name, "test");
    all.push_back({name, type, t.shape, t.bytes});
  }
  write_safetensors(path, all, said);
}

TEST(SaapArtefact, NetworksThatDoNotFitAreRefused) {
  ThreadPool pool(1);
  World world({.kv_heads = 2, .d = 64});
  const LayerGeometry geometry = world.geometry(pool);
  const std::filesystem::path path = temporary("damaged.safetensors");
  const auto refused = [&](const std::string& part) {
    try {
      read_saap(path, geometry, "model");
      ADD_FAILURE() << "accepted: " << part;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(part));
      EXPECT_THAT(error.what(), testing::HasSubstr(path.string()));
    }
  };
  const auto nothing = [](auto&) {};
  write_damaged(path, nothing);
  EXPECT_EQ(read_saap(path, geometry, "model").stretches[1].from, 70);
  for (const char* const from : {"0", "-1", "70x", "", "2147483648", "1e3"}) {
    write_damaged(path, [&](auto& said) { said["network.2.from"] = from; });
    refused("'network.2.from': expected a whole number from 1 to 2147483647, found '");
  }
  write_damaged(path, [](auto& said) { said["network.2.from"] = "71"; });
  refused("layer.3.fingerprint");
  for (const char* const networks : {"0", "5", "two"}) {
    write_damaged(path, [&](auto& said) { said["networks"] = networks; });
    refused("'networks': expected a whole number from 1 to 4");
  }
  write_damaged(path, [](auto& said) { said["networks"] = "3", said["network.3.from"] = "99"; });
  refused("layer.3.head.0.query.3.hidden.weight");
  write_damaged(path, [](auto& said) { said.erase("networks"); });
  refused("layer.3.fingerprint");
  write_damaged(path, nothing, "layer.3.head.1.query.2.output.weight", std::byte{0x80});
  refused("layer.3.head.1.query.2.output.weight': expected codes in [-127, 127], found -128");
  write_damaged(path, nothing, "layer.3.head.0.query.hidden.weight", std::byte{1});
  refused("layer.3.fingerprint");
  std::vector<SaapHead> heads = {random_saap_head_of(2, {}, 0), random_saap_head_of(2, {}, 1)};
  heads[1].networks[1] = random_saap_head({.clusters = 23}, 1).networks[0];
  write_saap(path, {{3, heads}}, "model", {{0, "{}"}, {70, "{}"}});
  refused("layer.3.head.1.query.2': expected as many buckets for queries as for keys, 24, found 23");
  std::filesystem::remove(path);
}

TEST(SaapArtefact, FilesThatDoNotFitAreRefused) {
  ThreadPool pool(1);
  const std::filesystem::path path = temporary("bad.safetensors");
  World world({.kv_heads = 2, .d = 64});
  const LayerGeometry geometry = world.geometry(pool);
  const std::string spec = "saap:weights=" + path.string();
  const auto refused = [&](const std::string& part, const std::string& with = "",
                           const char* fingerprint = "model") {
    try {
      make(spec + with, geometry, fingerprint);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(part));
      EXPECT_THAT(error.what(), testing::HasSubstr(path.string()));
    }
  };
  const auto write = [&](const std::function<void(std::vector<SaapHead>&)>& damage) {
    std::vector<SaapHead> heads = {random_saap_head({}, 0), random_saap_head({}, 1)};
    damage(heads);
    write_saap(path, {{3, heads}}, "model", {{.from = 0, .training = "{}"}});
  };
  refused("");  // missing file
  write([](auto&) {});
  make(spec, geometry);
  make(spec + ",clusters=24", geometry);
  refused("expected 24", ",clusters=25");
  refused("model_fingerprint 'another'", "", "another");
  write([](auto& heads) { heads.pop_back(); });
  refused("layer.3.head.1.key.hidden.weight");
  write([](auto& heads) { heads[1] = random_saap_head({.clusters = 23}, 1); });
  refused("expected 24 buckets as in head 0, found 23");
  write([](auto& heads) { heads[1].networks = random_saap_head({.clusters = 23}, 1).networks; });
  refused("as many buckets for queries as for keys, 24, found 23");
  write([](auto& heads) { heads[0] = random_saap_head({.d = 32}, 1); });
  refused("expected the shape [any, 64], found [24, 32]");
  write([](auto& heads) {
    heads[1].networks[0].queries.hidden_bias[3] = std::numeric_limits<float>::quiet_NaN();
  });
  refused("layer.3.head.1.query.hidden.bias': expected finite");
  write([](auto& heads) {
    std::fill_n(heads[0].networks[0].queries.output_weight.begin() + 4, 4, std::byte{0xff});  // a NaN
  });
  refused("query.output.weight': expected finite");
  write([](auto& heads) { heads[0].load.pop_back(); });
  refused("layer.3.head.0.load': expected the shape [24], found [23]");
  write([](auto& heads) { heads[0].networks[0].selectivity.clear(); });
  refused("selectivity");
  write_safetensors(path, {}, {});
  refused("method 'saap', found none given");
  write_safetensors(path, {}, {{"method", "saap"}, {"version", "3"}});
  refused("version '1' or '2', found '3'");
  // Cut anywhere, one byte changed anywhere: refused (or read, if it stands in what nobody reads).
  write([](auto&) {});
  const std::string good = read_file(path);
  for (std::size_t at = good.size() - 1; at > 4096; at -= good.size() / 41 + 1) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    std::ofstream(path, std::ios::binary) << bad;
    EXPECT_THROW(make(spec, geometry), InputError) << at;
  }
  for (std::size_t cut = 0; cut < good.size(); cut += good.size() / 37 + 1) {
    std::ofstream(path, std::ios::binary) << good.substr(0, cut);
    EXPECT_THROW(make(spec, geometry), InputError) << cut;
  }
  Rng rng(1);
  for (int i = 0; i < 200; ++i) {
    std::string bad = good;
    bad[rng.below(1500)] = static_cast<char>(rng.below(256));
    std::ofstream(path, std::ios::binary) << bad;
    try {
      make(spec, geometry);
    } catch (const InputError&) {
    }
  }
  std::filesystem::remove(path);
}

TEST(SaapSelector, WithoutAnArtefactItSaysWhatIsMissing) {
  ThreadPool pool(1);
  World world({});
  try {
    make("saap", world.geometry(pool));
    ADD_FAILURE();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("weights=FILE"));
  }
  EXPECT_THROW(parse_spec("saap:group=all"), InputError);
  EXPECT_THROW(parse_spec("saap:probes=0"), InputError);
  EXPECT_THROW(parse_spec("saap:fallback=saap"), InputError);
  EXPECT_THROW(parse_spec("saap:fallback=nothing"), InputError);
  EXPECT_THROW(parse_spec("saap:fallback=squeezed"), InputError) << "its tokens choose together";
  EXPECT_THROW(parse_spec("saap:alarm=0.5"), InputError);
  EXPECT_THROW(parse_spec("saap:network=0"), InputError);
  EXPECT_THROW(parse_spec("saap:network=near"), InputError);
  EXPECT_EQ(parse_spec("saap").dense_layers, 1);
  EXPECT_EQ(parse_spec("saap").dense.window, 2047);
}

/// For the bench: a fifth of the keys in one bucket, which every query ranks first.
TEST(SaapSelector, AMadeUpBucketIsAsLargeAsAsked) {
  constexpr std::int64_t d = 32, n = 4000, clusters = 40;
  ThreadPool pool(1);
  Rng rng(1);
  const std::vector<float> x = random_floats(n * d, 7, 1.0);
  const Matrix<const float> keys(x.data(), n, d);
  BucketNet centroids = centroid_net(keys, clusters, 2, pool),
            classifier = made_up_classifier(d, clusters, DType::f16, rng);
  const auto in_first = [&] {
    std::vector<std::int32_t> labels(static_cast<std::size_t>(n));
    centroids.label(keys, labels);
    return static_cast<double>(std::count(labels.begin(), labels.end(), 0)) / n;
  };
  EXPECT_LT(in_first(), 0.1);
  enlarge_first_bucket(centroids, classifier, keys, 0.2);
  EXPECT_NEAR(in_first(), 0.2, 0.01);
  std::vector<std::int32_t> best(static_cast<std::size_t>(n));
  classifier.label(keys, best);
  EXPECT_EQ(best, std::vector<std::int32_t>(static_cast<std::size_t>(n), 0));
}

TEST(SaapSelector, ImbalanceIsThatOfARandomKeysBucket) {
  const std::vector<std::int64_t> even = {100, 100, 100, 100}, one = {0, 400, 0, 0}, none = {0, 0},
                                  pair = {1, 1};
  EXPECT_NEAR(imbalance_of(even), 4 * 4 * 9900.0 / (400 * 399), 1e-12);
  EXPECT_NEAR(imbalance_of(one), 4.0, 1e-12);
  EXPECT_EQ(imbalance_of(none), 1.0);
  EXPECT_EQ(imbalance_of(pair), 0.0);
}

/// What each of two networks would choose alone, and both by position, whatever the chunks and whatever came
/// before.
TEST(SaapSelector, TheQuerysPositionNamesTheNetwork) {
  ThreadPool pool(2);
  const std::filesystem::path path = temporary("two.safetensors");
  for (const char* const group : {"batched", "independent"}) {
    for (const DType type : {DType::f16, DType::q8}) {
      World world({.kv_heads = 2, .group = 3, .d = 64, .dense = {1, 16}});
      const LayerGeometry geometry = world.geometry(pool);
      const SaapShape shape = {.type = type};
      write_saap(path, {{3, {random_saap_head_of(2, shape, 0), random_saap_head_of(2, shape, 1)}}}, "model",
                 {{0, "{}"}, {175, "{}"}});
      const std::string spec = std::string("saap:probes=3,group=") + group + ",weights=" + path.string();
      const auto both = make(spec, geometry), near = make(spec + ",network=1", geometry),
                 far = make(spec + ",network=2", geometry), grown = make(spec + ",network=auto", geometry);
      EXPECT_THROW(make(spec + ",network=3", geometry), InputError);
      world.write(150);
      for (Selector* selector : {both.get(), near.get(), far.get()})
        selector->build(0, world.store().layer(0));
      for (int i = 0; i < 30; ++i) {
        world.write(1);
        grown->append(0, world.store().layer(0),
                      static_cast<Position>(std::max<std::int64_t>(1, world.tokens() - 16)));
      }
      for (Selector* selector : {both.get(), near.get(), far.get()})
        selector->append(0, world.store().layer(0), 164);
      const auto of = [&](Selector& selector, Position begin, std::int64_t tokens) {
        return select(selector, world.block(begin, tokens), geometry);
      };
      const auto found = of(*both, 170, 10), by_near = of(*near, 170, 10), by_far = of(*far, 170, 10);
      EXPECT_NE(by_near, by_far);
      const auto cut = std::ptrdiff_t{5 * 6};  // five tokens of six heads before position 175
      EXPECT_TRUE(std::equal(found.begin(), found.begin() + cut, by_near.begin()));
      EXPECT_TRUE(std::equal(found.begin() + cut, found.end(), by_far.begin() + cut));
      EXPECT_EQ(of(*grown, 170, 10), found) << "grown equals rebuilt";
      std::vector<FarSet> one_by_one;
      for (Position p = 170; p < 180; ++p)
        for (FarSet& set : of(*both, p, 1)) one_by_one.push_back(std::move(set));
      EXPECT_EQ(one_by_one, found) << "chunks change nothing";
      both->roll_back(0, 160);
      EXPECT_EQ(of(*both, 150, 10), of(*near, 150, 10)) << "after a rollback";
      const auto choice = dynamic_cast<BucketChooser&>(*both).bucket_choice();
      ASSERT_EQ(choice.has_value(), std::string_view(group) == "batched");
      if (!choice) continue;
      EXPECT_EQ(choice->from, (std::vector<Position>{0, 175}));
      ASSERT_EQ(choice->queries.size(), 4u);
      EXPECT_EQ(choice->queries[3].output_weight,
                random_saap_head_of(2, shape, 1).networks[1].queries.output_weight);
      const auto alone = dynamic_cast<BucketChooser&>(*far).bucket_choice();
      EXPECT_EQ(alone->from, std::vector<Position>{0});
      EXPECT_EQ(alone->queries[1].output_weight, choice->queries[3].output_weight);
    }
  }
  std::filesystem::remove(path);
}

/// A world whose keys all lie in one direction from position `from` on.
std::unique_ptr<World> uniform_world(bool alike) {
  auto world = std::make_unique<World>(WorldShape{.kv_heads = 2, .group = 2, .d = 64, .dense = {1, 16}});
  if (alike)
    world->shape_key = [](Position, int, int i, float x) { return 0.01f * x + (i % 3 == 0 ? 1.0f : -0.5f); };
  world->write(1500);
  return world;
}

/// Twice the length of a training prompt, shift included, is as far as an artefact is taken at its word.
TEST(SaapSelector, AContextLongerThanTheTrainingPromptsIsSaid) {
  ThreadPool pool(2);
  const auto world = uniform_world(false);  // 1,500 tokens
  const LayerGeometry geometry = world->geometry(pool);
  const auto notice_of = [&](const std::string& training) {
    const auto path = temporary("trained.safetensors");
    write_saap(path, {{3, {random_saap_head({}, 0), random_saap_head({}, 1)}}}, "model",
               {{.from = 0, .training = training}});
    const auto selector = make("saap:probes=2,weights=" + path.string(), geometry);
    selector->build(0, world->store().layer(0));
    return selector->notice(0);
  };
  EXPECT_THAT(notice_of(R"({"prompts":4,"tokens":2000})"), testing::HasSubstr("1500 tokens"));
  for (const char* const enough :
       {R"({"prompts":4,"tokens":3000})", R"({"prompts":4,"tokens":2000,"shift":250})", "{}", "[3]", "words",
        R"({"prompts":0,"tokens":5})", R"({"prompts":-1,"tokens":1})"})
    EXPECT_EQ(notice_of(enough), "") << enough;
}

/// What one question attended says nothing of the next, nor of another sequence's.
TEST(SaapSelector, QuestionsUnlikeTheTrainingTextAreSaidUntilTheyAreRolledBack) {
  ThreadPool pool(2);
  const auto world = uniform_world(false);  // 1,500 tokens
  const LayerGeometry geometry = world->geometry(pool);
  const auto path = temporary("live.safetensors");
  std::vector<SaapHead> heads = {random_saap_head({}, 0), random_saap_head({}, 1)};
  for (SaapHead& head : heads) head.networks[0].selectivity = {0.001f};
  write_saap(path, {{3, heads}}, "model", {{.from = 0, .training = "{}"}});
  const auto selector = make("saap:probes=2,weights=" + path.string(), geometry);
  for (const int sequence : {0, 1}) selector->build(sequence, world->store().layer(0));
  const auto ask = [&](int tokens) {
    world->write(tokens);
    select(*selector, world->block(1500, tokens), geometry);
  };
  ask(200);
  EXPECT_THAT(selector->notice(0), testing::HasSubstr("questions unlike"));
  EXPECT_EQ(selector->notice(1), "");
  selector->roll_back(0, 1500);
  world->store().roll_back(1500);
  EXPECT_EQ(selector->notice(0), "");
  ask(2);
  EXPECT_EQ(selector->notice(0), "");
}

/// The network that answers at the context's end is the one whose training counts.
TEST(SaapSelector, ALongContextIsMeasuredByTheNetworkInUse) {
  ThreadPool pool(2);
  const auto world = uniform_world(false);  // 1,500 tokens
  const LayerGeometry geometry = world->geometry(pool);
  const auto path = temporary("lengths.safetensors");
  const auto notice_of = [&](Position from, int longer, const std::string& network) {
    write_saap(path, {{3, {random_saap_head_of(2, {}, 0), random_saap_head_of(2, {}, 1)}}}, "model",
               {{0, R"({"prompts":1,"tokens":500})"},
                {from, R"({"prompts":1,"tokens":)" + std::to_string(longer) + "}"}});
    const auto selector = make("saap:probes=2,weights=" + path.string() + network, geometry);
    selector->build(0, world->store().layer(0));
    return selector->notice(0);
  };
  EXPECT_EQ(notice_of(1000, 2000, ""), "");
  EXPECT_THAT(notice_of(1000, 700, ""), testing::HasSubstr("trained for 700"));
  EXPECT_EQ(notice_of(1501, 3000, ""), "") << "the file gives the first network everything to 1,501";
  EXPECT_THAT(notice_of(1000, 2000, ",network=1"), testing::HasSubstr("trained for 500"));
  EXPECT_EQ(notice_of(1000, 2000, ",network=2"), "");
  std::filesystem::remove(path);
}

TEST(SaapSelector, AnUnlikeTextIsSaidAndFallsBackAsNamed) {
  ThreadPool pool(2);
  const std::string weights = ",weights=" + SaapFiles::of({});
  for (const bool alike : {false, true}) {
    const auto world = uniform_world(alike);
    const LayerGeometry geometry = world->geometry(pool);
    const auto plain = make("saap:probes=2" + weights, geometry),
               full = make("saap:probes=2,fallback=full" + weights, geometry),
               topk = make("saap:probes=2,fallback=topk,alarm=2.5" + weights, geometry);
    for (Selector* selector : {plain.get(), full.get(), topk.get()}) {
      EXPECT_EQ(selector->notice(0), "");
      selector->build(0, world->store().layer(0));
    }
    world->write(4);
    const QueryBlock block = world->block(1500, 4);
    const auto found = select(*plain, block, geometry), exact = select(*full, block, geometry),
               best = select(*topk, block, geometry);
    EXPECT_EQ(plain->notice(0).empty(), !alike);
    if (!alike) {
      EXPECT_EQ(found, exact);
      EXPECT_EQ(found, best);
      continue;
    }
    EXPECT_THAT(plain->notice(0), testing::HasSubstr("unlike the training text"));
    EXPECT_THAT(full->notice(0), testing::HasSubstr("attends by full"));
    for (std::int64_t t = 0; t < 4; ++t) {
      for (int h = 0; h < 4; ++h) {
        const auto at = static_cast<std::size_t>(t * 4 + h);
        EXPECT_EQ(std::ssize(exact[at]), block.far_end(t, geometry.dense) - 1);
        EXPECT_EQ(best[at].size(), 100u);
      }
    }
    // Saved and loaded it is the same, and a rollback does not forget it.
    const std::filesystem::path path = temporary("alarm.lode");
    topk->roll_back(0, 1500);
    {
      ContainerWriter out(path);
      SectionWriter sections(out, "x/");
      topk->save(0, sections);
      out.finish();
    }
    const auto loaded = make("saap:probes=2,fallback=topk,alarm=2.5" + weights, geometry);
    const ContainerReader in(path);
    SectionReader reader(in, "x/");
    loaded->load(0, reader, world->store().layer(0));
    EXPECT_EQ(loaded->notice(0), topk->notice(0));
    EXPECT_EQ(select(*loaded, block, geometry), best);
    std::filesystem::remove(path);
  }
}

// Until the text is indexed nobody knows whether a layer falls back, so the other method hears all along.
TEST(SaapSelector, TheFallbackForgetsWhatWasRolledBackBeforeTheTextWasIndexed) {
  ThreadPool pool(2);
  const auto world = uniform_world(true);
  const LayerGeometry geometry = world->geometry(pool);
  IndexSections found[2];
  for (const bool twice : {false, true}) {
    const auto selector = make("saap:probes=2,fallback=infllm,weights=" + SaapFiles::of({}), geometry);
    if (twice) {
      tell(*selector, *world, 250);
      selector->roll_back(0, 129);  // where a block of infllm ends
      tell(*selector, world->block(129, 1371));
    } else {
      tell(*selector, *world, 1500);
    }
    selector->build(0, world->store().layer(0));
    EXPECT_THAT(selector->notice(0), testing::HasSubstr("attends by infllm"));
    found[twice] = saved_sections(*selector);
  }
  EXPECT_EQ(found[0], found[1]);
}

// An index is refused with any other artefact than its own, and the old index stays.
TEST(SaapSelector, IndexesOfAnotherArtefactAreRefused) {
  ThreadPool pool(2);
  World world({.dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(120);
  const auto one = make("saap:probes=2,weights=" + SaapFiles::of({}), geometry),
             other = make("saap:probes=2,weights=" + SaapFiles::of({.type = DType::bf16}), geometry);
  const std::filesystem::path path = temporary("index.lode");
  for (Selector* selector : {one.get(), other.get()}) selector->build(0, world.store().layer(0));
  const auto save = [&](const std::string& artefact, std::vector<double> alarm) {
    ContainerWriter out(path);
    SectionWriter sections(out, "x/");
    one->save(0, sections);
    SectionWriter changed(out, "y/");
    changed.add("artefact", std::as_bytes(std::span(artefact)));
    changed.add<double>("alarm", alarm);
    out.finish();
  };
  save("no", {1.0});
  const ContainerReader in(path);
  const auto before = select(*other, world.block(119, 1), geometry);
  SectionReader good(in, "x/"), bad(in, "y/"), missing(in, "z/");
  EXPECT_THROW(other->load(0, good, world.store().layer(0)), InputError);
  EXPECT_THROW(one->load(0, bad, world.store().layer(0)), InputError);
  EXPECT_THROW(one->load(0, missing, world.store().layer(0)), InputError);
  EXPECT_EQ(select(*other, world.block(119, 1), geometry), before);
  one->load(0, good, world.store().layer(0));
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace lode::test
