// SPDX-License-Identifier: Apache-2.0
// Sections: shape = {heads, d, channels, bits, begin, keys, type} int64; channels [heads, channels] int32,
// empty before calibration; labels [heads, keys, channels] of the type, or codes [heads, blocks, parts, 16]
// uint32 and levels [heads, 2, channels] float: low and step.
#include "select/baselines/label_cache.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr int kGemvRows = 8;  // that one call of gemv takes

/// Of stored labels: numbers of q8 keys have a scale for each key, and are kept in bf16.
DType label_type(DType keys) {
  return keys == DType::q8 || keys == DType::q4 ? DType::bf16 : keys;
}

std::vector<std::int32_t> largest(std::span<const float> magnitude, int count) {
  std::vector<std::int32_t> order(magnitude.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return magnitude[static_cast<std::size_t>(a)] > magnitude[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(count));
  std::sort(order.begin(), order.end());
  return order;
}

/// Levels of some channels, from the keys [begin, end) of a head.
ChannelLevels levels_of(const KvRows& kv, Position begin, Position end,
                        std::span<const std::int32_t> channels, int bits) {
  std::vector<float> least(channels.size(), std::numeric_limits<float>::infinity()),
      most(channels.size(), -std::numeric_limits<float>::infinity()), row(static_cast<std::size_t>(kv.d));
  for (Position key = begin; key < end; ++key) {
    read_stored_keys({&kv, 1}, key, nullptr, row);
    for (std::size_t c = 0; c < channels.size(); ++c) {
      least[c] = std::min(least[c], row[static_cast<std::size_t>(channels[c])]);
      most[c] = std::max(most[c], row[static_cast<std::size_t>(channels[c])]);
    }
  }
  return {bits, least, most};
}

}  // namespace

void LabelCache::calibrate(std::span<const std::vector<float>> magnitude, KvLayer kv,
                           const ForEach& for_each) {
  *this = LabelCache(shape_);
  if (kv.tokens <= shape_.begin) return;
  for_each(shape_.heads, [&](std::int64_t h, int) {
    Head& head = heads_[static_cast<std::size_t>(h)];
    head.channels = largest(magnitude[static_cast<std::size_t>(h)], shape_.channels);
    if (!shape_.coded()) return;
    head.levels = levels_of(kv.heads[static_cast<std::size_t>(h)], shape_.begin,
                            static_cast<Position>(kv.tokens), head.channels, shape_.bits);
    head.codes = NibbleCodes(head.levels.parts(shape_.channels));
  });
}

void LabelCache::extend(KvLayer kv, Position end_of_keys, const ForEach& for_each) {
  const std::int64_t first = size_, wanted = std::int64_t{end_of_keys} - shape_.begin;
  if (wanted <= first || !ready()) return;
  LODE_ASSERT(end_of_keys <= kv.tokens);
  size_ = wanted;
  type_ = label_type(kv.heads[0].type);
  for (Head& head : heads_) {
    if (shape_.coded()) {
      head.codes.resize(wanted);
    } else {
      head.stored.resize(static_cast<std::size_t>(wanted * label_bytes()));
    }
  }
  // Codes of one block share words, so an item is a block.
  const std::int64_t block = first / kPackedBlock, blocks = padded(wanted) / kPackedBlock - block;
  for_each(blocks * shape_.heads, [&](std::int64_t item, int) {
    const auto h = static_cast<std::size_t>(item / blocks);
    const std::int64_t from = (block + item % blocks) * kPackedBlock;
    std::vector<float> row(static_cast<std::size_t>(shape_.d));
    for (std::int64_t key = std::max(first, from); key < std::min(wanted, from + kPackedBlock); ++key)
      take(heads_[h], kv.heads[h], key, row);
  });
}

