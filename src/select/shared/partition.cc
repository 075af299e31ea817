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

/// Each number := the least of all ranks'.
void least_of_all(Communicator& ranks, std::span<Position> numbers) {
  std::vector<std::vector<Position>> all(static_cast<std::size_t>(ranks.size()),
                                         std::vector<Position>(numbers.size()));
  std::ranges::copy(numbers, all[static_cast<std::size_t>(ranks.rank())].begin());
  std::vector<std::span<std::byte>> parts;
  for (std::vector<Position>& part : all) parts.push_back(std::as_writable_bytes(std::span(part)));
  ranks.all_gather(parts);
  for (const std::vector<Position>& part : all)
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::min(numbers[i], part[i]);
}

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
  if (share().divided()) all_buckets_[sequence] = gather_buckets(index);
  indexes_.insert_or_assign(sequence, std::move(index));
  ++versions_;
}

PartitionSelector::TrainingKeys PartitionSelector::training_keys(KvLayer kv) const {
  const auto begin = static_cast<Position>(sink());
  return {begin, (share().divided() ? share().tokens : kv.tokens) - begin};
}

PartitionSelector::AllBuckets PartitionSelector::gather_buckets(const BucketIndex& index) const {
  constexpr Position kElsewhere = std::numeric_limits<Position>::max();
  AllBuckets all;
  all.late_begin = static_cast<Position>(std::max<std::int64_t>(0, share().tokens - geometry_.dense.window));
  const std::int64_t late = share().tokens - all.late_begin;
  all.late.assign(static_cast<std::size_t>(index.heads() * late), kElsewhere);
  for (int head = 0; head < index.heads(); ++head) {
    all.firsts.insert(all.firsts.end(), index.firsts(head).begin(), index.firsts(head).end());
    for (std::int64_t bucket = 0; bucket < index.buckets(); ++bucket) {
      const std::span<const Position> rows = index.rows(head, bucket, index.end());
      all.sizes.push_back(std::ssize(rows));
      for (auto row = std::ranges::lower_bound(rows, all.late_begin); row != rows.end(); ++row)
        all.late[static_cast<std::size_t>(head * late + *row - all.late_begin)] =
            static_cast<Position>(bucket);
    }
  }
  least_of_all(*share().ranks, all.firsts);
  least_of_all(*share().ranks, all.late);
  share().ranks->sum(all.sizes);
  return all;
}

std::vector<std::int64_t> PartitionSelector::bucket_sizes(std::int32_t sequence) const {
  if (share().divided()) return all_buckets_.at(sequence).sizes;
  const BucketIndex& index = indexes_.at(sequence);
  std::vector<std::int64_t> sizes;
  for (int head = 0; head < index.heads(); ++head)
    for (std::int64_t bucket = 0; bucket < index.buckets(); ++bucket)
      sizes.push_back(std::ssize(index.rows(head, bucket, index.end())));
  return sizes;
}

void PartitionSelector::count_far_keys(const SelectUnit& unit, std::span<std::int64_t> keys) const {
  const BucketIndex& index = index_of(unit);
  if (!share().divided()) {
    for (std::size_t bucket = 0; bucket < keys.size(); ++bucket)
      keys[bucket] = index.keys(unit.kv_head, static_cast<std::int64_t>(bucket), unit.far_end);
    return;
  }
  const AllBuckets& all = all_buckets_.at(unit.block->sequence);
  const std::int64_t late = share().tokens - all.late_begin;
  std::copy_n(all.sizes.begin() + unit.kv_head * index.buckets(), keys.size(), keys.begin());
  for (std::int64_t row = std::max(unit.all_far_end, all.late_begin); row < share().tokens; ++row) {
    const Position bucket = all.late[static_cast<std::size_t>(unit.kv_head * late + row - all.late_begin)];
    if (bucket < index.buckets()) --keys[static_cast<std::size_t>(bucket)];  // else it lies in the sink
  }
}

