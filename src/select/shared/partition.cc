// SPDX-License-Identifier: Apache-2.0
#include "select/shared/partition.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "ann/kmeans.h"
#include "base/rng.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/centroids.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kBlock = 4096;  // keys of all heads un-rotated and labelled at a time
constexpr std::int64_t kPiece = 64;    // of one thread's item

}  // namespace

PartitionSelector::PartitionSelector(const LayerGeometry& geometry)
    : PerTokenSelector(geometry), scratch_(static_cast<std::size_t>(workers())) {}

void PartitionSelector::append(std::int32_t sequence, KvLayer kv, Position far_end) {
  const auto [at, fresh] = indexes_.try_emplace(sequence);
  if (fresh) at->second = empty_index();
  extend(at->second, kv, far_end);
}

void PartitionSelector::roll_back(std::int32_t sequence, std::int64_t tokens) {
  if (tokens == 0) {  // another text's buckets are its own
    indexes_.erase(sequence);
    return;
  }
  if (const auto found = indexes_.find(sequence); found != indexes_.end()) found->second.roll_back(tokens);
}

void PartitionSelector::save(std::int32_t sequence, SectionWriter& out) const {
  const BucketIndex* index = find_index(sequence);
  (index == nullptr ? empty_index() : *index).save(out);
}

void PartitionSelector::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  set_index(sequence, read_index(in, kv));
}

BucketIndex PartitionSelector::read_index(const SectionReader& in, KvLayer kv) const {
  const BucketIndex empty = empty_index();
  const int d = empty.centroids(0).empty() ? 0 : geometry_.head_dim;
  return BucketIndex::load(in, empty.begin(), geometry_.kv_heads, d, kv.tokens);
}

std::int64_t PartitionSelector::index_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [sequence, index] : indexes_) bytes += index.bytes();
  return bytes;
}

const BucketIndex* PartitionSelector::find_index(std::int32_t sequence) const {
  const auto found = indexes_.find(sequence);
  return found == indexes_.end() ? nullptr : &found->second;
}

void PartitionSelector::set_index(std::int32_t sequence, BucketIndex index) {
  indexes_.insert_or_assign(sequence, std::move(index));
  ++versions_;
}

bool PartitionSelector::copy_index(std::int32_t sequence, const PartitionSelector& other) {
  const BucketIndex* const index = other.find_index(sequence);
  if (index == nullptr || other.geometry_.dense.sink != geometry_.dense.sink) return false;
  set_index(sequence, *index);
  indexes_.at(sequence).set_ordered(0);
  return true;
}

RowOrder PartitionSelector::row_order(std::int32_t sequence, int head, Position end) const {
  const BucketIndex* const index = find_index(sequence);
  if (index == nullptr || end > index->end() || end <= index->begin()) return {};
  return {.begin = index->begin(), .tokens = index->listed(head, end)};
}

void PartitionSelector::rows_ordered(std::int32_t sequence, Position end) {
  if (const auto found = indexes_.find(sequence); found != indexes_.end()) found->second.set_ordered(end);
}

Position PartitionSelector::ordered_end(std::int32_t sequence) const {
  const BucketIndex* const index = find_index(sequence);
  return index == nullptr ? 0 : index->ordered_end();
}

const BucketIndex& PartitionSelector::index_of(const SelectUnit& unit) const {
  const BucketIndex& index = indexes_.at(unit.block->sequence);
  LODE_ASSERT(index.begin() == unit.far_begin && index.end() >= unit.far_end &&
              index.ordered_end() <= unit.far_end);
  return index;
}

void PartitionSelector::extend(BucketIndex& index, KvLayer kv, Position end) const {
  while (index.end() < end) {
    const auto stop = static_cast<Position>(std::min<std::int64_t>(end, index.end() + kBlock));
    LODE_ASSERT(stop <= kv.tokens);
    extend_block(index, kv, stop);
  }
}

