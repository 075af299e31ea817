// SPDX-License-Identifier: Apache-2.0
// The forward pass on the GPU, in the order of model/llama.cc.
//
// A step enqueues everything on one stream and waits once, at its end. A decode step in which the host takes
// no part is captured as a graph the first time, and replayed: its inputs are the token's id and position, in
// pinned memory. Where a method's selectors run on the host, each layer hands its queries, keys and values
// over and takes lists of keys back. Where keys and values lie in host memory (HostTier), a dense step of
// many tokens has each layer's brought before it runs; in all other steps the host attends the far keys,
// chosen or all of them, while the GPU attends sink and window, and the two states are merged exactly
// (RetrievalAttention, equations 4 and 5): queries and new keys go down, (output, log-sum-exp) comes up.
#include "gpu/context.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/cancel.h"
#include "base/finite.h"
#include "base/timed_parts.h"
#include "gpu/document_bytes.h"
#include "gpu/layers/layer_rows.h"
#include "gpu/layers/states_of.h"
#include "gpu/sharded.h"
#include "kernels/cuda/attend/attend_block.h"
#include "kernels/cuda/device/random.h"
#include "lodestone/error.h"
#include "model/kv_shape.h"

namespace lode {

namespace {

constexpr std::int64_t kLogitRows = 64;

std::int64_t vector_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t d) {
  return tokens * heads * d * std::int64_t{sizeof(float)};
}

/// Of the product behind attention, or of the one behind a recurrent layer, or of those of latent rows.
std::int64_t widest_input(const ModelConfig& c) {
  return std::max({c.most_query_columns(), c.plan.delta.values(), LatentLayers::most_columns(c)});
}

/// Within a layer.
std::int64_t widest_inside(const ModelConfig& c) {
  return std::max<std::int64_t>(widest_feed_forward(c), c.plan.inputs.width);
}

std::int64_t linear_scratch(const ModelConfig& c, std::int64_t chunk) {
  return cuda::Linear::scratch_bytes(chunk, c.hidden, widest_inside(c), widest_input(c), c.most_kv_columns());
}

cuda::Precision precision_of(DType kv_type) {
  return kv_type == DType::f32 ? cuda::Precision::exact : cuda::Precision::fast;
}

/// Device memory of a context beside weights, keys and values.
std::int64_t working_bytes(const ModelConfig& c, const CudaModel& model, const GpuContextOptions& options) {
  const std::int64_t n = options.chunk, f = sizeof(float);
  return n * c.hidden * f + 3 * n * f * (c.most_query_columns() + c.most_kv_columns()) +
         std::min(n, kLogitRows) * c.vocab * f + linear_scratch(c, n) +
         model.panel_bytes(precision_of(options.kv_type)) +
         cuda::Experts::scratch_bytes(model.expert_sizes(c), n, precision_of(options.kv_type)) +
         (c.plan.sinks ? vector_bytes(n, c.query_heads, 1) : 0) +
         cuda::rows_prefill_workspace_bytes(c.head_dim) + DeltaLayers::bytes(c, n) +
         LatentLayers::bytes(c, n) + GpuStates::bytes(DeltaLayers::state_floats(c)) +
         LayerInputs::bytes(c, n) + attention_workspace_bytes(c);
}

/// Keys and values as the GPU has them.
KvShape shape_on_gpu(const ModelConfig& config, const GpuContextOptions& options) {
  return kv_shape(config, type_on_gpu(options.kv_type), options.max_tokens);
}

/// Where active keys lie if keys and values lie in host memory.
ActiveTier::Room active_room(const ModelConfig& config, const GpuContextOptions& options) {
  if (options.active_memory == 0) return {.first_row = options.max_tokens};
  return ActiveTier::room_for(shape_on_gpu(config, options), options.active_memory);
}

Placement placement_of(const ModelConfig& config, const CudaModel& model, const GpuContextOptions& options) {
  const KvShape shape = shape_on_gpu(config, options);
  KvShape on_host = shape;
  on_host.type = options.kv_type;
  // Pages of 2 MiB: at most one too many at either end of what is held, in every layer.
  const std::int64_t held = std::min(options.max_tokens, HostTier::kHeldTokens) * shape.token_bytes() +
                            3 * config.layers * (std::int64_t{2} << 20) + active_room(config, options).bytes;
  const std::int64_t free = model.bytes() + gpu_info().free_bytes;
  return place_kv({.weights = model.bytes(),
                   .working = working_bytes(config, model, options),
                   .token_bytes = on_host.token_bytes(),
                   .gpu_token_bytes = shape.token_bytes(),
                   .layers = config.layers,
                   .max_tokens = options.max_tokens,
                   .held = held,
                   .moved = vector_bytes(kMostSparseTokens, config.query_heads, config.head_dim + 2),
                   .limit = options.memory_limit > 0 ? options.memory_limit : free,
                   .by_flag = options.memory_limit > 0,
                   .wanted = lies_on_gpu(options.kv_type) ? options.tier : KvTier::host});
}

bool has_listeners(const Step& step) {
  return std::any_of(step.listeners.begin(), step.listeners.end(),
                     [](const auto& some) { return !some.empty(); });
}

/// Behind its range a GPU writes rows that others keep: of a step, from anywhere in a block.
std::int64_t spare_rows(const GpuContextOptions& options, const CudaContext::Share& share) {
  return share.ranges ? options.chunk + 2 * cuda::kBlockTokens : 0;
}

/// For people, with what of the options changes nothing.
std::string sentence_of(const Placement& place, const GpuContextOptions& options) {
  if (place.on_host || options.active_memory == 0) return place.sentence;
  return place.sentence + "; --active-memory is for keys in host memory (--kv-tier host) and changes nothing";
}

}  // namespace

