// SPDX-License-Identifier: Apache-2.0
// How a layer attends on the GPU: all of its keys, those that the GPU chose or the host chose; and with keys
// and values in host memory, the two of them together.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "attend/window.h"
#include "gpu/context.h"
#include "kernels/cuda/attend/attend_block.h"
#include "kernels/cuda/attend/attend_window.h"
#include "kernels/cuda/attend/merge_states.h"
#include "lodestone/error.h"
#include "select/shared/estimates_rest.h"

namespace lode {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Enqueues a copy to host memory as large as the buffer; returns its bytes.
std::int64_t download_floats(const cuda::Buffer& from, std::int64_t count, cuda::PinnedBuffer& to,
                             cuda::StreamHandle stream) {
  if (to.bytes() < from.bytes()) to = cuda::PinnedBuffer(from.bytes());
  const std::int64_t bytes = count * std::int64_t{sizeof(float)};
  cuda::copy(to.as<void>(), from.as<void>(), bytes, stream);
  return bytes;
}

std::span<const float> floats(const cuda::PinnedBuffer& buffer, std::int64_t count) {
  if (buffer.bytes() == 0) return {};
  return {buffer.as<float>(), static_cast<std::size_t>(count)};
}

/// Every far key of every query.
void choose_all(const QueryBlock& block, const LayerGeometry& where, Selection& selection) {
  for (int head = 0; head < where.kv_heads; ++head) {
    selection.add_set({.sequence = block.sequence,
                       .kv_head = head,
                       .heads = all_heads(where.group()),
                       .token_begin = 0,
                       .token_end = static_cast<std::int32_t>(block.tokens)});
    selection.add_run(block.far_begin, block.far_end(block.tokens - 1, where.dense));
  }
}

}  // namespace

/// Memory for the step's new rows, and what must be on the GPU before it begins.
void CudaContext::make_room(const Run& run) {
  if (run.reach == Reach::all)
    range_.back(rows_here() + run.count + (share_.ranges ? cuda::kBlockTokens : 0));
  if (run.reach != Reach::split) return;
  const std::int64_t heads = config_.query_heads, d = config_.head_dim, number = sizeof(float);
  if (near_lse_.bytes() < run.count * heads * number) {
    near_lse_ = cuda::Buffer(run.count * heads * number, "states of a question");
    far_ = cuda::Buffer(run.count * heads * (d + 1) * number, "states of a question");
    host_far_ = cuda::PinnedBuffer(far_.bytes());
  }
  const QueryBlock block = places_of(run);
  tier_->hold(range_, *run.step.sequences.front().kv, block.far_begin, block.far_end(0, run.step.dense),
              run.count, stream_.get());
  if (uses_active(run))
    active_->begin_step(run.step.selectors.data(), tokens_, run.count, *run.step.sequences.front().kv,
                        stream_.get());
  list_near_keys(run);
}

/// Whether the GPU attends keys that the step's method found before. Dense steps do not: the host attends
/// all. Nor does a method that estimates what it skips: an active key that it skips would count twice.
bool CudaContext::uses_active(const Run& run) const {
  const auto& selectors = run.step.selectors;
  return active_ != nullptr && run.reach == Reach::split && !selectors.empty() &&
         run.count <= kMostSparseTokens && std::none_of(selectors.begin(), selectors.end(), estimates_rest);
}

/// The rows that the GPU attends in every layer of a split step: sink and window, by the kernel's own rule,
/// what lies between the far keys and the kernel's window where that does not slide, and active keys, of
/// which each layer has its own number.
void CudaContext::list_near_keys(const Run& run) {
  const QueryBlock block = places_of(run);
  const LayerGeometry where = geometry(0, run);
  Selection none;
  for (int head = 0; head < config_.kv_heads; ++head)
    none.add_set({.sequence = block.sequence,
                  .kv_head = head,
                  .heads = all_heads(where.group()),
                  .token_begin = 0,
                  .token_end = run.count});
  const ListedBlock listed = {.block = &block};
  hits_.assign(group_sets({&none, 1}, {&block, 1}, where), {&listed, 1}, where, run.count);
  if (uses_active(run)) active_->list(hits_, run.count, stream_.get());
  near_lists_ = hits_.upload(near_memory_, stream_.get());
}

