// SPDX-License-Identifier: Apache-2.0
#include "base/huge_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace lode {

namespace {

constexpr std::size_t kLine = 64, kHugePage = std::size_t{2} << 20;
/// Only the last array of a mapping shares a huge page with nothing, so large mappings waste little.
constexpr std::size_t kLeastMapping = std::size_t{64} << 20;

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// Whole huge pages of zeros, from the first one on.
std::span<std::byte> map_huge_pages(std::size_t bytes) {
  const std::size_t size = bytes + kHugePage;  // the system aligns to small pages: what sticks out goes back
  void* const at =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(at);
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  const std::size_t before = round_up(address, kHugePage) - address, behind = size - before - bytes;
  if (before > 0) munmap(begin, before);
  if (behind > 0) munmap(begin + before + bytes, behind);
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // may fail: small pages are slower, not wrong
  return {begin + before, bytes};
}

}  // namespace

HugeArena::~HugeArena() {
  for (const std::span<std::byte> m : mapped_) munmap(m.data(), m.size());
}

std::span<std::byte> HugeArena::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::size_t size = round_up(bytes, kLine);
  if (size <= rest_.size()) {
    const std::span<std::byte> taken = rest_.first(bytes);
    rest_ = rest_.subspan(size);
    return taken;
  }
  mapped_.reserve(mapped_.size() + 1);  // no mapping is lost where this throws
  const std::span<std::byte> fresh =
      mapped_.emplace_back(map_huge_pages(std::max(kLeastMapping, round_up(size, kHugePage))));
  if (fresh.size() - size > rest_.size()) rest_ = fresh.subspan(size);
  return fresh.first(bytes);
}

}  // namespace lode
