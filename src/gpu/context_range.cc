// SPDX-License-Identifier: Apache-2.0
// A context of which this GPU has a range of tokens, others the rest (context parallelism).
//
// All of these GPUs run every product for every token. The one whose range a token falls into keeps its key and value;
// on the others they go to rows that nobody attends and that are overwritten. Each attends to its range, and the states
// are merged in the order of the ranges: the same bits on all. A step's tokens never lie in two ranges.
#include <algorithm>

#include "gpu/context.h"
#include "kernels/cuda/attend/attend_shared.h"
#include "kernels/cuda/attend/merge_states.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Query tokens that read the keys of a range in front of them together.
constexpr int kSharedTokens = 128;

}  // namespace

RangeTalk::RangeTalk(const cuda::GroupExchange& exchange, int rank, int size, std::int64_t room,
                     cuda::StreamHandle stream, std::function<void()> meet)
    : exchange_(exchange),
      rank_(rank),
      size_(size),
      room_(room),
      stream_(stream),
      meet_(std::move(meet)),
      gathered_(size * room * std::int64_t{sizeof(std::int32_t)}, "what other GPUs have told") {}

std::int32_t* RangeTalk::part(std::int64_t count) {
  LODE_ASSERT(count <= room_);
  return reinterpret_cast<std::int32_t*>(state());
}

const std::int32_t* RangeTalk::gather(std::int64_t count) {
  LODE_ASSERT(count <= room_);
  meet_();
  exchange_.gather(rank_, slot(), count, gathered_.as<void>(), stream_);
  meet_();
  ++calls_;
  return gathered_.as<std::int32_t>();
}

void RangeTalk::merge(std::int64_t rows, int d, float* to) {
  meet_();
  exchange_.merge(rank_, slot(), rows, d, to, stream_);
  meet_();
  ++calls_;
}

std::int64_t range_exchange_room(const ModelConfig& share, std::int64_t chunk) {
  return std::max(chunk * share.query_heads * (share.head_dim + 1),
                  RangeTalk::room_to_tell(share.query_heads));
}

void CudaContext::make_range_buffers() {
  const char* const what = "attention over a range of the text";
  const int rank = share_.ranges.rank, size = share_.ranges.size;
  talk_ = std::make_unique<RangeTalk>(*share_.ranges.exchange, rank, size,
                                      RangeTalk::room_to_tell(config_.query_heads), stream_.get(),
                                      [this] { meet_others(); });
  near_places_ = cuda::Buffer(places_.bytes(), what);
  staged_near_places_ = cuda::PinnedBuffer(places_.bytes());
  write_bases_ = cuda::Buffer(sizeof(const char*), what);
  staged_write_bases_ = cuda::PinnedBuffer(sizeof(const char*));
  shared_workspace_ =
      cuda::Buffer(cuda::shared_workspace_bytes(kSharedTokens, config_.query_heads, config_.head_dim), what);
}

void CudaContext::take_range(const TextRange& range) {
  LODE_ASSERT(tokens_ == 0 && share_.ranges);
  held_ = range;
}

/// What of sink and window lies in this range: the first has the sink, the last the window.
LocalWindow CudaContext::dense_here(const LocalWindow& dense) const {
  if (!share_.ranges) return dense;
  LocalWindow here = dense;
  if (share_.ranges.rank > 0) here.sink = 0;
  if (share_.ranges.rank + 1 < share_.ranges.size) here.window = 0;
  return here;
}

/// How many keys of this range a token of the step sees.
std::int64_t CudaContext::visible(int token) const {
  return rows_here() + (held_.has(tokens_) ? token + 1 : 0);
}

/// Where the step's rows go, and what its queries see.
void CudaContext::stage_range(const Run& run) {
  if (!share_.ranges) return;
  talk_->begin();
  for (int i = 0; i < run.count; ++i)
    staged_near_places_.as<cuda::QueryToken>()[i] = {0, static_cast<std::int32_t>(visible(i) - 1)};
  // A row that is at the same place of its block as in the whole text, not in front of the first that is free.
  const std::int64_t row = rows_here() + (held_.has(tokens_) ? 0 : tokens_ % cuda::kBlockTokens);
  LODE_ASSERT((tokens_ - row) % cuda::kBlockTokens == 0);
  *staged_write_bases_.as<const char*>() =
      range_.base() - (tokens_ - row) / cuda::kBlockTokens * range_.layout().block_stride();
  far_of_step_.clear();
  for (int i = 0; i < run.count && run.native != nullptr; ++i)
    far_of_step_.push_back(far_keys(run.step.dense, tokens_ + i));
}

/// The state of attention over this GPU's range goes to where the others read it.
void CudaContext::aim_at_part(cuda::Queries& own) const {
  own.o = talk_->state();
  own.lse = own.o + std::int64_t{own.count} * own.query_heads * own.layout.head_dim;
}

void CudaContext::attend_over_ranges(int layer, const Run& run) {
  cuda::Queries own = queries(layer, run);
  if (run.sparse(layer)) {
    const cuda::RowLists lists =
        run.native->selector->select(layer, own, q_unrotated_.as<float>(), stream_.get());
    aim_at_part(own);
    attend_rows_decode(own, lists, options_.max_tokens, workspace_.as<void>(), stream_.get());
  } else {
    aim_at_part(own);
    attend_range(own);
  }
  talk_->merge(std::int64_t{run.count} * config_.query_heads, config_.head_dim, attention_.as<float>());
}

/// All keys of this range that the queries see.
void CudaContext::attend_range(const cuda::Queries& own) {
  const bool owns = held_.has(tokens_);
  const std::int64_t rows = rows_here(), d = own.layout.head_dim;
  if (own.count > kDecodeTokens && owns)
    return attend_prefill(own, static_cast<std::int32_t>(rows), stream_.get(), precision());
  const int most = own.count <= kDecodeTokens ? kDecodeTokens : rows == 0 ? kMostSparseTokens : kSharedTokens;
  for (int first = 0; first < own.count; first += most) {
    cuda::Queries some = own;
    const std::int64_t row = std::int64_t{first} * own.query_heads;
    some.count = std::min(most, own.count - first);
    some.tokens += first, some.q += row * d, some.o += row * d, some.lse += row;
    if (most != kSharedTokens) {
      attend_full_decode(some, options_.max_tokens, workspace_.as<void>(), stream_.get());
      continue;
    }
    const cuda::StatePlanes planes =
        attend_shared(some, rows, shared_workspace_.as<void>(), stream_.get(), precision());
    cuda::merge_parts(planes.outputs, planes.lse, planes.count, std::int64_t{some.count} * own.query_heads,
                      static_cast<int>(d), some.o, some.lse, stream_.get());
  }
}

/// Around what all GPUs launch, unless it is recorded.
void CudaContext::meet_others() const {
  if (!recording_ && share_.meet) share_.meet();
}

/// A GPU has failed, for which the others would wait.
void CudaContext::stop_exchanges() const noexcept {
  for (const Group* const group : {&share_.heads, &share_.ranges})
    if (*group) group->exchange->stop();
}

void CudaContext::expect_whole() const {
  for (const Group* const group : {&share_.heads, &share_.ranges})
    if (*group) group->exchange->expect_whole();
}

}  // namespace lode
