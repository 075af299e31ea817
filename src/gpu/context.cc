// SPDX-License-Identifier: Apache-2.0
// The forward pass on the GPU, in the order of model/llama.cc.
//
// A step enqueues everything on one stream and waits once, at its end. A decode step in which the host takes
// no part is captured as a graph the first time, and replayed: its inputs are the token's id and position, in
// pinned memory. Where a method's selectors run on the host, each layer hands its queries, keys and values
// over and takes lists of keys back.
#include "gpu/context.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/cancel.h"
#include "kernels/cuda/random.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kDecodeTokens = 8;  // up to so many, dense attention splits the keys; above, the queries
constexpr std::int64_t kLogitRows = 64;

std::int64_t vector_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t d) {
  return tokens * heads * d * std::int64_t{sizeof(float)};
}

void download_floats(const cuda::Buffer& from, std::int64_t count, std::vector<float>& to,
                     cuda::StreamHandle stream) {
  to.resize(static_cast<std::size_t>(count));
  cuda::copy(to.data(), from.as<float>(), count * std::int64_t{sizeof(float)}, stream);
}

}  // namespace

std::unique_ptr<GpuContext> make_gpu_context(const ModelConfig& config, std::shared_ptr<const GpuModel> model,
                                             const GpuContextOptions& options) {
  if (options.kv_type == DType::q8) {
    throw InputError("--kv-type: expected f32, f16 or bf16 with --device cuda, found q8");
  }
  const KvShape shape = {config.layers, config.kv_heads, config.head_dim, options.kv_type,
                         options.max_tokens};
  const std::int64_t needed = model->bytes() + options.max_tokens * shape.token_bytes();
  if (options.memory_limit > 0 && needed > options.memory_limit) {
    throw InputError(
        fmt::format("--gpu-memory: expected room for {} MiB (weights {}, keys and values of {} tokens "
                    "{}), found a limit of {} MiB; --device cpu keeps them in host memory",
                    needed >> 20, model->bytes() >> 20, options.max_tokens, (needed - model->bytes()) >> 20,
                    options.memory_limit >> 20));
  }
  return std::make_unique<CudaContext>(config, std::dynamic_pointer_cast<const CudaModel>(model), options);
}

bool CudaContext::Run::sparse(int layer) const {
  const auto l = static_cast<std::size_t>(layer);
  return native != nullptr ? native->layers[l] : !step.selectors.empty() && step.selectors[l] != nullptr;
}

bool CudaContext::Run::host_takes_part() const {
  const auto any = [](const std::vector<Selector*>& some) { return !some.empty(); };
  return (native == nullptr && !step.selectors.empty()) ||
         std::any_of(step.listeners.begin(), step.listeners.end(), any);
}

CudaContext::CudaContext(const ModelConfig& config, std::shared_ptr<const CudaModel> model,
                         const GpuContextOptions& options)
    : config_(config),
      model_(std::move(model)),
      options_(options),
      range_({config.kv_heads, config.head_dim, options.kv_type, 0}, config.layers, options.max_tokens),
      linear_(stream_.get(), precision()) {
  const std::int64_t n = options.chunk, d = config.head_dim;
  const char* const what = "the activations of a chunk";
  ids_ = cuda::Buffer(n * std::int64_t{sizeof(TokenId)}, what);
  places_ = cuda::Buffer(n * std::int64_t{sizeof(cuda::QueryToken)}, what);
  bases_ = cuda::Buffer(sizeof(const char*), what);
  frequencies_ = cuda::Buffer(d / 2 * std::int64_t{sizeof(float)}, what);
  x_ = cuda::Buffer(n * config.hidden * std::int64_t{sizeof(float)}, what);
  for (cuda::Buffer* b : {&q_, &q_unrotated_, &attention_})
    *b = cuda::Buffer(vector_bytes(n, config.query_heads, d), what);
  for (cuda::Buffer* b : {&k_, &k_unrotated_, &v_})
    *b = cuda::Buffer(vector_bytes(n, config.kv_heads, d), what);
  logits_ = cuda::Buffer(std::min(n, kLogitRows) * config.vocab * std::int64_t{sizeof(float)}, "logits");
  staged_ids_ = cuda::PinnedBuffer(ids_.bytes());
  staged_places_ = cuda::PinnedBuffer(places_.bytes());
  staged_logits_ = cuda::PinnedBuffer(logits_.bytes());
  linear_.reserve(n, config.hidden, config.intermediate, std::int64_t{config.query_heads} * d,
                  std::int64_t{config.kv_heads} * d);
  workspace_ = cuda::Buffer(cuda::decode_workspace_bytes(kMostSparseTokens, config.query_heads,
                                                         config.head_dim, options.max_tokens),
                            "partial results of attention");
  cuda::fill(workspace_.as<void>(), 0, workspace_.bytes(), stream_.get());
  const char* const base = range_.base();
  cuda::copy(bases_.as<void>(), &base, sizeof base, stream_.get());
  stream_.synchronize();
}

