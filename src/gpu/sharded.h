// SPDX-License-Identifier: Apache-2.0
// A model that several GPUs of this host share, one thread for each of them. A step runs on all of them at once.
//
//   by KV heads (tensor parallelism)       what attention and the feed-forward give is summed over them
//   by ranges of the text (context p.)     each has all products; their states of attention are merged
//
// and by both: GPU `range * shares + share` has a share of the heads for a range of the text. It sums with those of its
// range, and merges with those of its heads, inside of the captured step.
#pragma once

#include "gpu/context.h"
#include "gpu/rank_threads.h"

namespace lode {

class ShardedModel final : public GpuModel {
 public:
  ShardedModel(const ModelConfig& config, const ModelWeights& weights, std::int64_t limit,
               const GpuGroup& group);
  ~ShardedModel() override;
  std::int64_t bytes() const override;
  int gpus() const override { return threads_.size(); }
  int ranges() const override { return ranges_; }
  /// GPUs that share the model by its heads.
  int shares() const { return gpus() / ranges_; }
  /// Those with one range of the text, or with one share of the heads; none where one GPU is alone in it.
  const cuda::DeviceGroup* of_range(int range) const;
  const cuda::DeviceGroup* of_share(int share) const;
  RankThreads& threads() const { return threads_; }
  std::shared_ptr<const CudaModel> part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }

 private:
  const int ranges_;
  // First: they say which GPUs are of no use.
  std::vector<std::unique_ptr<cuda::DeviceGroup>> of_range_, of_share_;  // [ranges], [shares], or empty
  mutable RankThreads threads_;
  std::vector<std::shared_ptr<const CudaModel>> parts_;  // [ranks]
};

std::shared_ptr<const GpuModel> make_sharded_model(const ModelConfig& config, const ModelWeights& weights,
                                                   std::int64_t limit, const GpuGroup& group);

class ShardedContext final : public GpuContext {
 public:
  ShardedContext(const ModelConfig& config, std::shared_ptr<const ShardedModel> model,
                 const GpuContextOptions& options);
  ~ShardedContext() override;

  std::int64_t tokens() const override { return shards_.front()->tokens(); }
  std::int64_t bytes() const override;
  bool keys_on_host() const override { return false; }
  std::string placement() const override;
  TierWork take_tier_work() override { return {}; }
  void roll_back(std::int64_t tokens) override;
  void upload(const KvStore& store) override;
  void download(KvStore& store) override;
  void fill_random(std::int64_t tokens, std::uint64_t seed) override;
  /// InputError for a method whose keys the GPUs do not choose by themselves.
  ChosenBy attach(const Spec& spec, std::span<Selector* const> selectors) override;
  bool finds_masses() const override { return false; }  // each GPU has heads of its own
  bool chooses(std::span<Selector* const> selectors) const override;
  std::int64_t most_together(std::span<Selector* const> selectors) const override;
  void index(std::span<Selector* const> selectors, const Rope& rope) override;
  double sum_microseconds() override;
  ForwardWork forward(const Step& step, const Rope& rope, LogitRows rows,
                      std::vector<float>& logits) override;

 private:
  void cut(std::int64_t tokens);
  std::int64_t next_cut() const;
  void expect_ranges(const Step& step) const;
  ForwardWork forward_in_range(const Step& step, const Rope& rope, LogitRows rows,
                               std::vector<float>& logits);
  CudaContext& shard(int rank) const { return *shards_[static_cast<std::size_t>(rank)]; }
  template <class Body>
  void on_all(const Body& body) const;
  void expect_step(const Step& step) const;
  void tell(int rank, int layer, const Step& step, const KvWrite& own);

  const ModelConfig share_;  ///< of each GPU
  const int kv_heads_;       ///< of the whole model
  const std::int64_t chunk_, max_tokens_;
  std::shared_ptr<const ShardedModel> model_;
  std::vector<std::unique_ptr<cuda::GroupExchange>> of_range_, of_share_;  // as the model's groups
  std::vector<TextRange> held_;                       // [ranges], or empty: not known yet, or one GPU has all
  std::vector<std::unique_ptr<CudaContext>> shards_;  // [ranks]
  /// Of a layer that listeners hear of, all heads: [N, Hq, d] twice, [N, Hkv, d] three times.
  std::vector<float> q_, q_unrotated_, k_, k_unrotated_, v_;
};

std::unique_ptr<GpuContext> make_sharded_context(const ModelConfig& config,
                                                 std::shared_ptr<const ShardedModel> model,
                                                 const GpuContextOptions& options);

}  // namespace lode