std::unique_ptr<GpuContext> make_gpu_context(const ModelConfig& config, std::shared_ptr<const GpuModel> model,
                                             const GpuContextOptions& options) {
  const TimedPart timed("GPU buffers");
  if (auto shared = std::dynamic_pointer_cast<const ShardedModel>(model); shared != nullptr)
    return make_sharded_context(config, std::move(shared), options);
  return CudaContext::make(config, std::dynamic_pointer_cast<const CudaModel>(model), options, {});
}

std::unique_ptr<CudaContext> CudaContext::make(const ModelConfig& config,
                                               std::shared_ptr<const CudaModel> model,
                                               const GpuContextOptions& options, Share share) {
  if (!lies_on_gpu(options.kv_type) && options.tier == KvTier::gpu)
    throw InputError("--kv-type: expected f32, f16 or bf16 with --kv-tier gpu, found " +
                     std::string(name_of(options.kv_type)));
  if (options.active_memory > 0 && options.tier == KvTier::gpu) {
    throw InputError("--active-memory: expected --kv-tier host or auto, found gpu");
  }
  GpuContextOptions held = options;  // of the text, this GPU's range
  held.max_tokens = (options.max_tokens + share.ranges.size - 1) / share.ranges.size;
  Placement place = placement_of(config, *model, held);
  if (options.active_memory > 0 && config.plan.latent.kv_rank > 0)
    throw InputError(fmt::format(
        "--active-memory: expected a model whose heads have rows of their own, found the latent rows of {}",
        config.architecture));
  const char* const part = !config.plan.recurrent_floats().empty() ? "recurrent layers"
                           : !layer_rows(config).empty()           ? "heads of different sizes"
                                                                   : nullptr;
  if (place.on_host && part != nullptr)
    throw InputError(
        fmt::format("expected keys and values of a model with {} on the GPU, found them in host memory ({}): "
                    "use a smaller context, another type of keys and values, or the CPU",
                    part, place.sentence));
  place.sentence = sentence_of(place, options);
  if (!model->remark().empty()) place.sentence += "; " + model->remark();
  return std::make_unique<CudaContext>(config, std::move(model), options, place, std::move(share));
}

std::int64_t gpu_document_bytes(const ModelConfig& config, const GpuModel& model, DType kv_type,
                                std::int64_t max_tokens, std::int64_t chunk) {
  constexpr std::int64_t kPage = std::int64_t{2} << 20;  // one too many in every layer, at most
  const auto& here = dynamic_cast<const CudaModel&>(model);
  const GpuContextOptions options = {
      .kv_type = kv_type, .max_tokens = max_tokens, .chunk = std::min(chunk, max_tokens)};
  return working_bytes(config, here, options) + max_tokens * shape_on_gpu(config, options).token_bytes() +
         config.layers * kPage;
}

bool CudaContext::Run::sparse(int layer) const {
  const auto l = static_cast<std::size_t>(layer);
  if (window(layer) > 0) return false;
  return native != nullptr ? native->layers[l] : !step.selectors.empty() && step.selectors[l] != nullptr;
}

bool CudaContext::Run::host_takes_part() const {
  return reach != Reach::all || host_chooses() || tells_all;
}

bool CudaContext::Run::audits_some() const {
  if (step.hooks == nullptr || !step.hooks->compare) return false;
  const auto layers = static_cast<int>(native != nullptr ? native->layers.size() : step.selectors.size());
  for (int layer = 0; layer < layers; ++layer)
    if (audits(layer)) return true;
  return false;
}

