// SPDX-License-Identifier: Apache-2.0
// sum_c max(q_c least_c, q_c largest_c) is a product: of the positive parts of q with the largest numbers and
// the negative parts with the least. So stored bounds are scored by gemv, and coded ones by sums of table
// entries; both are linear, and the sum over the heads of a group needs one pass.
//
// Sections: shape = {heads, d, page, bits, begin, pages, type} int64; bounds [heads, pages, 2, d] of the
// type, or codes [heads, blocks, parts, 16] uint32 and levels [heads, 2, d] float: low and step.
#include "select/baselines/page_bounds.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr int kGemvRows = 8;  // that one call of gemv takes

/// Least and largest number in each channel of keys [begin, end) of a head.
struct Extremes {
  std::vector<float> least, largest;  // [d]

  Extremes(const KvRows& kv, Position begin, Position end)
      : least(static_cast<std::size_t>(kv.d), std::numeric_limits<float>::infinity()),
        largest(least.size(), -std::numeric_limits<float>::infinity()) {
    std::vector<float> key(least.size());
    for (Position row = begin; row < end; ++row) {
      read_stored_keys({&kv, 1}, row, nullptr, key);
      for (std::size_t c = 0; c < key.size(); ++c) {
        least[c] = std::min(least[c], key[c]);
        largest[c] = std::max(largest[c], key[c]);
      }
    }
  }
};

/// To bf16, away from what it bounds where it does not fit.
void widen_outwards(std::span<float> x, bool up) {
  for (float& value : x) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto cut = std::bit_cast<float>(bits & 0xffff0000u);  // towards 0
    const bool inside = up ? cut < value : cut > value;
    value = inside ? std::bit_cast<float>((bits & 0xffff0000u) + 0x10000u) : cut;
  }
}

}  // namespace

DType bound_type(DType keys) {
  return keys == DType::q8 || keys == DType::q4 ? DType::bf16 : keys;
}

void PageBounds::calibrate(KvLayer kv, const ForEach& for_each) {
  if (!shape_.coded() || kv.tokens <= shape_.begin) return;
  for_each(shape_.heads, [&](std::int64_t h, int) {
    const Extremes all(kv.heads[static_cast<std::size_t>(h)], shape_.begin, static_cast<Position>(kv.tokens));
    heads_[static_cast<std::size_t>(h)].levels = ChannelLevels(shape_.bits, all.least, all.largest);
  });
}

void PageBounds::extend(KvLayer kv, Position end, const ForEach& for_each) {
  const std::int64_t first = pages_, wanted = (std::int64_t{end} - shape_.begin) / shape_.page;
  if (wanted <= first || !ready()) return;
  LODE_ASSERT(end <= kv.tokens);
  pages_ = wanted;
  type_ = bound_type(kv.heads[0].type);
  for (Head& head : heads_) {
    if (shape_.coded()) {
      head.codes = head.codes.parts() > 0 ? std::move(head.codes)
                                          : NibbleCodes(head.levels.parts(std::int64_t{2} * shape_.d));
      head.codes.resize(wanted);
    } else {
      head.stored.resize(static_cast<std::size_t>(wanted * page_bytes()));
    }
  }
  // Codes of one block share words, so an item is a block.
  const std::int64_t block = first / kPackedBlock, blocks = padded(wanted) / kPackedBlock - block;
  for_each(blocks * shape_.heads, [&](std::int64_t item, int) {
    const auto h = static_cast<std::size_t>(item / blocks);
    const std::int64_t from = (block + item % blocks) * kPackedBlock;
    for (std::int64_t page = std::max(first, from); page < std::min(wanted, from + kPackedBlock); ++page)
      take(heads_[h], kv.heads[h], page);
  });
}

