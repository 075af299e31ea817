// SPDX-License-Identifier: Apache-2.0
// The test runner of the CUDA kernels: no library, so that the tests build wherever nvcc is. Exits with 77,
// which CTest counts as skipped, when there is no GPU.
#pragma once

#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace lode::cuda::test {

struct Case {
  const char* name;
  std::function<void()> body;
};
std::vector<Case>& cases();
/// Counts a failure of the running case and prints it.
void fail(const char* file, int line, const std::string& what);
/// The running case needs what this GPU or this build has not; it is counted apart.
void skip(const std::string& why);

struct Register {
  Register(const char* name, std::function<void()> body) { cases().push_back({name, std::move(body)}); }
};

}  // namespace lode::cuda::test

#define LODE_TEST(name)                                                          \
  static void test_##name();                                                     \
  static const ::lode::cuda::test::Register register_##name(#name, test_##name); \
  static void test_##name()
#define LODE_CHECK(condition)                                                   \
  do {                                                                          \
    if (!(condition)) ::lode::cuda::test::fail(__FILE__, __LINE__, #condition); \
  } while (0)
/// Leaves the case.
#define LODE_NEEDS(condition)               \
  do {                                      \
    if (!(condition)) {                     \
      ::lode::cuda::test::skip(#condition); \
      return;                               \
    }                                       \
  } while (0)
/// Fails too when `found` is not a number.
#define LODE_CHECK_CLOSE(found, expected, tolerance)                                             \
  do {                                                                                           \
    const double found_ = (found), expected_ = (expected);                                       \
    if (!(std::fabs(found_ - expected_) <= (tolerance)))                                         \
      ::lode::cuda::test::fail(__FILE__, __LINE__,                                               \
                               std::string(#found) + ": expected " + std::to_string(expected_) + \
                                   ", found " + std::to_string(found_));                         \
  } while (0)
