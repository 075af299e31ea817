// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/work_cost.h"

#include <map>
#include <set>

namespace lode {

/// A token at position x costs as much as 1 + x / 2200 first ones.
std::int64_t prefill_cost(std::int64_t tokens) {
  return tokens + tokens * tokens / 4400;
}

std::int64_t index_cost(const std::string& method, std::int64_t tokens, bool first) {
  static const std::map<std::string, double> dear = {{"retrieval", 8}, {"hnsw", 8},  {"squeezed", 1},
                                                     {"kmeans", 0.5},  {"h2o", 0.6}, {"magicpig", 0.2}};
  const auto found = dear.find(method);
  const bool shares = method == "retrieval" || method == "hnsw" || method == "kmeans";
  const double each = found == dear.end() || (!first && shares) ? 0.05
                      : first || method != "squeezed"           ? found->second
                                                                : 0.1;
  return static_cast<std::int64_t>(each * static_cast<double>(tokens));
}

std::int64_t indexes_cost(std::span<const std::string> methods, std::int64_t tokens) {
  std::set<std::string> indexed;
  std::int64_t cost = 0;
  for (const std::string& method : methods) cost += index_cost(method, tokens, indexed.insert(method).second);
  return cost;
}

std::int64_t answers_cost(const Protocol& protocol, std::int64_t tokens, std::int64_t methods) {
  if (methods == 0) return 0;
  const std::int64_t read = 128 + tokens / 100;
  return protocol.kind == Protocol::Kind::decode_sparse ? read + 48 * methods : read * methods;
}

}  // namespace lode
