// SPDX-License-Identifier: Apache-2.0
// Memory for arrays that are read at random places: rows begin at cache lines, and large arrays lie in huge
// pages where the system grants them, since with pages of 4 KiB most reads would miss the TLB as well.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>

namespace lode {

template <class T>
class HugePages {
 public:
  using value_type = T;
  HugePages() = default;
  template <class U>
  explicit(false) HugePages(const HugePages<U>&) noexcept {}

  T* allocate(std::size_t count) {
    if (count > static_cast<std::size_t>(-1) / sizeof(T)) throw std::bad_array_new_length();
    const std::size_t bytes = count * sizeof(T);
    void* const at = ::operator new(bytes, alignment(bytes));
    // Not more than a wish: without huge pages the same memory is slower.
    if (bytes >= kHugePage) madvise(at, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(at);
  }
  void deallocate(T* at, std::size_t count) noexcept { ::operator delete(at, alignment(count * sizeof(T))); }
  bool operator==(const HugePages&) const = default;

 private:
  static constexpr std::size_t kLine = 64, kHugePage = std::size_t{2} << 20;
  static std::align_val_t alignment(std::size_t bytes) {
    return std::align_val_t{bytes >= kHugePage ? kHugePage : kLine};
  }
};

template <class T>
using HugeVector = std::vector<T, HugePages<T>>;

/// Resizes; where the vector must move, it gets a sixteenth of room to spare rather than as much again.
template <class T>
void resize_tightly(HugeVector<T>& vector, std::size_t size, const T& value = T{}) {
  if (size > vector.capacity() && !vector.empty()) vector.reserve(size + size / 16);
  vector.resize(size, value);
}

}  // namespace lode
