// SPDX-License-Identifier: Apache-2.0
#include "gpu/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/cancel.h"
#include "kernels/cuda/attend/attend_beside.h"
#include "kernels/cuda/attend/attend_shared.h"
#include "kernels/cuda/attend/attend_window.h"
#include "kernels/cuda/device/sm_count.h"
#include "lodestone/error.h"
#include "select/of_layers.h"

namespace lode {

namespace {

using cuda::kBlockTokens, cuda::kNarrowRows;

std::int64_t whole_blocks(std::int64_t tokens) {
  return tokens / kBlockTokens * kBlockTokens;
}
std::int64_t power_above(std::int64_t n) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(n, 256))));
}

cuda::NarrowLinear::Sizes sizes_of(const ModelConfig& c) {
  return {.hidden = c.hidden,
          .intermediate = std::max<std::int64_t>(widest_feed_forward(c), c.plan.inputs.width),
          .q_cols = std::max({c.most_query_columns(), c.plan.delta.values(), LatentLayers::most_columns(c)}),
          .kv_cols = c.most_kv_columns(),
          .vocab = std::max({c.vocab, DeltaLayers::most_columns(c), LayerInputs::most_columns(c)})};
}

CudaContext& on_gpu(GpuContext& context) {
  return dynamic_cast<CudaContext&>(context);
}

/// The host chooses for a batch by queries alone.
void expect_asked_by_queries(std::span<Selector* const> selectors) {
  if (goes_by_mass(selectors))
    throw InputError(
        "questions asked together on a GPU: expected a method that chooses by its queries, found one that "
        "goes by the weights of earlier keys, as h2o does: use another one, or the CPU");
}

}  // namespace

std::string why_no_gpu_batch(const GpuModel& model, DType kv_type) {
  if (kv_type != DType::f32 && kv_type != DType::f16 && kv_type != DType::bf16)
    return fmt::format(
        "questions asked together on a GPU: expected keys and values in f32, f16 or bf16, found {}",
        name_of(kv_type));
  if (model.gpus() > 1)
    return fmt::format(
        "questions asked together on a GPU: expected one GPU, found {} that share the model or "
        "the text: leave out --tensor-parallel and --context-parallel",
        model.gpus());
  return {};
}

std::unique_ptr<GpuBatch> make_gpu_batch(const ModelConfig& config, std::shared_ptr<const GpuModel> model,
                                         const GpuBatchOptions& options) {
  if (const std::string why = why_no_gpu_batch(*model, options.kv_type); !why.empty()) throw InputError(why);
  return std::make_unique<CudaBatch>(config, std::dynamic_pointer_cast<const CudaModel>(model), options);
}

CudaBatch::CudaBatch(const ModelConfig& config, std::shared_ptr<const CudaModel> model,
                     const GpuBatchOptions& options)
    : config_(config),
      model_(std::move(model)),
      options_(options),
      pool_(std::make_shared<TailPool>(layout_of(config, options.kv_type), config.layers, options.tail_tokens,
                                       layer_rows(config))),
      linear_(stream_.get(), precision()),
      narrow_(linear_, stream_.get(), precision()),
      experts_(linear_, stream_.get(), precision()),
      recurrent_(config, kWideRows, stream_.get()),
      latent_(config, kWideRows, stream_.get(), precision()),
      inputs_(config, kWideRows, stream_.get()),
      kinds_(config),
      turns_(config) {
  const std::int64_t n = kWideRows, heads = config.query_heads, f = sizeof(float);
  const char* const what = "the activations of a batch";
  staged_there_ = cuda::Buffer(sizeof(Staged), what);
  staged_ = cuda::PinnedBuffer(sizeof(Staged));
  layer_bases_ = cuda::PinnedBuffer(config.layers * (kMostSparseTokens + std::int64_t{kWideRows}) *
                                    std::int64_t{sizeof(char*)});
  layer_bases_there_ = cuda::Buffer(layer_bases_.bytes(), what);
  frequencies_ = cuda::Buffer(LayerTurns::frequency_bytes(config), what);
  no_rows_ =
      cuda::Buffer(kMostSparseTokens * config.most_kv_heads() * std::int64_t{sizeof(std::int32_t)}, what);
  cuda::fill(no_rows_.as<void>(), 0, no_rows_.bytes(), stream_.get());
  x_ = cuda::Buffer(n * config.hidden * f, what);
  for (cuda::Buffer* b : {&q_, &q_unrotated_, &attention_, &far_, &near_})
    *b = cuda::Buffer(n * config.most_query_columns() * f, what);
  for (cuda::Buffer* b : {&tail_lse_, &far_lse_, &near_lse_}) *b = cuda::Buffer(n * heads * f, what);
  logits_ = cuda::Buffer(kNarrowRows * config.vocab * f, "logits");
  staged_logits_ = cuda::PinnedBuffer(logits_.bytes());
  largest_ = cuda::Buffer(kNarrowRows * std::int64_t{sizeof(TokenId)}, what);
  staged_largest_ = cuda::PinnedBuffer(largest_.bytes());
  const cuda::NarrowLinear::Sizes sizes = sizes_of(config);
  linear_.reserve(n, config.hidden, sizes.intermediate, sizes.q_cols, sizes.kv_cols);
  experts_.reserve(model_->expert_sizes(config), n);
  linear_.reserve_panel(model_->panel_bytes(precision()));
  narrow_.reserve(sizes);
  for (cuda::Buffer* b : {&workspace_, &tail_workspace_}) {
    *b = cuda::Buffer(attention_workspace_bytes(config), "partial results of attention");
    cuda::fill(b->as<void>(), 0, b->bytes(), stream_.get());
  }
  shared_workspace_ = cuda::Buffer(
      cuda::shared_workspace_bytes(kWideRows, config.query_heads, config.head_dim), "partial results");
  make_window_lists(config.max_positions);  // at once, since what a batch takes is measured when it is made
  static_cast<void>(cuda::may_wait_for_room(stream_.get()));  // before the streams of contexts
  stream_.synchronize();
}

