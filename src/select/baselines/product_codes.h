// SPDX-License-Identifier: Apache-2.0
// Product-quantised keys of one sequence and layer: codebooks of the context's keys, and a code for each key.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ann/packed_codes.h"
#include "ann/product_quantizer.h"
#include "lodestone/kv_view.h"

namespace lode {

class SectionWriter;
class SectionReader;

struct ProductShape {
  Position begin = 0;    ///< first key
  int heads = 0, d = 0;  ///< KV heads, channels
  int parts = 2;         ///< m
  int bits = 6;          ///< of a part's code, 1 to 8
  int iterations = 10;   ///< of k-means, at most
  bool nibbles() const { return bits <= 4; }
  int entries() const { return nibbles() ? 16 : 256; }  ///< of a part's table
};

class ProductCodes {
 public:
  /// Runs body(item, worker) for all items, side by side.
  using ForEach = std::function<void(std::int64_t, const std::function<void(std::int64_t, int)>&)>;

  ProductCodes() = default;
  explicit ProductCodes(const ProductShape& shape);

  /// Takes codebooks from keys [begin, kv.tokens), or a sample of them, and forgets all codes; without keys
  /// nothing is known. `seed` of a head's KV head in the layer.
  void train(KvLayer kv, const std::function<std::uint64_t(int head)>& seed, const ForEach& for_each);
  bool ready() const { return !heads_.empty() && heads_[0].quantizer.levels > 0; }
  void extend(KvLayer kv, Position end, const ForEach& for_each);
  void roll_back(std::int64_t tokens);
  Position end() const { return shape_.begin + static_cast<Position>(size_); }

  /// scores[r * stride + i] := q[r] . (what the code of key begin + i stands for). stride >= padded(keys).
  void score(int head, Matrix<const float> q /*[rows, d]*/, std::int64_t keys, float* scores,
             std::int64_t stride, std::vector<float>& tables) const;
  static std::int64_t padded(std::int64_t keys) {
    return (keys + kPackedBlock - 1) / kPackedBlock * kPackedBlock;
  }

  /// Of one key and head: nibbles or bytes, as they are read.
  std::int64_t code_bytes() const { return shape_.nibbles() ? (shape_.parts + 1) / 2 : shape_.parts; }
  std::int64_t codebook_bytes() const;  ///< of one head
  std::int64_t bytes() const;           ///< memory held
  const ProductQuantizer& quantizer(int head) const {
    return heads_[static_cast<std::size_t>(head)].quantizer;
  }

  void save(SectionWriter& out) const;
  /// What save wrote; InputError unless it fits the shape and a context of `tokens`.
  static ProductCodes load(const ProductShape& shape, const SectionReader& in, std::int64_t tokens);

 private:
  struct Head {
    ProductQuantizer quantizer;
    NibbleCodes nibbles;  // codes of up to 4 bits
    ByteCodes bytes;      // codes of more
  };
  void resize(std::int64_t size);

  ProductShape shape_;
  std::int64_t size_ = 0;
  std::vector<Head> heads_;
};

}  // namespace lode