void PageBounds::take(Head& head, const KvRows& kv, std::int64_t page) const {
  const auto begin = static_cast<Position>(shape_.begin + page * shape_.page);
  Extremes x(kv, begin, static_cast<Position>(begin + shape_.page));
  if (!shape_.coded()) {
    std::byte* const to = head.stored.data() + page * page_bytes();
    if (type_ != kv.type) {
      widen_outwards(x.largest, true);
      widen_outwards(x.least, false);
    }
    kernels().narrow(x.largest.data(), shape_.d, type_, to);
    kernels().narrow(x.least.data(), shape_.d, type_, to + page_bytes() / 2);
    return;
  }
  const int together = head.levels.codes_in_nibble();
  for (int part = 0; part < head.codes.parts(); ++part) {
    std::uint32_t nibble = 0;
    for (int j = 0; j < together && part * together + j < 2 * shape_.d; ++j) {
      const int bound = part * together + j, c = bound % shape_.d;
      const bool upper = bound < shape_.d;
      const float value = (upper ? x.largest : x.least)[static_cast<std::size_t>(c)];
      nibble |=
          head.levels.code(c, value, upper ? ChannelLevels::Rounding::up : ChannelLevels::Rounding::down)
          << (shape_.bits * j);
    }
    head.codes.set(page, part, nibble);
  }
}

void PageBounds::roll_back(std::int64_t tokens) {
  const std::int64_t kept = std::max<std::int64_t>(0, tokens - shape_.begin) / shape_.page;
  if (kept >= pages_) return;
  pages_ = kept;
  for (Head& head : heads_) {
    if (shape_.coded()) {
      head.codes.resize(kept);
    } else {
      head.stored.resize(static_cast<std::size_t>(kept * page_bytes()));
    }
  }
}

void PageBounds::fill_tables(const Head& head, std::int64_t rows, Scratch& scratch) const {
  const std::int64_t bounds = std::int64_t{2} * shape_.d, parts = head.codes.parts();
  const std::int64_t together = head.levels.codes_in_nibble();
  scratch.tables.resize(static_cast<std::size_t>(rows * parts * 16));
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const weights = scratch.weights.data() + r * bounds;
    for (std::int64_t b = 0; b < bounds; ++b)
      weights[b] *= head.levels.step[static_cast<std::size_t>(b % shape_.d)];
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t from = part * together, count = std::min(together, bounds - from);
      fill_nibble_table(
          shape_.bits, {weights + from, static_cast<std::size_t>(count)},
          std::span<float, 16>(scratch.tables.data() + (r * parts + part) * 16, std::size_t{16}));
    }
  }
}

void PageBounds::score(int which, Matrix<const float> q, bool sum_rows, std::int64_t pages, float* scores,
                       std::int64_t stride, Scratch& scratch) const {
  const std::int64_t d = shape_.d, rows = sum_rows ? 1 : q.rows;
  scratch.weights.assign(static_cast<std::size_t>(rows * 2 * d), 0.0f);
  for (std::int64_t r = 0; r < q.rows; ++r) {
    float* const weights = scratch.weights.data() + (sum_rows ? 0 : r) * 2 * d;
    for (std::int64_t c = 0; c < d; ++c) {
      const float x = q[r][static_cast<std::size_t>(c)];
      weights[c] += std::max(x, 0.0f);
      weights[d + c] += std::min(x, 0.0f);
    }
  }
  const Head& head = heads_[static_cast<std::size_t>(which)];
  if (shape_.coded()) {
    fill_tables(head, rows, scratch);
    packed_sum_kernels().sum_nibbles(scratch.tables.data(), static_cast<int>(rows), head.codes.parts(),
                                     head.codes.data(), padded(pages) / kPackedBlock, scores, stride);
    return;
  }
  for (std::int64_t r = 0; r < rows; r += kGemvRows) {
    kernels().gemv(scratch.weights.data() + r * 2 * d,
                   static_cast<int>(std::min<std::int64_t>(kGemvRows, rows - r)), head.stored.data(), type_,
                   2 * d, 0, pages, scores + r * stride, stride);
  }
}

std::int64_t PageBounds::page_bytes() const {
  const std::int64_t bounds = std::int64_t{2} * shape_.d;
  return shape_.coded() ? (bounds * shape_.bits + 7) / 8 : bounds * bytes_of(type_);
}

