// SPDX-License-Identifier: Apache-2.0
// Rows in the order of a method's lists: the same keys are chosen and the same answers given as in token
// order, by every method that has lists and for every type of keys, whatever happens to the context
// meanwhile.
#include "select/shared/orders_rows.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/file.h"
#include "io/container.h"
#include "support/compare.h"
#include "support/failing_new.h"
#include "support/rounding.h"
#include "support/saap.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

constexpr std::int64_t kContext = 600;
constexpr LocalWindow kDense = {.sink = 3, .window = 40};

struct Case {
  const char* name;
  const char* spec;
};

class OrderedRows : public testing::TestWithParam<std::tuple<Case, DType>> {
 protected:
  OrderedRows() : world_({.kv_heads = 2, .group = 3, .d = 48, .type = type(), .dense = kDense}) {
    plant_topics(world_, 30, 0.4f);
    geometry_ = world_.geometry(pool_);
    world_.write(kContext);
    selector_ = fresh();
  }

  static DType type() { return std::get<1>(GetParam()); }
  std::unique_ptr<Selector> fresh() {
    std::string text = std::get<0>(GetParam()).spec;
    if (text.starts_with("saap"))
      text += ",weights=" + SaapFiles::of({.kv_heads = geometry_.kv_heads, .d = geometry_.head_dim});
    auto selector = make(text, geometry_);
    tell(*selector, world_, kContext);
    build_whole(parse_spec(text).name, *selector, world_);
    return selector;
  }
  void order() {
    order_rows(world_.store(), 0, selector_.get(), 0, always_far_end(kDense, kContext), pool_);
    ASSERT_GT(ordered_end(selector_.get(), 0), kContext / 2);
  }
  void restore() {
    restore_rows(world_.store(), 0, selector_.get(), 0, pool_);
    EXPECT_EQ(ordered_end(selector_.get(), 0), 0);
  }

  /// Tokens that each (query token, head) of a block attends.
  std::vector<FarSet> chosen(const QueryBlock& block, Selector& selector) {
    std::vector<FarSet> rows = select(selector, block, geometry_);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto head = static_cast<int>(i) % geometry_.query_heads / geometry_.group();
      const Position end = ordered_end(&selector, 0);
      const RowOrder order =
          end > 0 ? dynamic_cast<OrdersRows&>(selector).row_order(0, head, end) : RowOrder{};
      FarSet tokens;
      for (const auto& [row, weight] : rows[i]) tokens.emplace(order.token_of(row), weight);
      rows[i] = std::move(tokens);
    }
    return rows;
  }
  std::vector<float> attended(const QueryBlock& block, Selector& selector) {
    std::vector<float> output(block.q.size());
    float* const outputs[] = {output.data()};
    attend({&block, 1}, selection_of(selector, block, geometry_), geometry_, outputs);
    return output;
  }
  /// Keys, values and scales of all heads.
  std::vector<std::byte> rows() {
    std::vector<std::byte> all;
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      using enum KvStore::Part;
      for (const KvStore::Part part : {k, v, k_scale, v_scale}) {
        if ((part == k_scale || part == v_scale) && type() != DType::q8) continue;
        const auto of_head = world_.store().rows(0, head, part);
        all.insert(all.end(), of_head.begin(), of_head.end());
      }
    }
    return all;
  }
  /// The queries behind the context: alone, and a question.
  template <class Body>
  void for_blocks(Body body) {
    for (const Phase phase : {Phase::generation, Phase::question}) {
      QueryBlock block = world_.block(kContext, world_.tokens() - kContext);
      block.phase = phase;
      body(block);
    }
  }

  ThreadPool pool_{2};
  World world_;
  LayerGeometry geometry_;
  std::unique_ptr<Selector> selector_;
};

// Also the keys that leave the window behind the ordered rows.
TEST_P(OrderedRows, ChooseAndAnswerAsInTokenOrder) {
  world_.write(90);
  std::vector<std::vector<FarSet>> sets;
  std::vector<std::vector<float>> outputs;
  for_blocks([&](const QueryBlock& block) {
    sets.push_back(chosen(block, *selector_));
    outputs.push_back(attended(block, *selector_));
  });
  order();
  std::size_t i = 0;
  for_blocks([&](const QueryBlock& block) {
    EXPECT_EQ(chosen(block, *selector_), sets[i]);
    // Weights are rounded beside the largest of their piece of work, which the order decides.
    const float tolerance = test::multiplies_pairs(kernels(), type())   ? 3e-3f
                            : test::multiplies_words(kernels(), type()) ? 2e-4f
                                                                        : 2e-5f;
    EXPECT_LT(relative_difference(attended(block, *selector_), outputs[i]), tolerance);
    ++i;
  });
  restore();
  i = 0;
  for_blocks([&](const QueryBlock& block) {
    EXPECT_EQ(chosen(block, *selector_), sets[i]);
    EXPECT_EQ(attended(block, *selector_), outputs[i]) << "to the bit";
    ++i;
  });
}

TEST_P(OrderedRows, ListsAreRuns) {
  world_.write(1);
  const QueryBlock block = world_.block(kContext, 1);
  const Selection before = selection_of(*selector_, block, geometry_);
  if (before.set(0).queries.heads != all_heads(geometry_.group())) return;  // each head on its own, or by key
  order();
  const Selection after = selection_of(*selector_, block, geometry_);
  for (std::int64_t i = 0; i < after.sets(); ++i) {
    EXPECT_EQ(after.keys(i), before.keys(i));
    EXPECT_LE(after.set(i).rows.size(), static_cast<std::size_t>(kDense.window));
    EXPECT_LT(after.set(i).runs.size(), before.set(i).rows.size() / 4);
  }
}