CudaContext::CudaContext(const ModelConfig& config, std::shared_ptr<const CudaModel> model,
                         const GpuContextOptions& options, const Placement& place, Share share)
    : turns_(config),
      config_(config),
      model_(std::move(model)),
      options_(options),
      place_(place),
      share_(std::move(share)),
      active_room_(place.on_host ? active_room(config, options)
                                 : ActiveTier::Room{.first_row = options.max_tokens}),
      range_(layout_of(config, type_on_gpu(options.kv_type)), config.layers,
             active_room_.end() + spare_rows(options, share_), layer_rows(config)),
      linear_(stream_.get(), precision()),
      experts_(linear_, stream_.get(), precision()),
      recurrent_(config, options.chunk, stream_.get()),
      latent_(config, options.chunk, stream_.get(), precision()),
      inputs_(config, options.chunk, stream_.get()),
      states_(DeltaLayers::state_floats(config)) {
  const std::int64_t n = options.chunk, d = config.head_dim;
  const char* const what = "the activations of a chunk";
  ids_ = cuda::Buffer(n * std::int64_t{sizeof(TokenId)}, what);
  places_ = cuda::Buffer(n * std::int64_t{sizeof(cuda::QueryToken)}, what);
  bases_ = cuda::Buffer(sizeof(const char*), what);
  frequencies_ = cuda::Buffer(LayerTurns::frequency_bytes(config), what);
  no_rows_ = cuda::Buffer(kDecodeTokens * config.most_kv_heads() * std::int64_t{sizeof(std::int32_t)}, what);
  cuda::fill(no_rows_.as<void>(), 0, no_rows_.bytes(), stream_.get());
  x_ = cuda::Buffer(n * config.hidden * std::int64_t{sizeof(float)}, what);
  if (share_.heads && !attention_addition(model_->layers.front(), config).plain())
    summed_ = cuda::Buffer(x_.bytes(), what);
  for (cuda::Buffer* b : {&q_, &q_unrotated_, &attention_})
    *b = cuda::Buffer(vector_bytes(n, 1, config.most_query_columns()), what);
  for (cuda::Buffer* b : {&k_, &k_unrotated_, &v_})
    *b = cuda::Buffer(vector_bytes(n, 1, config.most_kv_columns()), what);
  if (config.plan.sinks) lse_ = cuda::Buffer(vector_bytes(n, config.query_heads, 1), what);
  logits_ = cuda::Buffer(std::min(n, kLogitRows) * config.vocab * std::int64_t{sizeof(float)}, "logits");
  staged_ids_ = cuda::PinnedBuffer(ids_.bytes());
  staged_places_ = cuda::PinnedBuffer(places_.bytes());
  staged_logits_ = cuda::PinnedBuffer(logits_.bytes());
  linear_.reserve(n, config.hidden, widest_inside(config), widest_input(config), config.most_kv_columns());
  experts_.reserve(model_->expert_sizes(config), n);
  for (const LayerPlan& layer : config.plan.layers)
    if (!layer.own_rows()) shown_rows_[layer.rows_of] = {};
  state_rows_there_ = cuda::Buffer(sizeof(cuda::DeltaRows), what);
  staged_state_rows_ = cuda::PinnedBuffer(state_rows_there_.bytes());
  states_.clear(0, stream_.get());
  linear_.reserve_panel(model_->panel_bytes(precision()));
  workspace_ = cuda::Buffer(attention_workspace_bytes(config), "partial results of attention");
  cuda::fill(workspace_.as<void>(), 0, workspace_.bytes(), stream_.get());
  parts_ = cuda::Buffer(cuda::rows_prefill_workspace_bytes(config.head_dim), "partial results of attention");
  if (place.on_host) {
    LODE_ASSERT(options.pool != nullptr);
    const KvShape shape = shape_on_gpu(config, options);
    tier_ = std::make_unique<HostTier>(shape, *options.pool, stream_.get());
    if (active_room_.slots > 0)
      active_ = std::make_unique<ActiveTier>(shape, active_room_, *options.pool, range_);
    near_lse_ = cuda::Buffer(vector_bytes(kMostSparseTokens, config.query_heads, 1), what);
    far_ = cuda::Buffer(vector_bytes(kMostSparseTokens, config.query_heads, d + 1), what);
    host_far_ = cuda::PinnedBuffer(far_.bytes());
  }
  if (share_.ranges) make_range_buffers();
  if (tier_ == nullptr && share_.alone())
    device_keys_ = make_device_keys([this] { return stored_keys(); }, config.query_heads,
                                    [this] { return free_bytes(); });
  const char* const base = range_.base();
  cuda::copy(bases_.as<void>(), &base, sizeof base, stream_.get());
  stream_.synchronize();
}

CudaContext::~CudaContext() = default;

std::uint64_t CudaContext::next_number() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

std::int64_t CudaContext::bytes() const {
  std::int64_t bytes = range_.backed_bytes() + working_bytes(config_, *model_, options_) +
                       lists_memory_.bytes() + exact_.bytes() + near_lse_.bytes() + far_.bytes() +
                       near_memory_.bytes() + summed_.bytes() + masses_.bytes();
  if (share_.heads) bytes += share_.heads.exchange->bytes();
  if (talk_ != nullptr) bytes += talk_->bytes() + shared_workspace_.bytes();
  if (tier_ != nullptr) bytes += tier_->bytes();
  if (active_ != nullptr) bytes += active_->bytes();
  if (device_keys_ != nullptr) bytes += device_keys_->bytes();
  for (const auto& [key, native] : methods_state_) bytes += native.selector->bytes();
  return bytes;
}

/// Of what this program may take of the GPU.
std::int64_t CudaContext::free_bytes() const {
  const std::int64_t free = gpu_info().free_bytes;
  if (options_.memory_limit == 0) return free;
  return std::min(free, options_.memory_limit - model_->bytes() - bytes());
}

// ---- The two copies of the cache.
// -------------------------------------------------------------------------------

void CudaContext::roll_back(std::int64_t tokens) {
  tokens_ = std::min(tokens_, tokens);
  if (tier_ != nullptr) tier_->roll_back(tokens_);
  if (active_ != nullptr) active_->roll_back(tokens_);
  for (auto& [key, native] : methods_state_) native.selector->roll_back(0, rows_here());
}

void CudaContext::bring_states(RecurrentStates& states) {
  states_.bring(tokens_, config_.layers, states, stream_.get());
}

void CudaContext::restore_states(const RecurrentStates& states) {
  if (states_.empty()) return;
  LODE_ASSERT(states.tokens() == tokens_);
  states_.load(states, stream_.get());
}

void CudaContext::download(KvStore& store) {
  bring_states(store.recurrent());
  const std::int64_t more = tokens_ - store.tokens();
  if (more <= 0) return;
  copy_rows_to(store);
  store.commit(more);
}

void CudaContext::copy_rows_to(KvStore& store) const {
  copy_rows_to(store, {});
  stream_.synchronize();
}

void CudaContext::copy_rows_to(KvStore& store, const std::function<void(int layer)>& done) const {
  const std::int64_t more = tokens_ - store.tokens(), begin = held_.count(store.tokens()), end = rows_here();
  const auto copy = [&](int layer, int head, cuda::KvRange::Part part, KvStore::Part to) {
    if (!range_.holds(layer, head, part)) return;
    const std::int64_t ahead = (held_.begin + begin - store.tokens()) * range_.layout(layer).row_bytes();
    auto* const rows = store.rows_to_write(layer, share_.first_kv_head + head, to, more);
    range_.to_host(layer, head, part, begin, end, static_cast<std::byte*>(rows) + ahead, stream_.get());
  };
  for (int layer = 0; layer < config_.layers; ++layer) {
    check_cancel();
    for (int head = 0; head < config_.kv_heads_of(layer) && begin < end && range_.has_rows(layer); ++head) {
      copy(layer, head, cuda::KvRange::Part::k, KvStore::Part::k);
      copy(layer, head, cuda::KvRange::Part::v, KvStore::Part::v);
    }
    if (!done) continue;
    stream_.synchronize();
    done(layer);
  }
}