CudaContext::~CudaContext() = default;

std::int64_t CudaContext::bytes() const {
  std::int64_t bytes = range_.backed_bytes() + x_.bytes() + 3 * q_.bytes() + 3 * k_.bytes() +
                       logits_.bytes() + workspace_.bytes() + lists_memory_.bytes() +
                       cuda::Linear::scratch_bytes(options_.chunk, config_.hidden, config_.intermediate,
                                                   std::int64_t{config_.query_heads} * config_.head_dim,
                                                   std::int64_t{config_.kv_heads} * config_.head_dim);
  for (const auto& [key, native] : natives_) bytes += native.selector->bytes();
  return bytes;
}

// ---- The two copies of the cache.
// -------------------------------------------------------------------------------

void CudaContext::roll_back(std::int64_t tokens) {
  tokens_ = std::min(tokens_, tokens);
  for (auto& [key, native] : natives_) native.selector->roll_back(0, tokens_);
}

void CudaContext::upload(const KvStore& store) {
  const std::int64_t begin = tokens_, end = store.tokens();
  if (begin >= end) return;
  range_.back(end);
  const std::int64_t skip = begin * range_.layout().row_bytes();
  for (int layer = 0; layer < config_.layers; ++layer) {
    check_cancel();
    for (int head = 0; head < config_.kv_heads; ++head) {
      range_.to_device(layer, head, cuda::KvRange::Part::k, begin, end,
                       store.rows(layer, head, KvStore::Part::k).data() + skip, stream_.get());
      range_.to_device(layer, head, cuda::KvRange::Part::v, begin, end,
                       store.rows(layer, head, KvStore::Part::v).data() + skip, stream_.get());
    }
  }
  stream_.synchronize();
  tokens_ = end;
}

void CudaContext::download(KvStore& store) {
  const std::int64_t begin = store.tokens(), end = tokens_;
  if (begin >= end) return;
  for (int layer = 0; layer < config_.layers; ++layer) {
    check_cancel();
    for (int head = 0; head < config_.kv_heads; ++head) {
      range_.to_host(layer, head, cuda::KvRange::Part::k, begin, end,
                     store.rows_to_write(layer, head, KvStore::Part::k, end - begin), stream_.get());
      range_.to_host(layer, head, cuda::KvRange::Part::v, begin, end,
                     store.rows_to_write(layer, head, KvStore::Part::v, end - begin), stream_.get());
    }
  }
  stream_.synchronize();
  store.commit(end - begin);
}

