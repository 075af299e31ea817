// SPDX-License-Identifier: Apache-2.0
// Prose of our own: the chronicle of an invented town, written by a grammar (assets/prose.json) from a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lode {

/// At least `bytes` bytes of prose in whole paragraphs, parted by blank lines: clean UTF-8, the same on every
/// machine. A year is told in order, season by season; a paragraph stays with one person or one matter.
std::string make_prose(std::uint64_t seed, std::size_t bytes);

}  // namespace lode
