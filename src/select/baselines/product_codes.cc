// SPDX-License-Identifier: Apache-2.0
// Sections: shape = {heads, d, parts, bits, begin, keys, levels} int64; codebooks [heads, parts, levels,
// width] float; codes [heads, blocks, parts, 16] uint32, or [heads, blocks, parts, 128] bytes for more than 4
// bits.
#include "select/baselines/product_codes.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "io/container.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kTrainingKeysPerCentroid = 256;

}  // namespace

ProductCodes::ProductCodes(const ProductShape& shape)
    : shape_(shape), heads_(static_cast<std::size_t>(shape.heads)) {
  for (Head& head : heads_) {
    head.nibbles = NibbleCodes(shape.parts);
    head.bytes = ByteCodes(shape.parts);
    head.quantizer.parts = shape.parts;
    head.quantizer.width = shape.d / shape.parts;
  }
}

// Every (head, part) is one k-means, done by one thread: the same for any number of them.
void ProductCodes::train(KvLayer kv, const std::function<std::uint64_t(int)>& seed, const ForEach& for_each) {
  *this = ProductCodes(shape_);
  const std::int64_t keys = kv.tokens - shape_.begin, width = shape_.d / shape_.parts;
  if (keys <= 0) return;
  const std::int64_t levels = std::min<std::int64_t>(keys, std::int64_t{1} << shape_.bits);
  const std::int64_t sample = std::min(keys, levels * kTrainingKeysPerCentroid);
  for (Head& head : heads_) {
    head.quantizer.levels = static_cast<int>(levels);
    head.quantizer.centroids.resize(static_cast<std::size_t>(levels * shape_.d));
  }
  for_each(std::int64_t{shape_.heads} * shape_.parts, [&](std::int64_t item, int) {
    const int h = static_cast<int>(item / shape_.parts), part = static_cast<int>(item % shape_.parts);
    std::vector<float> key(static_cast<std::size_t>(shape_.d)), x;
    for (std::int64_t i = 0; i < sample; ++i) {  // evenly spread over the context
      const auto row = static_cast<Position>(shape_.begin + i * keys / sample);
      read_stored_keys({&kv.heads[static_cast<std::size_t>(h)], 1}, row, nullptr, key);
      x.insert(x.end(), key.begin() + part * width, key.begin() + (part + 1) * width);
    }
    const std::vector<float> centroids = euclidean_kmeans(
        {x.data(), sample, width}, levels, shape_.iterations, seed(h) + static_cast<std::uint64_t>(part));
    std::copy(centroids.begin(), centroids.end(),
              heads_[static_cast<std::size_t>(h)].quantizer.centroids.begin() + part * levels * width);
  });
}

void ProductCodes::resize(std::int64_t size) {
  size_ = size;
  for (Head& head : heads_) {
    if (shape_.nibbles()) {
      head.nibbles.resize(size);
    } else {
      head.bytes.resize(size);
    }
  }
}

void ProductCodes::extend(KvLayer kv, Position end_of_keys, const ForEach& for_each) {
  const std::int64_t first = size_, wanted = std::int64_t{end_of_keys} - shape_.begin;
  if (wanted <= first || !ready()) return;
  LODE_ASSERT(end_of_keys <= kv.tokens);
  resize(wanted);
  const std::int64_t width = shape_.d / shape_.parts;
  // Codes of one block share words, so an item is a block.
  const std::int64_t block = first / kPackedBlock, blocks = padded(wanted) / kPackedBlock - block;
  for_each(blocks * shape_.heads, [&](std::int64_t item, int) {
    const auto h = static_cast<std::size_t>(item / blocks);
    Head& head = heads_[h];
    const std::int64_t from = std::max(first, (block + item % blocks) * kPackedBlock),
                       to = std::min(wanted, (block + item % blocks + 1) * kPackedBlock);
    std::vector<float> keys(static_cast<std::size_t>((to - from) * shape_.d));  // [to - from, d]
    std::vector<std::int32_t> labels(static_cast<std::size_t>(to - from));
    for (std::int64_t key = from; key < to; ++key)
      read_stored_keys({&kv.heads[h], 1}, static_cast<Position>(shape_.begin + key), nullptr,
                       std::span(keys).subspan(static_cast<std::size_t>((key - from) * shape_.d),
                                               static_cast<std::size_t>(shape_.d)));
    for (int part = 0; part < shape_.parts; ++part) {
      nearest_centroids({keys.data() + part * width, to - from, width, shape_.d},
                        {head.quantizer.part(part), static_cast<std::size_t>(head.quantizer.levels * width)},
                        labels);
      for (std::int64_t key = from; key < to; ++key) {
        const auto code = static_cast<std::uint32_t>(labels[static_cast<std::size_t>(key - from)]);
        if (shape_.nibbles()) {
          head.nibbles.set(key, part, code);
        } else {
          head.bytes.set(key, part, code);
        }
      }
    }
  });
}

void ProductCodes::roll_back(std::int64_t tokens) {
  const std::int64_t kept = std::max<std::int64_t>(0, tokens - shape_.begin);
  if (kept < size_) resize(kept);
}

