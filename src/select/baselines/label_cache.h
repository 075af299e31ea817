// SPDX-License-Identifier: Apache-2.0
// The label cache of Double Sparsity (section 3.2): a few channels of every key, of one sequence and layer,
// as the keys are stored or in 2 or 4 bits.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ann/packed_codes.h"
#include "lodestone/kv_view.h"

namespace lode {

class SectionWriter;
class SectionReader;

struct LabelShape {
  Position begin = 0;    ///< first key
  int heads = 0, d = 0;  ///< KV heads, channels of a key
  int channels = 0;      ///< of a label
  int bits = 4;          ///< of a channel: 2 or 4; 16 = as the keys are stored
  bool coded() const { return bits < 16; }
};

class LabelCache {
 public:
  /// Runs body(item, worker) for all items, side by side.
  using ForEach = std::function<void(std::int64_t, const std::function<void(std::int64_t, int)>&)>;
  struct Scratch {
    std::vector<float> weights;  // [rows, channels]
    std::vector<float> tables;   // [rows, parts, 16]
  };

  LabelCache() = default;
  explicit LabelCache(const LabelShape& shape)
      : shape_(shape), heads_(static_cast<std::size_t>(shape.heads)) {}

  /// Labels hold the channels of the largest `magnitude`, the lower channel of equal ones; the levels of
  /// coded ones are taken from keys [begin, kv.tokens). Forgets all labels; without keys, nothing is known.
  void calibrate(std::span<const std::vector<float>> magnitude /*[heads][d]*/, KvLayer kv,
                 const ForEach& for_each);
  bool ready() const { return !heads_.empty() && !heads_[0].channels.empty(); }
  /// Takes in keys before `end`; none before it was calibrated.
  void extend(KvLayer kv, Position end, const ForEach& for_each);
  void roll_back(std::int64_t tokens);

  Position end() const { return shape_.begin + static_cast<Position>(size_); }
  std::span<const std::int32_t> channels(int head) const {
    return heads_[static_cast<std::size_t>(head)].channels;
  }
  /// Of coded labels that are ready.
  const ChannelLevels& levels(int head) const { return heads_[static_cast<std::size_t>(head)].levels; }
  /// scores[r * stride + i] := q[r] . key begin + i over the label's channels, for i in [0, keys); coded, up
  /// to what is the same for all keys of a row. stride >= padded(keys).
  void score(int head, Matrix<const float> q /*[rows, d]*/, std::int64_t keys, float* scores,
             std::int64_t stride, Scratch& scratch) const;
  static std::int64_t padded(std::int64_t keys) {
    return (keys + kPackedBlock - 1) / kPackedBlock * kPackedBlock;
  }

  std::int64_t label_bytes() const;  ///< of one key and head
  std::int64_t bytes() const;        ///< memory held

  void save(SectionWriter& out) const;
  /// What save wrote; InputError unless it fits the shape, a context of `kv.tokens` and the type of its keys.
  static LabelCache load(const LabelShape& shape, const SectionReader& in, KvLayer kv);

 private:
  struct Head {
    std::vector<std::int32_t> channels;  // rising
    std::vector<std::byte> stored;       // [keys, channels] of type_; empty if coded
    NibbleCodes codes;                   // [keys]; empty if not
    ChannelLevels levels;                // [channels]
  };

  void take(Head& head, const KvRows& kv, std::int64_t key, std::span<float> row /*[d]*/) const;

  LabelShape shape_;
  DType type_ = DType::f32;  // of stored labels
  std::int64_t size_ = 0;    // keys
  std::vector<Head> heads_;
};

}  // namespace lode