/// The first key of each bucket of the unit's head, wherever it lies.
std::span<const Position> PartitionSelector::all_firsts(const SelectUnit& unit) const {
  const BucketIndex& index = index_of(unit);
  if (!share().divided()) return index.firsts(unit.kv_head);
  const auto buckets = static_cast<std::size_t>(index.buckets());
  return std::span(all_buckets_.at(unit.block->sequence).firsts)
      .subspan(static_cast<std::size_t>(unit.kv_head) * buckets, buckets);
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

void PartitionSelector::extend_to_context(BucketIndex& index, KvLayer kv) const {
  const auto end = static_cast<Position>(kv.tokens);
  const KeysOnDevice keys = {geometry_.layer, heads_in_layer(geometry_), index.end(), end, unrotate_by()};
  if (!labels_by_centroids() || !on_device(keys, index.buckets())) return extend(index, kv, end);
  std::vector<std::vector<float>> centroids;
  for (int head = 0; head < geometry_.kv_heads; ++head) centroids.push_back(label_centroids(index, head));
  index.add(device_->labels(keys, centroids), keys.count());
}

std::uint64_t PartitionSelector::seed_of(int head) const {
  return hash_seed(geometry_.seed, geometry_.layer, geometry_.kv_head_in_layer(head));
}

std::vector<std::vector<float>> PartitionSelector::train_centroids(KvLayer kv, Position begin,
                                                                   std::int64_t keys,
                                                                   std::int64_t clusters) const {
  std::vector<std::vector<Position>> samples;
  std::vector<std::uint64_t> seeds;
  for (int head = 0; head < geometry_.kv_heads; ++head) {
    samples.push_back(training_sample(head, begin, keys, clusters));
    seeds.push_back(seed_of(head));
  }
  const KeysOnDevice all = {geometry_.layer, heads_in_layer(geometry_), begin,
                            static_cast<Position>(begin + keys), unrotate_by()};
  if (on_device(all, clusters)) return device_->centroids(all, samples, clusters, seeds);
  std::vector<std::vector<float>> centroids;
  for (int head = 0; head < geometry_.kv_heads; ++head)
    centroids.push_back(train_on_host(kv.heads[static_cast<std::size_t>(head)], head,
                                      samples[static_cast<std::size_t>(head)], clusters));
  return centroids;
}

/// Keys that a head's centroids are trained on, rising.
std::vector<Position> PartitionSelector::training_sample(int head, Position begin, std::int64_t keys,
                                                         std::int64_t clusters) const {
  std::vector<Position> sample(static_cast<std::size_t>(keys));
  std::iota(sample.begin(), sample.end(), begin);
  // Time grows with clusters x sample: of many clusters each learns from fewer keys (kTrainingKeysPerCentroid says
  // what that costs).
  constexpr std::int64_t kMany = 1024, kFewKeys = 8;
  const std::int64_t limit =
      std::max(std::min(clusters, kMany) * kTrainingKeysPerCentroid, clusters * kFewKeys);
  if (keys > limit) {
    Rng rng(seed_of(head));
    for (std::int64_t i = 0; i < limit; ++i) {
      const auto pick = i + static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(keys - i)));
      std::swap(sample[static_cast<std::size_t>(i)], sample[static_cast<std::size_t>(pick)]);
    }
    sample.resize(static_cast<std::size_t>(limit));
    std::sort(sample.begin(), sample.end());
  }
  return sample;
}

std::vector<float> PartitionSelector::train_on_host(const KvRows& kv, int head,
                                                    std::span<const Position> sample,
                                                    std::int64_t clusters) const {
  const std::int64_t d = geometry_.head_dim;
  std::vector<float> x(sample.size() * static_cast<std::size_t>(d));  // [sample, d]
  const auto here = [&](Position row) {
    return !share().divided() || (row >= share().own.begin && row < share().own.end);
  };
  for_each((std::ssize(sample) + kPiece - 1) / kPiece, [&](std::int64_t item, int) {
    for (std::int64_t i = item * kPiece; i < std::min(std::ssize(sample), (item + 1) * kPiece); ++i) {
      const Position row = sample[static_cast<std::size_t>(i)];
      if (!here(row)) continue;
      read_stored_keys({&kv, 1}, row, unrotate_by(),
                       std::span(x).subspan(static_cast<std::size_t>(i * d), static_cast<std::size_t>(d)));
    }
  });
  if (share().divided()) gather_sample(sample, x);
  return spherical_kmeans({x.data(), std::ssize(sample), d}, {.clusters = clusters, .seed = seed_of(head)},
                          *geometry_.pool);
}

/// Everybody gets the keys of the sample that others have.
void PartitionSelector::gather_sample(std::span<const Position> sample, std::span<float> x) const {
  std::vector<std::span<std::byte>> parts;
  const auto at = [&](std::int64_t token) {
    return static_cast<std::size_t>(std::ranges::lower_bound(sample, static_cast<Position>(token)) -
                                    sample.begin());
  };
  const auto d = static_cast<std::size_t>(geometry_.head_dim);
  for (int r = 0; r < share().ranks->size(); ++r) {
    const Share own = token_share(share().tokens, r, share().ranks->size());
    const std::size_t first = at(own.begin), last = at(own.end);
    parts.push_back(std::as_writable_bytes(x.subspan(first * d, (last - first) * d)));
  }
  share().ranks->all_gather(parts);
}

std::int64_t PartitionSelector::add_best_buckets(const SelectUnit& unit, int worker, std::span<float> scores,
                                                 std::int64_t probes, Selection& out, SelectWork& work) {
  const BucketIndex& index = index_of(unit);
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  const std::span<const Position> firsts = all_firsts(unit);
  for (std::size_t bucket = 0; bucket < firsts.size(); ++bucket) {
    // A probe would be wasted on a bucket without far keys.
    if (firsts[bucket] >= unit.all_far_end) scores[bucket] = -std::numeric_limits<float>::infinity();
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