void CudaContext::fill_random(std::int64_t tokens, std::uint64_t seed) {
  range_.back(tokens);
  constexpr float kWidth = 1.7320508f;  // of a uniform number with variance 1
  for (int layer = 0; layer < config_.layers; ++layer) {
    cuda::fill_uniform(range_.base() + layer * range_.layout().layer_stride, options_.kv_type,
                       range_.layout().layer_bytes(tokens) / bytes_of(options_.kv_type), 0.0f, kWidth,
                       seed + static_cast<std::uint64_t>(layer), stream_.get());
  }
  stream_.synchronize();
  tokens_ = tokens;
}

// ---- Methods.
// -----------------------------------------------------------------------------------------------------

ChosenBy CudaContext::attach(const Spec& spec, std::span<Selector* const> selectors) {
  const GpuGeometry geometry = {.layers = config_.layers,
                                .query_heads = config_.query_heads,
                                .kv_heads = config_.kv_heads,
                                .head_dim = config_.head_dim,
                                .max_tokens = options_.max_tokens,
                                .most_queries = kMostSparseTokens,
                                .key_row_bytes = range_.layout().row_bytes()};
  auto selector = make_gpu_selector(spec, geometry, selectors);
  if (selector == nullptr) return ChosenBy::host;
  const ChosenBy by = selector->needs_host_index() ? ChosenBy::gpu_by_host_index : ChosenBy::gpu;
  cuda::PinnedBuffer counts(config_.layers * selector->counts_per_layer() * 4);
  Native native = {.selector = std::move(selector),
                   .dense = spec.dense,
                   .layers = {},
                   .counts = std::move(counts),
                   .graph = {}};
  for (const Selector* s : selectors) native.layers.push_back(s != nullptr);
  natives_.insert_or_assign(selectors.data(), std::move(native));
  return by;
}

// ---- The step.
// ----------------------------------------------------------------------------------------------------

ForwardWork CudaContext::forward(const Step& step, const Rope& rope, LogitRows rows,
                                 std::vector<float>& logits) {
  const SequenceTokens& all = step.sequences.front();
  const auto most = static_cast<std::size_t>(
      step.selectors.empty() ? options_.chunk : std::min<std::int64_t>(kMostSparseTokens, options_.chunk));
  ForwardWork work;
  std::vector<float> some, together;
  for (std::size_t at = 0; at < all.tokens.size(); at += most) {
    const SequenceTokens part = {all.tokens.subspan(at, std::min(most, all.tokens.size() - at)), all.kv,
                                 all.id, all.far_limit};
    const bool last = at + most >= all.tokens.size();
    Step piece = step;
    piece.sequences = {&part, 1};
    const ForwardWork more =
        forward_some(piece, rope, rows == LogitRows::last_of_each && !last ? LogitRows::none : rows, some);
    work.attend += more.attend;
    work.select.bytes += more.select.bytes;
    work.select.keys_scored += more.select.keys_scored;
    work.sparse_tokens += more.sparse_tokens;
    if (rows == LogitRows::all) together.insert(together.end(), some.begin(), some.end());
  }
  logits = rows == LogitRows::all ? std::move(together) : std::move(some);
  return work;
}

ForwardWork CudaContext::forward_some(const Step& step, const Rope& rope, LogitRows rows,
                                      std::vector<float>& logits) {
  LODE_ASSERT(step.sequences.size() == 1);
  const SequenceTokens& sequence = step.sequences.front();
  const auto native = natives_.find(step.selectors.data());
  const Run run = {.step = step,
                   .rope = rope,
                   .count = static_cast<int>(sequence.tokens.size()),
                   .native = step.selectors.empty() || native == natives_.end() ? nullptr : &native->second,
                   .rows = rows};
  for (const TokenId id : sequence.tokens) {
    if (id < 0 || id >= config_.vocab) {
      throw InputError(fmt::format("expected token ids from 0 to {}, found {}", config_.vocab - 1, id));
    }
  }
  set_frequencies(rope);
  range_.back(tokens_ + run.count);
  ForwardWork work;
  begin(run);
  run_step(run, work);
  take_logits(run, logits);
  count_work(run, work);
  tokens_ += run.count;
  if (run.host_takes_part()) sequence.kv->commit(run.count);
  return work;
}

