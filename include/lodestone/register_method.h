// SPDX-License-Identifier: Apache-2.0
// Attention methods from outside: a program adds its own, and specs, documents, `.lode` files and comparisons
// know it as they know those that come with the library. examples/04_own_method.cc is a whole one.
#pragma once

#include "lodestone/spec.h"

namespace lode {

/// Adds a method to methods(), behind those that are there. Its selectors need select() and the index calls
/// of Selector alone; their index is saved in files under the method's name.
///
/// Call it before other threads parse specs: the list is read without a lock. InputError when the name (or an
/// alias) is taken, or has other characters than letters, digits, '-' and '_'; when `make` is missing; and
/// when kMostMethods are registered.
void register_method(MethodInfo info);

/// How many methods the list can hold, those of the library included. References into it stay valid.
inline constexpr std::size_t kMostMethods = 256;

}  // namespace lode