std::unique_ptr<GpuTail> CudaBatch::branch(GpuContext& document, std::int64_t room) {
  const CudaContext& from = on_gpu(document);
  if (from.tier_ != nullptr)
    throw InputError(
        "expected a document whose keys and values are on the GPU, found them in host memory "
        "(--kv-tier, --gpu-memory)");
  const std::int64_t seam = whole_blocks(from.tokens_), rest = from.tokens_ - seam;
  const std::int64_t blocks = gpu_tail_tokens(from.tokens_, room) / kBlockTokens;
  if (blocks > pool_->blocks())
    throw RunError(fmt::format(
        "expected a question and answer that take at most {} tokens of GPU memory, found a need for {}",
        pool_->blocks() * kBlockTokens, blocks * kBlockTokens));
  const std::optional<std::int64_t> first = pool_->take(blocks);
  if (!first) return nullptr;
  const auto take = [&] {
    try {
      return std::make_unique<CudaTail>(pool_, *first, DeltaLayers::state_floats(config_));
    } catch (...) {
      pool_->give(*first);
      throw;
    }
  };
  auto tail = take();
  for (int layer = 0; layer < config_.layers && rest > 0; ++layer) {
    if (!from.range_.has_rows(layer)) continue;
    const std::int64_t block = from.range_.layout(layer).block_stride();
    cuda::copy(pool_->block(tail->first, layer) + layer * pool_->range().layout().layer_stride,
               from.range_.layer(layer) + seam / kBlockTokens * block, block, stream_.get());
  }
  return tail;
}

std::vector<CudaBatch::Token> CudaBatch::tokens_of(const GpuBatchRow& row, float* logits) const {
  CudaContext& document = on_gpu(*row.document);
  GpuMethodState* method = nullptr;
  if (!row.selectors.empty()) {
    method = document.method_of(row.selectors);
    if (method == nullptr) expect_asked_by_queries(row.selectors);
  }
  const bool on_host = !row.selectors.empty() && method == nullptr;
  const std::int64_t seam = whole_blocks(document.tokens_);
  std::vector<Token> tokens;
  for (std::size_t t = 0; t < row.tokens.size(); ++t) {
    LayerInputs::expect_known(config_, row.tokens[t]);
    Token token = {.row = &row,
                   .id = row.tokens[t],
                   .position = document.tokens_ + row.earlier + static_cast<std::int64_t>(t),
                   .seam = seam,
                   .document = &document};
    const std::int64_t behind = std::min<std::int64_t>(token.position + 1 - row.dense.window, row.far_limit);
    find_far_keys(behind, on_host || row.dense.from_context, token);
    const bool far = token.index_end > row.dense.sink;
    if (far) token.method = method;
    token.host_chooses = on_host && far;
    const bool last = t + 1 == row.tokens.size();
    if (row.largest != nullptr && row.phase == Phase::generation && row.tokens.size() == 1) {
      token.largest = row.largest;
    } else if (row.rows == LogitRows::all || (row.rows == LogitRows::last_of_each && last)) {
      token.logits = logits;
      logits += config_.vocab;
    }
    tokens.push_back(token);
  }
  return tokens;
}

/// Of a token whose keys in front of `behind` are far. `as_a_whole`: the index must be asked for exactly these.
void CudaBatch::find_far_keys(std::int64_t behind, bool as_a_whole, Token& token) {
  token.far_end =
      std::clamp<std::int64_t>(whole_blocks(behind + (as_a_whole ? kBlockTokens - 1 : 0)), 0, token.seam);
  token.index_end = as_a_whole ? std::clamp<std::int64_t>(behind, 0, token.far_end) : token.far_end;
  token.select_end = as_a_whole ? std::max(behind, token.far_end) : token.far_end;
}

CudaBatch::Asked CudaBatch::asked_by(const Token& token) {
  return {token.document, token.method, token.host_chooses ? token.row->selectors.data() : nullptr};
}

void CudaBatch::forward(std::span<const GpuBatchRow> rows, std::vector<float>& logits) {
  std::int64_t wanted = 0;
  const auto rows_of = [](const GpuBatchRow& row) {
    if (row.largest != nullptr && row.phase == Phase::generation && row.tokens.size() == 1)
      return std::ptrdiff_t{0};
    return row.rows == LogitRows::none  ? std::ptrdiff_t{0}
           : row.rows == LogitRows::all ? std::ssize(row.tokens)
                                        : std::ptrdiff_t{1};
  };
  for (const GpuBatchRow& row : rows) wanted += rows_of(row);
  logits.resize(static_cast<std::size_t>(wanted * config_.vocab));
  std::vector<Token> narrow;
  std::vector<std::vector<Token>> wide;
  float* at = logits.data();
  for (const GpuBatchRow& row : rows) {
    std::vector<Token> tokens = tokens_of(row, at);
    at += rows_of(row) * config_.vocab;
    if (row.phase == Phase::generation)
      narrow.insert(narrow.end(), tokens.begin(), tokens.end());
    else
      wide.push_back(std::move(tokens));
  }
  run_narrow(narrow);
  for (const std::vector<Token>& tokens : wide) run_wide(tokens);
}

/// Rows of one document and method come to lie side by side; those of one sequence stay in their order. Ropes
/// that differ have passes of their own.
void CudaBatch::run_narrow(std::span<Token> tokens) {
  const auto place = [](const Token& t) {
    return std::tuple(t.document->number_, t.method != nullptr ? t.method->number : 0, asked_by(t).on_host);
  };
  std::stable_sort(tokens.begin(), tokens.end(),
                   [&](const Token& a, const Token& b) { return place(a) < place(b); });
  const auto turns_alike = [](const Token& a, const Token& b) {
    return a.row->rope == b.row->rope ||
           (std::ranges::equal(a.row->rope->frequencies(), b.row->rope->frequencies()) &&
            a.row->rope->attention_scaling() == b.row->rope->attention_scaling());
  };
  for (std::size_t begin = 0, end = 0; begin < tokens.size(); begin = end) {
    for (end = begin;
         end < tokens.size() && end - begin < kNarrowRows && turns_alike(tokens[begin], tokens[end]);)
      ++end;
    Pass pass = make_pass(tokens.subspan(begin, end - begin), true);
    run(pass);
  }
}

/// A question's tokens, as many at a time as attend in one way and the method takes.
void CudaBatch::run_wide(std::span<const Token> tokens) {
  for (std::size_t begin = 0; begin < tokens.size();) {
    check_cancel();
    const Token& first = tokens[begin];
    std::size_t most = kWideRows;
    if (first.method != nullptr)
      most = static_cast<std::size_t>(std::clamp<std::int64_t>(
          first.method->selector->most_tokens(first.select_position(), first.row->phase), 1,
          kMostSparseTokens));
    if (first.host_chooses) {
      const auto joint = static_cast<std::size_t>(joint_query_tokens(first.row->selectors));
      if (joint > 0 && joint < most) most = most / joint * joint;
    }
    std::size_t end = begin;
    while (end < tokens.size() && end - begin < most && asked_by(tokens[end]) == asked_by(first)) ++end;
    Pass pass = make_pass(tokens.subspan(begin, end - begin), false);
    run(pass);
    begin = end;
  }
}

