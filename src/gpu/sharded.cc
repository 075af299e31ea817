// SPDX-License-Identifier: Apache-2.0
#include "gpu/sharded.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/cancel.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Methods whose GPU selectors, each with a range of the text, choose together what one would.
constexpr std::array<std::string_view, 3> kMethodsOfRanges = {"streaming", "hash", "hyperplanes"};
/// Methods whose GPU selectors know which of the host's heads are theirs.
constexpr std::array<std::string_view, 7> kMethods = {"streaming", "topk", "kmeans",     "saap",
                                                      "squeezed",  "hash", "hyperplanes"};

GpuContextOptions options_of_share(GpuContextOptions options) {
  if (options.tier == KvTier::host || !lies_on_gpu(options.kv_type) || options.active_memory > 0)
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

/// InputError where a text cannot be cut into so many ranges.
void expect_ranges(const ModelConfig& config, int gpus, int ranges) {
  if (ranges < 1 || gpus % ranges != 0)
    throw InputError(fmt::format(
        "--context-parallel: expected a number that divides that of the GPUs ({}), found {}", gpus, ranges));
  if (ranges > 1 && config.head_dim % 4 != 0)  // states are merged four numbers at a time
    throw InputError(fmt::format("--context-parallel: expected heads of a multiple of 4 numbers, found {}",
                                 config.head_dim));
  for (int layer = 0; ranges > 1 && layer < config.layers; ++layer)
    if (config.plan.layer(layer).window > 0 || config.plan.layer(layer).recurrent)
      throw InputError(
          fmt::format("--context-parallel: expected a model whose layers all attend to the whole text, found "
                      "others in {}: leave it out",
                      config.architecture));
}

std::vector<int> every(std::span<const int> all, int first, int step, int count) {
  std::vector<int> some;
  for (int i = 0; i < count; ++i) some.push_back(all[static_cast<std::size_t>(first + i * step)]);
  return some;
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
    : ranges_(group.ranges), threads_(group.devices), parts_(group.devices.size()) {
  const int shares = this->shares();
  for (int range = 0; shares > 1 && range < ranges_; ++range)
    of_range_.push_back(
        std::make_unique<cuda::DeviceGroup>(every(group.devices, range * shares, 1, shares), group.sum));
  for (int share = 0; ranges_ > 1 && share < shares; ++share)
    of_share_.push_back(
        std::make_unique<cuda::DeviceGroup>(every(group.devices, share, shares, ranges_), GpuSum::peers));
  const ModelConfig part = share_of(config, shares);
  threads_.run([&](int rank) {
    const ModelShare share = {rank % shares, shares};
    const auto r = static_cast<std::size_t>(rank);
    parts_[r] = share.whole()
                    ? std::make_shared<const CudaModel>(config, weights, limit, share)
                    : std::make_shared<const CudaModel>(part, share_of(weights, config, share), limit, share);
  });
}

const cuda::DeviceGroup* ShardedModel::of_range(int range) const {
  return of_range_.empty() ? nullptr : of_range_[static_cast<std::size_t>(range)].get();
}
const cuda::DeviceGroup* ShardedModel::of_share(int share) const {
  return of_share_.empty() ? nullptr : of_share_[static_cast<std::size_t>(share)].get();
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
  const int gpus = static_cast<int>(group.devices.size());
  expect_ranges(config, gpus, group.ranges);
  if (gpus > group.ranges) expect_shares(config, weights, gpus / group.ranges);
  return std::make_shared<ShardedModel>(config, weights, limit, group);
}

std::unique_ptr<GpuContext> make_sharded_context(const ModelConfig& config,
                                                 std::shared_ptr<const ShardedModel> model,
                                                 const GpuContextOptions& options) {
  return std::make_unique<ShardedContext>(config, std::move(model), options_of_share(options));
}

ShardedContext::ShardedContext(const ModelConfig& config, std::shared_ptr<const ShardedModel> model,
                               const GpuContextOptions& options)
    : share_(share_of(config, model->shares())),
      kv_heads_(config.kv_heads),
      chunk_(options.chunk),
      max_tokens_(options.max_tokens),
      model_(std::move(model)),
      shards_(static_cast<std::size_t>(model_->gpus())) {
  const int shares = model_->shares(), ranges = model_->ranges();
  for (int range = 0; shares > 1 && range < ranges; ++range)
    of_range_.push_back(
        std::make_unique<cuda::GroupExchange>(*model_->of_range(range), options.chunk * config.hidden));
  for (int share = 0; ranges > 1 && share < shares; ++share)
    of_share_.push_back(std::make_unique<cuda::GroupExchange>(*model_->of_share(share),
                                                              range_exchange_room(share_, options.chunk)));
  const auto exchange = [](const auto& groups, int group) {
    return groups.empty() ? nullptr : groups[static_cast<std::size_t>(group)].get();
  };
  on_all([&](int rank) {
    const int range = rank / shares, share = rank % shares;
    shards_[static_cast<std::size_t>(rank)] =
        CudaContext::make(share_, model_->part(rank), options,
                          {.leads = rank == 0,
                           .first_kv_head = share * share_.kv_heads,
                           .all_kv_heads = kv_heads_,
                           .heads = {exchange(of_range_, range), share, shares},
                           .ranges = {exchange(of_share_, share), range, ranges},
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
  const std::string heads = model_->shares() == 1
                                ? std::string()
                                : fmt::format("{} GPUs share the model and its KV heads, sums by {}; ",
                                              model_->shares(), model_->of_range(0)->way()),
                    ranges = model_->ranges() == 1
                                 ? std::string()
                                 : fmt::format("{} ranges of the text, each on {}, merged over peer memory; ",
                                               model_->ranges(),
                                               model_->shares() == 1 ? "one GPU" : "GPUs of its own");
  return fmt::format("{}{}on each of them: {}", heads, ranges, shards_.front()->placement());
}

void ShardedContext::roll_back(std::int64_t tokens) {
  on_all([&](int rank) { shard(rank).roll_back(tokens); });
  if (tokens <= 0) held_.clear();
}

/// Shares a text out that is empty so far and will have so many tokens.
void ShardedContext::cut(std::int64_t tokens) {
  const int ranges = model_->ranges();
  if (ranges == 1 || !held_.empty()) return;
  for (int range = 0; range < ranges; ++range) held_.push_back(text_range(tokens, range, ranges));
  on_all([&](int rank) { shard(rank).take_range(held_[static_cast<std::size_t>(rank / model_->shares())]); });
}

/// The first position behind the context's end where another range begins.
std::int64_t ShardedContext::next_cut() const {
  for (const TextRange& range : held_)
    if (range.begin > tokens()) return range.begin;
  return TextRange::kNoEnd;
}

void ShardedContext::upload(const KvStore& store) {
  if (tokens() == 0 && store.tokens() > 0) cut(store.tokens());
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
  cut(tokens);
  on_all([&](int rank) {
    shard(rank).fill_random(
        tokens, seed + static_cast<std::uint64_t>(rank) * static_cast<std::uint64_t>(share_.layers));
  });
}

ChosenBy ShardedContext::attach(const Spec& spec, std::span<Selector* const> selectors) {
  const bool in_ranges = model_->ranges() > 1;
  const std::span<const std::string_view> methods =
      in_ranges ? std::span<const std::string_view>(kMethodsOfRanges) : kMethods;
  std::vector<ChosenBy> by(shards_.size(), ChosenBy::host);
  if (std::ranges::find(methods, spec.name) != methods.end() && !(in_ranges && spec.dense.from_context))
    on_all([&](int rank) { by[static_cast<std::size_t>(rank)] = shard(rank).attach(spec, selectors); });
  if (std::find(by.begin(), by.end(), ChosenBy::host) == by.end()) return by.front();
  throw InputError(
      fmt::format("attention spec '{}': expected a method that several GPUs choose keys by, each for its own "
                  "{} (full, {}), found one that they do not: leave out {}",
                  spec.str(), in_ranges ? "range of the text" : "heads", fmt::join(methods, ", "),
                  in_ranges ? "--context-parallel" : "--tensor-parallel"));
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
      fmt::format("several GPUs: expected what they do without the host, found {}: use one GPU", what));
}

/// Of a method the first range holds the sink and the last one the window.
void ShardedContext::expect_ranges(const Step& step) const {
  if (held_.empty() || step.selectors.empty()) return;
  const LocalWindow& dense = step.dense;
  const std::int64_t least = held_.back().begin + dense.window;
  if (tokens() + 1 >= least && held_.front().end >= dense.sink) return;
  throw InputError(
      fmt::format("--context-parallel: expected sink and window ({} and {} tokens) within the first and the "
                  "last of {} ranges, the last from token {} on, found a text of {}: fewer GPUs",
                  dense.sink, dense.window, held_.size(), held_.back().begin, tokens()));
}

/// Tokens on both sides of a cut take a step each.
ForwardWork ShardedContext::forward(const Step& step, const Rope& rope, LogitRows rows,
                                    std::vector<float>& logits) {
  cut(max_tokens_);
  const SequenceTokens& all = step.sequences.front();
  ForwardWork work;
  std::vector<float> some, together;
  for (std::size_t at = 0; at < all.tokens.size();) {
    const auto left = static_cast<std::size_t>(
        std::min(next_cut() - tokens(), std::ssize(all.tokens) - static_cast<std::ptrdiff_t>(at)));
    const SequenceTokens part = {all.tokens.subspan(at, left), all.kv, all.id, all.far_limit};
    at += left;
    Step piece = step;
    piece.sequences = {&part, 1};
    const bool last = at == all.tokens.size();
    work += forward_in_range(piece, rope, rows == LogitRows::last_of_each && !last ? LogitRows::none : rows,
                             some);
    if (rows == LogitRows::all) together.insert(together.end(), some.begin(), some.end());
  }
  logits = rows == LogitRows::all ? std::move(together) : std::move(some);
  return work;
}

ForwardWork ShardedContext::forward_in_range(const Step& step, const Rope& rope, LogitRows rows,
                                             std::vector<float>& logits) {
  expect_step(step);
  expect_ranges(step);
  for (const auto& groups : {&of_range_, &of_share_})
    for (const auto& exchange : *groups) exchange->expect_whole();
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
  parts.resize(static_cast<std::size_t>(model_->shares()));  // of the first range: the others have the same
  logits = rows == LogitRows::none ? std::vector<float>() : joined(parts, share_.vocab);
  ForwardWork work = works.front();
  for (std::size_t rank = 1; rank < works.size(); ++rank) {
    works[rank].sparse_tokens = 0;  // each of its tokens once
    work += works[rank];
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
    if (rank == 0) vector.all.resize(vector.part.size() * static_cast<std::size_t>(model_->shares()));
  model_->threads().meet();
  for (const auto& vector : vectors)  // GPUs of other ranges have the same
    if (rank < model_->shares()) put_heads(vector.part, own.tokens, rank, vector.all);
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
