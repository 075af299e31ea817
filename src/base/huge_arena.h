// SPDX-License-Identifier: Apache-2.0
// Huge pages for many arrays that are each smaller than one. HugePages (huge_pages.h) serves single large arrays.
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

namespace lode {

class HugeArena {
 public:
  HugeArena() = default;
  ~HugeArena();
  HugeArena(const HugeArena&) = delete;
  HugeArena& operator=(const HugeArena&) = delete;

  /// An array that lives as long as the arena and begins at a cache line. Its bytes are 0, and the system gives it
  /// memory when they are first written. Several threads may call. std::bad_alloc if there is no address space.
  std::span<std::byte> take(std::size_t bytes);

 private:
  std::mutex mutex_;
  std::vector<std::span<std::byte>> mapped_;
  std::span<std::byte> rest_;  // of one of them: not taken yet
};

}  // namespace lode
