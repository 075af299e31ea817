// SPDX-License-Identifier: Apache-2.0
#include "gpu/sharded.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/cancel.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Methods whose GPU selectors know which of the host's heads are theirs.
constexpr std::array<std::string_view, 7> kMethods = {"streaming", "topk", "kmeans",     "saap",
                                                      "squeezed",  "hash", "hyperplanes"};

GpuContextOptions options_of_share(GpuContextOptions options) {
  if (options.tier == KvTier::host || options.kv_type == DType::q8 || options.active_memory > 0)
    throw InputError(
        "--tensor-parallel: expected keys and values on the GPUs (--kv-tier gpu, --kv-type f32, f16 or "
        "bf16, no --active-memory), found them in host memory");
  options.tier = KvTier::gpu;
  return options;
}

bool compares(const Step& step) {
  return step.hooks != nullptr && step.hooks->compare;
}

/// A share's heads [N, H / ranks, d] to their place among all of them, [N, H, d].
void put_heads(std::span<const float> own, std::int64_t tokens, int rank, std::vector<float>& all) {
  const std::int64_t each = std::ssize(own) / tokens, row = std::ssize(all) / tokens;
  for (std::int64_t t = 0; t < tokens && !own.empty(); ++t)
    std::copy_n(own.begin() + t * each, each, all.begin() + t * row + rank * each);
}

/// Rows of logits that GPUs have a part of each, as one: [rows, V].
std::vector<float> joined(const std::vector<std::vector<float>>& parts, std::int64_t vocab) {
  std::size_t numbers = 0;
  for (const auto& part : parts) numbers += part.size();
  std::vector<float> all;
  all.reserve(numbers);
  const std::size_t rows = numbers / static_cast<std::size_t>(vocab);
  for (std::size_t row = 0; row < rows; ++row) {
    for (const auto& part : parts) {
      const auto own = static_cast<std::ptrdiff_t>(part.size() / rows);
      const auto begin = part.begin() + static_cast<std::ptrdiff_t>(row) * own;
      all.insert(all.end(), begin, begin + own);
    }
  }
  return all;
}

}  // namespace

ShardedModel::ShardedModel(const ModelConfig& config, const ModelWeights& weights, std::int64_t limit,
                           const GpuGroup& group)
    : group_(std::make_unique<cuda::DeviceGroup>(group.devices, group.sum)),
      threads_(group.devices),
      parts_(group.devices.size()) {
  const ModelConfig part = share_of(config, gpus());
  threads_.run([&](int rank) {
    const ModelShare share = {rank, gpus()};
    parts_[static_cast<std::size_t>(rank)] =
        std::make_shared<const CudaModel>(part, share_of(weights, config, share), limit, share);
  });
}
ShardedModel::~ShardedModel() {
  threads_.run([&](int rank) { parts_[static_cast<std::size_t>(rank)] = nullptr; });
}

std::int64_t ShardedModel::bytes() const {
  std::int64_t bytes = 0;
  for (const auto& part : parts_) bytes += part->bytes();
  return bytes;
}

std::shared_ptr<const GpuModel> make_sharded_model(const ModelConfig& config, const ModelWeights& weights,
                                                   std::int64_t limit, const GpuGroup& group) {
  expect_shares(config, weights, static_cast<int>(group.devices.size()));
  return std::make_shared<ShardedModel>(config, weights, limit, group);
}

std::unique_ptr<GpuContext> make_sharded_context(const ModelConfig& config,
                                                 std::shared_ptr<const ShardedModel> model,
                                                 const GpuContextOptions& options) {
  return std::make_unique<ShardedContext>(config, std::move(model), options_of_share(options));
}

ShardedContext::ShardedContext(const ModelConfig& config, std::shared_ptr<const ShardedModel> model,
                               const GpuContextOptions& options)
    : share_(share_of(config, model->gpus())),
      kv_heads_(config.kv_heads),
      chunk_(options.chunk),
      model_(std::move(model)),
      sum_(std::make_unique<cuda::GroupSum>(model_->group(), options.chunk * config.hidden)),
      shards_(static_cast<std::size_t>(model_->gpus())) {
  on_all([&](int rank) {
    shards_[static_cast<std::size_t>(rank)] =
        CudaContext::make(share_, model_->part(rank), options,
                          {.rank = rank,
                           .first_kv_head = rank * share_.kv_heads,
                           .all_kv_heads = kv_heads_,
                           .sum = sum_.get(),
                           .meet = [this] { model_->threads().meet(); },
                           .tell = [this, rank](int layer, const Step& step,
                                                const KvWrite& own) { tell(rank, layer, step, own); }});
  });
}

ShardedContext::~ShardedContext() {
  on_all([&](int rank) { shards_[static_cast<std::size_t>(rank)] = nullptr; });
}

template <class Body>
void ShardedContext::on_all(const Body& body) const {
  model_->threads().run(body);
}

std::int64_t ShardedContext::bytes() const {
  std::int64_t bytes = 0;
  for (const auto& shard : shards_) bytes += shard->bytes();
  return bytes;
}

std::string ShardedContext::placement() const {
  return fmt::format("{} GPUs share the model and its KV heads, sums by {}; on each of them: {}",
                     model_->gpus(), model_->group().way(), shards_.front()->placement());
}

