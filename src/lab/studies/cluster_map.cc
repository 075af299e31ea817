// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/cluster_map.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/context.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"
#include "select/squeezed/cluster_choice.h"

namespace lode {

namespace {

double dot(const float* a, const double* b, std::int64_t d) {
  double sum = 0;
  for (std::int64_t i = 0; i < d; ++i) sum += a[i] * b[i];
  return sum;
}

/// Keys of one cluster that are shown.
struct Group {
  std::int64_t keys = 0;
  std::vector<Position> rows;
};

/// The clusters of the finest level with the most keys, larger ones first.
std::vector<Group> largest(const ClusterTree& tree, const ClusterMapOptions& options) {
  const std::vector<std::int32_t>& first = tree.levels.back().first;
  std::vector<std::size_t> order(first.size() - 1);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return first[a + 1] - first[a] > first[b + 1] - first[b];
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(options.clusters)));
  std::vector<Group> groups;
  for (const std::size_t cluster : order) {
    const std::int64_t begin = first[cluster], keys = first[cluster + 1] - begin;
    Group& group = groups.emplace_back(Group{keys, {}});
    const std::int64_t shown = std::min(keys, options.keys);
    for (std::int64_t i = 0; i < shown; ++i)
      group.rows.push_back(tree.rows[static_cast<std::size_t>(begin + i * keys / shown)]);
  }
  return groups;
}

Json map_of(const ClusterTree& tree, const KvRows& kv, const ClusterMapOptions& options) {
  const std::vector<Group> groups = largest(tree, options);
  const std::int64_t d = kv.d;
  std::vector<float> keys;  // [shown, d]
  for (const Group& group : groups) {
    for (const Position row : group.rows) {
      keys.resize(keys.size() + static_cast<std::size_t>(d));
      read_stored_keys({&kv, 1}, row, nullptr, std::span(keys).last(static_cast<std::size_t>(d)));
    }
  }
  const std::int64_t n = std::ssize(keys) / d;
  for (std::int64_t i = 0; i < d; ++i) {
    double mean = 0;
    for (std::int64_t row = 0; row < n; ++row) mean += keys[static_cast<std::size_t>(row * d + i)];
    for (std::int64_t row = 0; row < n; ++row)
      keys[static_cast<std::size_t>(row * d + i)] -= static_cast<float>(mean / static_cast<double>(n));
  }
  const double all = std::inner_product(keys.begin(), keys.end(), keys.begin(), 0.0);
  std::vector<float> x, y;
  const double held = take_main_axis(keys, d, x) + take_main_axis(keys, d, y);
  Json shown = Json::array();
  std::size_t at = 0;
  for (const Group& group : groups) {
    Json points = Json::array();
    for (std::size_t i = 0; i < group.rows.size(); ++i, ++at) points.push_back({x[at], y[at]});
    shown.push_back({{"keys", group.keys}, {"points", std::move(points)}});
  }
  return {{"clusters", tree.levels.back().nodes()},
          {"shown", all > 0 ? held / all : 1.0},
          {"groups", std::move(shown)}};
}

/// Those asked for, or else the first that chooses its keys, the middle and the last.
template <class Selectors>
std::vector<int> wanted_layers(const ClusterMapOptions& options, const Selectors& selectors) {
  if (!options.layers.empty()) return options.layers;
  const int layers = static_cast<int>(std::ssize(selectors));
  int first = 0;
  while (first + 1 < layers && selectors[static_cast<std::size_t>(first)] == nullptr) ++first;
  std::vector<int> wanted = {first, std::max(first, layers / 2), layers - 1};
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  return wanted;
}

}  // namespace

double take_main_axis(std::vector<float>& rows, std::int64_t d, std::vector<float>& along) {
  constexpr int kRounds = 200;
  const std::int64_t n = std::ssize(rows) / d;
  // From the longest row on: it lies along some of the spread.
  std::int64_t longest = 0;
  double most = -1;
  for (std::int64_t row = 0; row < n; ++row) {
    const float* const r = rows.data() + row * d;
    const double norm = std::inner_product(r, r + d, r, 0.0);
    if (norm > most) most = norm, longest = row;
  }
  along.assign(static_cast<std::size_t>(n), 0.0f);
  if (most <= 0) return 0.0;
  std::vector<double> axis(rows.begin() + longest * d, rows.begin() + (longest + 1) * d);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> next(static_cast<std::size_t>(d));
    for (std::int64_t row = 0; row < n; ++row) {
      const float* const r = rows.data() + row * d;
      const double by = dot(r, axis.data(), d);
      for (std::int64_t i = 0; i < d; ++i) next[static_cast<std::size_t>(i)] += by * r[i];
    }
    const double norm = std::sqrt(std::inner_product(next.begin(), next.end(), next.begin(), 0.0));
    for (std::size_t i = 0; i < next.size(); ++i) axis[i] = next[i] / norm;
  }
  double spread = 0;
  for (std::int64_t row = 0; row < n; ++row) {
    float* const r = rows.data() + row * d;
    const double by = dot(r, axis.data(), d);
    for (std::int64_t i = 0; i < d; ++i) r[i] -= static_cast<float>(by * axis[static_cast<std::size_t>(i)]);
    along[static_cast<std::size_t>(row)] = static_cast<float>(by);
    spread += by * by;
  }
  return spread;
}

std::vector<Json> cluster_maps(const std::shared_ptr<const Model>& model, std::string_view text,
                               const std::vector<NamedSpec>& specs, const ClusterMapOptions& options) {
  const std::vector<TokenId> tokens = model->tokenizer().encode(text, Tokenizer::Bos::as_template);
  ContextOptions context_options = options.context;
  context_options.device = Device::cpu;  // where selectors can be asked
  context_options.max_tokens = std::ssize(tokens);
  Context context(model, context_options);
  std::vector<MethodId> methods;
  for (const NamedSpec& named : specs) methods.push_back(context.attach(named.spec));
  context.prefill(tokens);
  context.build_indexes();
  std::vector<Json> maps;
  for (std::size_t m = 0; m < specs.size(); ++m) {
    const auto& selectors = context.impl().methods[static_cast<std::size_t>(methods[m])].selectors;
    for (const int layer : wanted_layers(options, selectors)) {
      const Selector* const selector = selectors[static_cast<std::size_t>(layer)];
      const auto* const chooser = dynamic_cast<const ClusterChooser*>(selector);
      const auto choice = chooser != nullptr ? chooser->cluster_choice() : std::nullopt;
      if (!choice || choice->segments.empty())
        throw InputError("cluster map: expected a method that has clustered this text, found '" +
                         specs[m].name + "'");
      Json map = map_of(
          choice->segments[0].heads[static_cast<std::size_t>(options.kv_head)],
          context.impl().host_kv().layer(layer).heads[static_cast<std::size_t>(options.kv_head)], options);
      map.update({{"attention", specs[m].name}, {"layer", layer}, {"kv_head", options.kv_head}});
      maps.push_back(std::move(map));
    }
  }
  return maps;
}

}  // namespace lode