CudaBatch::Pass CudaBatch::make_pass(std::span<const Token> tokens, bool narrow) {
  Pass pass = {.tokens = tokens, .groups = {}, .narrow = narrow, .rope = tokens.front().row->rope};
  int documents = 0;
  for (int i = 0; i < pass.count(); ++i) {
    const Token& token = tokens[static_cast<std::size_t>(i)];
    const Asked asked = asked_by(token);
    if (pass.groups.empty() || !joins(pass.groups.back(), asked))
      pass.groups.push_back({.asked = {asked}, .first = i, .number = documents});
    if (pass.groups.back().asked.back() != asked) pass.groups.back().asked.push_back(asked);
    documents = pass.groups.back().number + static_cast<int>(pass.groups.back().asked.size());
    ++pass.groups.back().count;
    pass.wants_logits |= token.logits != nullptr;
    pass.wants_largest |= token.largest != nullptr;
    pass.longest_tail = std::max(pass.longest_tail, token.position + 1 - token.seam);
    if (token.sparse()) pass.longest_near = std::max(pass.longest_near, token.seam - token.far_end);
  }
  pass.longest_tail = power_above(pass.longest_tail);
  if (pass.longest_near > 0) pass.longest_near = power_above(pass.longest_near);
  return pass;
}

/// Whether the group may take a token that asks this; a selector with more room then leads it.
bool CudaBatch::joins(Group& group, const Asked& asked) {
  if (group.asked.back() == asked) return true;
  const GpuMethodState *const leader = group.method(), *const other = asked.method;
  if (leader == nullptr || other == nullptr || leader->layers != other->layers) return false;
  if (leader->selector->joins(*other->selector)) return true;
  if (!other->selector->joins(*leader->selector)) return false;
  group.leading = group.asked.size();
  return true;
}

void CudaBatch::run(Pass& pass) {
  stage(pass);
  prepare(pass);
  try {
    enqueue_or_replay(pass);
  } catch (...) {  // of what beside_ has begun, the next pass would write over the inputs
    stream_.synchronize();
    beside_.synchronize();
    throw;
  }
  take_logits(pass);
  commit_states(pass);
  count_work(pass);
}

/// A pass of generated tokens is captured when its like comes a second time, and replayed from then on.
void CudaBatch::enqueue_or_replay(const Pass& pass) {
  if (!pass.narrow || pass.host_chooses()) return enqueue(pass);
  if (graphs_.size() > kMostGraphs) graphs_.clear();
  const auto [at, fresh] = graphs_.try_emplace(key_of(pass));
  if (fresh) return enqueue(pass);
  cuda::Graph& graph = at->second;
  if (!graph) {
    cuda::Graph::begin(stream_.get());
    try {
      enqueue(pass);
    } catch (...) {
      cuda::Graph::abandon(stream_.get());
      throw;
    }
    graph = cuda::Graph::end(stream_.get());
  }
  graph.launch(stream_.get());
}

/// Everything that a captured pass has taken for granted beside what it looks up.
std::vector<std::uint64_t> CudaBatch::key_of(const Pass& pass) const {
  const auto number = [](auto n) { return static_cast<std::uint64_t>(n); };
  std::vector<std::uint64_t> key = {
      number(pass.count()),      number(pass.wants_logits + 2 * pass.wants_largest),
      number(pass.longest_tail), number(pass.longest_near),
      number(pass.single()),     std::bit_cast<std::uint32_t>(rope_scale_)};
  for (const Group& group : pass.groups) {
    for (const auto& [document, method, on_host] : group.asked) {
      key.push_back(document->number_);
      key.push_back(method != nullptr ? method->number : 0);
    }
    key.push_back(number(group.first));
    key.push_back(number(group.count));
  }
  return key;
}

/// The document's index of each method that takes part, and RoPE's frequencies.
void CudaBatch::prepare(const Pass& pass) {
  rope_scale_ = pass.rope->attention_scaling();
  if (!std::ranges::equal(pass.rope->frequencies(), frequencies_set_)) {
    frequencies_set_.assign(pass.rope->frequencies().begin(), pass.rope->frequencies().end());
    const std::vector<float> both = turns_.frequencies(*pass.rope);
    cuda::copy(frequencies_.as<void>(), both.data(), frequencies_.bytes(), stream_.get());
    stream_.synchronize();
  }
  make_window_lists(longest_document(pass));
  for (const Group& group : pass.groups) {
    if (group.method() == nullptr) continue;
    std::vector<GpuSelector*> selectors;
    for (const auto& [document, method, on_host] : group.asked) {
      document->set_frequencies(*pass.rope);
      document->prepare(*method);
      document->stream_.synchronize();
      selectors.push_back(method->selector.get());
    }
    const Token& first = pass.tokens[static_cast<std::size_t>(group.first)];
    const GpuStep step = {.queries = {staged_.as<Staged>()->to_select.data() + group.first,
                                      static_cast<std::size_t>(group.count)},
                          .phase = first.row->phase,
                          .far_limit = static_cast<Position>(std::min<std::int64_t>(
                              first.row->far_limit, std::max(first.seam, first.select_end))),
                          .listed_end = static_cast<Position>(first.seam)};
    if (selectors.size() == 1)
      group.method()->selector->begin(step);
    else
      group.method()->selector->begin_joined(step, selectors);
  }
}