void LabelCache::take(Head& head, const KvRows& kv, std::int64_t key, std::span<float> row) const {
  read_stored_keys({&kv, 1}, static_cast<Position>(shape_.begin + key), nullptr, row);
  for (std::size_t c = 0; c < head.channels.size(); ++c)
    row[c] = row[static_cast<std::size_t>(head.channels[c])];
  if (!shape_.coded()) {
    kernels().narrow(row.data(), shape_.channels, type_, head.stored.data() + key * label_bytes());
    return;
  }
  const int together = head.levels.codes_in_nibble();
  for (int part = 0; part < head.codes.parts(); ++part) {
    std::uint32_t nibble = 0;
    for (int c = part * together; c < std::min(shape_.channels, (part + 1) * together); ++c)
      nibble |= head.levels.code(c, row[static_cast<std::size_t>(c)], ChannelLevels::Rounding::nearest)
                << (shape_.bits * (c - part * together));
    head.codes.set(key, part, nibble);
  }
}

void LabelCache::roll_back(std::int64_t tokens) {
  const std::int64_t kept = std::max<std::int64_t>(0, tokens - shape_.begin);
  if (kept >= size_) return;
  size_ = kept;
  for (Head& head : heads_) {
    if (shape_.coded()) {
      head.codes.resize(kept);
    } else {
      head.stored.resize(static_cast<std::size_t>(kept * label_bytes()));
    }
  }
}

void LabelCache::score(int which, Matrix<const float> q, std::int64_t keys, float* scores,
                       std::int64_t stride, Scratch& scratch) const {
  const Head& head = heads_[static_cast<std::size_t>(which)];
  const std::int64_t channels = shape_.channels, parts = head.codes.parts();
  scratch.weights.resize(static_cast<std::size_t>(q.rows * channels));
  for (std::int64_t r = 0; r < q.rows; ++r) {
    for (std::int64_t c = 0; c < channels; ++c) {
      const auto at = static_cast<std::size_t>(c);
      const float step = shape_.coded() ? head.levels.step[at] : 1.0f;
      scratch.weights[static_cast<std::size_t>(r * channels + c)] =
          q[r][static_cast<std::size_t>(head.channels[at])] * step;
    }
  }
  if (!shape_.coded()) {
    for (std::int64_t r = 0; r < q.rows; r += kGemvRows) {
      kernels().gemv(scratch.weights.data() + r * channels,
                     static_cast<int>(std::min<std::int64_t>(kGemvRows, q.rows - r)), head.stored.data(),
                     type_, channels, 0, keys, scores + r * stride, stride);
    }
    return;
  }
  scratch.tables.resize(static_cast<std::size_t>(q.rows * parts * 16));
  const std::int64_t together = head.levels.codes_in_nibble();
  for (std::int64_t item = 0; item < q.rows * parts; ++item) {
    const std::int64_t from = item % parts * together;
    fill_nibble_table(shape_.bits,
                      {scratch.weights.data() + item / parts * channels + from,
                       static_cast<std::size_t>(std::min(together, channels - from))},
                      std::span<float, 16>(scratch.tables.data() + item * 16, std::size_t{16}));
  }
  packed_sum_kernels().sum_nibbles(scratch.tables.data(), static_cast<int>(q.rows), static_cast<int>(parts),
                                   head.codes.data(), padded(keys) / kPackedBlock, scores, stride);
}

std::int64_t LabelCache::label_bytes() const {
  return shape_.coded() ? (std::int64_t{shape_.channels} * shape_.bits + 7) / 8
                        : std::int64_t{shape_.channels} * bytes_of(type_);
}

std::int64_t LabelCache::bytes() const {
  std::int64_t sum = 0;
  for (const Head& head : heads_)
    sum += static_cast<std::int64_t>(head.stored.capacity()) + head.codes.bytes();
  return sum;
}

