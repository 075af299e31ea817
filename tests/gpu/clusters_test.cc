// SPDX-License-Identifier: Apache-2.0
// Which clusters squeezed keeps for a block of a model's own queries, against their weights in float64. Two
// lookups that round differently agree on what is clearly above or below the threshold, and only on that: a
// cluster 0.7 % below it, looked up or not, moves the shipped model's logits by a quarter. Chosen on the
// host, which tests the reference, and on a GPU where there is one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "engine/context.h"
#include "engine/document.h"
#include "gpu/select/selectors.h"
#include "kernels/cuda/device/device.h"
#include "lodestone/scheduler.h"
#include "select/squeezed/cluster_choice.h"
#include "support/gpu.h"

namespace lode {
namespace {

constexpr std::int64_t kContext = 1700, kMostTokens = 4096;
// A weight is off by 0.07 % on average and at most 1 % where queries and centroids have 11 bits, squares and
// variances 8 (a model of the arithmetic on the host).
constexpr double kHostMargin = 1e-4, kGpuMargin = 1.2e-2;

/// One layer's block of queries, with memory of its own, and the far keys that the host chose for it.
struct Block {
  LayerGeometry geometry;
  QueryBlock at;
  std::vector<float> q;                       // [T, Hq, d]
  std::vector<std::vector<Position>> chosen;  // [Hkv]
};

/// A question's queries in all layers, as the host has them.
std::vector<Block> blocks_of(Context& context, MethodId method, std::int64_t question) {
  std::vector<Block> blocks;
  ForwardHooks hooks;
  hooks.attended = [&](const LayerGeometry& geometry, std::span<const QueryBlock> some,
                       const Selection* selection, std::span<float* const>) {
    Block& block = blocks.emplace_back(Block{geometry, some[0], {some[0].q.begin(), some[0].q.end()}, {}});
    for (std::int64_t i = 0; i < selection->sets(); ++i) {
      const Selection::Set set = selection->set(i);
      std::vector<Position>& keys = block.chosen.emplace_back(set.rows.begin(), set.rows.end());
      for (const Run& run : set.runs)
        for (Position key = run.begin; key < run.end; ++key) keys.push_back(key);
    }
  };
  context.impl().hooks = &hooks;
  context.forward(story(question), method);
  context.impl().hooks = nullptr;
  context.roll_back(kContext);
  for (Block& block : blocks) block.at.q = block.q;
  return blocks;
}

/// The logit of a node of one level, in float64.
double logit(const ClusterTree& tree, std::size_t node, std::span<const float> q, double scale,
             bool spreads) {
  const ClusterLevel& level = tree.levels[0];
  const std::size_t d = q.size(), planes = d / 2;
  double z = 0.0, variance = 0.0;
  for (std::size_t j = 0; j < d; ++j) {
    const double x = scale * q[j];
    double centroid = 0.0;
    if (tree.type == DType::q8) {
      centroid = static_cast<signed char>(level.centroids[node * d + j]) * double{level.scales[node]};
    } else {
      const auto* const halves = reinterpret_cast<const std::uint16_t*>(level.centroids.data());
      centroid = to_float(f16{halves[node * d + j]});
    }
    z += x * centroid;
    if (spreads)
      variance += x * x * static_cast<signed char>(level.spreads[node * planes + j % planes]) *
                  double{level.spread_scales[node]};
  }
  if (!spreads) return z;
  const double s = std::sqrt(variance), below = std::min(s, std::sqrt(2.0 * std::log(level.keys[node])));
  return z + below * (s - below / 2.0);
}

/// sqrt(mean over the block's queries of (K exp(z) / sum N exp(z))^2) of each node.
std::vector<double> weights(const Block& block, const ClusterTree& tree, int head, bool spreads) {
  const LayerGeometry& g = block.geometry;
  const std::vector<std::int32_t>& keys = tree.levels[0].keys;
  std::vector<double> sum(keys.size(), 0.0), z(keys.size());
  const std::int64_t rows = block.at.tokens * g.group();
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t query = row / g.group() * g.query_heads + head * g.group() + row % g.group();
    const auto q = std::span(block.q).subspan(static_cast<std::size_t>(query * g.head_dim),
                                              static_cast<std::size_t>(g.head_dim));
    for (std::size_t i = 0; i < z.size(); ++i) z[i] = logit(tree, i, q, g.scale, spreads);
    const double most = *std::max_element(z.begin(), z.end());
    double total = 0.0;
    for (std::size_t i = 0; i < z.size(); ++i) total += keys[i] * std::exp(z[i] - most);
    for (std::size_t i = 0; i < z.size(); ++i)
      sum[i] += std::pow(static_cast<double>(tree.rows.size()) * std::exp(z[i] - most) / total, 2.0);
  }
  for (double& x : sum) x = std::sqrt(x / static_cast<double>(rows));
  return sum;
}

/// What is `margin` above the threshold is kept with all of its keys, what is as much below is not, and keys
/// behind the index are kept up to `end`.
void check(const Block& block, const AttachedMethod& method, int head, std::span<const Position> chosen,
           Position end, double margin) {
  const auto& chooser =
      dynamic_cast<const ClusterChooser&>(*method.selectors[static_cast<std::size_t>(block.geometry.layer)]);
  const ClusterChoice choice = *chooser.cluster_choice();
  ASSERT_EQ(choice.segments.size(), 1u);
  const ClusterTree& tree = choice.segments[0].heads[static_cast<std::size_t>(head)];
  const double threshold = choice.thresholds.of(QueryKind::together, block.at.tokens, 0);
  const std::vector<double> all = weights(block, tree, head, adds(choice.spreads, QueryKind::together));
  std::vector<int> times(static_cast<std::size_t>(kMostTokens), 0);
  for (const Position key : chosen) ++times.at(static_cast<std::size_t>(key));
  const auto times_of = [&](Position key) { return times[static_cast<std::size_t>(key)]; };
  std::size_t expected = 0, near = 0;  // keys; nodes
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::span<const Position> keys = std::span(tree.rows).subspan(
        static_cast<std::size_t>(tree.levels[0].first[i]), static_cast<std::size_t>(tree.levels[0].keys[i]));
    const int kept = times_of(keys[0]);
    for (const Position key : keys) EXPECT_EQ(times_of(key), kept);
    expected += kept > 0 ? keys.size() : 0;
    const double off = all[i] / threshold - 1.0;
    if (std::abs(off) <= margin)
      ++near;
    else
      EXPECT_EQ(kept, off > 0.0 ? 1 : 0) << "layer " << block.geometry.layer << ", head " << head << ", node "
                                         << i << " is " << 100.0 * off << " % off the threshold";
  }
  EXPECT_LT(near, all.size() / 10);
  for (Position key = choice.segments[0].end; key < end; ++key, ++expected) EXPECT_EQ(times_of(key), 1);
  EXPECT_EQ(chosen.size(), expected);
}

