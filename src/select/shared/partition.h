// SPDX-License-Identifier: Apache-2.0
// Base of methods that keep every key in one bucket per KV head. How the index grows, is cut back, saved and
// read is the same for all; what a bucket is and which ones a query attends is the method's.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "select/device_keys.h"
#include "select/shared/buckets.h"
#include "select/shared/orders_rows.h"
#include "select/shared/per_token.h"
#include "select/shared/rows.h"

namespace lode {

class PartitionSelector : public PerTokenSelector, public OrdersRows, public BuiltByDevice {
 public:
  explicit PartitionSelector(const LayerGeometry& geometry);

  void append(std::int32_t sequence, KvLayer kv, Position far_end) override;
  void roll_back(std::int32_t sequence, std::int64_t tokens) override;
  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;
  std::int64_t index_bytes() const override;
  RowOrder row_order(std::int32_t sequence, int head, Position end) const override;
  void rows_ordered(std::int32_t sequence, Position end) override;
  Position ordered_end(std::int32_t sequence) const override;

 protected:
  /// No keys yet, the first to come is that behind the sink.
  virtual BucketIndex empty_index() const = 0;
  /// Buckets of keys of one head, given as un-rotated by `unrotate_by`; numbers that are not finite have been
  /// replaced by 0. Called by several threads at once.
  virtual void label(const BucketIndex& index, int head, Matrix<const float> keys /*[n, d]*/,
                     std::span<std::int32_t> labels) const = 0;
  /// Whether label() gives the nearest of centroids, by inner product.
  virtual bool labels_by_centroids() const { return true; }
  /// These centroids, [C, d].
  virtual std::vector<float> label_centroids(const BucketIndex& index, int head) const {
    return {index.centroids(head).begin(), index.centroids(head).end()};
  }
  /// Null when keys are labelled as they are stored, after RoPE.
  virtual const Rope* unrotate_by() const { return geometry_.rope; }

  /// Spherical k-means centroids [Hkv][clusters, d] of each head's keys [begin, begin + keys), or of a sample of
  /// them, un-rotated by `unrotate_by`.
  std::vector<std::vector<float>> train_centroids(KvLayer kv, Position begin, std::int64_t keys,
                                                  std::int64_t clusters) const;
  /// What save wrote; InputError when it does not fit.
  BucketIndex read_index(const SectionReader& in, KvLayer kv) const;
  /// Puts keys [index.end(), end) into their buckets, a block at a time.
  void extend(BucketIndex& index, KvLayer kv, Position end) const;
  /// The same of a whole context: by a GPU that has the keys, where labels are nearest centroids.
  void extend_to_context(BucketIndex& index, KvLayer kv) const;
  /// The sequence's index, or null.
  const BucketIndex* find_index(std::int32_t sequence) const;
  void set_index(std::int32_t sequence, BucketIndex index);
  /// The keys that centroids are trained on: those behind the sink, of all ranks.
  struct TrainingKeys {
    Position begin = 0;
    std::int64_t count = 0;
  };
  TrainingKeys training_keys(KvLayer kv) const;
  /// How often an index has been set.
  std::int64_t versions() const { return versions_; }
  /// For SharesIndex::take_index: false when the other covers other keys or has no index.
  bool copy_index(std::int32_t sequence, const PartitionSelector& other);
  /// How many of a unit's far keys are in each bucket, on all ranks.
  void count_far_keys(const SelectUnit& unit, std::span<std::int64_t> keys /*[C]*/) const;
  /// How many keys are in each bucket, on all ranks: [Hkv, C].
  std::vector<std::int64_t> bucket_sizes(std::int32_t sequence) const;
  /// The index that answers a unit.
  const BucketIndex& index_of(const SelectUnit& unit) const;

  /// Adds the unit's far keys in the `probes` buckets of the highest scores to the last set of `out`; returns
  /// how many. Buckets without far keys are passed over, ties go to the higher bucket. Scores are spoilt,
  /// the bytes of lists counted.
  std::int64_t add_best_buckets(const SelectUnit& unit, int worker, std::span<float> scores /*[C]*/,
                                std::int64_t probes, Selection& out, SelectWork& work);

 private:
  struct Scratch {
    std::vector<Position> probes, chosen;
    RowSet rows;
  };
  /// What ranks know of the buckets of all of them, where keys are shared out.
  struct AllBuckets {
    std::vector<Position> firsts;     // [Hkv, C]
    std::vector<std::int64_t> sizes;  // [Hkv, C]
    Position late_begin = 0;          ///< keys from here on may lie in a query's window
    std::vector<Position> late;       // [Hkv, tokens - late_begin] bucket of each
  };
  AllBuckets gather_buckets(const BucketIndex& index) const;
  std::span<const Position> all_firsts(const SelectUnit& unit) const;
  std::uint64_t seed_of(int head) const;
  std::vector<Position> training_sample(int head, Position begin, std::int64_t keys,
                                        std::int64_t clusters) const;
  std::vector<float> train_on_host(const KvRows& kv, int head, std::span<const Position> sample,
                                   std::int64_t clusters) const;
  void gather_sample(std::span<const Position> sample, std::span<float> x) const;
  void extend_block(BucketIndex& index, KvLayer kv, Position end) const;

  std::map<std::int32_t, BucketIndex> indexes_;     // by sequence
  std::map<std::int32_t, AllBuckets> all_buckets_;  // by sequence
  std::vector<Scratch> scratch_;                    // [workers]
  std::int64_t versions_ = 0;
};

}  // namespace lode