LayerGeometry CudaContext::geometry(int layer, const Run& run) const {
  return {.layer = layer,
          .query_heads = config_.query_heads,
          .kv_heads = config_.kv_heads,
          .head_dim = config_.head_dim,
          .scale = score_scale(config_),
          .dense = run.step.dense,
          .rope = &turns_.of(layer, run.rope).rope,
          .pool = options_.pool};
}

/// The host's copy of the layer's vectors goes to the host's store and to the selectors that listen.
void CudaContext::tell_listeners(int layer, const Run& run) {
  const std::int64_t q = query_floats(layer, run), kv = kv_floats(layer, run);
  const bool own = config_.plan.layer(layer).own_rows(), shown = shown_rows_.contains(layer);
  const bool heard = run.window(layer) == 0 && !run.step.listeners.empty() &&
                     !run.step.listeners[static_cast<std::size_t>(layer)].empty();
  std::int64_t bytes = 0;
  const auto download = [&](const cuda::Buffer& from, std::int64_t count, cuda::PinnedBuffer& to) {
    bytes += download_floats(from, count, to, stream_.get());
  };
  if (heard || run.host_chooses()) {
    download(q_, q, host_q_);
    download(q_unrotated_, q, host_q_unrotated_);
  }
  if (own) {
    download(k_, kv, host_k_);
    download(v_, kv, host_v_);
    if (heard || shown) download(k_unrotated_, kv, host_k_unrotated_);
  }
  const auto waits = Clock::now();
  stream_.synchronize();
  if (tier_ != nullptr) {
    tier_work_.bytes_to_host += bytes;
    tier_work_.wait_seconds += seconds_since(waits);
  }
  if (shown)
    for (const auto& [from, to] : {std::pair(&host_k_unrotated_, &ShownRows::k_unrotated),
                                   std::pair(&host_k_, &ShownRows::k), std::pair(&host_v_, &ShownRows::v)})
      (shown_rows_[layer].*to).assign(from->as<float>(), from->as<float>() + kv);
  const SequenceTokens& sequence = run.step.sequences.front();
  LODE_ASSERT(sequence.kv->tokens() == tokens_);
  const KvWrite write = write_of(layer, run);
  if (share_.tell) return share_.tell(layer, run.step, write);
  if (own) sequence.kv->write(layer, run.count, write.k, write.v, options_.pool);
  if (!heard) return;
  for (Selector* listener : run.step.listeners[static_cast<std::size_t>(layer)]) listener->on_write(write);
}

/// The layer's vectors on the host. Of a layer that attends to an earlier one's rows, these are what that one had.
KvWrite CudaContext::write_of(int layer, const Run& run) const {
  const std::int64_t q = query_floats(layer, run), kv = kv_floats(layer, run);
  KvWrite write = {.sequence = run.step.sequences.front().id,
                   .phase = run.step.phase,
                   .begin = static_cast<Position>(tokens_),
                   .tokens = run.count,
                   .q_unrotated = floats(host_q_unrotated_, q),
                   .k_unrotated = floats(host_k_unrotated_, kv),
                   .q = floats(host_q_, q),
                   .k = floats(host_k_, kv),
                   .v = floats(host_v_, kv)};
  if (const LayerPlan plan = config_.plan.layer(layer); !plan.own_rows()) {
    const ShownRows& shown = shown_rows_.at(plan.rows_of);
    write.k_unrotated = shown.k_unrotated, write.k = shown.k, write.v = shown.v;
  }
  return write;
}

/// Of those tokens of a context alone whose queries the layer's listeners wait for.
void CudaContext::tell_queries(int layer, const Run& run) {
  if (run.window(layer) > 0 || run.step.phase != Phase::context) return;
  const SequenceTokens& sequence = run.step.sequences.front();
  const std::int64_t width = query_floats(layer, run) / run.count;
  for (Selector* const selector : run.step.listeners[static_cast<std::size_t>(layer)]) {
    auto& listener = dynamic_cast<HearsQueries&>(*selector);
    const std::vector<Position> positions =
        listener.wanted_queries(sequence.id, static_cast<Position>(tokens_), run.count);
    if (positions.empty()) continue;
    const cuda::Buffer& from = listener.hears_rotated() ? q_ : q_unrotated_;
    cuda::PinnedBuffer& to = listener.hears_rotated() ? host_q_ : host_q_unrotated_;
    if (to.bytes() == 0) to = cuda::PinnedBuffer(from.bytes());
    for_runs(positions, [&](std::int64_t first, std::int64_t count) {
      cuda::copy(to.as<float>() + first * width,
                 from.as<float>() + (positions[static_cast<std::size_t>(first)] - tokens_) * width,
                 count * width * std::int64_t{sizeof(float)}, stream_.get());
    });
    stream_.synchronize();
    listener.on_queries({.sequence = sequence.id,
                         .begin = static_cast<Position>(tokens_),
                         .tokens = run.count,
                         .positions = positions,
                         .q = floats(to, std::ssize(positions) * width)});
  }
}