/// Lists of all layers and heads, chosen on a GPU.
std::vector<std::vector<std::vector<Position>>> chosen_on_gpu(const AttachedMethod& method,
                                                              std::span<const Block> blocks) {
  const LayerGeometry& g = blocks[0].geometry;
  const std::int64_t tokens = blocks[0].at.tokens;
  const cuda::Stream stream;
  const auto selector = make_gpu_clusters(method.spec,
                                          {.layers = static_cast<int>(blocks.size()),
                                           .query_heads = g.query_heads,
                                           .kv_heads = g.kv_heads,
                                           .head_dim = g.head_dim,
                                           .max_tokens = kMostTokens,
                                           .most_queries = kMostSparseTokens,
                                           .most_tokens = static_cast<int>(tokens),
                                           .key_row_bytes = std::int64_t{g.head_dim} * 2,
                                           .stream = stream.get()},
                                          method.selectors);
  std::vector<cuda::QueryToken> places;
  for (std::int64_t t = 0; t < tokens; ++t)
    places.push_back({0, blocks[0].at.begin + static_cast<Position>(t)});
  const cuda::Buffer places_there(std::ssize(places) * std::int64_t{sizeof(cuda::QueryToken)}, "places");
  const cuda::Buffer q(std::ssize(blocks[0].q) * 4, "queries");
  cuda::copy(places_there.as<void>(), places.data(), places_there.bytes(), stream.get());
  selector->prepare({}, stream.get());
  selector->begin({.queries = places, .phase = Phase::question, .far_limit = blocks[0].at.far_limit});
  selector->upload(stream.get());
  std::vector<std::vector<std::vector<Position>>> all(blocks.size());  // [L][Hkv]
  for (std::size_t layer = 0; layer < blocks.size(); ++layer) {
    cuda::copy(q.as<void>(), blocks[layer].q.data(), q.bytes(), stream.get());
    const cuda::RowLists lists = selector->select_together(static_cast<int>(layer),
                                                           {.tokens = places_there.as<cuda::QueryToken>(),
                                                            .layout = {g.kv_heads, g.head_dim, DType::f16, 0},
                                                            .count = static_cast<int>(tokens),
                                                            .query_heads = g.query_heads,
                                                            .scale = g.scale,
                                                            .q = q.as<float>()},
                                                           stream.get());
    std::vector<std::int32_t> counts(static_cast<std::size_t>(g.kv_heads));
    cuda::copy(counts.data(), lists.counts, std::ssize(counts) * 4, stream.get());
    stream.synchronize();
    for (std::size_t head = 0; head < counts.size(); ++head) {
      std::vector<Position>& rows = all[layer].emplace_back(static_cast<std::size_t>(counts[head]));
      cuda::copy(rows.data(), lists.rows + static_cast<std::int64_t>(head) * lists.capacity,
                 std::ssize(rows) * 4, stream.get());
    }
    stream.synchronize();
  }
  return all;
}

