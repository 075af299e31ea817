// SPDX-License-Identifier: Apache-2.0
// Sections of a saved index: shape = {heads, C, d, begin, end} int64, centroids [Hkv, C, d] float32 (none
// when d is 0), offsets [Hkv, C + 1] int64 into the head's part of rows [Hkv, end - begin] int32: bucket by
// bucket, rising inside.
#include "select/shared/buckets.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "io/container.h"
#include "lodestone/error.h"

namespace lode {

namespace {

template <class T>
std::span<const T> part(std::span<const T> all, std::int64_t from, std::int64_t count) {
  return all.subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(count));
}

}  // namespace

BucketIndex::BucketIndex(Position begin, int head_dim, std::vector<std::vector<float>> centroids)
    : begin_(begin), end_(begin), head_dim_(head_dim), centroids_(std::move(centroids)) {
  LODE_ASSERT(!centroids_.empty() && !centroids_[0].empty());
  for (const std::vector<float>& head : centroids_) LODE_ASSERT(head.size() == centroids_[0].size());
  rows_.resize(centroids_.size() * centroids_[0].size() / static_cast<std::size_t>(head_dim));
  firsts_.assign(rows_.size(), kNone);
  lasts_.assign(rows_.size(), -1);
}

BucketIndex::BucketIndex(Position begin, int heads, std::int64_t buckets)
    : begin_(begin),
      end_(begin),
      centroids_(static_cast<std::size_t>(heads)),
      rows_(static_cast<std::size_t>(heads * buckets)),
      firsts_(rows_.size(), kNone),
      lasts_(rows_.size(), -1) {
  LODE_ASSERT(heads >= 1 && buckets >= 1);
}

std::span<const Position> BucketIndex::rows(int head, std::int64_t bucket, Position end) const {
  const std::vector<Position>& rows = rows_[static_cast<std::size_t>(head * buckets() + bucket)];
  if (rows.empty() || rows.back() < end) return rows;
  return {rows.begin(), std::lower_bound(rows.begin(), rows.end(), end)};
}

void BucketIndex::add(std::span<const std::int32_t> labels, std::int64_t count) {
  LODE_ASSERT(std::ssize(labels) == heads() * count);
  for (int head = 0; head < heads(); ++head) {
    const std::span<const std::int32_t> own = part(labels, head * count, count);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(head * buckets() + own[static_cast<std::size_t>(i)]);
      const Position row = end_ + static_cast<Position>(i);
      rows_[at].push_back(row);
      firsts_[at] = std::min(firsts_[at], row);
      lasts_[at] = row;
    }
  }
  end_ += static_cast<Position>(count);
}

std::vector<Position> BucketIndex::listed(int head, Position end) const {
  std::vector<Position> keys;
  for (std::int64_t bucket = 0; bucket < buckets(); ++bucket) {
    const std::span<const Position> own = rows(head, bucket, end);
    keys.insert(keys.end(), own.begin(), own.end());
  }
  return keys;
}

std::vector<std::uint16_t> BucketIndex::labels(int head, Position begin, Position end) const {
  LODE_ASSERT(begin_ <= begin && begin <= end && end <= end_ &&
              buckets() <= std::int64_t{std::numeric_limits<std::uint16_t>::max()} + 1);
  std::vector<std::uint16_t> found(static_cast<std::size_t>(end - begin));
  for (std::int64_t bucket = 0; bucket < buckets(); ++bucket) {
    const std::span<const Position> keys = rows(head, bucket, end);
    for (auto key = std::ranges::lower_bound(keys, begin); key != keys.end(); ++key)
      found[static_cast<std::size_t>(*key - begin)] = static_cast<std::uint16_t>(bucket);
  }
  return found;
}

void BucketIndex::set_ordered(Position end) {
  LODE_ASSERT(end <= end_);
  ordered_end_ = end;
  ordered_.clear();
  for (int head = 0; head < heads() && end > begin_; ++head) {
    ordered_.push_back(begin_);
    for (std::int64_t bucket = 0; bucket < buckets(); ++bucket)
      ordered_.push_back(ordered_.back() + static_cast<Position>(rows(head, bucket, end).size()));
  }
}

void BucketIndex::roll_back(std::int64_t tokens) {
  if (end_ <= tokens) return;
  LODE_ASSERT(tokens >= ordered_end_);
  end_ = std::max(begin_, static_cast<Position>(tokens));
  for (std::size_t at = 0; at < rows_.size(); ++at) {
    std::vector<Position>& rows = rows_[at];
    rows.erase(std::lower_bound(rows.begin(), rows.end(), end_), rows.end());
    if (rows.empty()) firsts_[at] = kNone;
    lasts_[at] = rows.empty() ? -1 : rows.back();
  }
}