/// What the kernels look up, in pinned memory.
void CudaBatch::stage(Pass& pass) {
  Staged& s = *staged_.as<Staged>();
  for (std::size_t i = 0; i < pass.tokens.size(); ++i) {
    const Token& t = pass.tokens[i];
    const auto number = static_cast<std::int32_t>(i);
    const auto at = [](std::int64_t position) { return static_cast<std::int32_t>(position); };
    for (int kind = 0; kind < kinds_.count(); ++kind) {
      const int layer = kinds_.layer(kind);
      const char* const tail = pool_->block(dynamic_cast<const CudaTail&>(*t.row->tail).first, layer);
      const auto k = static_cast<std::size_t>(kind);
      s.tail_bases[k][i] = tail;
      s.absolute_bases[k][i] = tail - t.seam / kBlockTokens * pool_->range().layout(layer).block_stride();
    }
    s.ids[i] = t.id;
    s.absolute[i] = {number, at(t.position)};
    s.in_tail[i] = {number, at(t.position - t.seam)};
    s.to_select[i] = {document_of(pass, number), at(t.sparse() ? t.select_position() : t.seam)};
    s.in_document[i] = {group_of(pass, number).number + document_of(pass, number), at(t.seam)};
    if (!t.sparse()) continue;
    s.in_near[i] = {number, at(t.seam - t.far_end - 1)};
  }
  stage_documents(pass);
  stage_states(pass);
}

/// The states of each sequence. A captured pass looks up as many as there are tokens: the others have none.
void CudaBatch::stage_states(Pass& pass) {
  if (config_.plan.recurrent_floats().empty()) return;
  for (int first = 0, end = 0; first < pass.count(); first = end) {
    const Token& token = pass.tokens[static_cast<std::size_t>(first)];
    for (end = first; end < pass.count() && pass.tokens[static_cast<std::size_t>(end)].row == token.row;)
      ++end;
    pass.states.push_back(dynamic_cast<CudaTail&>(*token.row->tail)
                              .states.next(token.row->earlier, token.position - token.document->tokens_,
                                           first, end - first,
                                           token.document->states_.at(token.document->tokens_)));
  }
  auto& staged = staged_.as<Staged>()->states;
  staged.fill({});
  std::ranges::copy(pass.states, staged.begin());
}

void CudaBatch::commit_states(const Pass& pass) {
  for (const cuda::DeltaRows& rows : pass.states) {
    const Token& last = pass.tokens[static_cast<std::size_t>(rows.first + rows.count - 1)];
    dynamic_cast<CudaTail&>(*last.row->tail).states.commit(rows, last.position + 1 - last.document->tokens_);
  }
}

const CudaBatch::Group& CudaBatch::group_of(const Pass& pass, int token) {
  return *std::ranges::find_if(pass.groups, [&](const Group& g) { return token < g.first + g.count; });
}

/// The number of a token's document within its group.
std::int32_t CudaBatch::document_of(const Pass& pass, int token) {
  const Token& t = pass.tokens[static_cast<std::size_t>(token)];
  const Group& group = group_of(pass, token);
  return static_cast<std::int32_t>(std::ranges::find(group.asked, asked_by(t)) - group.asked.begin());
}

/// Where each layer of every document begins, and of each sparse token the keys that are near.
void CudaBatch::stage_documents(const Pass& pass) {
  auto** const documents = layer_bases_.as<const char*>();
  auto** const near = documents + config_.layers * kMostSparseTokens;
  for (int layer = 0; layer < config_.layers; ++layer) {
    const auto of_layer = [&](const CudaContext& document) { return document.range_.layer(layer); };
    const std::int64_t row = std::int64_t{layer} * kMostSparseTokens,
                       near_row = std::int64_t{layer} * kWideRows;
    for (const Group& group : pass.groups)
      for (std::size_t i = 0; i < group.asked.size(); ++i)
        documents[row + group.number + static_cast<std::int64_t>(i)] = of_layer(*group.asked[i].document);
    for (std::size_t i = 0; i < pass.tokens.size(); ++i) {
      const Token& t = pass.tokens[i];
      if (t.sparse())
        near[near_row + static_cast<std::int64_t>(i)] =
            of_layer(*t.document) +
            t.far_end / kBlockTokens * t.document->range_.layout(layer).block_stride();
    }
  }
}

void CudaBatch::enqueue(const Pass& pass) {
  const cuda::StreamHandle stream = stream_.get();
  cuda::copy(staged_there_.as<void>(), staged_.as<void>(), staged_there_.bytes(), stream);
  cuda::copy(layer_bases_there_.as<void>(), layer_bases_.as<void>(), layer_bases_.bytes(), stream);
  for (const Group& group : pass.groups)
    if (group.method() != nullptr) group.method()->selector->upload(stream);
  cuda::embed(there(staged_.as<Staged>()->ids)->data(), pass.count(), model_->embedding, x_.as<float>(),
              stream, static_cast<float>(config_.plan.embedding_multiplier));
  inputs_.make(*model_, there(staged_.as<Staged>()->ids)->data(), pass.count(), x_.as<float>(),
               product_of_stream(pass));
  for (int layer = 0; layer < config_.layers; ++layer) enqueue_layer(layer, pass);
  for (const Group& group : pass.groups)
    if (GpuMethodState* const method = group.method(); method != nullptr)
      method->selector->copy_counts(method->counts.as<std::int32_t>(), config_.layers, stream);
  if (pass.wants_logits || pass.wants_largest) enqueue_head(pass);
}

/// Where a part of what is staged lies on the GPU.
template <class T>
const T* CudaBatch::there(const T& staged) const {
  const auto* const begin = staged_.as<char>();
  return reinterpret_cast<const T*>(staged_there_.as<char>() +
                                    (reinterpret_cast<const char*>(&staged) - begin));
}

/// Of all tokens, over the tails.
cuda::Queries CudaBatch::queries(const Pass& pass, int layer, const cuda::QueryToken* tokens,
                                 const TailBases& bases) const {
  const cuda::KvLayout layout = pool_->range().layout(layer);
  return {.tokens = tokens,
          .bases = bases[static_cast<std::size_t>(kinds_.of(layer))].data(),
          .layer_offset = layer * layout.layer_stride,
          .layout = layout,
          .count = pass.count(),
          .query_heads = config_.query_heads,
          .scale = score_scale(config_),
          .q = q_.as<float>(),
          .o = attention_.as<float>(),
          .lse = tail_lse_.as<float>()};
}

// One layer in the order of the diagram in src/README.md.
void CudaBatch::enqueue_layer(int layer, const Pass& pass) {
  const CudaModel::Layer& w = model_->layers[static_cast<std::size_t>(layer)];
  const cuda::Linear::MlpArguments mlp = mlp_of(w, config_);
  const cuda::DeviceWeight& next = layer + 1 < config_.layers
                                       ? model_->layers[static_cast<std::size_t>(layer) + 1].attention_norm
                                       : model_->final_norm;
  enqueue_mixer(layer, pass);
  if (w.experts())
    enqueue_experts(w, pass);
  else if (pass.narrow)
    narrow_.mlp(mlp, pass.count(), x_.as<float>(), inputs_.none() ? next : cuda::DeviceWeight{});
  else
    linear_.mlp(mlp, pass.count(), x_.as<float>());
  if (!inputs_.none()) enqueue_inputs(layer, pass, next);
}

