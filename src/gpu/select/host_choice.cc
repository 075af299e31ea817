// SPDX-License-Identifier: Apache-2.0
#include "gpu/select/host_choice.h"

#include "attend/attend.h"

namespace lode {

/// The parts' queries to the host.
void HostChoice::bring(std::span<Part> parts, const LayerGeometry& geometry, const float* q,
                       const float* q_unrotated, const cuda::Stream& stream) {
  const std::int64_t width = std::int64_t{geometry.query_heads} * geometry.head_dim;
  std::int64_t tokens = 0;
  for (const Part& part : parts) tokens += part.block.tokens;
  const std::int64_t bytes = tokens * width * std::int64_t{sizeof(float)};
  for (cuda::PinnedBuffer* const to : {&q_, &q_unrotated_})
    if (to->bytes() < bytes) *to = cuda::PinnedBuffer(bytes);
  cuda::copy(q_.as<void>(), q, bytes, stream.get());
  cuda::copy(q_unrotated_.as<void>(), q_unrotated, bytes, stream.get());
  stream.synchronize();
  std::int64_t first = 0;
  for (Part& part : parts) {
    const auto count = static_cast<std::size_t>(part.block.tokens * width);
    part.block.q = {q_.as<float>() + first * width, count};
    part.block.q_unrotated = {q_unrotated_.as<float>() + first * width, count};
    first += part.block.tokens;
  }
}

cuda::RowLists HostChoice::choose(std::span<Part> parts, Selector& selector, const LayerGeometry& geometry,
                                  const float* q, const float* q_unrotated, const cuda::Stream& stream) {
  bring(parts, geometry, q, q_unrotated, stream);
  std::vector<QueryBlock> blocks;
  selections_.resize(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const QueryBlock& block = blocks.emplace_back(parts[i].block);
    ForwardWork& work = *parts[i].work;
    selections_[i].clear();
    selector.select({&block, 1}, selections_[i]);
    const SelectWork select = selector.take_work();
    work.select.bytes += select.bytes;
    work.select.keys_scored += select.keys_scored;
    work.sparse_tokens += block.tokens;
    work.attend += count_attended({&block, 1}, selections_[i], geometry);
  }
  std::vector<ListedBlock> listed;
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    listed.push_back({.block = &blocks[i], .first = tokens, .near_begin = parts[i].near_begin});
    tokens += blocks[i].tokens;
  }
  lists_.assign(group_sets(selections_, blocks, geometry), listed, geometry, tokens);
  return lists_.upload(memory_, stream.get());
}

}  // namespace lode