void CudaContext::attend(int layer, const Run& run, ForwardWork& work) {
  attend_keys(layer, run, work);
  if (run.reach == Reach::split && run.window(layer) == 0) return;  // which merged them with the near keys
  add_sinks(layer, run.count, attention_.as<float>(), lse_.as<float>());
}

/// The layer's sinks, if it has any, behind the keys of so many tokens.
void CudaContext::add_sinks(int layer, std::int64_t count, float* output, float* lse) const {
  const cuda::DeviceWeight& sinks = model_->layers[static_cast<std::size_t>(layer)].sinks;
  if (sinks.data == nullptr) return;
  cuda::merge_sinks(output, lse, static_cast<const float*>(sinks.data), count * config_.query_heads,
                    config_.query_heads, config_.head_dim, stream_.get());
}

void CudaContext::attend_keys(int layer, const Run& run, ForwardWork& work) {
  if (run.window(layer) > 0) return attend_window(layer, run);
  if (run.reach == Reach::split) return attend_split(layer, run, work);
  if (share_.ranges) return attend_over_ranges(layer, run);
  const cuda::Queries all = queries(layer, run);
  if (run.sparse(layer) && run.native == nullptr) return attend_chosen_by_host(layer, run, work);
  if (run.sparse(layer)) return attend_chosen_by_gpu(layer, run);
  if (run.count <= kDecodeTokens) {
    attend_full_decode(all, options_.max_tokens, workspace_.as<void>(), stream_.get());
  } else {
    attend_prefill(all, static_cast<std::int32_t>(tokens_), stream_.get(), precision());
  }
}

void CudaContext::attend_window(int layer, const Run& run) {
  if (run.reach == Reach::split) return attend_window_on_host(layer, run);
  const cuda::Queries all = queries(layer, run);
  const std::int64_t window = std::min(run.window(layer), options_.max_tokens);
  if (run.count > kDecodeTokens)
    return attend_window_prefill(all, static_cast<std::int32_t>(tokens_), window, stream_.get(), precision());
  const auto* const counts = no_rows_.as<std::int32_t>();  // of lists that are empty
  attend_rows_decode(all, {.rows = counts, .counts = counts, .window = window}, options_.max_tokens,
                     workspace_.as<void>(), stream_.get());
}

/// Where keys lie in host memory and few tokens come, bringing a window would take longer than attending it.
void CudaContext::attend_window_on_host(int layer, const Run& run) {
  const QueryBlock block = block_of(layer, run);
  const auto bytes = static_cast<std::int64_t>(block.q.size_bytes()),
             lse_bytes = lse_.bytes() == 0 ? 0 : bytes / config_.head_dim;
  if (host_outputs_.bytes() < bytes + lse_bytes) host_outputs_ = cuda::PinnedBuffer(bytes + lse_bytes);
  auto* const output = host_outputs_.as<float>();
  float* const lse = output + block.q.size();
  const std::span<float* const> wanted(&lse, lse_bytes > 0 ? 1 : 0);
  AttendWork counted_later;
  lode::attend_window({&block, 1}, {}, geometry(layer, run), run.window(layer), {&output, 1},
                      {&counted_later, 1}, wanted);
  cuda::copy(attention_.as<void>(), output, bytes, stream_.get());
  if (lse_bytes > 0) cuda::copy(lse_.as<void>(), lse, lse_bytes, stream_.get());
  tier_work_.bytes_to_gpu += bytes + lse_bytes;
}

/// Where the step's queries stand, without vectors.
QueryBlock CudaContext::places_of(const Run& run) const {
  const SequenceTokens& sequence = run.step.sequences.front();
  return {.sequence = sequence.id,
          .phase = run.step.phase,
          .begin = static_cast<Position>(tokens_),
          .tokens = run.count,
          .q = {},
          .q_unrotated = {},
          .kv = {},
          .far_begin = static_cast<Position>(run.step.dense.sink),
          .far_limit = sequence.far_limit};
}