std::int64_t BucketIndex::bytes() const {
  std::size_t bytes =
      rows_.size() * (sizeof(rows_[0]) + 2 * sizeof(Position)) + ordered_.size() * sizeof(Position);
  for (const auto& head : centroids_) bytes += head.size() * sizeof(float);
  for (const auto& rows : rows_) bytes += rows.capacity() * sizeof(Position);
  return static_cast<std::int64_t>(bytes);
}

void BucketIndex::save(SectionWriter& out) const {
  const std::array<std::int64_t, 5> shape = {heads(), buckets(), head_dim_, begin_, end_};
  std::vector<float> centroids;
  std::vector<std::int64_t> offsets;
  std::vector<Position> rows;
  for (int head = 0; head < heads(); ++head) {
    const std::span<const float> own = this->centroids(head);
    centroids.insert(centroids.end(), own.begin(), own.end());
    offsets.push_back(0);
    for (std::int64_t bucket = 0; bucket < buckets(); ++bucket) {
      const std::span<const Position> keys = this->rows(head, bucket, end_);
      rows.insert(rows.end(), keys.begin(), keys.end());
      offsets.push_back(offsets.back() + std::ssize(keys));
    }
  }
  out.add<std::int64_t>("shape", shape);
  out.add<float>("centroids", centroids);
  out.add<std::int64_t>("offsets", offsets);
  out.add<Position>("rows", rows);
}

BucketIndex BucketIndex::load(const SectionReader& in, Position begin, int heads, int head_dim,
                              std::int64_t tokens) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto shape = in.values<std::int64_t>("shape");
  require(shape.size() == 5 && shape[0] == heads && shape[2] == head_dim,
          "the model's KV heads and head dimension");
  require(shape[3] == begin && shape[4] >= begin && shape[4] <= std::max<std::int64_t>(begin, tokens),
          "keys behind the sink and within the context");
  const std::int64_t clusters = shape[1], keys = shape[4] - begin;
  const auto centroids = in.values<float>("centroids");
  const auto offsets = in.values<std::int64_t>("offsets");
  const auto rows = in.values<Position>("rows");
  require(clusters >= 1 && clusters <= std::ssize(offsets), "at least one bucket");
  require(std::ssize(centroids) == heads * clusters * head_dim &&
              std::ssize(offsets) == heads * (clusters + 1) && std::ssize(rows) == heads * keys,
          "sections of the sizes that 'shape' gives");
  require(std::all_of(centroids.begin(), centroids.end(), [](float x) { return std::isfinite(x); }),
          "finite centroids");

  std::vector<std::vector<float>> split;
  for (int h = 0; h < heads; ++h) {
    const auto own = part(centroids, h * clusters * head_dim, clusters * head_dim);
    split.emplace_back(own.begin(), own.end());
  }
  BucketIndex index =
      head_dim > 0 ? BucketIndex(begin, head_dim, std::move(split)) : BucketIndex(begin, heads, clusters);
  for (int h = 0; h < heads; ++h) {
    const auto offset = part(offsets, h * (clusters + 1), clusters + 1);
    require(offset.front() == 0 && offset.back() == keys && std::is_sorted(offset.begin(), offset.end()),
            "rising offsets up to the number of keys");
    std::vector<bool> seen(static_cast<std::size_t>(keys), false);
    for (std::int64_t c = 0; c < clusters; ++c) {
      const std::int64_t first = offset[static_cast<std::size_t>(c)],
                         last = offset[static_cast<std::size_t>(c + 1)];
      const auto bucket = part(rows, h * keys + first, last - first);
      require(std::is_sorted(bucket.begin(), bucket.end()), "rising rows in each bucket");
      for (const Position row : bucket) {
        require(row >= begin && row < shape[4] && !seen[static_cast<std::size_t>(row - begin)],
                "each key in one bucket");
        seen[static_cast<std::size_t>(row - begin)] = true;
      }
      const auto at = static_cast<std::size_t>(h * clusters + c);
      index.rows_[at].assign(bucket.begin(), bucket.end());
      if (!bucket.empty()) index.firsts_[at] = bucket.front(), index.lasts_[at] = bucket.back();
    }
  }
  index.end_ = static_cast<Position>(shape[4]);
  return index;
}

}  // namespace lode
