// SPDX-License-Identifier: Apache-2.0
// usage: test_cuda [PART OF A NAME]; GTEST_TOTAL_SHARDS and GTEST_SHARD_INDEX deal the cases to several processes
#include <cstdlib>
#include <cstring>
#include <exception>

#include "harness.h"
#include "kernels/cuda/device/device.h"

namespace lode::cuda::test {
namespace {
int failures = 0;
bool skipped = false;
constexpr int kMostPrinted = 10;
}  // namespace

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

void fail(const char* file, int line, const std::string& what) {
  if (++failures <= kMostPrinted) std::printf("  %s:%d: %s\n", file, line, what.c_str());
}

void skip(const std::string& why) {
  skipped = true;
  std::printf("  needs %s\n", why.c_str());
}

}  // namespace lode::cuda::test

/// By the names that GoogleTest's runners know.
static int number_in(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

int main(int argc, char** argv) {
  using namespace lode::cuda;
  const Availability gpu = availability();
  if (!gpu.ok) {
    std::printf("skipped: %s\n", gpu.why.c_str());
    return 77;
  }
  std::printf("%s, sm_%d%d\n", gpu.name.c_str(), gpu.major, gpu.minor);
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a run that is stopped shows how far it came
  int bad = 0, run = 0, left_out = 0, seen = 0;
  const int shards = number_in("GTEST_TOTAL_SHARDS", 1), shard = number_in("GTEST_SHARD_INDEX", 0);
  for (const test::Case& c : test::cases()) {
    if (argc > 1 && std::strstr(c.name, argv[1]) == nullptr) continue;
    if (seen++ % shards != shard) continue;
    test::failures = 0;
    test::skipped = false;
    try {
      c.body();
    } catch (const std::exception& e) {
      test::fail(c.name, 0, e.what());
    }
    ++run;
    const bool failed = test::failures > 0, left = !failed && test::skipped;
    bad += failed, left_out += left;
    std::printf("%s %s\n", failed ? "FAILED" : left ? "skip  " : "ok    ", c.name);
  }
  std::printf("%d of %d passed", run - bad - left_out, run);
  if (left_out > 0) std::printf(", %d skipped", left_out);
  std::printf("\n");
  return bad > 0 || run == 0 ? 1 : 0;
}