/// The queries of a layer as the host sees them, once tell_listeners has them.
QueryBlock CudaContext::block_of(int layer, const Run& run) const {
  const std::int64_t q = std::int64_t{run.count} * config_.query_heads * config_.head_dim;
  QueryBlock block = places_of(run);
  block.q = floats(host_q_, q);
  block.q_unrotated = floats(host_q_unrotated_, q);
  block.kv = run.step.sequences.front().kv->layer(layer, run.count);
  return block;
}

/// Many tokens choose together and share what they attend.
void CudaContext::attend_chosen_by_gpu(int layer, const Run& run) {
  GpuSelector& selector = *run.native->selector;
  const cuda::Queries all = queries(layer, run);
  if (run.count > kMostSparseTokens) {
    const cuda::RowLists lists = selector.select_together(layer, all, stream_.get());
    return attend_rows_prefill(all, static_cast<std::int32_t>(tokens_), lists, parts_.as<void>(),
                               stream_.get(), precision());
  }
  const float* const q_unrotated = q_unrotated_.as<float>();
  if (selector.attend(layer, all, q_unrotated, workspace_.as<void>(), stream_.get())) return;
  const cuda::RowLists lists = selector.select(layer, all, q_unrotated, stream_.get());
  attend_rows_decode(all, lists, options_.max_tokens, workspace_.as<void>(), stream_.get());
}

void CudaContext::attend_chosen_by_host(int layer, const Run& run, ForwardWork& work) {
  const LayerGeometry where = geometry(layer, run);
  const QueryBlock block = block_of(layer, run);
  Selection selection;
  choose(layer, run, block, selection, work);
  const std::vector<SetGroup> groups = group_sets({&selection, 1}, {&block, 1}, where);
  for (int first = 0; first < run.count; first += kMostSparseTokens) {
    const cuda::Queries some =
        part_of(queries(layer, run), first, std::min(kMostSparseTokens, run.count - first));
    const ListedBlock listed = {.block = &block, .first = -first};
    lists_.assign(groups, {&listed, 1}, where, some.count);
    attend_lists(some, lists_.upload(lists_memory_, stream_.get()), options_.max_tokens,
                 workspace_.as<void>(), stream_.get());
  }
}

/// Full attention of a sparse layer's queries beside what they have; the hook sees both and may exchange them.
void CudaContext::audit(int layer, const Run& run) {
  const std::int64_t d = config_.head_dim, count = std::int64_t{run.count} * config_.query_heads * d,
                     bytes = count * std::int64_t{sizeof(float)};
  if (host_outputs_.bytes() < bytes) host_outputs_ = cuda::PinnedBuffer(bytes);
  if (host_exact_.bytes() < bytes) host_exact_ = cuda::PinnedBuffer(bytes);
  const std::span<float> outputs = {host_outputs_.as<float>(), static_cast<std::size_t>(count)};
  cuda::copy(outputs.data(), attention_.as<void>(), bytes, stream_.get());
  if (run.reach == Reach::split) {
    if (config_.plan.sinks)
      throw InputError(
          "--audit: expected a model without attention sinks, or keys and values on the GPU (--kv-tier gpu)");
    stream_.synchronize();
    const QueryBlock block = block_of(layer, run);
    float* const exact = host_exact_.as<float>();
    attend_full({&block, 1}, geometry(layer, run), {&exact, 1});
  } else {
    if (exact_.bytes() < bytes) exact_ = cuda::Buffer(bytes, "exact outputs of a layer");
    cuda::Queries all = queries(layer, run);
    all.o = exact_.as<float>();
    if (run.count <= kDecodeTokens)
      attend_full_decode(all, options_.max_tokens, workspace_.as<void>(), stream_.get());
    else
      attend_prefill(all, static_cast<std::int32_t>(tokens_), stream_.get(), precision());
    add_sinks(layer, run.count, all.o, all.lse);
    cuda::copy(host_exact_.as<void>(), exact_.as<void>(), bytes, stream_.get());
    stream_.synchronize();
  }
  run.step.hooks->compare(layer, d, outputs, {host_exact_.as<float>(), outputs.size()});
  cuda::copy(attention_.as<void>(), outputs.data(), bytes, stream_.get());
  stream_.synchronize();
}