void CudaContext::fill_random(std::int64_t tokens, std::uint64_t seed) {
  LODE_ASSERT(tier_ == nullptr);
  const std::int64_t rows = held_.count(tokens);
  range_.back(rows);
  constexpr float kWidth = 1.7320508f;  // of a uniform number with variance 1
  for (int layer = 0; layer < config_.layers; ++layer) {
    if (!range_.has_rows(layer)) continue;
    const DType type = range_.layout(layer).type;
    cuda::fill_uniform(range_.base() + layer * range_.layout().layer_stride, type,
                       range_.layout(layer).layer_bytes(rows) / bytes_of(type), 0.0f, kWidth,
                       seed + static_cast<std::uint64_t>(layer), stream_.get());
  }
  states_.clear(tokens, stream_.get());
  stream_.synchronize();
  tokens_ = tokens;
}

// ---- Methods.
// -----------------------------------------------------------------------------------------------------

ChosenBy CudaContext::attach(const Spec& spec, std::span<Selector* const> selectors) {
  if (tier_ != nullptr || !turns_alike()) return ChosenBy::host;
  const GpuGeometry geometry = {.layers = config_.layers,
                                .query_heads = config_.query_heads,
                                .kv_heads = config_.kv_heads,
                                .head_dim = config_.head_dim,
                                .max_tokens = options_.max_tokens,
                                .most_queries = kMostSparseTokens,
                                .most_tokens = static_cast<int>(options_.chunk),
                                .rows = layer_rows(config_),
                                .key_row_bytes = range_.layout().row_bytes(),
                                .stream = stream_.get(),
                                .seed = options_.seed,
                                .first_head = share_.first_kv_head,
                                .all_heads = share_.all_kv_heads,
                                .ranges = talk_.get(),
                                .pool = share_.alone() ? options_.pool : nullptr};
  Spec here = spec;
  here.dense = dense_here(spec.dense);
  auto selector = make_gpu_selector(here, geometry, selectors);
  if (selector == nullptr) return ChosenBy::host;
  const ChosenBy by = selector->needs_host_index() ? ChosenBy::gpu_by_host_index : ChosenBy::gpu;
  cuda::PinnedBuffer counts(config_.layers * selector->counts_per_layer() * 4);
  GpuMethodState native = {.selector = std::move(selector),
                           .dense = spec.dense,
                           .layers = {},
                           .counts = std::move(counts),
                           .graph = {},
                           .number = next_number()};
  for (const Selector* s : selectors) native.layers.push_back(s != nullptr);
  methods_state_.insert_or_assign(selectors.data(), std::move(native));
  return by;
}

// ---- The step.
// ----------------------------------------------------------------------------------------------------

ForwardWork CudaContext::forward(const Step& step, const Rope& rope, LogitRows rows,
                                 std::vector<float>& logits) {
  LODE_ASSERT(step.sequences.size() == 1 && step.sequences.front().document.empty());
  const SequenceTokens& all = step.sequences.front();
  ForwardWork work;
  std::vector<float> some, together;
  std::size_t most = 0;
  forward_begin_ = tokens_;
  // Pieces that count on the host already are given up with a later one that fails.
  if (!states_.empty() && all.kv != nullptr && all.kv->recurrent().tokens() == tokens_ &&
      std::ssize(all.tokens) > std::min(most_tokens(step), options_.chunk))
    all.kv->recurrent().keep();
  for (std::size_t at = 0; at < all.tokens.size(); at += most) {
    most = static_cast<std::size_t>(std::min(most_tokens(step), options_.chunk));
    const SequenceTokens part = {all.tokens.subspan(at, std::min(most, all.tokens.size() - at)), all.kv,
                                 all.id, all.far_limit};
    const bool last = at + most >= all.tokens.size();
    Step piece = step;
    piece.sequences = {&part, 1};
    try {
      work +=
          forward_some(piece, rope, rows == LogitRows::last_of_each && !last ? LogitRows::none : rows, some);
    } catch (...) {
      if (!states_.empty()) tokens_ = forward_begin_;  // whose states are still here
      throw;
    }
    if (rows == LogitRows::all) together.insert(together.end(), some.begin(), some.end());
  }
  logits = rows == LogitRows::all ? std::move(together) : std::move(some);
  return work;
}

bool CudaContext::writes_to_host(const Step& step) const {
  if (tier_ != nullptr || share_.tell) return has_listeners(step);
  for (const std::vector<Selector*>& some : step.listeners)
    for (const Selector* const listener : some)
      if (dynamic_cast<const HearsQueries*>(listener) == nullptr) return true;
  return false;
}

DeviceKeys* device_keys_of(GpuContext& context) {
  const auto* const own = dynamic_cast<const CudaContext*>(&context);
  return own != nullptr ? own->device_keys() : nullptr;
}

void bring_states(GpuContext& context, RecurrentStates& states) {
  if (auto* const own = dynamic_cast<CudaContext*>(&context); own != nullptr) own->bring_states(states);
}
void restore_states(GpuContext& context, const RecurrentStates& states) {
  if (auto* const own = dynamic_cast<CudaContext*>(&context); own != nullptr) own->restore_states(states);
}

void download_by_layer(const GpuContext& context, KvStore& store,
                       const std::function<void(int layer)>& done) {
  dynamic_cast<const CudaContext&>(context).copy_rows_to(store, done);
}