void ProductCodes::score(int which, Matrix<const float> q, std::int64_t keys, float* scores,
                         std::int64_t stride, std::vector<float>& tables) const {
  const Head& head = heads_[static_cast<std::size_t>(which)];
  const auto each = static_cast<std::size_t>(shape_.parts * shape_.entries());
  tables.resize(static_cast<std::size_t>(q.rows) * each);
  for (std::int64_t r = 0; r < q.rows; ++r) {
    fill_product_tables(head.quantizer, q[r], shape_.entries(),
                        std::span(tables).subspan(static_cast<std::size_t>(r) * each, each));
  }
  const PackedSumKernels& sums = packed_sum_kernels();
  const std::int64_t blocks = padded(keys) / kPackedBlock;
  if (shape_.nibbles()) {
    sums.sum_nibbles(tables.data(), static_cast<int>(q.rows), shape_.parts, head.nibbles.data(), blocks,
                     scores, stride);
  } else {
    sums.sum_bytes(tables.data(), static_cast<int>(q.rows), shape_.parts, head.bytes.data(), blocks, scores,
                   stride);
  }
}

std::int64_t ProductCodes::codebook_bytes() const {
  return heads_.empty() ? 0
                        : heads_[0].quantizer.levels * heads_[0].quantizer.d() * std::int64_t{sizeof(float)};
}

std::int64_t ProductCodes::bytes() const {
  std::int64_t sum = 0;
  for (const Head& head : heads_) sum += codebook_bytes() + head.nibbles.bytes() + head.bytes.bytes();
  return sum;
}

void ProductCodes::save(SectionWriter& out) const {
  const std::int64_t levels = heads_.empty() ? 0 : heads_[0].quantizer.levels;
  const std::array<std::int64_t, 7> shape = {shape_.heads, shape_.d, shape_.parts, shape_.bits,
                                             shape_.begin, size_,    levels};
  std::vector<float> codebooks;
  std::vector<std::byte> codes;
  for (const Head& head : heads_) {
    codebooks.insert(codebooks.end(), head.quantizer.centroids.begin(), head.quantizer.centroids.end());
    const auto own =
        shape_.nibbles()
            ? std::as_bytes(head.nibbles.words())
            : std::as_bytes(std::span(head.bytes.data(),
                                      static_cast<std::size_t>(ByteCodes::bytes_for(size_, shape_.parts))));
    codes.insert(codes.end(), own.begin(), own.end());
  }
  out.add<std::int64_t>("shape", shape);
  out.add<float>("codebooks", codebooks);
  out.add<std::byte>("codes", codes);
}

ProductCodes ProductCodes::load(const ProductShape& shape, const SectionReader& in, std::int64_t tokens) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto saved = in.values<std::int64_t>("shape");
  require(saved.size() == 7 && saved[0] == shape.heads && saved[1] == shape.d && saved[2] == shape.parts &&
              saved[3] == shape.bits && saved[4] == shape.begin,
          "heads, channels, parts and bits of the spec");
  require(saved[5] >= 0 && saved[5] <= std::max<std::int64_t>(0, tokens - shape.begin),
          "keys behind the sink and within the context");
  require(saved[6] >= (saved[5] > 0 ? 1 : 0) && saved[6] <= (1 << shape.bits),
          "centroids as the bits can name");
  const std::int64_t levels = saved[6], each = levels * shape.d;
  const auto codebooks = in.values<float>("codebooks");
  require(std::ssize(codebooks) == shape.heads * each &&
              std::all_of(codebooks.begin(), codebooks.end(), [](float x) { return std::isfinite(x); }),
          "a section 'codebooks' of finite centroids for every head and part");
  const std::int64_t code_bytes = shape.nibbles() ? NibbleCodes::words_for(saved[5], shape.parts) * 4
                                                  : ByteCodes::bytes_for(saved[5], shape.parts);
  const auto codes = in.bytes("codes");
  require(std::ssize(codes) == shape.heads * code_bytes, "a section 'codes' of the size that 'shape' gives");
  ProductCodes index(shape);
  index.resize(saved[5]);
  for (int h = 0; h < shape.heads; ++h) {
    Head& head = index.heads_[static_cast<std::size_t>(h)];
    head.quantizer.levels = static_cast<int>(levels);
    head.quantizer.centroids.assign(codebooks.begin() + h * each, codebooks.begin() + (h + 1) * each);
    const auto own =
        codes.subspan(static_cast<std::size_t>(h * code_bytes), static_cast<std::size_t>(code_bytes));
    if (shape.nibbles()) {
      std::vector<std::uint32_t> words(own.size() / sizeof(std::uint32_t));
      std::copy(own.begin(), own.end(), std::as_writable_bytes(std::span(words)).begin());
      head.nibbles = NibbleCodes::of(words, saved[5], shape.parts);
    } else {
      std::copy(own.begin(), own.end(), reinterpret_cast<std::byte*>(head.bytes.data()));
    }
  }
  return index;
}

}  // namespace lode
