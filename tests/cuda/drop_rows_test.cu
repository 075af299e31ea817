// SPDX-License-Identifier: Apache-2.0
// Lists lose the rows from an end on, and nothing else.
#include <algorithm>
#include <random>
#include <vector>

#include "harness.h"
#include "kernels/cuda/squeezed/drop_rows.h"

namespace lode::cuda {
namespace {

/// A list of so many rows below `end`, in any order, with so many from it on among them.
std::vector<std::int32_t> list_of(std::int64_t kept, std::int64_t gone, std::int32_t end, unsigned seed) {
  std::vector<std::int32_t> list;
  for (std::int64_t i = 0; i < kept; ++i) list.push_back(end - 1 - static_cast<std::int32_t>(i));
  for (std::int64_t i = 0; i < gone; ++i) list.push_back(end + static_cast<std::int32_t>(i));
  std::shuffle(list.begin(), list.end(), std::mt19937(seed));
  return list;
}

LODE_TEST(drop_rows_takes_out_what_lies_behind_the_end) {
  constexpr std::int64_t kCapacity = 40'000;
  constexpr std::int32_t kEnd = 38'912;
  std::vector<std::vector<std::int32_t>> lists;
  for (const auto& [kept, gone] : {std::pair(0, 0),
                                   {0, 1},
                                   {0, 127},
                                   {1, 0},
                                   {1, 127},
                                   {100, 28},
                                   {511, 1},
                                   {512, 127},
                                   {5'000, 0},
                                   {30'000, 27},
                                   {38'912, 127}})
    lists.push_back(list_of(kept, gone, kEnd, static_cast<unsigned>(lists.size())));
  lists.push_back(list_of(1000, 0, kEnd, 3));  // all of them last, then all of them first
  lists.push_back(lists.back());
  for (std::int32_t i = 0; i < 64; ++i) {
    lists[lists.size() - 2].push_back(kEnd + i);
    lists.back().insert(lists.back().begin(), kEnd + i);
  }
  std::vector<std::int32_t> rows(lists.size() * kCapacity, -1), counts;
  for (std::size_t l = 0; l < lists.size(); ++l) {
    std::ranges::copy(lists[l], rows.begin() + static_cast<std::ptrdiff_t>(l * kCapacity));
    counts.push_back(static_cast<std::int32_t>(lists[l].size()));
  }
  Stream stream;
  std::vector<std::int32_t> first;
  for (int time = 0; time < 2; ++time) {
    std::vector<std::int32_t> found(rows.size()), left(counts.size());
    const Buffer there(std::ssize(rows) * 4, "a test"), number(std::ssize(counts) * 4, "a test");
    copy(there.as<void>(), rows.data(), there.bytes(), stream.get());
    copy(number.as<void>(), counts.data(), number.bytes(), stream.get());
    drop_rows(there.as<std::int32_t>(), number.as<std::int32_t>(), kCapacity, std::ssize(counts), kEnd,
              stream.get());
    copy(found.data(), there.as<void>(), there.bytes(), stream.get());
    copy(left.data(), number.as<void>(), number.bytes(), stream.get());
    stream.synchronize();
    for (std::size_t l = 0; l < lists.size(); ++l) {
      std::vector<std::int32_t> expected = lists[l];
      std::erase_if(expected, [](std::int32_t row) { return row >= kEnd; });
      const auto begin = found.begin() + static_cast<std::ptrdiff_t>(l * kCapacity);
      LODE_CHECK(left[l] == std::ssize(expected));
      std::vector<std::int32_t> kept(begin, begin + left[l]);
      if (expected.size() == lists[l].size()) LODE_CHECK(kept == expected);  // untouched
      std::ranges::sort(kept);
      std::ranges::sort(expected);
      LODE_CHECK(kept == expected);
    }
    if (time == 0) {
      first = found;
    } else {
      LODE_CHECK(found == first);
    }
  }
}

}  // namespace
}  // namespace lode::cuda
