// SPDX-License-Identifier: Apache-2.0
#include "engine/context.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>

#include "base/cancel.h"
#include "engine/context_file.h"
#include "engine/row_order.h"
#include "gpu/index/arriving_rows.h"
#include "gpu/layers/states_of.h"
#include "lodestone/error.h"
#include "model/kv_shape.h"
#include "select/artefacts.h"
#include "select/device_keys.h"
#include "select/made_for_length.h"
#include "select/of_layers.h"
#include "select/shared/branches.h"
#include "select/shared/orders_rows.h"
#include "select/shared/shares_index.h"

namespace lode {

namespace {

constexpr MethodId kNotAttached = -2;
/// Tokens of a text between states of recurrent layers that are kept: a multiple of every usual chunk. Beyond as many as
/// are kept it grows with the text, so that few states are brought from a GPU in vain.
std::int64_t kept_every(std::int64_t tokens) {
  constexpr std::int64_t kLeast = 4096;
  const auto times = static_cast<std::uint64_t>(
      std::max<std::int64_t>(tokens / (kLeast * std::int64_t{RecurrentStates::kMost}), 1));
  return kLeast * static_cast<std::int64_t>(std::bit_floor(times));
}

ModelConfig scaled_config(const Model& model, const ContextOptions& options) {
  ModelConfig config = model.config();
  if (!options.rope_factor || *options.rope_factor == 1.0) return config;
  if (!(*options.rope_factor > 1 && *options.rope_factor <= kMostRopeFactor))  // NaN, too
    throw InputError(fmt::format("--rope-factor: expected a number from 1 to {:g}, found {:g}",
                                 kMostRopeFactor, *options.rope_factor));
  // Frequencies that a model was trained with are not yarn's of its full context.
  if (config.rope_scaling.kind != RopeScaling::Kind::none)
    throw InputError(fmt::format(
        "--rope-factor: expected a model without RoPE scaling of its own, found '{}' with a factor "
        "of {:g}; a larger factor there and a longer max_position_embeddings in config.json "
        "stretch it",
        name_of(config.rope_scaling.kind), config.rope_scaling.factor));
  config.rope_scaling = {.kind = RopeScaling::Kind::yarn,
                         .factor = *options.rope_factor,
                         .original_max_positions = config.max_positions};
  config.max_positions =
      static_cast<std::int64_t>(static_cast<double>(config.max_positions) * *options.rope_factor);
  return config;
}

ContextOptions checked(const ModelConfig& config, ContextOptions options) {
  options.chunk = prefill_chunk(options);
  if (options.max_tokens == 0) options.max_tokens = config.max_positions;
  if (options.max_tokens > config.max_positions) {
    throw InputError(
        fmt::format("expected at most {} tokens, the model's context, found a need for {}; a RoPE scaling "
                    "(--rope-factor {}) would stretch it",
                    config.max_positions, options.max_tokens,
                    (options.max_tokens + config.max_positions - 1) / config.max_positions));
  }
  LODE_ASSERT(options.max_tokens > 0 && options.chunk > 0);
  return options;
}

}  // namespace

GpuGroup gpu_group(const ContextOptions& options) {
  return {.devices = options.gpus, .ranges = options.context_parallel, .sum = options.gpu_sum};
}

WorkReport report_of(const ForwardWork& work, std::int64_t tokens) {
  return {.kv_bytes = work.attend.kv_bytes,
          .selector_bytes = work.select.bytes,
          .full_bytes = work.attend.full_bytes,
          .far_keys = work.attend.far_keys,
          .far_total = work.attend.far_total,
          .tokens = tokens,
          .sparse_tokens = work.sparse_tokens,
          .tiers = {},
          .dense_reason = {},
          .notice = {}};
}

std::string notice_of(const AttachedMethod& method, std::int64_t tokens) {
  std::string first;
  int more = 0;
  for (const Selector* selector : method.selectors) {
    std::string notice = remark_on_length(selector, tokens);
    if (notice.empty() && selector != nullptr) notice = selector->notice(0);
    if (!first.empty() && !notice.empty()) ++more;
    if (first.empty()) first = notice;
  }
  return more == 0 ? first : fmt::format("{} ({} more layers like it)", first, more);
}

namespace {

/// The spec with what the model has of its own for the method.
Spec completed(Spec spec, const Model& model) {
  if (spec.name == "plan")  // for the methods of its heads
    spec.given.emplace("folder", artefact_folder(model.path()).string());
  return with_artefact(std::move(spec), model.path(), model.fingerprint());
}

}  // namespace

double WorkReport::density() const {
  return full_bytes == 0 ? 1.0
                         : static_cast<double>(kv_bytes + selector_bytes) / static_cast<double>(full_bytes);
}

double WorkReport::selectivity() const {
  return far_total == 0 ? 1.0 : static_cast<double>(far_keys) / static_cast<double>(far_total);
}

TierWork& TierWork::operator+=(const TierWork& other) {
  bytes_to_host += other.bytes_to_host;
  bytes_to_gpu += other.bytes_to_gpu;
  host_keys += other.host_keys;
  gpu_keys += other.gpu_keys;
  active_keys += other.active_keys;
  active_hits += other.active_hits;
  active_bytes += other.active_bytes;
  wait_seconds += other.wait_seconds;
  search_seconds += other.search_seconds;
  attend_seconds += other.attend_seconds;
  return *this;
}

KvTier parse_kv_tier(std::string_view text) {
  if (text == "auto") return KvTier::automatic;
  if (text == "gpu") return KvTier::gpu;
  if (text == "host") return KvTier::host;
  throw InputError(fmt::format("--kv-tier: expected auto, gpu or host, found '{}'", text));
}

WorkReport& WorkReport::operator+=(const WorkReport& other) {
  kv_bytes += other.kv_bytes;
  selector_bytes += other.selector_bytes;
  full_bytes += other.full_bytes;
  far_keys += other.far_keys;
  far_total += other.far_total;
  tokens += other.tokens;
  sparse_tokens += other.sparse_tokens;
  tiers += other.tiers;
  audited += other.audited;
  audit_error_sum += other.audit_error_sum;
  audit_error_max = std::max(audit_error_max, other.audit_error_max);
  if (dense_reason.empty()) dense_reason = other.dense_reason;
  if (far_total > 0) dense_reason.clear();
  if (notice.empty()) notice = other.notice;
  return *this;
}

Context::Impl::Impl(std::shared_ptr<const Model> model_, const ContextOptions& options_)
    : model(std::move(model_)),
      config(scaled_config(*model, options_)),
      rope_tokens(checked(config, options_).max_tokens),
      rope(config, rope_tokens),
      kv(kv_shape(config, options_.kv_type, rope_tokens)),
      llama(model->config(), model->impl().weights, model->pool()),
      listeners(static_cast<std::size_t>(config.layers)),
      later_listeners(listeners),
      audit(options_.audit, options_.seed, config.layers) {
  options = checked(config, options_);
  if (options.device == Device::cuda) {
    gpu = make_gpu_context(config, model->impl().gpu_model(options.gpu_memory, gpu_group(options)),
                           {.pool = &model->pool(),
                            .kv_type = options.kv_type,
                            .max_tokens = options.max_tokens,
                            .chunk = std::min(options.chunk, options.max_tokens),
                            .memory_limit = options.gpu_memory,
                            .tier = options.kv_tier,
                            .active_memory = options.active_memory,
                            .seed = options.seed});
  }
}

KvStore& Context::Impl::host_kv() {
  if (gpu != nullptr) gpu->download(kv);
  return kv;
}

MethodId Context::Impl::find(const Spec& spec) const {
  for (std::size_t i = 0; i < methods.size(); ++i) {
    if (same_method(methods[i].spec, spec)) return static_cast<MethodId>(i);
  }
  return kNotAttached;
}

void Context::Impl::require_room(std::int64_t more) const {
  if (tokens() + more <= options.max_tokens) return;
  throw InputError(fmt::format("expected at most {} tokens in the context, found {} there and {} to add",
                               options.max_tokens, tokens(), more));
}

/// On the GPU, unless there is none, somebody wants to look inside, or more tokens of a question choose
/// together than a step of it has room for.
ForwardWork Context::Impl::forward(const Step& step, const AttachedMethod* method, LogitRows rows) {
  const bool sparse = !step.selectors.empty();
  if (gpu == nullptr) return llama.forward(step, rope, rows, logits);
  const MethodId own = sparse ? static_cast<MethodId>(method - methods.data()) : kDense;
  const auto note = [&](const std::string& what) {
    if (std::ranges::find(on_host, what) == on_host.end()) on_host.push_back(what);
  };
  if (const std::string reason = why_on_host(step, method); !reason.empty()) {
    note(reason);
    prepare_to_choose(own);
    return llama.forward(step, rope, rows, logits);
  }
  if (sparse && !gpu->chooses(step.selectors)) {
    if (!gpu->keys_on_host()) note(choice_on_host(method->spec));
    // Before build_indexes there is no index, on any device.
    prepare_to_choose(method->built ? own : kDense);
  } else if (writes_to_host(*gpu, step)) {
    host_kv();
  }
  gpu->upload(kv);
  return gpu->forward(step, rope, rows, logits);
}

void Context::Impl::prepare_to_choose(MethodId method) {
  host_kv();
  if (method == kDense) return;
  AttachedMethod& own = methods[static_cast<std::size_t>(method)];
  if (!own.built_on_host && own.chosen_by != ChosenBy::host) build_on_host(own, {});
}

/// Whether the masses that are wanted, of a dense step, are all that is wanted, and the GPU finds them.
bool Context::Impl::gpu_finds_masses(const Step& step) const {
  const ForwardHooks& wanted = *step.hooks;
  return gpu->finds_masses() && step.selectors.empty() && wanted.mass && wanted.least_mass > 0 &&
         !wanted.attended && !wanted.layer_done;
}

/// Why a step of a context on the GPU runs on the host, for people; empty: it does not.
std::string Context::Impl::why_on_host(const Step& step, const AttachedMethod* method) const {
  if (step.hooks != nullptr && !step.hooks->compare && !gpu_finds_masses(step))
    return step.hooks->mass ? "tokens whose sources are looked for" : "tokens that are looked into";
  if (step.selectors.empty() || step.phase != Phase::question) return {};
  const std::int64_t tokens = std::ssize(step.sequences.front().tokens),
                     stretch = joint_query_tokens(static_cast<MethodId>(method - methods.data())),
                     together = stretch == 0 ? tokens : std::min(stretch, tokens);
  if (stretch == 1 || together <= gpu->most_together(step.selectors)) return {};
  return fmt::format("questions of which more than {} tokens choose together",
                     gpu->most_together(step.selectors));
}

/// What of `on_host` is new behind the first `known`, as a remark.
std::string Context::Impl::remark_on_host(std::size_t known) const {
  return lode::remark_on_host(std::span(on_host).subspan(std::min(known, on_host.size())));
}

std::string choice_on_host(const Spec& spec) {
  return "the choice of keys by " + spec.str();
}

std::string remark_on_host(std::span<const std::string> what) {
  return what.empty() ? "" : fmt::format("on the host, not on the GPU: {}", fmt::join(what, "; "));
}

std::int64_t Context::Impl::joint_query_tokens(MethodId method) const {
  if (method == kDense) return 1;
  return lode::joint_query_tokens(methods.at(static_cast<std::size_t>(method)).selectors);
}

Position Context::Impl::far_limit_of(const AttachedMethod* method) const {
  if (method == nullptr || !method->spec.dense.from_context) return QueryBlock::kNoLimit;
  return static_cast<Position>(std::max<std::int64_t>(0, indexed - method->spec.dense.window));
}

/// `later_listeners`, and the selectors of a method that chooses by a prompt: a GPU that attends to the keys which they keep does
/// not choose them.
std::vector<std::vector<Selector*>> Context::Impl::listeners_with(MethodId method) const {
  std::vector<std::vector<Selector*>> all = later_listeners;
  for (std::size_t layer = 0; layer < all.size(); ++layer) {
    Selector* const selector = methods.at(static_cast<std::size_t>(method)).selectors[layer];
    if (prompt_chooser(selector) != nullptr && std::ranges::find(all[layer], selector) == all[layer].end())
      all[layer].push_back(selector);
  }
  return all;
}

bool chooses_by_prompt(const AttachedMethod& method) {
  return std::ranges::any_of(method.selectors,
                             [](Selector* selector) { return prompt_chooser(selector) != nullptr; });
}

ForwardWork Context::Impl::step(std::span<const TokenId> tokens, const StepOptions& wanted) {
  const AttachedMethod* const attached =
      wanted.method == kDense ? nullptr : &methods.at(static_cast<std::size_t>(wanted.method));
  const SequenceTokens part = {tokens, &kv, 0, far_limit_of(attached)};
  const auto told =
      wanted.told == kDense ? std::vector<std::vector<Selector*>>() : listeners_with(wanted.told);
  Step step = {.sequences = {&part, 1},
               .phase = wanted.phase,
               .selectors = {},
               .dense = {},
               .listeners = wanted.phase == Phase::context ? listeners
                            : told.empty()                 ? later_listeners
                                                           : told,
               .hooks = wanted.hooks,
               .given = given};
  if (attached != nullptr && !attached->dense()) {
    step.selectors = attached->selectors;
    if (wanted.audit != nullptr) step.selectors = wanted.audit->without_fallen(step.selectors);
    step.dense = attached->spec.dense;
  }
  ForwardWork work;
  try {
    work = forward(step, attached, wanted.rows);
  } catch (...) {
    roll_back(this->tokens());  // selectors may have seen tokens that do not count
    throw;
  }
  ids.insert(ids.end(), tokens.begin(), tokens.end());
  if (this->tokens() % kept_every(this->tokens()) == 0) keep_states(gpu.get(), kv.recurrent());
  return work;
}

WorkReport Context::Impl::run(std::span<const TokenId> tokens, MethodId method, Phase phase, LogitRows rows,
                              const std::function<void(std::int64_t)>& progress) {
  require_room(static_cast<std::int64_t>(tokens.size()));
  WorkReport report;
  std::vector<float> all;  // [tokens, V] when every row is wanted
  const AttachedMethod* attached = method == kDense ? nullptr : &methods.at(static_cast<std::size_t>(method));
  const bool sparse = attached != nullptr && !attached->dense();
  WorkReport seen_by_audit;
  const ForwardHooks audited = audit.hooks(hooks, seen_by_audit);
  const std::size_t on_host_before = on_host.size();
  // Question tokens that choose their keys together are never cut apart, but for questions beyond kMostTogether.
  const auto stretch = static_cast<std::size_t>(phase == Phase::question ? joint_query_tokens(method) : 1);
  const auto steps = static_cast<std::size_t>(phase == Phase::context ? options.chunk : question_chunk());
  const std::size_t chunk =
      stretch == 0 ? std::size_t{kMostTogether} : std::max(stretch, steps / stretch * stretch);
  StepOptions wanted = {.method = method,
                        .phase = phase,
                        .rows = rows,
                        .hooks = sparse && audit.active() ? &audited : hooks,
                        .audit = &audit};
  if (tokens.size() > 1) keep_states(gpu.get(), kv.recurrent());
  for (std::size_t at = 0; at < tokens.size(); at += chunk) {
    const auto part = tokens.subspan(at, std::min(chunk, tokens.size() - at));
    const bool last = at + chunk >= tokens.size();
    wanted.rows = rows == LogitRows::last_of_each && !last ? LogitRows::none : rows;
    report += report_of(step(part, wanted), std::ssize(part));
    if (gpu != nullptr) report.tiers += gpu->take_tier_work();
    if (rows == LogitRows::all) all.insert(all.end(), logits.begin(), logits.end());
    if (progress) progress(this->tokens());
  }
  if (rows == LogitRows::all) logits = std::move(all);
  report += seen_by_audit;
  if (sparse && report.far_total == 0 && audit.fallen_back().empty()) {
    report.dense_reason = fmt::format("the {} tokens fit into sink + window ({} + {})", this->tokens(),
                                      attached->spec.dense.sink, attached->spec.dense.window);
  }
  if (attached != nullptr && report.dense_reason.empty())
    report.notice =
        sparse && !audit.fallen_back().empty() ? audit.notice() : notice_of(*attached, this->tokens());
  if (const std::string remark = remark_on_host(on_host_before); !remark.empty())
    report.notice += (report.notice.empty() ? "" : "; ") + remark;
  return report;
}

void Context::Impl::build(AttachedMethod& method, const std::function<void()>& layer_done) {
  if (method.chosen_by != ChosenBy::gpu) build_on_host(method, layer_done);
  if (method.chosen_by != ChosenBy::host) {
    gpu->upload(kv);
    gpu->index(method.selectors, rope);
  }
  method.built = true;
}

namespace {

/// A GPU that helps to build an index, which keeps nothing of what it takes for that, however that ends.
struct GivesBack {
  void operator()(DeviceKeys* device) const { device->release(); }
};
using HelpingDevice = std::unique_ptr<DeviceKeys, GivesBack>;

HelpingDevice helping_device(GpuContext* gpu) {
  return HelpingDevice(gpu != nullptr ? device_keys_of(*gpu) : nullptr);
}

}  // namespace

/// A GPU that holds the keys helps (LayerGeometry::device).
void Context::Impl::build_on_host(AttachedMethod& method, const std::function<void()>& layer_done) {
  const HelpingDevice device = helping_device(gpu.get());
  std::optional<ArrivingRows> arriving;
  if (device != nullptr && gpu->tokens() > kv.tokens()) {
    bring_states(*gpu, kv.recurrent());  // rows alone arrive
    arriving.emplace(*gpu, kv);
  } else {
    host_kv();
  }
  if (device != nullptr) gpu->upload(kv);
  for (int layer = 0; layer < config.layers; ++layer) {
    check_cancel();
    if (arriving) arriving->wait_for(layer);
    const auto l = static_cast<std::size_t>(layer);
    if (Selector* const selector = method.selectors[l]; selector != nullptr && !take_index(method, l))
      selector->build(
          0, arriving ? kv.layer(layer, arriving->rows()) : IndexedRows(*this, method, layer).view());
    if (layer_done) layer_done();
  }
  if (arriving) arriving->commit();
  finish(method);
  method.built_on_host = true;
  method.built_over = tokens();
}

Context::Impl::IndexedRows::IndexedRows(const Context::Impl& context, const AttachedMethod& method,
                                        int layer) {
  const KvLayer all = context.kv.layer(layer);
  heads_.assign(all.heads.begin(), all.heads.end());
  tokens_ = method.divided ? std::min(all.tokens, context.share.own.end) : all.tokens;
  for (KvRows& head : heads_) head.rows = tokens_;
}

void Context::Impl::divide(AttachedMethod& method) {
  if (!share.divided() || method.dense()) return;
  const auto sparse = std::ranges::find_if(method.selectors, [](const Selector* s) { return s != nullptr; });
  method.divided = sparse == method.selectors.end() ||
                   std::ranges::all_of(method.selectors,
                                       [&](Selector* s) { return s == nullptr || divide_keys(s, share); });
  if (method.divided) return;
  if (!read_all_rows)
    throw InputError(
        fmt::format("'{}': expected a method whose keys several ranks choose together (full, streaming, "
                    "topk, random, kmeans, "
                    "ivf, saap, hash, hyperplanes), found one that needs all keys in one process: index the "
                    "text on one machine, and "
                    "ask that file over ranks",
                    method.spec.str()));
  read_all_rows();
}

/// Specs that differ in how they search alone are indexed once.
bool Context::Impl::take_index(const AttachedMethod& method, std::size_t layer) {
  auto* const taker = dynamic_cast<SharesIndex*>(method.selectors[layer]);
  if (taker == nullptr) return false;
  return std::any_of(methods.begin(), methods.end(), [&](const AttachedMethod& other) {
    return &other != &method && other.built_on_host && other.built_over == tokens() &&
           other.spec.name == method.spec.name && other.selectors[layer] != nullptr &&
           other.divided == method.divided &&
           taker->take_index(0, *other.selectors[layer],
                             IndexedRows(*this, method, static_cast<int>(layer)).view());
  });
}

void Context::Impl::finish(AttachedMethod& method) {
  if (const MethodInfo& info = find_method(method.spec.name); info.finish) {
    info.finish(method.selectors, 0, [&](int layer) { return kv.layer(layer); });
  }
}

void Context::Impl::roll_back(std::int64_t tokens) {
  const bool there = gpu != nullptr && gpu->tokens() == tokens &&
                     kv.recurrent().tokens() <= tokens;  // the host's states may be earlier ones
  const std::int64_t reached = there ? tokens : kv.reachable(tokens);
  if (reached >= tokens) return cut(tokens);
  const std::vector<TokenId> again(ids.begin() + reached, ids.begin() + tokens);
  cut(reached);
  run(again, kDense, Phase::question, LogitRows::none);
}

void Context::Impl::cut(std::int64_t tokens) {
  const Position ordered = ordered_end(*this);
  for (const AttachedMethod& method : methods) {
    // Some rows that lie in another order are no longer far for every query to come; or what was indexed of
    // the text is cut, and will be indexed anew by the tokens' places.
    const bool cut = tokens < indexed || ordered > always_far_end(method.spec.dense, tokens);
    if (!method.dense() && ordered > 0 && cut) restore_rows(*this);
  }
  kv.roll_back(tokens);
  if (gpu != nullptr) {
    const bool cut = gpu->tokens() > tokens;
    gpu->roll_back(tokens);
    if (cut) restore_states(*gpu, kv.recurrent());
  }
  ids.resize(static_cast<std::size_t>(tokens));
  indexed = std::min(indexed, tokens);
  audit.forget();
  for (AttachedMethod& method : methods) {
    // What was built over more than is left is no index of another text that grows as long (take_index).
    if (method.built_over > tokens) method.built_over = -1;
    // Nor is one of which nothing is left: the text that comes next is indexed as if it were the first.
    if (tokens == 0 && !method.dense()) method.built = method.built_on_host = false;
    for (Selector* selector : method.selectors) {
      if (selector != nullptr) selector->roll_back(0, tokens);
    }
  }
}

Context::Context(std::shared_ptr<const Model> model, const ContextOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), options)) {}
Context::Context(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;

const Model& Context::model() const {
  return *impl_->model;
}
const std::vector<Spec>& Context::methods() const {
  return impl_->specs;
}
const ContextOptions& Context::options() const {
  return impl_->options;
}
std::int64_t Context::tokens() const {
  return impl_->tokens();
}
std::int64_t Context::indexed_tokens() const {
  return impl_->indexed;
}
std::span<const TokenId> Context::token_ids() const {
  return impl_->ids;
}
std::int64_t Context::kv_bytes() const {
  return impl_->tokens() * impl_->kv.shape().token_bytes();
}

std::string Context::placement() const {
  return impl_->gpu == nullptr ? std::string() : impl_->gpu->placement();
}

std::int64_t Context::index_bytes() const {
  std::int64_t bytes = 0;
  for (const AttachedMethod& method : impl_->methods) {
    for (const Selector* selector : method.selectors)
      bytes += selector != nullptr ? selector->index_bytes() : 0;
  }
  return bytes;
}

namespace {

bool listens(const Selector* selector) {
  return selector != nullptr && selector->wants_writes();
}

void expect_no_listeners(const AttachedMethod& method) {
  if (std::ranges::any_of(method.selectors, listens))
    throw InputError(fmt::format("'{}' learns from the prefill itself: name it when the text is indexed",
                                 method.spec.str()));
}

}  // namespace

/// One for each layer that is not dense. Trained methods read their artefact anew for each, which all cores do together,
/// but for the first layer: it checks the file's checksum, which the others then need not. Methods that others
/// have registered are made one by one, and so is what may hold one: a fallback.
void Context::Impl::make_selectors(const MethodInfo& info, const Spec& complete, AttachedMethod& method) {
  std::vector<int> sparse;
  for (int layer = method.spec.dense_layers; layer < config.layers; ++layer)
    if (config.plan.layer(layer).chooses()) sparse.push_back(layer);
  method.owned.resize(static_cast<std::size_t>(config.layers));
  const auto make = [&](int layer) {
    const LayerGeometry geometry = {.layer = layer,
                                    .query_heads = config.query_heads,
                                    .kv_heads = config.kv_heads_of(layer),
                                    .head_dim = config.head_dim_of(layer),
                                    .scale = score_scale(config),
                                    .dense = method.spec.dense,
                                    .rope = &llama.rope_of(layer, rope),
                                    .pool = &model->pool(),
                                    .seed = options.seed};
    method.owned[static_cast<std::size_t>(layer)] = info.make(complete, geometry, model->fingerprint());
  };
  const bool together = info.trained && !complete.text("fallback");
  const std::size_t first = std::min<std::size_t>(together ? 1 : sparse.size(), sparse.size());
  for (std::size_t i = 0; i < first; ++i) make(sparse[i]);
  model->pool().for_each(std::ssize(sparse) - static_cast<std::int64_t>(first), [&](std::int64_t item, int) {
    make(sparse[first + static_cast<std::size_t>(item)]);
  });
  for (const auto& selector : method.owned) method.selectors.push_back(selector.get());
}

MethodId Context::attach(const Spec& spec) {
  Impl& c = *impl_;
  if (const MethodId known = c.find(spec); known != kNotAttached) return known;
  const MethodInfo& info = find_method(spec.name);
  const Spec complete = completed(spec, *c.model);
  if (info.make) restore_rows(c);  // it names rows by their tokens
  AttachedMethod method = {.spec = spec, .owned = {}, .selectors = {}, .built = false};
  if (info.make) c.make_selectors(info, complete, method);
  if (c.gpu != nullptr && !c.share.divided())
    for (Selector* const selector : method.selectors)
      if (auto* const built = dynamic_cast<BuiltByDevice*>(selector); built != nullptr)
        built->build_by(device_keys_of(*c.gpu));
  c.divide(method);
  if (c.tokens() > 0) expect_no_listeners(method);
  method.built = !info.make;
  if (c.gpu != nullptr && info.make) method.chosen_by = c.gpu->attach(spec, method.selectors);
  for (std::size_t layer = 0; layer < method.selectors.size(); ++layer) {
    if (!listens(method.selectors[layer])) continue;
    c.listeners[layer].push_back(method.selectors[layer]);
    if (method.chosen_by == ChosenBy::host) c.later_listeners[layer].push_back(method.selectors[layer]);
  }
  c.methods.push_back(std::move(method));
  c.specs.push_back(spec);
  return static_cast<MethodId>(c.methods.size() - 1);
}

void Context::prefill(std::span<const TokenId> tokens, const std::function<void(std::int64_t)>& progress) {
  impl_->kv.expect(impl_->kv.tokens() + std::ssize(tokens));
  impl_->run(tokens, kDense, Phase::context, LogitRows::none, progress);
}

void Context::build_indexes(const std::function<void(std::int64_t)>& progress) {
  Impl& c = *impl_;
  const bool grown = c.tokens() > c.indexed;
  c.indexed = c.tokens();
  keep_states(c.gpu.get(), c.kv.recurrent());
  std::int64_t done = 0;
  for (AttachedMethod& method : c.methods) {
    if (method.built) {
      if (grown && method.built_on_host) {
        c.host_kv();
        if (c.gpu != nullptr) c.gpu->upload(c.kv);
        const HelpingDevice device = helping_device(c.gpu.get());
        c.finish(method);
      }
      continue;
    }
    c.build(method, [&] {
      if (progress) progress(++done);
    });
  }
}

void expect_index_without_reading(const std::shared_ptr<const Model>& model, const Spec& spec) {
  Context context(model, {.max_tokens = 1});
  context.attach(spec);
  expect_no_listeners(context.impl().methods.back());
}

std::string clusters_left_to_host(const Context& context) {
  const Context::Impl& c = context.impl();
  if (c.gpu == nullptr) return {};
  for (const AttachedMethod& method : c.methods) {
    for (const Selector* const selector : method.selectors) {
      const auto* const built = dynamic_cast<const BuiltByDevice*>(selector);
      if (built == nullptr || !built->left_to_host()) continue;
      return fmt::format("{}: the host's cores sorted keys into clusters, not the GPU: {}", method.spec.str(),
                         device_keys_of(*c.gpu) == nullptr
                             ? "the keys are not on one GPU"
                             : "it has no room for so many, or its heads are wider than 128");
    }
  }
  return {};
}

void Context::roll_back(std::int64_t tokens) {
  LODE_ASSERT(tokens >= 0 && tokens <= impl_->tokens());
  impl_->roll_back(tokens);
}

std::vector<float> Context::forward(std::span<const TokenId> tokens, MethodId method, WorkReport* work) {
  const WorkReport report = impl_->run(tokens, method, Phase::question, LogitRows::all);
  if (work != nullptr) *work = report;
  return impl_->logits;
}

}  // namespace lode