bool writes_to_host(const GpuContext& context, const Step& step) {
  const auto* const own = dynamic_cast<const CudaContext*>(&context);
  return own != nullptr ? own->writes_to_host(step) : has_listeners(step);
}

std::int64_t CudaContext::most_together(std::span<Selector* const> selectors) const {
  const GpuMethodState* const native = method_of(selectors);
  return native != nullptr ? std::min(options_.chunk, native->selector->most_together()) : options_.chunk;
}

bool CudaContext::chooses(std::span<Selector* const> selectors) const {
  return method_of(selectors) != nullptr;
}

CudaContext::GpuMethodState* CudaContext::method_of(std::span<Selector* const> selectors) const {
  const auto found = selectors.empty() ? methods_state_.end() : methods_state_.find(selectors.data());
  return found == methods_state_.end() || !found->second.selector->chooses() ? nullptr : &found->second;
}

/// How many tokens from the next one on may come at once; of a question, whole stretches that choose
/// together.
std::int64_t CudaContext::most_tokens(const Step& step) const {
  if (step.selectors.empty()) return options_.chunk;
  if (const GpuMethodState* const native = method_of(step.selectors); native != nullptr)
    return std::min<std::int64_t>(native->selector->most_tokens(tokens_, step.phase),
                                  share_.ranges ? kMostSparseTokens : options_.chunk);
  std::int64_t stretch = 1;
  for (const Selector* const selector : step.selectors)
    if (selector != nullptr && step.phase == Phase::question) stretch = selector->joint_query_tokens();
  if (stretch == 1 && active_ != nullptr) return ActiveTier::most_tokens(tokens_);
  if (stretch == 0) return options_.chunk;
  return std::max(stretch, kMostSparseTokens / stretch * stretch);
}

ForwardWork CudaContext::forward_some(const Step& step, const Rope& rope, LogitRows rows,
                                      std::vector<float>& logits) {
  LODE_ASSERT(step.sequences.size() == 1);
  const SequenceTokens& sequence = step.sequences.front();
  const Run run = {.step = step,
                   .rope = rope,
                   .plan = config_.plan,
                   .count = static_cast<int>(sequence.tokens.size()),
                   .native = method_of(step.selectors),
                   .rows = rows,
                   .reach = reach_of(step),
                   .begin = tokens_,
                   .tells_some = has_listeners(step),
                   .tells_all = writes_to_host(step)};
  for (const TokenId id : sequence.tokens) LayerInputs::expect_known(config_, id);
  set_frequencies(rope);
  make_room(run);
  ForwardWork work;
  begin(run);
  if (share_.meet) share_.meet();
  try {
    run_step(run, work);
  } catch (...) {
    stop_exchanges();
    throw;
  }
  take_logits(run, logits);
  count_work(run, work);
  tokens_ += run.count;
  if (!states_.empty()) states_.commit(state_rows_, tokens_);
  if (run.host_takes_part() && share_.leads) {
    bring_states(sequence.kv->recurrent());
    sequence.kv->commit(run.count);
  }
  if (run.reach == Reach::split) tier_->held_more(run.count);
  if (tier_ != nullptr) tier_work_.bytes_to_gpu += tier_->take_moved();
  if (active_ != nullptr) {
    const std::int64_t moved = active_->take_moved();
    tier_work_.bytes_to_gpu += moved;
    tier_work_.active_bytes += moved;
  }
  return work;
}

CudaContext::Reach CudaContext::reach_of(const Step& step) const {
  if (tier_ == nullptr) return Reach::all;
  const bool many = std::ssize(step.sequences.front().tokens) > kDecodeTokens;
  return step.selectors.empty() && many ? Reach::staged : Reach::split;
}

void CudaContext::set_frequencies(const Rope& rope) {
  rope_scale_ = rope.attention_scaling();
  if (std::ranges::equal(rope.frequencies(), frequencies_set_)) return;
  frequencies_set_.assign(rope.frequencies().begin(), rope.frequencies().end());
  const std::vector<float> both = turns_.frequencies(rope);
  cuda::copy(frequencies_.as<void>(), both.data(), frequencies_.bytes(), stream_.get());
  stream_.synchronize();
  dense_graph_ = {};  // captured with the old scale
  for (auto& [key, native] : methods_state_) native.graph = {};
}

/// Whether all layers with far keys turn their keys in one way, and all pairs of a head at one scale, as the
/// GPU's selectors take for granted.
bool CudaContext::turns_alike() const {
  const ModelConfig& c = config_;
  for (int layer = 0; layer < c.layers; ++layer) {
    const LayerPlan of = c.plan.layer(layer);
    if (of.window == 0 && of.turn != Turn::usual) return false;
  }
  return c.plan.rotary_dim == 0 || c.plan.rotary_dim == c.head_dim ||
         Rope(c, options_.max_tokens).attention_scaling() == 1.0f;
}

void CudaContext::index(std::span<Selector* const> selectors, const Rope& rope) {
  const auto native = methods_state_.find(selectors.data());
  if (native == methods_state_.end()) return;
  set_frequencies(rope);
  prepare(native->second);
  stream_.synchronize();
}

GpuKeys CudaContext::stored_keys() const {
  return {.base = range_.base(),
          .layout = range_.layout(),
          .tokens = rows_here(),
          .frequencies = frequencies_.as<float>(),
          .rope_scale = rope_scale_};
}

void CudaContext::prepare(GpuMethodState& native) {
  if (!native.selector->prepare(stored_keys(), stream_.get())) return;
  native.graph = {};
  native.number = next_number();
}