void ShardedContext::roll_back(std::int64_t tokens) {
  on_all([&](int rank) { shard(rank).roll_back(tokens); });
}

void ShardedContext::upload(const KvStore& store) {
  on_all([&](int rank) { shard(rank).upload(store); });
}

/// One GPU after another: the store notes how far it has been written.
void ShardedContext::download(KvStore& store) {
  const std::int64_t more = tokens() - store.tokens();
  if (more <= 0) return;
  for (int turn = 0; turn < model_->gpus(); ++turn)
    on_all([&](int rank) {
      if (rank == turn) shard(rank).copy_rows_to(store);
    });
  store.commit(more);
}

void ShardedContext::fill_random(std::int64_t tokens, std::uint64_t seed) {
  on_all([&](int rank) {
    shard(rank).fill_random(
        tokens, seed + static_cast<std::uint64_t>(rank) * static_cast<std::uint64_t>(share_.layers));
  });
}

ChosenBy ShardedContext::attach(const Spec& spec, std::span<Selector* const> selectors) {
  const bool known = std::find(kMethods.begin(), kMethods.end(), spec.name) != kMethods.end();
  std::vector<ChosenBy> by(shards_.size(), ChosenBy::host);
  if (known)
    on_all([&](int rank) { by[static_cast<std::size_t>(rank)] = shard(rank).attach(spec, selectors); });
  if (std::find(by.begin(), by.end(), ChosenBy::host) == by.end()) return by.front();
  throw InputError(
      fmt::format("attention spec '{}': expected a method that several GPUs choose keys by, each for its own "
                  "heads ({}), found one "
                  "that they do not: leave out --tensor-parallel",
                  spec.str(), fmt::format("full, {}", fmt::join(kMethods, ", "))));
}

bool ShardedContext::chooses(std::span<Selector* const> selectors) const {
  return std::all_of(shards_.begin(), shards_.end(),
                     [&](const auto& shard) { return shard->chooses(selectors); });
}

std::int64_t ShardedContext::most_together(std::span<Selector* const> selectors) const {
  std::int64_t most = chunk_;
  for (const auto& shard : shards_) most = std::min(most, shard->most_together(selectors));
  return most;
}

void ShardedContext::index(std::span<Selector* const> selectors, const Rope& rope) {
  on_all([&](int rank) { shard(rank).index(selectors, rope); });
}

void ShardedContext::expect_step(const Step& step) const {
  const char* const what = compares(step)          ? "an audit of the attention"
                           : !step.given.q.empty() ? "made-up queries (--kv ood)"
                           : !step.selectors.empty() && !chooses(step.selectors)
                               ? "a step whose keys the GPUs cannot choose by themselves"
                               : nullptr;
  if (what == nullptr) return;
  throw InputError(
      fmt::format("--tensor-parallel: expected what GPUs do without the host, found {}: use one GPU", what));
}

ForwardWork ShardedContext::forward(const Step& step, const Rope& rope, LogitRows rows,
                                    std::vector<float>& logits) {
  expect_step(step);
  sum_->expect_whole();
  check_cancel();  // on all GPUs or none: inside of a step they wait for one another
  const std::int64_t before = tokens();
  std::vector<std::vector<float>> parts(shards_.size());
  std::vector<ForwardWork> works(shards_.size());
  try {
    on_all([&](int rank) {
      const auto r = static_cast<std::size_t>(rank);
      works[r] = shard(rank).forward(step, rope, rows, parts[r]);
    });
  } catch (...) {
    roll_back(before);
    throw;
  }
  logits = rows == LogitRows::none ? std::vector<float>() : joined(parts, share_.vocab);
  ForwardWork work = works.front();
  for (std::size_t rank = 1; rank < works.size(); ++rank) {
    work.attend += works[rank].attend;
    work.select.bytes += works[rank].select.bytes;
    work.select.keys_scored += works[rank].select.keys_scored;
  }
  return work;
}

/// The first rank's thread tells the host's store and listeners, once all heads are there.
void ShardedContext::tell(int rank, int layer, const Step& step, const KvWrite& own) {
  const struct {
    std::span<const float> part;
    std::vector<float>& all;
  } vectors[] = {{own.q, q_},
                 {own.q_unrotated, q_unrotated_},
                 {own.k, k_},
                 {own.k_unrotated, k_unrotated_},
                 {own.v, v_}};
  for (const auto& vector : vectors)
    if (rank == 0) vector.all.resize(vector.part.size() * shards_.size());
  model_->threads().meet();
  for (const auto& vector : vectors) put_heads(vector.part, own.tokens, rank, vector.all);
  model_->threads().meet();
  if (rank == 0) {
    step.sequences.front().kv->write(layer, own.tokens, k_, v_);
    KvWrite all = own;
    all.q = q_, all.q_unrotated = q_unrotated_, all.k = k_, all.k_unrotated = k_unrotated_, all.v = v_;
    if (!step.listeners.empty())
      for (Selector* const listener : step.listeners[static_cast<std::size_t>(layer)])
        listener->on_write(all);
  }
  model_->threads().meet();
}

double ShardedContext::sum_microseconds() {
  std::vector<double> times(shards_.size());
  on_all([&](int rank) { times[static_cast<std::size_t>(rank)] = shard(rank).sum_microseconds(); });
  return *std::max_element(times.begin(), times.end());
}

}  // namespace lode
