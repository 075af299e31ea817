// SPDX-License-Identifier: Apache-2.0
#include "gpu/select/host_choice.h"

#include "attend/attend.h"

namespace lode {

/// The parts' queries to the host.
void HostChoice::bring(const float* q, const float* q_unrotated, const cuda::Stream& stream) {
  const std::int64_t width = std::int64_t{geometry_.query_heads} * geometry_.head_dim;
  std::int64_t tokens = 0;
  for (const Part& part : parts_) tokens += part.block.tokens;
  const std::int64_t bytes = tokens * width * std::int64_t{sizeof(float)};
  for (cuda::PinnedBuffer* const to : {&q_, &q_unrotated_})
    if (to->bytes() < bytes) *to = cuda::PinnedBuffer(bytes);
  cuda::copy(q_.as<void>(), q, bytes, stream.get());
  cuda::copy(q_unrotated_.as<void>(), q_unrotated, bytes, stream.get());
  stream.synchronize();
  std::int64_t first = 0;
  for (Part& part : parts_) {
    const auto count = static_cast<std::size_t>(part.block.tokens * width);
    part.block.q = {q_.as<float>() + first * width, count};
    part.block.q_unrotated = {q_unrotated_.as<float>() + first * width, count};
    first += part.block.tokens;
  }
}

void HostChoice::choose(std::vector<Part> parts, Selector& selector, const LayerGeometry& geometry,
                        const float* q, const float* q_unrotated, const cuda::Stream& stream) {
  parts_ = std::move(parts);
  geometry_ = geometry;
  bring(q, q_unrotated, stream);
  std::vector<QueryBlock> blocks;
  selections_.resize(parts_.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const QueryBlock& block = blocks.emplace_back(parts_[i].block);
    ForwardWork& work = *parts_[i].work;
    selections_[i].clear();
    selector.select({&block, 1}, selections_[i]);
    const SelectWork select = selector.take_work();
    work.select.bytes += select.bytes;
    work.select.keys_scored += select.keys_scored;
    work.sparse_tokens += block.tokens;
    work.attend += count_attended({&block, 1}, selections_[i], geometry);
  }
  groups_ = group_sets(selections_, blocks, geometry);
}

cuda::RowLists HostChoice::lists(int first, int count, const cuda::Stream& stream) {
  std::vector<ListedBlock> listed;
  std::int64_t at = -std::int64_t{first};
  for (const Part& part : parts_) {
    listed.push_back({.block = &part.block, .first = at, .seam = part.seam});
    at += part.block.tokens;
  }
  lists_.assign(groups_, listed, geometry_, count);
  return lists_.upload(memory_, stream.get());
}

}  // namespace lode