/// What the host knows of the step, to pinned memory; the index of the method that chooses.
void CudaContext::begin(const Run& run) {
  const std::span<const TokenId> tokens = run.step.sequences.front().tokens;
  std::copy(tokens.begin(), tokens.end(), staged_ids_.as<TokenId>());
  for (int i = 0; i < run.count; ++i)
    staged_places_.as<cuda::QueryToken>()[i] = {0, static_cast<std::int32_t>(tokens_ + i)};
  stage_given(run.step.given);
  stage_range(run);
  if (!states_.empty())
    *staged_state_rows_.as<cuda::DeltaRows>() = state_rows_ =
        states_.next(forward_begin_, tokens_, 0, run.count);
  if (run.native == nullptr) return;
  prepare(*run.native);
  const cuda::PinnedBuffer& places = share_.ranges ? staged_near_places_ : staged_places_;
  run.native->selector->begin(
      {.queries = {places.as<cuda::QueryToken>(), static_cast<std::size_t>(run.count)},
       .phase = run.step.phase,
       .far_limit = run.step.sequences.front().far_limit,
       .far = far_of_step_});
}

void CudaContext::stage_given(const QueryOverride& given) {
  if (given.q.empty()) return;
  const auto bytes = static_cast<std::int64_t>(given.q.size_bytes());
  if (given_.bytes() < 2 * bytes) {
    given_ = cuda::Buffer(2 * bytes, "given queries");
    staged_given_ = cuda::PinnedBuffer(2 * bytes);
  }
  std::ranges::copy(given.q_unrotated, staged_given_.as<float>());
  std::ranges::copy(given.q, staged_given_.as<float>() + given.q.size());
}

/// Puts what was given in the place of a layer's queries.
void CudaContext::enqueue_given(int layer, const Run& run) {
  if (run.step.given.q.empty()) return;
  LODE_ASSERT(run.count == 1);
  const std::int64_t one = std::int64_t{config_.query_heads} * config_.head_dim;
  const float* const unrotated = given_.as<float>() + layer * one;
  const std::int64_t bytes = one * std::int64_t{sizeof(float)};
  cuda::copy(q_unrotated_.as<void>(), unrotated, bytes, stream_.get());
  cuda::copy(q_.as<void>(), unrotated + std::ssize(run.step.given.q), bytes, stream_.get());
}

void CudaContext::enqueue_inputs(const Run& run) {
  const cuda::StreamHandle stream = stream_.get();
  cuda::copy(ids_.as<void>(), staged_ids_.as<void>(), run.count * std::int64_t{sizeof(TokenId)}, stream);
  cuda::copy(places_.as<void>(), staged_places_.as<void>(),
             run.count * std::int64_t{sizeof(cuda::QueryToken)}, stream);
  if (share_.ranges) {
    cuda::copy(near_places_.as<void>(), staged_near_places_.as<void>(),
               run.count * std::int64_t{sizeof(cuda::QueryToken)}, stream);
    cuda::copy(write_bases_.as<void>(), staged_write_bases_.as<void>(), write_bases_.bytes(), stream);
  }
  if (!states_.empty())
    cuda::copy(state_rows_there_.as<void>(), staged_state_rows_.as<void>(), state_rows_there_.bytes(),
               stream);
  if (!run.step.given.q.empty())
    cuda::copy(given_.as<void>(), staged_given_.as<void>(), given_.bytes(), stream);
  if (run.native != nullptr) run.native->selector->upload(stream);
  cuda::embed(ids_.as<TokenId>(), run.count, model_->embedding, x_.as<float>(), stream,
              static_cast<float>(config_.plan.embedding_multiplier));
  inputs_.make(*model_, ids_.as<TokenId>(), run.count, x_.as<float>(), product_of_stream(run.count));
}

/// Of a step's rows as they are, without a norm.
LayerInputs::Product CudaContext::product_of_stream(std::int64_t count) {
  return [this, count](const float* x, const cuda::DeviceWeight& w, float* y) {
    linear_.multiply_stream(x, count, w, y);
  };
}

void CudaContext::run_step(const Run& run, ForwardWork& work) {
  const auto enqueue = [&] {
    enqueue_inputs(run);
    for (int layer = 0; layer < config_.layers; ++layer) {
      if (run.count > 1 && share_.alone()) check_cancel();  // exchanges wait for every GPU
      enqueue_layer(layer, run, work);
    }
    if (run.native == nullptr) return;
    run.native->selector->copy_counts(run.native->counts.as<std::int32_t>(), config_.layers, stream_.get());
  };
  if (!run.is_graph()) return enqueue();
  cuda::Graph& graph = run.native != nullptr ? run.native->graph : dense_graph_;
  if (!graph) {
    graph = captured([&] {
      enqueue();
      enqueue_head(0, 1);
    });
  }
  graph.launch(stream_.get());
  if (share_.meet) share_.meet();  // as behind an exchange
}

cuda::Graph CudaContext::captured(const std::function<void()>& enqueue) {
  cuda::Graph::begin(stream_.get());
  recording_ = true;
  try {
    enqueue();
  } catch (...) {
    recording_ = false;
    cuda::Graph::abandon(stream_.get());
    throw;
  }
  recording_ = false;
  return cuda::Graph::end(stream_.get());
}

double CudaContext::sum_microseconds() {
  constexpr int kWarmUp = 3, kMeasured = 20;
  if (share_.alone()) return 0;
  if (talk_ != nullptr) talk_->begin();
  const cuda::Graph graph = captured([&] {
    for (int layer = 0; layer < config_.layers; ++layer) {
      if (talk_ != nullptr) talk_->merge(config_.query_heads, config_.head_dim, attention_.as<float>());
      for (const int slot : {0, 1})
        if (share_.heads) sum_parts(slot, config_.hidden, x_.as<float>(), true);
    }
  });
  const auto run = [&](int times) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) {
      share_.meet();
      graph.launch(stream_.get());
      stream_.synchronize();  // a graph's first exchange may have the slot of its last one
    }
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  };
  run(kWarmUp);
  const double all = run(kMeasured);
  expect_whole();
  return all / kMeasured;
}

