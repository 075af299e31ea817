// SPDX-License-Identifier: Apache-2.0
// Sections of a saved index: shape = {heads, tables, d, codes, begin, end, seed} int64 and codes
// [heads, tables, end - begin] uint32; the order follows from them.
#include "select/baselines/sorted_bins.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

constexpr std::int64_t kPiece = 64;    // keys of one thread's item
constexpr std::int64_t kBlock = 4096;  // keys of all heads hashed at a time
constexpr int kTogether = 8;           // vectors of one gemv

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace

void SortedCodes::append(std::span<const std::uint32_t> codes) {
  const std::int64_t before = size();
  codes_.insert(codes_.end(), codes.begin(), codes.end());
  order_.resize(codes_.size());
  const auto middle = order_.begin() + before;
  std::iota(middle, order_.end(), static_cast<std::int32_t>(before));
  const auto less = [&](std::int32_t a, std::int32_t b) { return codes_[at(a)] < codes_[at(b)]; };
  std::stable_sort(middle, order_.end(), less);
  std::inplace_merge(order_.begin(), middle, order_.end(), less);
}

void SortedCodes::cut(std::int64_t size) {
  if (this->size() <= size) return;
  codes_.resize(at(size));
  std::erase_if(order_, [&](std::int32_t number) { return number >= size; });
}

std::int64_t SortedCodes::bytes() const {
  return static_cast<std::int64_t>(codes_.capacity() * sizeof(codes_[0]) +
                                   order_.capacity() * sizeof(order_[0]));
}

std::span<const std::int32_t> SortedCodes::order(std::int64_t end, std::vector<std::int32_t>& scratch) const {
  if (end >= size()) return order_;
  scratch.clear();
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(scratch),
               [&](std::int32_t number) { return number < end; });
  return scratch;
}

std::pair<std::int64_t, std::int64_t> SortedCodes::places(std::span<const std::int32_t> order,
                                                          std::uint32_t code) const {
  const auto first = std::lower_bound(order.begin(), order.end(), code,
                                      [&](std::int32_t a, std::uint32_t c) { return codes_[at(a)] < c; });
  const auto last = std::upper_bound(first, order.end(), code,
                                     [&](std::uint32_t c, std::int32_t a) { return c < codes_[at(a)]; });
  return {first - order.begin(), last - order.begin()};
}

SortedBinsSelector::SortedBinsSelector(const LayerGeometry& geometry, const Amount& bin, int tables)
    : PerTokenSelector(geometry),
      bin_(bin),
      tables_(tables),
      directions_(at(std::int64_t{geometry.kv_heads} * tables)),
      scratch_(at(workers())) {}

/// No keys yet; sees to it that there are directions enough for so many codes. Direction i of a table is the
/// same however many there are.
SortedBinsSelector::Index SortedBinsSelector::empty_index(std::int64_t codes) {
  const std::int64_t d = geometry_.head_dim, wanted = directions_for(codes);
  for (std::size_t table = 0; table < directions_.size(); ++table) {
    std::vector<float>& own = directions_[table];
    const int head = geometry_.kv_head_in_layer(static_cast<int>(table) / tables_),
              hash = static_cast<int>(table) % tables_;
    for (std::int64_t i = std::ssize(own) / d; i < wanted; ++i) {
      Rng rng(hash_seed(geometry_.seed, geometry_.layer, head, hash, i));
      for (std::int64_t j = 0; j < d; ++j) own.push_back(static_cast<float>(rng.normal()));
    }
  }
  const auto sink = static_cast<Position>(geometry_.dense.sink);
  return {.begin = sink, .end = sink, .codes = codes, .tables = std::vector<SortedCodes>(directions_.size())};
}

void SortedBinsSelector::build(std::int32_t sequence, KvLayer kv) {
  Index index = empty_index(codes_for(std::max<std::int64_t>(0, kv.tokens - geometry_.dense.sink)));
  extend(index, kv, static_cast<Position>(kv.tokens));
  indexes_.insert_or_assign(sequence, std::move(index));
}