/// What the layer makes of the numbers that it is given beside the stream.
void CudaBatch::enqueue_inputs(int layer, const Pass& pass, const cuda::DeviceWeight& next) {
  const CudaModel::Layer& w = model_->layers[static_cast<std::size_t>(layer)];
  const cuda::Addition addition = input_addition(w, config_);
  float* const x = x_.as<float>();
  const float* const weighed = inputs_.weigh(layer, w, pass.count(), x, product_of_stream(pass));
  if (pass.narrow)
    narrow_.project_out(weighed, pass.count(), w.inputs.out, {}, x, addition, next);
  else
    linear_.project_out(weighed, pass.count(), w.inputs.out, {}, x, addition);
}

/// Of a pass's rows as they are, without a norm.
LayerInputs::Product CudaBatch::product_of_stream(const Pass& pass) {
  return [this, count = pass.count(), narrow = pass.narrow](const float* x, const cuda::DeviceWeight& w,
                                                            float* y) {
    if (narrow)
      narrow_.multiply(x, count, w, y);
    else
      linear_.multiply_stream(x, count, w, y);
  };
}

/// Generated tokens in pieces, so that a row goes one way whatever their number.
void CudaBatch::enqueue_experts(const CudaModel::Layer& w, const Pass& pass) {
  const int most = pass.narrow ? cuda::kFewRows : kWideRows;
  for (int first = 0; first < pass.count(); first += most)
    experts_.add(experts_of(w, config_), std::min(most, pass.count() - first),
                 x_.as<float>() + first * config_.hidden);
}

/// Attention or what stands in its place, added to the stream.
void CudaBatch::enqueue_mixer(int layer, const Pass& pass) {
  const CudaModel::Layer& w = model_->layers[static_cast<std::size_t>(layer)];
  const Staged& s = *staged_.as<Staged>();
  const auto add = [&](const float* from, const cuda::DeviceWeight& o, const cuda::DeviceWeight& bias) {
    const cuda::Addition addition = attention_addition(w, config_);
    if (pass.narrow)
      narrow_.project_out(from, pass.count(), o, bias, x_.as<float>(), addition, w.mlp_norm);
    else
      linear_.project_out(from, pass.count(), o, bias, x_.as<float>(), addition);
  };
  if (recurrent_.recurrent(layer)) {
    const std::size_t rows = pass.narrow ? pass.tokens.size() : 1;
    const float* const o = recurrent_.run(layer, w, pass.count(), {there(s.states)->data(), rows},
                                          pass.single(), product_of(w, pass));
    return add(o, w.delta.out, {});
  }
  cuda::Linear::QkvArguments qkv = qkv_of(w, config_);
  qkv.x = x_.as<float>();
  const LayerTurns::Turn turn = turns_.of(layer, *pass.rope);
  qkv.frequencies = frequencies_.as<float>() + turn.first;
  qkv.turning = static_cast<int>(turn.rope.turning_pairs());
  qkv.rope_scale = turn.rope.attention_scaling();
  qkv.q_out = q_.as<float>();
  qkv.q_unrotated = q_unrotated_.as<float>();
  const cuda::Queries all = queries(pass, layer, there(s.absolute)->data(), *there(s.absolute_bases));
  project(w, qkv, all, pass.narrow);
  attend(layer, pass);
  if (!pass.narrow) report_masses(layer, pass);
  recurrent_.gate(w, pass.count(), attention_.as<float>(), product_of(w, pass));
  const float* const attended = attention_.as<float>();
  add(latent_ ? latent_.unfold(w, attended, pass.count(), pass.narrow) : attended, w.o, w.o_bias);
}

/// Queries, and keys and values to their rows.
void CudaBatch::project(const CudaModel::Layer& w, const cuda::Linear::QkvArguments& qkv,
                        const cuda::Queries& where, bool narrow) {
  if (!latent_) return narrow ? narrow_.qkv(qkv, where) : linear_.qkv(qkv, where);
  latent_.project(
      w, qkv, where, narrow,
      [&](const float* x, const cuda::DeviceWeight& norm, const cuda::DeviceWeight& weight, float* y) {
        const auto eps = static_cast<float>(config_.norm_eps);
        if (narrow)
          narrow_.head(x, where.count, norm, eps, weight, y);
        else
          linear_.head(x, where.count, norm, eps, weight, y);
      });
}

DeltaLayers::Product CudaBatch::product_of(const CudaModel::Layer& w, const Pass& pass) {
  return [this, &w, count = pass.count(), narrow = pass.narrow](const cuda::DeviceWeight& weight, float* y) {
    const auto eps = static_cast<float>(config_.norm_eps);
    if (narrow)
      narrow_.head(x_.as<float>(), count, w.attention_norm, eps, weight, y);
    else
      linear_.head(x_.as<float>(), count, w.attention_norm, eps, weight, y);
  };
}

/// Whether nothing but short lists is read beside the choice of generated tokens: then tails are, and what is near.
bool CudaBatch::all_choose(int layer, const Pass& pass) const {
  return pass.narrow &&
         std::ranges::none_of(pass.groups, [&](const Group& g) { return attends_all(g, layer); });
}

/// Enqueues documents that rows with full attention read, and all tails. Of generated tokens the documents are read
/// beside stream_, until joined_; where every group chooses keys, so are the tails and what is near.
std::vector<cuda::StatePlanes> CudaBatch::attend_plain(int layer, const Pass& pass) {
  const Staged& s = *staged_.as<Staged>();
  const cuda::Queries tails = queries(pass, layer, there(s.in_tail)->data(), *there(s.tail_bases));
  // Generated tokens alone: a question's products keep the GPU busy by themselves.
  const cuda::StreamHandle beside = pass.narrow ? beside_.get() : stream_.get();
  if (pass.narrow) forked_.record(stream_.get()), forked_.hold_up(beside);
  std::vector<cuda::StatePlanes> planes;
  for (const Group& group : pass.groups) planes.push_back(read_document(layer, pass, group, beside));
  if (!pass.narrow) {
    const Token& first = pass.tokens.front();
    attend_prefill(tails, static_cast<std::int32_t>(first.position - first.seam), stream_.get(), precision());
    return planes;
  }
  if (all_choose(layer, pass)) {
    attend_full_beside(tails, pass.longest_tail, tail_workspace_.as<void>(), beside);
    for (const Group& group : pass.groups)
      attend_full_beside(near_of(layer, group), longest_near(pass), tail_workspace_.as<void>(), beside);
  } else {
    attend_full_decode(tails, pass.longest_tail, workspace_.as<void>(), stream_.get());
  }
  joined_.record(beside);
  return planes;
}