cuda::Queries CudaContext::queries(int layer, const Run& run) const {
  const bool staged = run.reach == Reach::staged;
  const cuda::KvRange& range = staged ? tier_->stage() : range_;
  return {.tokens = (share_.ranges ? near_places_ : places_).as<cuda::QueryToken>(),
          .bases = staged ? tier_->stage_bases() : bases_.as<const char*>(),
          .layer_offset = staged ? 0 : layer * range.layout().layer_stride,
          .layout = staged ? range.layout() : range.layout(layer),
          .count = run.count,
          .query_heads = config_.query_heads,
          .scale = score_scale(config_),
          .q = q_.as<float>(),
          .o = attention_.as<float>(),
          .lse = lse_.as<float>()};
}

// One layer in the order of the diagram in src/README.md.
void CudaContext::enqueue_layer(int layer, const Run& run, ForwardWork& work) {
  const CudaModel::Layer& w = model_->layers[static_cast<std::size_t>(layer)];
  if (recurrent_.recurrent(layer)) {
    enqueue_recurrence(layer, w, run.count);
    return enqueue_mlp(layer, w, run.count);
  }
  const bool host = run.host_takes_part(), sparse = !run.dense();
  const LayerTurns::Turn turn = turns_.of(layer, run.rope);
  if (run.reach == Reach::staged)
    tier_->bring(*run.step.sequences.front().kv, layer, run.count, stream_.get());
  cuda::Linear::QkvArguments qkv = qkv_of(w, config_);
  qkv.x = x_.as<float>();
  qkv.frequencies = frequencies_.as<float>() + turn.first;
  qkv.turning = static_cast<int>(turn.rope.turning_pairs());
  qkv.rope_scale = turn.rope.attention_scaling();
  qkv.q_out = q_.as<float>();
  qkv.q_unrotated = sparse || host || run.tells_some ? q_unrotated_.as<float>() : nullptr;
  if (host) {
    qkv.k_unrotated = k_unrotated_.as<float>();
    qkv.k_out = k_.as<float>();
    qkv.v_out = v_.as<float>();
  }
  cuda::Queries written = queries(layer, run);
  if (share_.ranges)
    written.tokens = places_.as<cuda::QueryToken>(), written.bases = write_bases_.as<const char*>();
  project(w, qkv, written);
  enqueue_given(layer, run);
  if (host)
    tell_listeners(layer, run);
  else if (run.tells_some)
    tell_queries(layer, run);
  attend(layer, run, work);
  if (run.audits(layer)) audit(layer, run);
  if (run.is_watched() && run.window(layer) == 0) report_masses(layer, run);
  enqueue_output(w, run.count);
  enqueue_mlp(layer, w, run.count);
}

/// Queries, and keys and values to their rows.
void CudaContext::project(const CudaModel::Layer& w, const cuda::Linear::QkvArguments& qkv,
                          const cuda::Queries& where) {
  if (!latent_) return linear_.qkv(qkv, where);
  latent_.project(
      w, qkv, where, where.count <= kDecodeTokens,
      [&](const float* x, const cuda::DeviceWeight& norm, const cuda::DeviceWeight& weight, float* y) {
        linear_.head(x, where.count, norm, static_cast<float>(config_.norm_eps), weight, y);
      });
}

DeltaLayers::Product CudaContext::product_of(const CudaModel::Layer& w, std::int64_t count) {
  return [this, &w, count](const cuda::DeviceWeight& weight, float* y) {
    linear_.head(x_.as<float>(), count, w.attention_norm, static_cast<float>(config_.norm_eps), weight, y);
  };
}

void CudaContext::enqueue_recurrence(int layer, const CudaModel::Layer& w, std::int64_t count) {
  const float* const o = recurrent_.run(layer, w, count, {state_rows_there_.as<cuda::DeltaRows>(), 1},
                                        /*single=*/count == 1, product_of(w, count));
  linear_.project_out(o, count, w.delta.out, {}, x_.as<float>(), attention_addition(w, config_));
}

/// Of several GPUs each computes a part of the sum that comes to the stream, behind attention and behind the
/// feed-forward.
void CudaContext::enqueue_output(const CudaModel::Layer& w, std::int64_t count) {
  const cuda::Addition addition = attention_addition(w, config_);
  recurrent_.gate(w, count, attention_.as<float>(), product_of(w, count));
  const float* const values = latent_
                                  ? latent_.unfold(w, attention_.as<float>(), count, count <= kDecodeTokens)
                                  : attention_.as<float>();
  if (!share_.heads) return linear_.project_out(values, count, w.o, w.o_bias, x_.as<float>(), addition);
  linear_.multiply(attention_.as<float>(), count, w.o, w.o_bias, own_part(0), false);
  add_sum(0, count, addition);
}

/// The feed-forward, and what the layer makes of the numbers that it is given beside the stream.
void CudaContext::enqueue_mlp(int layer, const CudaModel::Layer& w, std::int64_t count) {
  enqueue_feed_forward(w, count);
  if (inputs_.none()) return;
  const float* const weighed = inputs_.weigh(layer, w, count, x_.as<float>(), product_of_stream(count));
  linear_.project_out(weighed, count, w.inputs.out, {}, x_.as<float>(), input_addition(w, config_));
}