void SortedBinsSelector::append(std::int32_t sequence, KvLayer kv, Position far_end) {
  const auto [place, fresh] = indexes_.try_emplace(sequence);
  if (fresh) place->second = empty_index(codes_for(0));
  extend(place->second, kv, far_end);
}

void SortedBinsSelector::roll_back(std::int32_t sequence, std::int64_t tokens) {
  const auto found = indexes_.find(sequence);
  if (found == indexes_.end() || found->second.end <= tokens) return;
  Index& index = found->second;
  index.end = std::max(index.begin, static_cast<Position>(tokens));
  for (SortedCodes& table : index.tables) table.cut(index.end - index.begin);
}

void SortedBinsSelector::extend(Index& index, KvLayer kv, Position end) const {
  while (index.end < end) {
    check_cancel();
    extend_block(index, kv, static_cast<Position>(std::min<std::int64_t>(end, index.end + kBlock)));
  }
}

void SortedBinsSelector::extend_block(Index& index, KvLayer kv, Position end) const {
  LODE_ASSERT(end <= kv.tokens);
  const std::int64_t count = end - index.end, d = geometry_.head_dim, heads = geometry_.kv_heads,
                     pieces = (count + kPiece - 1) / kPiece;
  std::vector<std::uint32_t> codes(at(heads * tables_ * count));  // [Hkv, tables, count]
  for_each(heads * pieces, [&](std::int64_t item, int) {
    const std::int64_t head = item / pieces, first = item % pieces * kPiece,
                       some = std::min(kPiece, count - first);
    std::vector<float> keys(at(some * d)), products;
    for (std::int64_t i = 0; i < some; ++i) {
      read_stored_keys({&kv.heads[at(head)], 1}, index.end + static_cast<Position>(first + i), nullptr,
                       std::span(keys).subspan(at(i * d), at(d)));
    }
    for (std::int64_t table = head * tables_; table < (head + 1) * tables_; ++table)
      hash(at(table), index.codes, keys.data(), some, codes.data() + table * count + first, products);
  });
  for_each(heads * tables_, [&](std::int64_t table, int) {
    index.tables[at(table)].append(std::span(codes).subspan(at(table * count), at(count)));
  });
  index.end = end;
}

void SortedBinsSelector::hash(std::size_t table, std::int64_t codes, const float* x, std::int64_t n,
                              std::uint32_t* out, std::vector<float>& products) const {
  const std::int64_t directions = directions_for(codes), d = geometry_.head_dim;
  products.resize(at(kTogether * directions));
  for (std::int64_t first = 0; first < n; first += kTogether) {
    const auto some = static_cast<int>(std::min<std::int64_t>(kTogether, n - first));
    kernels().gemv(x + first * d, some, directions_[table].data(), DType::f32, d, 0, directions,
                   products.data(), directions);
    for (int i = 0; i < some; ++i)
      out[first + i] = code_of(std::span(products).subspan(at(i * directions), at(directions)));
  }
}