void CudaContext::set_frequencies(const Rope& rope) {
  rope_scale_ = rope.attention_scaling();
  if (std::ranges::equal(rope.frequencies(), frequencies_set_)) return;
  frequencies_set_.assign(rope.frequencies().begin(), rope.frequencies().end());
  cuda::copy(frequencies_.as<void>(), frequencies_set_.data(), frequencies_.bytes(), stream_.get());
  stream_.synchronize();
  dense_graph_ = {};  // captured with the old scale
  for (auto& [key, native] : natives_) native.graph = {};
}

/// What the host knows of the step, to pinned memory; the index of the method that chooses.
void CudaContext::begin(const Run& run) {
  const std::span<const TokenId> tokens = run.step.sequences.front().tokens;
  std::copy(tokens.begin(), tokens.end(), staged_ids_.as<TokenId>());
  for (int i = 0; i < run.count; ++i)
    staged_places_.as<cuda::QueryToken>()[i] = {0, static_cast<std::int32_t>(tokens_ + i)};
  if (run.native == nullptr) return;
  const GpuKeys keys = {.base = range_.base(),
                        .layout = range_.layout(),
                        .tokens = tokens_,
                        .frequencies = frequencies_.as<float>(),
                        .rope_scale = rope_scale_};
  if (run.native->selector->prepare(keys, stream_.get())) run.native->graph = {};
  run.native->selector->begin({staged_places_.as<cuda::QueryToken>(), static_cast<std::size_t>(run.count)});
}

void CudaContext::enqueue_inputs(const Run& run) {
  const cuda::StreamHandle stream = stream_.get();
  cuda::copy(ids_.as<void>(), staged_ids_.as<void>(), run.count * std::int64_t{sizeof(TokenId)}, stream);
  cuda::copy(places_.as<void>(), staged_places_.as<void>(),
             run.count * std::int64_t{sizeof(cuda::QueryToken)}, stream);
  if (run.native != nullptr) run.native->selector->upload(stream);
  cuda::embed(ids_.as<TokenId>(), run.count, model_->embedding, x_.as<float>(), stream);
}

void CudaContext::run_step(const Run& run, ForwardWork& work) {
  const auto enqueue = [&] {
    enqueue_inputs(run);
    for (int layer = 0; layer < config_.layers; ++layer) {
      if (run.count > 1) check_cancel();
      enqueue_layer(layer, run, work);
    }
    if (run.native == nullptr) return;
    const cuda::PinnedBuffer& counts = run.native->counts;
    cuda::copy(counts.as<void>(), run.native->selector->counts(), counts.bytes(), stream_.get());
  };
  if (!run.is_graph()) return enqueue();
  cuda::Graph& graph = run.native != nullptr ? run.native->graph : dense_graph_;
  if (!graph) {
    cuda::Graph::begin(stream_.get());
    try {
      enqueue();
      enqueue_head(0, 1);
    } catch (...) {
      cuda::Graph::abandon(stream_.get());
      throw;
    }
    graph = cuda::Graph::end(stream_.get());
  }
  graph.launch(stream_.get());
}

cuda::Queries CudaContext::queries(int layer, int count) const {
  return {.tokens = places_.as<cuda::QueryToken>(),
          .bases = bases_.as<const char*>(),
          .layer_offset = layer * range_.layout().layer_stride,
          .layout = range_.layout(),
          .count = count,
          .query_heads = config_.query_heads,
          .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
          .q = q_.as<float>(),
          .o = attention_.as<float>()};
}

