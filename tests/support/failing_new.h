// SPDX-License-Identifier: Apache-2.0
// Memory that runs out: replaces operator new of the whole program, so one source of it may include this.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

// GCC inlines some of these functions and not others, and then takes new and delete for a mismatch.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace lode::test {

/// Allocations of this thread before the one that fails, which is one alone; below 0: none does.
inline thread_local int allocations_left = -1;

inline void* allocate(std::size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}

}  // namespace lode::test

void* operator new(std::size_t bytes) {
  return lode::test::allocate(bytes);
}
void* operator new[](std::size_t bytes) {
  return lode::test::allocate(bytes);
}
// Of all kinds, so that a sanitizer sees memory come and go the same way.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes > 0 ? bytes : 1);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes > 0 ? bytes : 1);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