void SortedBinsSelector::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const Index& index = indexes_.at(unit.block->sequence);
  LODE_ASSERT(index.begin == unit.far_begin && index.end >= unit.far_end);
  const std::int64_t n = unit.far_keys(), d = geometry_.head_dim, group = geometry_.group(),
                     bin = std::max<std::int64_t>(1, bin_.of(n));
  if (bin >= n) {
    out.add_set(unit.set(all_heads(static_cast<int>(group))));
    return out.add_run(unit.far_begin, unit.far_end);
  }
  const Bins bins = {.keys = n, .count = (n + bin - 1) / bin};
  Scratch& s = scratch_[at(worker)];
  const std::span<const float> q = unit.group_of(unit.block->q, geometry_);  // [G, d]
  s.codes.resize(at(group * tables_));                                       // [tables, G]
  for (std::int64_t table = 0; table < tables_; ++table) {
    hash(at(unit.kv_head * tables_ + table), index.codes, q.data(), group, s.codes.data() + table * group,
         s.products);
  }
  work.bytes += tables_ * directions_for(index.codes) * d * std::int64_t{sizeof(float)};
  work.keys_scored += tables_ * directions_for(index.codes);
  for (std::int64_t g = 0; g < group; ++g) {
    out.add_set(unit.set(1u << g));
    s.set.reset(n);
    for (std::int64_t table = 0; table < tables_; ++table) {
      const SortedCodes& sorted = index.tables[at(unit.kv_head * tables_ + table)];
      const std::span<const std::int32_t> order = sorted.order(n, s.order);
      const auto [begin, end] = sorted.places(order, s.codes[at(table * group + g)]);
      const auto [first, last] = visited(bins, begin, end);
      for (std::int64_t i = bins.begin_of(first); i < bins.begin_of(last); ++i) s.set.insert(order[at(i)]);
      // What finding the place reads is a few codes of a sorted list; the bins are read whole.
      work.bytes += (bins.begin_of(last) - bins.begin_of(first)) * std::int64_t{sizeof(std::int32_t)};
    }
    s.rows.clear();
    s.set.drain([&](std::int64_t key) { s.rows.push_back(unit.far_begin + static_cast<Position>(key)); });
    out.add_rows(s.rows);
  }
}

void SortedBinsSelector::save(std::int32_t sequence, SectionWriter& out) const {
  const auto found = indexes_.find(sequence);
  const auto sink = static_cast<Position>(geometry_.dense.sink);
  const Index none = {.begin = sink,
                      .end = sink,
                      .codes = codes_for(0),
                      .tables = std::vector<SortedCodes>(directions_.size())};
  const Index& index = found == indexes_.end() ? none : found->second;
  const std::array<std::int64_t, 7> shape = {geometry_.kv_heads,
                                             tables_,
                                             geometry_.head_dim,
                                             index.codes,
                                             index.begin,
                                             index.end,
                                             static_cast<std::int64_t>(geometry_.seed)};
  std::vector<std::uint32_t> codes;
  for (const SortedCodes& table : index.tables)
    codes.insert(codes.end(), table.codes().begin(), table.codes().end());
  out.add<std::int64_t>("shape", shape);
  out.add<std::uint32_t>("codes", codes);
}

void SortedBinsSelector::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto shape = in.values<std::int64_t>("shape");
  const auto sink = static_cast<Position>(geometry_.dense.sink);
  require(shape.size() == 7 && shape[0] == geometry_.kv_heads && shape[1] == tables_ &&
              shape[2] == geometry_.head_dim,
          "the model's KV heads and head dimension, and the spec's number of tables");
  require(shape[6] == static_cast<std::int64_t>(geometry_.seed),
          "hashes of the same seed: index the text again");
  require(shape[4] == sink && shape[5] >= sink && shape[5] <= std::max<std::int64_t>(sink, kv.tokens),
          "keys behind the sink and within the context");
  require(gives_codes(shape[3]), "as many codes as the spec gives");
  const std::int64_t count = shape[5] - sink;
  const auto codes = in.values<std::uint32_t>("codes");
  require(std::ssize(codes) == std::ssize(directions_) * count,
          "a section 'codes' of the size that 'shape' gives");
  require(std::all_of(codes.begin(), codes.end(), [&](std::int64_t code) { return code < shape[3]; }),
          "codes below their number");
  Index index = empty_index(shape[3]);
  for_each(std::ssize(index.tables), [&](std::int64_t table, int) {
    index.tables[at(table)].append(codes.subspan(at(table * count), at(count)));
  });
  index.end = static_cast<Position>(shape[5]);
  indexes_.insert_or_assign(sequence, std::move(index));
}

std::int64_t SortedBinsSelector::index_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [sequence, index] : indexes_) {
    for (const SortedCodes& table : index.tables) bytes += table.bytes();
  }
  return bytes;
}

}  // namespace lode
