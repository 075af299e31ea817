// SPDX-License-Identifier: Apache-2.0
// The list of methods. A new method is one file beside this one, one line in methods.h and one here.
#include <fmt/format.h>

#include <algorithm>

#include "lodestone/error.h"
#include "lodestone/register_method.h"
#include "select/methods.h"

namespace lode {

namespace {

std::vector<MethodInfo> own_methods() {
  return {
      full_method(),
      streaming_method(),
      topk_method(),
      random_method(),
      kmeans_method(),
      ideal_method(),
      squeezed_method(),
      hash_method(),
      hyperplanes_method(),
      saap_method(),
      retrieval_method(),
      quest_method(),
      double_sparsity_method(),
      infllm_method(),
      pqcache_method(),
      magicpig_method(),
      kdeformer_method(),
      reformer_method(),
      h2o_method(),
      snapkv_method(),
      ivf_method(),
      hnsw_method(),
      plan_method(),
  };
}

/// All methods; its memory never moves, for whoever holds a MethodInfo of it.
std::vector<MethodInfo>& list() {
  static std::vector<MethodInfo> all = [] {
    std::vector<MethodInfo> own = own_methods();
    own.reserve(kMostMethods);
    return own;
  }();
  return all;
}

bool is_name(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
}

bool is_taken(const std::string& name) {
  return std::any_of(list().begin(), list().end(), [&](const MethodInfo& method) {
    return method.name == name || std::count(method.aliases.begin(), method.aliases.end(), name) > 0;
  });
}

}  // namespace

const std::vector<MethodInfo>& methods() {
  return list();
}

void register_method(MethodInfo info) {
  std::vector<std::string> names = info.aliases;
  names.insert(names.begin(), info.name);
  for (const std::string& name : names) {
    if (!is_name(name))
      throw InputError(
          fmt::format("register_method: expected a name of letters, digits, '-' and '_', found '{}'", name));
    if (is_taken(name))
      throw InputError(fmt::format(
          "register_method: expected a name that no method has, found '{}': call yours otherwise", name));
  }
  if (!info.make)
    throw InputError(fmt::format(
        "register_method: expected a function that makes the selectors of '{}', found none", info.name));
  if (list().size() == kMostMethods)
    throw InputError(fmt::format("register_method: expected at most {} methods, found '{}' beyond them",
                                 kMostMethods, info.name));
  list().push_back(std::move(info));
}

}  // namespace lode