void PartitionSelector::extend_block(BucketIndex& index, KvLayer kv, Position end) const {
  const Position begin = index.end();
  const std::int64_t count = end - begin, d = geometry_.head_dim, heads = index.heads();
  const std::int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<float> x(static_cast<std::size_t>(heads * count * d));          // [Hkv, count, d]
  std::vector<std::int32_t> labels(static_cast<std::size_t>(heads * count));  // [Hkv, count]
  for_each(pieces, [&](std::int64_t piece, int) {
    std::vector<float> keys(static_cast<std::size_t>(heads * d));  // [Hkv, d]
    for (std::int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); ++i) {
      read_stored_keys(kv.heads, begin + static_cast<Position>(i), unrotate_by(), keys);
      for (std::int64_t h = 0; h < heads; ++h)
        std::copy_n(keys.data() + h * d, d, x.data() + (h * count + i) * d);
    }
  });
  for_each(heads * pieces, [&](std::int64_t item, int) {
    const std::int64_t head = item / pieces, first = item % pieces * kPiece,
                       some = std::min(kPiece, count - first);
    label(index, static_cast<int>(head), {x.data() + (head * count + first) * d, some, d},
          std::span(labels).subspan(static_cast<std::size_t>(head * count + first),
                                    static_cast<std::size_t>(some)));
  });
  index.add(labels, count);
}

std::vector<float> PartitionSelector::train_centroids(const KvRows& kv, int head, Position begin,
                                                      std::int64_t keys, std::int64_t clusters) const {
  const std::int64_t d = geometry_.head_dim;
  const std::uint64_t seed = hash_seed(geometry_.seed, geometry_.layer, geometry_.kv_head_in_layer(head));
  std::vector<Position> sample(static_cast<std::size_t>(keys));
  std::iota(sample.begin(), sample.end(), begin);
  // Time grows with clusters x sample: of many clusters each learns from fewer keys (kTrainingKeysPerCentroid says
  // what that costs).
  constexpr std::int64_t kMany = 1024, kFewKeys = 8;
  const std::int64_t limit =
      std::max(std::min(clusters, kMany) * kTrainingKeysPerCentroid, clusters * kFewKeys);
  if (keys > limit) {
    Rng rng(seed);
    for (std::int64_t i = 0; i < limit; ++i) {
      const auto pick = i + static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(keys - i)));
      std::swap(sample[static_cast<std::size_t>(i)], sample[static_cast<std::size_t>(pick)]);
    }
    sample.resize(static_cast<std::size_t>(limit));
    std::sort(sample.begin(), sample.end());
  }
  std::vector<float> x(sample.size() * static_cast<std::size_t>(d));  // [sample, d]
  for_each((std::ssize(sample) + kPiece - 1) / kPiece, [&](std::int64_t item, int) {
    for (std::int64_t i = item * kPiece; i < std::min(std::ssize(sample), (item + 1) * kPiece); ++i) {
      read_stored_keys({&kv, 1}, sample[static_cast<std::size_t>(i)], unrotate_by(),
                       std::span(x).subspan(static_cast<std::size_t>(i * d), static_cast<std::size_t>(d)));
    }
  });
  return spherical_kmeans({x.data(), std::ssize(sample), d}, {.clusters = clusters, .seed = seed},
                          *geometry_.pool);
}

std::int64_t PartitionSelector::add_best_buckets(const SelectUnit& unit, int worker, std::span<float> scores,
                                                 std::int64_t probes, Selection& out, SelectWork& work) {
  const BucketIndex& index = index_of(unit);
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  const std::span<const Position> firsts = index.firsts(unit.kv_head);
  for (std::size_t bucket = 0; bucket < firsts.size(); ++bucket) {
    // A probe would be wasted on a bucket without far keys.
    if (firsts[bucket] >= unit.far_end) scores[bucket] = -std::numeric_limits<float>::infinity();
  }
  s.probes.clear();
  top_k(scores, probes, 0, s.probes);
  s.rows.reset(unit.far_end);
  std::int64_t visited = 0, listed = 0;
  for (const Position bucket : s.probes) {  // rising, as their rows are
    const Run run = index.ordered_rows(unit.kv_head, bucket);
    out.add_run(run.begin, run.end);
    const std::span<const Position> rows = index.rows_behind(unit.kv_head, bucket, unit.far_end);
    for (const Position row : rows) s.rows.insert(row);
    listed += std::ssize(rows);
    visited += run.end - run.begin + std::ssize(rows);
  }
  work.bytes += listed * std::int64_t{sizeof(Position)};
  if (listed == 0) return visited;
  s.chosen.clear();
  s.rows.drain([&](std::int64_t row) { s.chosen.push_back(static_cast<Position>(row)); });
  out.add_rows(s.chosen);
  return visited;
}

}  // namespace lode