void CudaBatch::attend(int layer, const Pass& pass) {
  if (config_.plan.layer(layer).window > 0) return attend_window(layer, pass);
  const std::vector<cuda::StatePlanes> planes = attend_plain(layer, pass);
  const CudaModel::Layer& w = model_->layers[static_cast<std::size_t>(layer)];
  const cuda::DeviceWeight& o = w.o;
  // A gate or each head's W_v stands between attention and the product.
  const bool straight = pass.narrow && w.attention_gate.data == nullptr && !latent_;
  auto* const halves = static_cast<bf16*>(straight ? narrow_.halves_for(o) : nullptr);
  for (std::size_t g = 0; g < pass.groups.size(); ++g) {
    const Group& group = pass.groups[g];
    cuda::StatePart states[3];
    const int count = attend_chosen(layer, pass, group, states);
    if (g == 0 && pass.narrow) joined_.hold_up(stream_.get());
    if (g == 0) add_sinks(layer, pass);
    const std::int64_t d = config_.head_dim, first = std::int64_t{group.first} * config_.query_heads;
    merge_planes(planes[g], states, count, std::int64_t{group.count} * config_.query_heads, config_.head_dim,
                 attention_.as<float>() + first * d,
                 {halves == nullptr ? nullptr : halves + first * d, kNarrowRows * o.cols}, stream_.get());
  }
}

std::int64_t CudaBatch::longest_document(const Pass& pass) const {
  std::int64_t longest = 0;
  for (const Token& t : pass.tokens) longest = std::max(longest, t.document->options_.max_tokens);
  return longest;
}

/// Room for what the widest window reaches of so long a document. Captured passes took the old one for granted.
void CudaBatch::make_window_lists(std::int64_t longest) {
  std::int64_t widest = 0;
  for (int layer = 0; layer < config_.layers; ++layer)
    widest = std::max(widest, config_.plan.layer(layer).window);
  const std::int64_t capacity = std::min(widest, longest);
  if (capacity <= window_capacity_) return;
  const char* const what = "rows of sliding windows";
  const std::int64_t lists = kMostSparseTokens * config_.most_kv_heads(), number = sizeof(std::int32_t);
  graphs_.clear();
  window_rows_ = {};
  window_capacity_ = 0;
  window_rows_ = cuda::Buffer(lists * capacity * number, what);
  if (window_counts_.bytes() == 0) window_counts_ = cuda::Buffer(lists * number, what);
  window_capacity_ = capacity;
}

/// Of each token's tail, then of its document.
void CudaBatch::attend_window(int layer, const Pass& pass) {
  const Staged& s = *staged_.as<Staged>();
  const std::int64_t window = config_.plan.layer(layer).window;
  const cuda::Queries tails = queries(pass, layer, there(s.in_tail)->data(), *there(s.tail_bases));
  const Token& first = pass.tokens.front();
  const auto* const none = no_rows_.as<std::int32_t>();
  if (pass.narrow)
    attend_rows_decode(tails, {.rows = none, .counts = none, .window = window}, pass.longest_tail,
                       workspace_.as<void>(), stream_.get());
  else
    attend_window_prefill(tails, static_cast<std::int32_t>(first.position - first.seam), window,
                          stream_.get(), precision());
  attend_window_of_documents(layer, pass, window);
  add_sinks(layer, pass);
  const cuda::StatePart states[3] = {{far_.as<float>(), far_lse_.as<float>()},
                                     {attention_.as<float>(), tail_lse_.as<float>()}};
  const CudaModel::Layer& w = model_->layers[static_cast<std::size_t>(layer)];
  const bool straight = pass.narrow && w.attention_gate.data == nullptr;
  merge_planes({}, states, 2, std::int64_t{pass.count()} * config_.query_heads, config_.head_dim_of(layer),
               attention_.as<float>(), {straight ? narrow_.halves_for(w.o) : nullptr, kNarrowRows * w.o.cols},
               stream_.get());
}

void CudaBatch::attend_window_of_documents(int layer, const Pass& pass, std::int64_t window) {
  const Staged& s = *staged_.as<Staged>();
  const std::int64_t heads = config_.query_heads, d = config_.head_dim_of(layer);
  cuda::WindowRows rows = {
      .kv_heads = config_.kv_heads_of(layer), .window = window, .capacity = window_capacity_};
  auto *const listed = window_rows_.as<std::int32_t>(), *const counts = window_counts_.as<std::int32_t>();
  for (int first = 0; first < pass.count(); first += kMostSparseTokens) {
    const int some = std::min(kMostSparseTokens, pass.count() - first);
    rows.absolute = there(s.absolute)->data() + first;
    rows.in_tail = there(s.in_tail)->data() + first;
    list_window(rows, some, listed, counts, stream_.get());
    const std::int64_t row = first * heads;
    cuda::attend_rows_decode(
        {.tokens = there(s.in_document)->data() + first,
         .bases = layer_bases_there_.as<const char*>() + std::int64_t{layer} * kMostSparseTokens,
         .layer_offset = 0,
         .layout = pass.tokens.front().document->range_.layout(layer),
         .count = some,
         .query_heads = config_.query_heads,
         .scale = score_scale(config_),
         .q = q_.as<float>() + row * d,
         .o = far_.as<float>() + row * d,
         .lse = far_lse_.as<float>() + row},
        {.rows = listed, .counts = counts, .capacity = window_capacity_}, longest_document(pass),
        workspace_.as<void>(), stream_.get());
  }
}

/// The layer's sinks, if it has any, behind the tails' keys.
void CudaBatch::add_sinks(int layer, const Pass& pass) {
  const cuda::DeviceWeight& sinks = model_->layers[static_cast<std::size_t>(layer)].sinks;
  if (sinks.data == nullptr) return;
  cuda::merge_sinks(attention_.as<float>(), tail_lse_.as<float>(), static_cast<const float*>(sinks.data),
                    std::int64_t{pass.count()} * config_.query_heads, config_.query_heads,
                    config_.head_dim_of(layer), stream_.get());
}