void CudaContext::enqueue_feed_forward(const CudaModel::Layer& w, std::int64_t count) {
  if (w.experts()) return experts_.add(experts_of(w, config_), count, x_.as<float>());
  cuda::Linear::MlpArguments mlp = mlp_of(w, config_);
  if (share_.heads) mlp.to = own_part(1);
  linear_.mlp(mlp, count, x_.as<float>());
  if (share_.heads) add_sum(1, count, mlp.addition);
}

void CudaContext::add_sum(int slot, std::int64_t count, const cuda::Addition& addition) {
  const std::int64_t numbers = count * config_.hidden;
  if (addition.plain()) return sum_parts(slot, numbers, x_.as<float>(), true);
  sum_parts(slot, numbers, summed_.as<float>(), false);
  linear_.add(summed_.as<float>(), count, config_.hidden, addition, x_.as<float>());
}

/// All launch a sum before any goes on. A thread that uses a kernel for the first time has it loaded, which waits for its
/// GPU and holds up the other threads' launches: a GPU that waits for theirs in a sum would wait for ever.
void CudaContext::sum_parts(int slot, std::int64_t numbers, float* to, bool add) {
  meet_others();
  share_.heads.exchange->sum(share_.heads.rank, slot, numbers, to, add, stream_.get());
  meet_others();
}

/// Where what this GPU adds to a sum is to be written.
float* CudaContext::own_part(int slot) const {
  return share_.heads.exchange->part(share_.heads.rank, slot);
}

/// Logits of some rows of the step, on their way to the host; of several GPUs, those of its tokens.
void CudaContext::enqueue_head(std::int64_t row, std::int64_t rows) {
  const std::int64_t numbers = rows * model_->output.rows;
  linear_.head(x_.as<float>() + row * config_.hidden, rows, model_->final_norm,
               static_cast<float>(config_.norm_eps), model_->output, logits_.as<float>());
  cuda::scale_and_cap(logits_.as<float>(), numbers, static_cast<float>(1 / config_.plan.logit_divisor),
                      static_cast<float>(config_.plan.logit_cap), stream_.get());
  cuda::copy(staged_logits_.as<void>(), logits_.as<void>(), numbers * std::int64_t{sizeof(float)},
             stream_.get());
}

/// Ends the step: waits for it, and for the logits of the wanted rows.
void CudaContext::take_logits(const Run& run, std::vector<float>& logits) {
  logits.clear();
  const std::int64_t first = run.rows == LogitRows::last_of_each ? run.count - 1 : 0;
  const std::int64_t end = run.rows == LogitRows::none ? first : run.count;
  for (std::int64_t at = first; at < end; at += kLogitRows) {
    const std::int64_t some = std::min(kLogitRows, end - at);
    if (!run.is_graph()) enqueue_head(at, some);
    stream_.synchronize();
    logits.insert(logits.end(), staged_logits_.as<float>(),
                  staged_logits_.as<float>() + some * model_->output.rows);
  }
  stream_.synchronize();
  expect_whole();
  if (!all_finite(logits))
    throw RunError(
        "the model gave a logit that is not a finite number: weights or cached keys are damaged or overflow");
}

/// Adds what the layers read whose keys the host did not choose. The step has ended.
void CudaContext::count_work(const Run& run, ForwardWork& work) {
  const LocalWindow dense = run.step.selectors.empty() ? LocalWindow{} : dense_here(run.step.dense);
  const Position limit = run.step.sequences.front().far_limit;
  const std::vector<int> heads = all_kv_heads(config_.kv_heads);
  for (int layer = 0; layer < config_.layers; ++layer) {
    if (recurrent_.recurrent(layer)) continue;
    const std::int64_t token_bytes = 2 * range_.layout(layer).row_bytes();
    const bool sparse = run.sparse(layer);
    if (sparse && run.native == nullptr) continue;
    if (const std::int64_t window = run.window(layer); window > 0) {
      const int kv_heads = config_.kv_heads_of(layer);
      for (std::int64_t t = 0; t < run.count * kv_heads; ++t)
        work.attend += work_of(std::min(window, tokens_ + t / kv_heads + 1), 0, 0, token_bytes);
      continue;
    }
    const GpuSelector* const selector = sparse ? run.native->selector.get() : nullptr;
    if (sparse) work.sparse_tokens += run.count;
    for (int t = 0; t < run.count; ++t) {
      // Where the window is the context's end, keys between it and the kernel's own are listed besides.
      const auto end_of_far = [&](std::int64_t behind) {
        return std::min<std::int64_t>(behind, std::max<std::int64_t>(dense.sink, limit));
      };
      const auto behind = [&](int token) { return std::max(dense.sink, visible(token) - dense.window); };
      const std::int64_t all = visible(t), far = end_of_far(behind(t)) - dense.sink;
      std::vector<std::int64_t> chosen(static_cast<std::size_t>(config_.kv_heads), far);
      if (sparse) {
        const CountedToken of = {.counts = run.native->counts.as<std::int32_t>(),
                                 .layer = layer,
                                 .kv_heads = config_.kv_heads,
                                 .token = selector->counted_token(t),
                                 .position = all - 1};
        const std::int64_t others = behind(of.token) - end_of_far(behind(of.token));
        for (const int head : heads)
          chosen[static_cast<std::size_t>(head)] =
              selector->listed(of, head) - others * selector->lists_per_head();
        work.select.bytes +=
            selector->select_bytes(of, heads, std::accumulate(chosen.begin(), chosen.end(), std::int64_t{0}));
      }
      for (const std::int64_t some : chosen)
        work.attend += work_of(all, far, std::min(some, far), token_bytes);
    }
  }
}

}  // namespace lode