// One layer in the order of the diagram in src/README.md.
void CudaContext::enqueue_layer(int layer, const Run& run, ForwardWork& work) {
  const CudaModel::Layer& w = model_->layers[static_cast<std::size_t>(layer)];
  const auto eps = static_cast<float>(config_.norm_eps);
  const bool host = run.host_takes_part(), sparse = !run.dense();
  linear_.qkv({.x = x_.as<float>(),
               .norm = w.attention_norm,
               .q = w.q,
               .k = w.k,
               .v = w.v,
               .q_bias = w.q_bias,
               .k_bias = w.k_bias,
               .v_bias = w.v_bias,
               .eps = eps,
               .frequencies = frequencies_.as<float>(),
               .rope_scale = rope_scale_,
               .q_out = q_.as<float>(),
               .q_unrotated = sparse || host ? q_unrotated_.as<float>() : nullptr,
               .k_unrotated = host ? k_unrotated_.as<float>() : nullptr,
               .k_out = host ? k_.as<float>() : nullptr,
               .v_out = host ? v_.as<float>() : nullptr},
              queries(layer, run.count));
  if (host) tell_listeners(layer, run);
  attend(layer, run, work);
  linear_.project_out(attention_.as<float>(), run.count, w.o, w.o_bias, x_.as<float>());
  linear_.mlp({.norm = w.mlp_norm,
               .gate = w.gate,
               .up = w.up,
               .down = w.down,
               .gate_bias = w.gate_bias,
               .up_bias = w.up_bias,
               .down_bias = w.down_bias,
               .eps = eps},
              run.count, x_.as<float>());
}

LayerGeometry CudaContext::geometry(int layer, const Run& run) const {
  return {.layer = layer,
          .query_heads = config_.query_heads,
          .kv_heads = config_.kv_heads,
          .head_dim = config_.head_dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
          .dense = run.step.dense,
          .rope = &run.rope,
          .pool = options_.pool};
}

/// The host's copy of the layer's vectors goes to the host's store and to the selectors that listen.
void CudaContext::tell_listeners(int layer, const Run& run) {
  const std::int64_t n = run.count, d = config_.head_dim, q = n * config_.query_heads * d,
                     kv = n * config_.kv_heads * d;
  download_floats(q_, q, host_q_, stream_.get());
  download_floats(q_unrotated_, q, host_q_unrotated_, stream_.get());
  download_floats(k_, kv, host_k_, stream_.get());
  download_floats(k_unrotated_, kv, host_k_unrotated_, stream_.get());
  download_floats(v_, kv, host_v_, stream_.get());
  stream_.synchronize();
  const SequenceTokens& sequence = run.step.sequences.front();
  LODE_ASSERT(sequence.kv->tokens() == tokens_);
  sequence.kv->write(layer, n, host_k_, host_v_);
  if (run.step.listeners.empty()) return;
  const KvWrite write = {.sequence = sequence.id,
                         .phase = run.step.phase,
                         .begin = static_cast<Position>(tokens_),
                         .tokens = n,
                         .q_unrotated = host_q_unrotated_,
                         .k_unrotated = host_k_unrotated_,
                         .q = host_q_,
                         .k = host_k_,
                         .v = host_v_};
  for (Selector* listener : run.step.listeners[static_cast<std::size_t>(layer)]) listener->on_write(write);
}

void CudaContext::attend(int layer, const Run& run, ForwardWork& work) {
  const cuda::Queries all = queries(layer, run.count);
  if (run.sparse(layer) && run.native == nullptr) return attend_chosen_by_host(layer, run, work);
  if (run.sparse(layer)) {
    const cuda::RowLists lists =
        run.native->selector->select(layer, all, q_unrotated_.as<float>(), stream_.get());
    return attend_rows_decode(all, lists, options_.max_tokens, workspace_.as<void>(), stream_.get());
  }
  if (run.count <= kDecodeTokens) {
    attend_full_decode(all, options_.max_tokens, workspace_.as<void>(), stream_.get());
  } else {
    attend_prefill(all, static_cast<std::int32_t>(tokens_), stream_.get(), precision());
  }
}