void LabelCache::save(SectionWriter& out) const {
  const std::array<std::int64_t, 7> shape = {shape_.heads, shape_.d, shape_.channels,        shape_.bits,
                                             shape_.begin, size_,    static_cast<int>(type_)};
  std::vector<std::int32_t> channels;
  std::vector<std::byte> stored;
  std::vector<std::uint32_t> codes;
  std::vector<float> levels;
  for (const Head& head : heads_) {
    channels.insert(channels.end(), head.channels.begin(), head.channels.end());
    stored.insert(stored.end(), head.stored.begin(), head.stored.end());
    codes.insert(codes.end(), head.codes.words().begin(), head.codes.words().end());
    levels.insert(levels.end(), head.levels.low.begin(), head.levels.low.end());
    levels.insert(levels.end(), head.levels.step.begin(), head.levels.step.end());
  }
  out.add<std::int64_t>("shape", shape);
  out.add<std::int32_t>("channels", channels);
  if (!shape_.coded()) return out.add<std::byte>("labels", stored);
  out.add<std::uint32_t>("codes", codes);
  out.add<float>("levels", levels);
}

LabelCache LabelCache::load(const LabelShape& shape, const SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto saved = in.values<std::int64_t>("shape");
  require(saved.size() == 7 && saved[0] == shape.heads && saved[1] == shape.d && saved[2] == shape.channels &&
              saved[3] == shape.bits && saved[4] == shape.begin,
          "heads, channels and bits of the spec");
  require(saved[5] >= 0 && saved[5] <= std::max<std::int64_t>(0, kv.tokens - shape.begin),
          "keys behind the sink and within the context");
  LabelCache cache(shape);
  cache.size_ = saved[5];
  const auto channels = in.values<std::int32_t>("channels");
  const auto heads = static_cast<std::size_t>(shape.heads), width = static_cast<std::size_t>(shape.channels);
  require(channels.size() == heads * width || (channels.empty() && cache.size_ == 0),
          "a section 'channels' of a label's channels for every head");
  if (channels.empty()) return cache;
  cache.type_ = cache.size_ > 0 ? label_type(kv.heads[0].type) : cache.type_;
  require(shape.coded() || cache.size_ == 0 || saved[6] == static_cast<int>(cache.type_),
          "labels of the type of the keys");
  const auto part = [&](auto all, std::size_t which) {
    return all.subspan(which * (all.size() / heads), all.size() / heads);
  };
  for (std::size_t h = 0; h < heads; ++h) {
    const auto own = part(channels, h);
    for (std::size_t c = 0; c < width; ++c)
      require(own[c] >= 0 && own[c] < shape.d && (c == 0 || own[c] > own[c - 1]), "rising channels of a key");
    cache.heads_[h].channels.assign(own.begin(), own.end());
  }
  if (!shape.coded()) {
    const auto stored = in.bytes("labels");
    require(std::ssize(stored) == shape.heads * cache.size_ * cache.label_bytes(),
            "a section 'labels' of the size that 'shape' gives");
    for (std::size_t h = 0; h < heads; ++h) {
      const auto own = part(stored, h);
      cache.heads_[h].stored.assign(own.begin(), own.end());
    }
    return cache;
  }
  const auto levels = in.values<float>("levels");
  const auto codes = in.values<std::uint32_t>("codes");
  const int parts = (shape.channels * shape.bits + 3) / 4;
  require(levels.size() == 2 * width * heads &&
              std::all_of(levels.begin(), levels.end(), [](float x) { return std::isfinite(x); }),
          "a section 'levels' of finite low and step for every head and channel");
  require(std::ssize(codes) == shape.heads * NibbleCodes::words_for(cache.size_, parts),
          "a section 'codes' of the size that 'shape' gives");
  for (std::size_t h = 0; h < heads; ++h) {
    Head& head = cache.heads_[h];
    const auto own = part(levels, h);
    head.levels.bits = shape.bits;
    head.levels.low.assign(own.begin(), own.begin() + shape.channels);
    head.levels.step.assign(own.begin() + shape.channels, own.end());
    head.codes = NibbleCodes::of(part(codes, h), cache.size_, parts);
  }
  return cache;
}

}  // namespace lode