std::int64_t PageBounds::bytes() const {
  std::int64_t sum = 0;
  for (const Head& head : heads_)
    sum += static_cast<std::int64_t>(head.stored.capacity()) + head.codes.bytes() +
           2 * head.levels.channels() * std::int64_t{sizeof(float)};
  return sum;
}

void PageBounds::save(SectionWriter& out) const {
  const std::array<std::int64_t, 7> shape = {
      shape_.heads, shape_.d, shape_.page, shape_.bits, shape_.begin, pages_, static_cast<int>(type_)};
  std::vector<std::byte> stored;
  std::vector<std::uint32_t> codes;
  std::vector<float> levels;
  for (const Head& head : heads_) {
    stored.insert(stored.end(), head.stored.begin(), head.stored.end());
    codes.insert(codes.end(), head.codes.words().begin(), head.codes.words().end());
    levels.insert(levels.end(), head.levels.low.begin(), head.levels.low.end());
    levels.insert(levels.end(), head.levels.step.begin(), head.levels.step.end());
  }
  out.add<std::int64_t>("shape", shape);
  if (!shape_.coded()) return out.add<std::byte>("bounds", stored);
  out.add<std::uint32_t>("codes", codes);
  out.add<float>("levels", levels);
}

PageBounds PageBounds::load(const PageShape& shape, const SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto saved = in.values<std::int64_t>("shape");
  require(saved.size() == 7 && saved[0] == shape.heads && saved[1] == shape.d && saved[2] == shape.page &&
              saved[3] == shape.bits && saved[4] == shape.begin,
          "heads, channels, page size and bits of the spec");
  const std::int64_t most = std::max<std::int64_t>(0, kv.tokens - shape.begin) / shape.page;
  require(saved[5] >= 0 && saved[5] <= most, "pages that lie within the context");
  PageBounds index(shape);
  index.pages_ = saved[5];
  if (index.pages_ > 0) index.type_ = bound_type(kv.heads[0].type);
  require(shape.coded() || index.pages_ == 0 || saved[6] == static_cast<int>(index.type_),
          "bounds of the type of the keys");
  const auto part = [](auto all, std::size_t which, std::size_t heads) {
    return all.subspan(which * (all.size() / heads), all.size() / heads);
  };
  if (!shape.coded()) {
    const auto stored = in.bytes("bounds");
    require(std::ssize(stored) == shape.heads * index.pages_ * index.page_bytes(),
            "a section 'bounds' of the size that 'shape' gives");
    for (std::size_t h = 0; h < index.heads_.size(); ++h) {
      const auto own = part(stored, h, index.heads_.size());
      index.heads_[h].stored.assign(own.begin(), own.end());
    }
    return index;
  }
  const auto levels = in.values<float>("levels");
  const auto codes = in.values<std::uint32_t>("codes");
  const auto d = static_cast<std::size_t>(shape.d);
  require(levels.size() == 2 * d * index.heads_.size() || (levels.empty() && index.pages_ == 0),
          "a section 'levels' of low and step for every head and channel");
  require(std::all_of(levels.begin(), levels.end(), [](float x) { return std::isfinite(x); }),
          "finite numbers in section 'levels'");
  const int parts = (2 * shape.d * shape.bits + 3) / 4;
  require(std::ssize(codes) == shape.heads * NibbleCodes::words_for(index.pages_, parts),
          "a section 'codes' of the size that 'shape' gives");
  for (std::size_t h = 0; h < index.heads_.size() && !levels.empty(); ++h) {
    Head& head = index.heads_[h];
    const auto own = part(levels, h, index.heads_.size());
    head.levels.bits = shape.bits;
    head.levels.low.assign(own.begin(), own.begin() + shape.d);
    head.levels.step.assign(own.begin() + shape.d, own.end());
    head.codes = NibbleCodes::of(part(codes, h, index.heads_.size()), index.pages_, parts);
  }
  return index;
}

}  // namespace lode
