// SPDX-License-Identifier: Apache-2.0
#include "ann/hashing/lsh_tables.h"

#include <algorithm>

#include "base/cancel.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kScanned = 512;  // vectors behind the lists that are not worth laying them anew
constexpr std::int64_t kScannedShare = 16;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace

LshTables::LshTables(int tables, int bits) : bits_(bits), codes_(at(tables)) {
  LODE_ASSERT(tables >= 2 && bits >= 1 && bits <= 16);
}

void LshTables::append(std::span<const std::uint16_t> codes, std::int64_t n) {
  const std::int64_t tables = std::ssize(codes_);
  LODE_ASSERT(std::ssize(codes) == n * tables);
  for (std::int64_t table = 0; table < tables; ++table) {
    std::vector<std::uint16_t>& own = codes_[at(table)];
    for (std::int64_t i = 0; i < n; ++i) own.push_back(codes[at(i * tables + table)]);
  }
  if (size() - listed_ > std::max(kScanned, size() / kScannedShare)) lay_lists();
}

void LshTables::cut(std::int64_t size) {
  for (std::vector<std::uint16_t>& own : codes_) own.resize(at(std::min(std::ssize(own), size)));
  listed_ = std::min(listed_, this->size());
}

/// Sorts the vectors of each table by bucket, counting.
void LshTables::lay_lists() {
  const std::int64_t buckets = std::int64_t{1} << bits_, n = size();
  listed_ = n;
  starts_.assign(codes_.size() * at(buckets + 1), 0);
  lists_.resize(codes_.size() * at(n));
  std::vector<std::uint32_t> next(at(buckets));
  for (std::size_t table = 0; table < codes_.size(); ++table) {
    check_cancel();
    std::uint32_t* const start = starts_.data() + table * at(buckets + 1);
    for (const std::uint16_t code : codes_[table]) ++start[code + 1];
    for (std::int64_t bucket = 0; bucket < buckets; ++bucket) start[bucket + 1] += start[bucket];
    std::copy_n(start, buckets, next.begin());
    std::int32_t* const list = lists_.data() + table * at(n);
    for (std::int64_t i = 0; i < n; ++i) list[next[codes_[table][at(i)]]++] = static_cast<std::int32_t>(i);
  }
}

std::int64_t LshTables::bytes() const {
  std::size_t bytes = starts_.capacity() * sizeof(starts_[0]) + lists_.capacity() * sizeof(lists_[0]);
  for (const std::vector<std::uint16_t>& own : codes_) bytes += own.capacity() * sizeof(own[0]);
  return static_cast<std::int64_t>(bytes);
}

std::int64_t LshTables::meet_twice(std::span<const std::uint16_t> query, std::int64_t end, Scratch& s,
                                   std::vector<std::int32_t>& found) const {
  found.clear();
  const std::int64_t listed = std::min(listed_, end), behind = std::max<std::int64_t>(0, end - listed_);
  const std::size_t buckets = std::size_t{1} << bits_,
                    each = codes_.empty() ? 0 : lists_.size() / codes_.size();
  std::int64_t entries = 0;
  s.met.clear();
  if (std::ssize(s.listed) < listed) s.listed.resize(at(listed), 0);
  s.behind.assign(at(behind), 0);
  for (std::size_t table = 0; table < codes_.size(); ++table) {
    const std::uint16_t code = query[table];
    if (listed > 0) {
      const std::uint32_t* const start = starts_.data() + table * (buckets + 1) + code;
      const std::int32_t* const list = lists_.data() + table * each;
      for (std::uint32_t i = start[0]; i < start[1] && list[i] < listed; ++i, ++entries) {
        std::uint8_t& times = s.listed[at(list[i])];
        if (times == 0) s.met.push_back(list[i]);
        if (times == 1) found.push_back(list[i]);
        times = std::min<std::uint8_t>(2, times + 1);
      }
    }
    const std::uint16_t* const codes = codes_[table].data() + listed_;
    for (std::int64_t i = 0; i < behind; ++i) s.behind[at(i)] += codes[i] == code;
  }
  for (const std::int32_t vector : s.met) s.listed[at(vector)] = 0;
  std::sort(found.begin(), found.end());
  for (std::int64_t i = 0; i < behind; ++i) {
    if (s.behind[at(i)] >= 2) found.push_back(static_cast<std::int32_t>(listed_ + i));
  }
  return entries * std::int64_t{sizeof(std::int32_t)} +
         std::ssize(codes_) *
             (behind * std::int64_t{sizeof(std::uint16_t)} + 2 * std::int64_t{sizeof(std::uint32_t)});
}

}  // namespace lode