void CudaContext::attend_chosen_by_host(int layer, const Run& run, ForwardWork& work) {
  const SequenceTokens& sequence = run.step.sequences.front();
  const LayerGeometry where = geometry(layer, run);
  const QueryBlock block = {.sequence = sequence.id,
                            .phase = run.step.phase,
                            .begin = static_cast<Position>(tokens_),
                            .tokens = run.count,
                            .q = host_q_,
                            .q_unrotated = host_q_unrotated_,
                            .kv = sequence.kv->layer(layer, run.count),
                            .far_begin = static_cast<Position>(where.dense.sink),
                            .far_limit = sequence.far_limit};
  Selector& selector = *run.step.selectors[static_cast<std::size_t>(layer)];
  selector.append(block.sequence, block.kv, block.far_end(block.tokens - 1, where.dense));
  Selection selection;
  selector.select({&block, 1}, selection);
  lists_.assign(group_sets(selection, {&block, 1}, where), block, where, 0, run.count);
  const cuda::RowLists lists = lists_.upload(lists_memory_, stream_.get());
  attend_rows_decode(queries(layer, run.count), lists, options_.max_tokens, workspace_.as<void>(),
                     stream_.get());
  if (selector.wants_mass()) {  // the device keeps no weights: the host attends as well
    std::vector<float> output(block.q.size());
    float* const place = output.data();
    lode::attend({&block, 1}, selection, where, {&place, 1},
                 [&](const AttentionMass& mass) { selector.observe(mass); });
  }
  work.attend += count_attended({&block, 1}, selection, where);
  const SelectWork select = selector.take_work();
  work.select.bytes += select.bytes;
  work.select.keys_scored += select.keys_scored;
  work.sparse_tokens += run.count;
}

/// Logits of some rows of the step, on their way to the host.
void CudaContext::enqueue_head(std::int64_t row, std::int64_t rows) {
  linear_.head(x_.as<float>() + row * config_.hidden, rows, model_->final_norm,
               static_cast<float>(config_.norm_eps), model_->output, logits_.as<float>());
  cuda::copy(staged_logits_.as<void>(), logits_.as<void>(),
             rows * config_.vocab * std::int64_t{sizeof(float)}, stream_.get());
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
                  staged_logits_.as<float>() + some * config_.vocab);
  }
  stream_.synchronize();
  for (const float x : logits) {
    if (!std::isfinite(x)) {
      throw RunError(
          "the model gave a logit that is not a finite number: weights or cached keys are damaged or "
          "overflow");
    }
  }
}

/// Adds what the layers read whose keys the host did not choose. The step has ended.
void CudaContext::count_work(const Run& run, ForwardWork& work) {
  const DenseParts dense = run.step.selectors.empty() ? DenseParts{} : run.step.dense;
  const std::int64_t token_bytes = 2 * range_.layout().row_bytes();
  for (int layer = 0; layer < config_.layers; ++layer) {
    const bool sparse = run.sparse(layer);
    if (sparse && run.native == nullptr) continue;
    const GpuSelector* const selector = sparse ? run.native->selector.get() : nullptr;
    const int per_head = sparse ? selector->lists_per_head() : 0;
    const std::int32_t* count =
        sparse ? run.native->counts.as<std::int32_t>() + layer * selector->counts_per_layer() : nullptr;
    if (sparse) work.sparse_tokens += run.count;
    for (int t = 0; t < run.count; ++t) {
      const std::int64_t all = tokens_ + t + 1, far = far_keys(dense, all - 1);
      if (sparse) work.select.bytes += selector->select_bytes(all - 1);
      for (int head = 0; head < config_.kv_heads; ++head) {
        std::int64_t chosen = sparse ? 0 : far;
        for (int i = 0; i < per_head; ++i) chosen += *count++;
        work.attend += work_of(all, far, std::min(chosen, far), token_bytes);
      }
    }
  }
}

}  // namespace lode
