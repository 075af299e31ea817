// SPDX-License-Identifier: Apache-2.0
// What a grid asks about the same texts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lab/report/grid.h"
#include "lab/tasks/samples.h"

namespace lode {

/// Samples of one task, or of all that share a text, of one length, seed and number of questions a context,
/// and what is asked of them.
struct MeasurementRunner::Group {
  std::string where;  ///< of the first run that asks
  std::string task;   ///< or kMixed; empty of the user's own samples
  std::int64_t length = 0, questions = 0;
  std::uint64_t seed = 0;
  std::int64_t count = 0, contexts = 0;  ///< to make
  bool timed = false;                    ///< whether a chart shows the time of a question
  std::vector<Sample> samples;
  /// Of a sample: which one of its task it is, and of which context.
  struct Place {
    std::int64_t rank = 0, context = 0;
  };
  std::map<std::string, Place> places;  // by id
  /// The first samples of a task in the first contexts.
  struct Extent {
    std::int64_t samples = 0, contexts = 0;
    bool holds(const Place& place) const { return place.rank < samples && place.context < contexts; }
  };
  std::map<std::tuple<std::string, std::string, std::string>, std::vector<Extent>>
      asked;  // by task, spec, protocol
  std::vector<NamedSpec> specs;
  std::vector<Protocol> protocols;

  /// Samples count by the task where several share a text.
  std::string key_of(const std::string& of_task) const { return task == kMixed ? of_task : ""; }

  Extent extent(const SuiteRun& run) const {
    constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
    if (task.empty()) return {kAll, kAll};
    return {samples_at(run, length), task == kMixed ? shared_texts(run, length) : kAll};
  }

  void add(const std::string& of_task, const NamedSpec& spec, const Protocol& protocol,
           const Extent& extent) {
    asked[{key_of(of_task), spec.name, protocol.str()}].push_back(extent);
    const auto has_spec = [&](const NamedSpec& s) { return s.name == spec.name; };
    if (std::none_of(specs.begin(), specs.end(), has_spec)) specs.push_back(spec);
    const auto has_protocol = [&](const Protocol& p) { return p.str() == protocol.str(); };
    if (std::none_of(protocols.begin(), protocols.end(), has_protocol)) protocols.push_back(protocol);
  }

  bool asks(const Sample& sample, const NamedSpec& spec, const Protocol& protocol) const {
    const auto found = asked.find({key_of(sample.task), spec.name, protocol.str()});
    if (found == asked.end()) return false;
    const Place& place = places.at(sample.id);
    return std::any_of(found->second.begin(), found->second.end(),
                       [&](const Extent& extent) { return extent.holds(place); });
  }

  void take(const Sample& sample) {
    const bool same_text = !samples.empty() && samples.back().context == sample.context;
    const std::int64_t context =
        samples.empty() ? 0 : places.at(samples.back().id).context + (same_text ? 0 : 1);
    places[sample.id] = {ranks_[key_of(sample.task)]++, context};
    samples.push_back(sample);
  }

 private:
  std::map<std::string, std::int64_t> ranks_;  // samples so far, by task
};

}  // namespace lode
