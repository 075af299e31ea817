// SPDX-License-Identifier: Apache-2.0
// A project outside the tree: parses a spec and meets an error, with nothing but the installed headers and
// library.
#include <lodestone/lodestone.h>

#include <iostream>

int main() {
  std::cout << lode::parse_spec("kmeans:probes=16").str() << "\n";
  try {
    lode::parse_spec("kmens");
  } catch (const lode::InputError& error) {
    std::cout << error.what() << "\n";
    return 0;
  }
  return 1;
}