/// To the hook of a question's tokens, which are the only ones of their pass.
void CudaBatch::report_masses(int layer, const Pass& pass) {
  const Token& first = pass.tokens.front();
  const ForwardHooks* const hooks = first.row->hooks;
  if (hooks == nullptr || config_.plan.layer(layer).window > 0) return;
  LODE_ASSERT(first.row->selectors.empty() && first.document->finds_masses());
  const cuda::KvLayout &layout = first.document->range_.layout(), &tails = pool_->range().layout();
  const char* const tail = pool_->block(dynamic_cast<const CudaTail&>(*first.row->tail).first, layer);
  masses_.report({.q = q_.as<float>(),
                  .count = pass.count(),
                  .query_heads = config_.query_heads,
                  .scale = score_scale(config_),
                  .layout = layout,
                  .document = first.document->range_.base() + layer * layout.layer_stride,
                  .seam = first.seam,
                  .behind = tail + layer * tails.layer_stride,
                  .position = first.position},
                 {.layer = layer,
                  .query_heads = config_.query_heads,
                  .kv_heads = config_.kv_heads,
                  .head_dim = config_.head_dim,
                  .scale = score_scale(config_)},
                 0, *hooks, stream_);
}

bool CudaBatch::attends_all(const Group& group, int layer) const {
  if (group.on_host() != nullptr) return group.on_host()[layer] == nullptr;
  return group.method() == nullptr || !group.method()->layers[static_cast<std::size_t>(layer)];
}

/// A group's queries over its documents, their results from its first row on.
cuda::Queries CudaBatch::of_group(const Group& group, int layer, float* o, float* lse) const {
  const Staged& s = *staged_.as<Staged>();
  const std::int64_t row = std::int64_t{group.first} * config_.query_heads, d = config_.head_dim;
  return {
      .tokens = there(s.to_select)->data() + group.first,
      .bases = layer_bases_there_.as<const char*>() + std::int64_t{layer} * kMostSparseTokens + group.number,
      .layer_offset = 0,
      .layout = group.leader().document->range_.layout(),
      .count = group.count,
      .query_heads = config_.query_heads,
      .scale = score_scale(config_),
      .q = q_.as<float>() + row * d,
      .o = o == nullptr ? nullptr : o + row * d,
      .lse = lse == nullptr ? nullptr : lse + row};
}

/// The same over the keys in front of the seam that are not far.
cuda::Queries CudaBatch::near_of(int layer, const Group& group) const {
  const Staged& s = *staged_.as<Staged>();
  cuda::Queries near = of_group(group, layer, near_.as<float>(), near_lse_.as<float>());
  near.tokens = there(s.in_near)->data() + group.first;
  near.bases = layer_bases_there_.as<const char*>() + std::int64_t{config_.layers} * kMostSparseTokens +
               std::int64_t{layer} * kWideRows;
  return near;
}
std::int64_t CudaBatch::longest_near(const Pass& pass) {
  return std::max<std::int64_t>(pass.longest_near, 1);
}

/// What rows with full attention have of their document, which is read once for all of them.
cuda::StatePlanes CudaBatch::read_document(int layer, const Pass& pass, const Group& group,
                                           cuda::StreamHandle stream) {
  const std::int64_t seam = pass.tokens[static_cast<std::size_t>(group.first)].seam;
  if (seam == 0 || !attends_all(group, layer)) return {};
  char* const own = shared_workspace_.as<char>() +
                    cuda::shared_workspace_bytes(group.first, config_.query_heads, config_.head_dim);
  return attend_shared(of_group(group, layer, nullptr, nullptr), seam, own, stream, precision());
}

/// The states of a group's rows over other keys than those of read_document; returns how many there are.
int CudaBatch::attend_chosen(int layer, const Pass& pass, const Group& group, cuda::StatePart (&states)[3]) {
  const std::int64_t row = std::int64_t{group.first} * config_.query_heads, d = config_.head_dim;
  const cuda::StatePart tail = {attention_.as<float>() + row * d, tail_lse_.as<float>() + row};
  if (attends_all(group, layer)) return states[0] = tail, 1;
  const cuda::StreamHandle stream = stream_.get();
  const cuda::Queries far = of_group(group, layer, far_.as<float>(), far_lse_.as<float>());
  if (group.on_host() != nullptr) {
    attend_chosen_on_host(layer, pass, group, far);
  } else {
    cuda::RowLists lists =
        group.method()->selector->select(layer, far, q_unrotated_.as<float>() + row * d, stream);
    lists.window = 0;  // what is near is attended to below
    std::int64_t longest = 0;
    for (const Asked& asked : group.asked) longest = std::max(longest, asked.document->options_.max_tokens);
    attend_rows_decode(far, lists, longest, workspace_.as<void>(), stream);
  }
  if (!all_choose(layer, pass)) attend_near(layer, pass, group);
  const cuda::Queries near = near_of(layer, group);
  states[0] = {far.o, far.lse}, states[1] = {near.o, near.lse}, states[2] = tail;
  return 3;
}

/// As many tokens at a time as the workspace has room for.
void CudaBatch::attend_near(int layer, const Pass& pass, const Group& group) {
  const cuda::Queries near = near_of(layer, group);
  for (int first = 0; first < near.count; first += kMostSparseTokens)
    attend_full_decode(part_of(near, first, std::min(kMostSparseTokens, near.count - first)),
                       longest_near(pass), workspace_.as<void>(), stream_.get());
}

/// Tokens of one sequence choose in one call.
std::vector<HostChoice::Part> CudaBatch::parts_on_host(int layer, std::span<const Token> tokens) {
  std::vector<HostChoice::Part> parts;
  const GpuBatchRow* before = nullptr;
  for (const Token& token : tokens) {
    const GpuBatchRow& row = *token.row;
    if (std::exchange(before, &row) == &row) {
      ++parts.back().block.tokens;
      continue;
    }
    const bool by_id = !row.by_id.empty() && row.by_id[static_cast<std::size_t>(layer)] != 0;
    parts.push_back({.block = {.sequence = by_id ? row.id : 0,
                               .phase = row.phase,
                               .begin = static_cast<Position>(token.position),
                               .tokens = 1,
                               .q = {},
                               .q_unrotated = {},
                               .kv = row.kv->layer(layer),
                               .far_begin = static_cast<Position>(row.dense.sink),
                               .far_limit = row.far_limit},
                     .seam = static_cast<Position>(token.seam),
                     .work = row.work});
  }
  return parts;
}