void CudaContext::report_masses(int layer, const Run& run) {
  LODE_ASSERT(finds_masses() && run.dense());
  const cuda::KvLayout& layout = range_.layout();
  const char* const keys = range_.base() + layer * layout.layer_stride;
  masses_.report({.q = q_.as<float>(),
                  .count = run.count,
                  .query_heads = config_.query_heads,
                  .scale = score_scale(config_),
                  .layout = layout,
                  .document = keys,
                  .behind = keys,
                  .position = tokens_},
                 geometry(layer, run), run.step.sequences.front().id, *run.step.hooks, stream_);
}

/// The GPU attends what it holds while the host chooses and attends the rest; merged in this order.
void CudaContext::attend_split(int layer, const Run& run, ForwardWork& work) {
  cuda::Queries near = queries(layer, run);
  near.lse = near_lse_.as<float>();
  cuda::RowLists near_lists = near_lists_;
  if (uses_active(run)) near_lists.counts = active_->counts(layer);
  attend_lists(near, near_lists, options_.max_tokens, workspace_.as<void>(), stream_.get());
  add_sinks(layer, run.count, near.o, near.lse);
  const LayerGeometry where = geometry(layer, run);
  const QueryBlock block = block_of(layer, run);
  const auto begin = Clock::now();
  Selection selection;
  AttendWork attended;
  if (run.sparse(layer)) {
    const AttendWork before = work.attend;
    choose(layer, run, block, selection, work);
    attended.far_keys = work.attend.far_keys - before.far_keys;
    attended.far_total = work.attend.far_total - before.far_total;
    attended.dense_keys = work.attend.dense_keys - before.dense_keys;
    if (uses_active(run)) leave_active(layer, run, block, selection, attended, work);
  } else {
    choose_all(block, where, selection);
    attended = count_full({&block, 1}, where);
    attended.far_keys = attended.far_total;
  }
  tier_work_.search_seconds += seconds_since(begin);
  tier_work_.host_keys += attended.far_keys;
  tier_work_.gpu_keys += attended.dense_keys;
  const auto found = Clock::now();
  const std::int64_t rows = std::int64_t{run.count} * config_.query_heads, d = config_.head_dim;
  auto* const state = host_far_.as<float>();  // [rows, d], [rows]
  attend_far(block, selection, where, {.output = state, .lse = state + rows * d, .rows = rows, .d = d});
  tier_work_.attend_seconds += seconds_since(found);
  cuda::copy(far_.as<void>(), state, rows * (d + 1) * std::int64_t{sizeof(float)}, stream_.get());
  tier_work_.bytes_to_gpu += rows * (d + 1) * std::int64_t{sizeof(float)};
  cuda::merge_states(attention_.as<float>(), near_lse_.as<float>(), far_.as<float>(),
                     far_.as<float>() + rows * d, rows, static_cast<int>(d), stream_.get());
}

/// Leaves to the host what of its choice the GPU does not attend.
void CudaContext::leave_active(int layer, const Run& run, const QueryBlock& block, Selection& selection,
                               AttendWork& attended, ForwardWork& work) {
  Selection rest;
  std::vector<std::int64_t> of_heads;
  for (int head = 0; head < config_.kv_heads; ++head)
    of_heads.push_back(std::ssize(active_->keys().rows(layer, head)));
  const std::int64_t active = run.count * active_->active(layer), found = attended.far_keys;
  active_->keys().take(layer, selection, rest, *options_.pool);
  selection = std::move(rest);
  // Heads that choose apart may find a key several times: it counts once, as in what was found.
  attended.far_keys = count_attended({&block, 1}, selection, geometry(layer, run), of_heads).far_keys;
  const std::int64_t hits = found - attended.far_keys;
  attended.dense_keys += active;
  work.attend.far_keys += active - hits;
  work.attend.kv_bytes += (active - hits) * block.kv.heads.front().token_bytes();
  tier_work_.active_keys += active;
  tier_work_.active_hits += hits;
}

/// Has the layer's selector choose for the block, tells it what its keys weigh if it asks, and counts.
void CudaContext::choose(int layer, const Run& run, const QueryBlock& block, Selection& selection,
                         ForwardWork& work) {
  const LayerGeometry where = geometry(layer, run);
  Selector& selector = *run.step.selectors[static_cast<std::size_t>(layer)];
  selector.append(block.sequence, block.kv, block.far_end(block.tokens - 1, where.dense));
  selector.select({&block, 1}, selection);
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

}  // namespace lode