TEST_P(OrderedRows, AppendAndRollBackBehindThem) {
  order();
  world_.write(300);
  selector_->append(0, world_.store().layer(0),
                    world_.block(static_cast<Position>(world_.tokens() - 1), 1).far_end(0, kDense));
  selector_->roll_back(0, kContext + 1);
  world_.store().roll_back(kContext + 1);
  world_.write(89);
  std::vector<std::vector<FarSet>> ordered;
  for_blocks([&](const QueryBlock& block) { ordered.push_back(chosen(block, *selector_)); });
  restore();
  world_.store().roll_back(kContext);
  const auto never = fresh();
  world_.write(90);
  std::size_t i = 0;
  for_blocks([&](const QueryBlock& block) { EXPECT_EQ(ordered[i++], chosen(block, *never)); });
}

TEST_P(OrderedRows, SavedAsInTokenOrder) {
  const auto save = [&] {
    const std::filesystem::path path =
        std::filesystem::path(testing::TempDir()) / ("ordered-" + std::to_string(getpid()));
    {
      ContainerWriter out(path);
      SectionWriter sections(out, "select/3/");
      selector_->save(0, sections);
      out.finish();
    }
    std::string bytes = read_file(path);
    std::filesystem::remove(path);
    return bytes;
  };
  const auto before = save();
  order();
  EXPECT_EQ(save(), before) << "an index names tokens, however rows lie";
  restore();
  EXPECT_EQ(save(), before);
}

// Whichever allocation fails on the way, no row has moved and whoever reads them knows.
TEST_P(OrderedRows, WithoutMemoryNothingMoves) {
  const std::vector<std::byte> tokens = rows();
  for (const bool back : {false, true}) {
    const std::vector<std::byte> before = rows();
    const Position end = ordered_end(selector_.get(), 0);
    bool failed = true;
    int failures = -1;
    for (; failed; ++failures) {
      try {
        allocations_left = failures + 1;
        if (back)
          restore_rows(world_.store(), 0, selector_.get(), 0, pool_);
        else
          order_rows(world_.store(), 0, selector_.get(), 0, always_far_end(kDense, kContext), pool_);
        failed = false;
      } catch (const std::bad_alloc&) {
        ASSERT_EQ(rows(), before) << failures << ", back " << back;
        ASSERT_EQ(ordered_end(selector_.get(), 0), end) << failures << ", back " << back;
      }
      allocations_left = -1;
    }
    EXPECT_GT(failures, 2);
    EXPECT_NE(rows(), before);
  }
  EXPECT_EQ(rows(), tokens);
  EXPECT_EQ(ordered_end(selector_.get(), 0), 0);
}

// Every type, since rows of each have another size, and q8 has scales beside them.
INSTANTIATE_TEST_SUITE_P(
    Select, OrderedRows,
    testing::Combine(testing::Values(Case{"kmeans", "kmeans:clusters=24,probes=6"},
                                     Case{"kmeans_roped", "kmeans:clusters=24,probes=6,rope=on"},
                                     Case{"saap", "saap:probes=6"},
                                     Case{"saap_independent", "saap:probes=6,group=independent,rank=mass"},
                                     Case{"ivf", "ivf:nlist=24,nprobe=6,k=10%"},
                                     Case{"squeezed", "squeezed:sparsity=0.7"},
                                     Case{"squeezed_two", "squeezed:levels=2,sparsity=0.7,clusters1=3%"},
                                     Case{"squeezed_cosine_tail", "squeezed:metric=cosine,tail=on"}),
                     testing::Values(DType::f32, DType::f16, DType::bf16, DType::q8, DType::q4)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" + std::string(name_of(std::get<1>(info.param)));
    });

// Everything selected runs full attention's own kernel over the same rows.
TEST(RowsInAnotherOrder, SelectingAllIsFullAttentionToTheBit) {
  ThreadPool pool(2);
  for (const char* const text : {"kmeans:clusters=24,probes=24", "squeezed:sparsity=0"}) {
    World world({.kv_heads = 2, .group = 4, .d = 64, .type = DType::f16, .dense = kDense});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(kContext);
    const auto selector = make(text, geometry);
    tell(*selector, world, kContext);
    selector->build(0, world.store().layer(0));
    order_rows(world.store(), 0, selector.get(), 0, always_far_end(kDense, kContext), pool);
    EXPECT_GT(ordered_end(selector.get(), 0), 0);
    world.write(1);
    const QueryBlock block = world.block(kContext, 1);
    std::vector<float> sparse(block.q.size()), full(sparse);
    float *const sparse_out[] = {sparse.data()}, *const full_out[] = {full.data()};
    attend({&block, 1}, selection_of(*selector, block, geometry), geometry, sparse_out);
    attend_full({&block, 1}, geometry, full_out);
    EXPECT_EQ(sparse, full) << text;
  }
}

// A context that is all sink and window, or has no index, has no order; a method without lists neither.
TEST(RowsInAnotherOrder, NothingToGain) {
  ThreadPool pool(1);
  World world({.dense = {.sink = 4, .window = 64}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(60);
  for (const char* const text : {"kmeans", "squeezed", "topk"}) {
    const auto selector = make(text, geometry);
    order_rows(world.store(), 0, selector.get(), 0, always_far_end(geometry.dense, 60), pool);
    tell(*selector, world, 60);
    selector->build(0, world.store().layer(0));
    order_rows(world.store(), 0, selector.get(), 0, always_far_end(geometry.dense, 60), pool);
    EXPECT_EQ(ordered_end(selector.get(), 0), 0) << text;
  }
}

}  // namespace
}  // namespace lode::test