class Clusters : public testing::TestWithParam<const char*> {};

TEST_P(Clusters, OfABlockAreThoseAboveTheThresholdOnHostAndGpu) {
  Context context(pocket(), {.kv_type = DType::f16, .max_tokens = kMostTokens});
  const MethodId id = context.attach(parse_spec(GetParam()));
  context.prefill(story(kContext));
  context.build_indexes();
  const AttachedMethod& method = context.impl().methods[static_cast<std::size_t>(id)];
  for (const std::int64_t question : {40, 150, 700}) {
    SCOPED_TRACE(question);
    const std::vector<Block> blocks = blocks_of(context, id, question);
    const bool has_gpu = gpu_info().ok;
    const auto on_gpu = has_gpu ? chosen_on_gpu(method, blocks) : decltype(chosen_on_gpu(method, blocks)){};
    // The key in front of the first token's window is never far on the host, and in a GPU's lists.
    const Position end = blocks[0].at.far_end(0, method.spec.dense),
                   end_on_gpu = blocks[0].at.begin + 1 - static_cast<Position>(method.spec.dense.window);
    for (std::size_t layer = 0; layer < blocks.size(); ++layer) {
      const Block& block = blocks[layer];
      for (int head = 0; head < block.geometry.kv_heads; ++head) {
        const auto own = static_cast<std::size_t>(head);
        check(block, method, head, block.chosen[own], end, kHostMargin);
        if (has_gpu) check(block, method, head, on_gpu[layer][own], end_on_gpu, kGpuMargin);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, Clusters,
                         testing::Values("squeezed", "squeezed:clusters=10%,sparsity=0.8",
                                         "squeezed:clusters=10%,sparsity=0.8,spread=question",
                                         "squeezed:clusters=10%,sparsity=0.8,spread=decode",
                                         "squeezed:clusters=10%,sparsity=0.8,spread=off",
                                         "squeezed:clusters=10%,sparsity=0.8,centroids=f16"),
                         [](const auto& info) { return "spec" + std::to_string(info.index); });

/// What the CPU and the GPU make of a question about the same file, asked as branches of the document.
Answer ask_branch(const std::filesystem::path& path, Device device, std::int64_t question) {
  const auto document = Document::open(path, pocket(), {.device = device, .max_tokens = 4096});
  Scheduler scheduler(pocket(), {.max_sequences = 2, .device = device});
  Request request = {.document = document,
                     .prompt = story(question),
                     .attention = document->impl().methods.front(),
                     .options = {.max_new_tokens = 12, .stop_at_eos = false}};
  const auto beside = scheduler.submit(request);
  Answer answer = scheduler.submit(request).result.get();
  EXPECT_EQ(beside.result.get().generation.tokens, answer.generation.tokens);
  return answer;
}

// An index of clusters ends with the document, wherever in a block that is, and is chosen from as a whole.
TEST(GpuClusters, BranchesLeaveOutWhatTheCpusDoWhereverTheDocumentEnds) {
  NEEDS_GPU();
  const auto path =
      std::filesystem::temp_directory_path() / ("lodestone-ends-" + std::to_string(getpid()) + ".lode");
  for (const char* const spec :
       {"squeezed:clusters=10%,sparsity=0.8", "squeezed:levels=2,clusters=10%,sparsity=0.8"}) {
    for (const std::int64_t tokens :
         {1252, 1253, 1300, 1315}) {  // ends of a block, behind one, inside of one
      SCOPED_TRACE(std::string(spec) + " " + std::to_string(tokens));
      Context context(pocket(), {.kv_type = DType::f32, .max_tokens = 4096});
      context.attach(parse_spec(spec));
      context.prefill(story(tokens));
      context.build_indexes();
      context.save(path, "");
      for (const std::int64_t question : {1, 30}) {
        const Answer host = ask_branch(path, Device::cpu, question),
                     gpu = ask_branch(path, Device::cuda, question);
        EXPECT_EQ(gpu.generation.tokens, host.generation.tokens) << question;
        const WorkReport &here = host.generation.work, &there = gpu.generation.work;
        EXPECT_LT(here.selectivity(), 0.6);
        EXPECT_NEAR(there.selectivity(), here.selectivity(), 0.01) << question;
        // Where the index ends in the block that tails begin with, keys of that block are never far.
        EXPECT_NEAR(static_cast<double>(there.far_total) / static_cast<double>(here.far_total), 1.0, 0.02);
      }
    }
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace lode
