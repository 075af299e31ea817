// SPDX-License-Identifier: Apache-2.0
// Attention methods are named by spec strings: which there are, what they take, and how a wrong one is
// refused.
#include <lodestone/error.h>
#include <lodestone/spec.h>

#include <cstdio>

int main() {
  for (const lode::MethodInfo& method : lode::methods()) {
    std::printf("%s (%s)\n", method.name.c_str(), method.source.c_str());
    for (const lode::SpecKey& key : method.keys) {
      std::printf("  %s = %s: %s\n", key.name.c_str(), key.default_value.c_str(), key.meaning.c_str());
    }
  }
  const lode::Spec spec = lode::parse_spec("kmeans:probes=16,window=512");
  std::printf("%s attends the first %lld and the last %lld keys anyway\n", spec.str().c_str(),
              static_cast<long long>(spec.dense.sink), static_cast<long long>(spec.dense.window));
  try {
    lode::parse_spec("kmeans:probes=0");
  } catch (const lode::InputError& error) {
    std::printf("%s\n", error.what());
    return 0;
  }
  return 1;
}