/// As many tokens at a time as the workspace has room for, and lists take little.
void CudaBatch::attend_chosen_on_host(int layer, const Pass& pass, const Group& group,
                                      const cuda::Queries& far) {
  const auto tokens =
      pass.tokens.subspan(static_cast<std::size_t>(group.first), static_cast<std::size_t>(group.count));
  const LayerGeometry geometry = {.layer = layer,
                                  .query_heads = config_.query_heads,
                                  .kv_heads = config_.kv_heads,
                                  .head_dim = config_.head_dim,
                                  .scale = score_scale(config_),
                                  .dense = tokens.front().row->dense,
                                  .rope = &turns_.of(layer, *pass.rope).rope,
                                  .pool = group.leader().document->options_.pool};
  const std::int64_t first = std::int64_t{group.first} * config_.query_heads * config_.head_dim;
  host_choice_.choose(parts_on_host(layer, tokens), *group.on_host()[layer], geometry, q_.as<float>() + first,
                      q_unrotated_.as<float>() + first, stream_);
  for (int at = 0; at < far.count; at += kMostSparseTokens) {
    const int some = std::min(kMostSparseTokens, far.count - at);
    attend_rows_decode(part_of(far, at, some), host_choice_.lists(at, some, stream_), longest_document(pass),
                       workspace_.as<void>(), stream_.get());
  }
}

void CudaBatch::enqueue_head(const Pass& pass) {
  if (!pass.narrow) return;  // take_logits asks for the rows that are wanted
  const std::int64_t count = std::int64_t{pass.count()} * config_.vocab;
  narrow_.head(x_.as<float>(), pass.count(), model_->final_norm, static_cast<float>(config_.norm_eps),
               model_->output, logits_.as<float>());
  if (pass.wants_largest) {
    cuda::argmax(logits_.as<float>(), pass.count(), config_.vocab, largest_.as<TokenId>(), stream_.get());
    cuda::copy(staged_largest_.as<void>(), largest_.as<void>(), largest_.bytes(), stream_.get());
  }
  if (pass.wants_logits) finish_logits(count);
}

/// The plan's scale and cap; then they are on their way to the host.
void CudaBatch::finish_logits(std::int64_t count) {
  cuda::scale_and_cap(logits_.as<float>(), count, static_cast<float>(1 / config_.plan.logit_divisor),
                      static_cast<float>(config_.plan.logit_cap), stream_.get());
  cuda::copy(staged_logits_.as<void>(), logits_.as<void>(), count * std::int64_t{sizeof(float)},
             stream_.get());
}

/// Waits for the pass.
void CudaBatch::take_logits(const Pass& pass) {
  const std::int64_t vocab = config_.vocab;
  stream_.synchronize();
  for (std::size_t i = 0; i < pass.tokens.size(); ++i) {
    if (TokenId* const largest = pass.tokens[i].largest; largest != nullptr) {
      *largest = staged_largest_.as<TokenId>()[i];
      if (*largest < 0)
        throw RunError("the model gave a logit that is not a number: weights or cached keys are damaged");
    }
    if (pass.tokens[i].logits == nullptr) continue;
    const float* from = staged_logits_.as<float>() + static_cast<std::int64_t>(i) * vocab;
    if (!pass.narrow) {
      from = staged_logits_.as<float>();
      linear_.head(x_.as<float>() + static_cast<std::int64_t>(i) * config_.hidden, 1, model_->final_norm,
                   static_cast<float>(config_.norm_eps), model_->output, logits_.as<float>());
      finish_logits(vocab);
      stream_.synchronize();
    }
    std::copy_n(from, vocab, pass.tokens[i].logits);
  }
}

/// As if each token had been decoded alone.
void CudaBatch::count_work(const Pass& pass) const {
  for (const Group& group : pass.groups) {
    for (int layer = 0; layer < config_.layers; ++layer) {
      if (recurrent_.recurrent(layer)) continue;
      const std::int64_t token_bytes = 2 * pool_->range().layout(layer).row_bytes();
      const std::int64_t window = config_.plan.layer(layer).window;
      if (window == 0 && !attends_all(group, layer)) {
        if (group.method() != nullptr) count_sparse(pass, group, layer);  // the host has counted its own
        continue;
      }
      for (int t = group.first; t < group.first + group.count; ++t) {
        const Token& token = pass.tokens[static_cast<std::size_t>(t)];
        const std::int64_t all = token.position + 1, keys = window > 0 ? std::min(window, all) : all;
        // Far keys of a method's dense layers are attended to, all of them.
        const std::int64_t far = token.sparse() && window == 0 ? token.index_end - token.row->dense.sink : 0;
        for (int head = 0; head < config_.kv_heads_of(layer); ++head)
          token.row->work->attend += work_of(keys, far, far, token_bytes);
      }
    }
  }
}

void CudaBatch::count_sparse(const Pass& pass, const Group& group, int layer) const {
  const GpuSelector& selector = *group.method()->selector;
  const std::vector<int> heads = all_kv_heads(config_.kv_heads);
  const std::int64_t token_bytes = 2 * pool_->range().layout().row_bytes();
  for (int t = 0; t < group.count; ++t) {
    const Token& token = pass.tokens[static_cast<std::size_t>(group.first + t)];
    ForwardWork& work = *token.row->work;
    const CountedToken of = {.counts = group.method()->counts.as<std::int32_t>(),
                             .layer = layer,
                             .kv_heads = config_.kv_heads,
                             .token = selector.counted_token(t),
                             .position = token.select_position()};
    const std::int64_t far = token.index_end - token.row->dense.sink,
                       always = token.far_end - token.index_end;
    std::int64_t all_chosen = 0;
    for (const int head : heads) {
      const std::int64_t chosen = std::min(far, selector.listed(of, head) - always);
      all_chosen += selector.listed(of, head);
      work.attend += work_of(token.position + 1, far, chosen, token_bytes);
    }
    work.select.bytes += selector.select_bytes(of, heads, all_chosen);
    ++work.sparse_tokens;
  }
}

}  // namespace lode
