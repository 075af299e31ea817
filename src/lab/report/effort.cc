// SPDX-License-Identifier: Apache-2.0
#include "lab/report/effort.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>

namespace lode {

namespace {

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double own_seconds() {
  rusage used = {};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

/// Seconds in which some program ran, over all processors: user, nice, system, irq, softirq and steal.
double busy_seconds() {
  std::ifstream stat("/proc/stat");
  std::string line;
  if (!std::getline(stat, line) || !line.starts_with("cpu ")) return 0;
  std::istringstream fields(line.substr(4));
  double ticks = 0, value = 0;
  for (int field = 0; field < 8 && fields >> value; ++field)
    ticks += field == 3 || field == 4 ? 0 : value;  // idle, waiting for devices
  return ticks / static_cast<double>(std::max<long>(1, sysconf(_SC_CLK_TCK)));
}

}  // namespace

CostLog& CostLog::operator+=(const CostLog& other) {
  wall += other.wall;
  processor += other.processor;
  others += other.others;
  room += other.room;
  return *this;
}

Json CostLog::json() const {
  return {{"wall_s", wall}, {"processor_s", processor}, {"others_s", others}, {"room_s", room}};
}

CostLog CostLog::of(const Json& json) {
  const auto field = [&](const char* name) {
    return json_has(json, name) && json.at(name).is_number() ? json.at(name).get<double>() : 0.0;
  };
  return {.wall = field("wall_s"),
          .processor = field("processor_s"),
          .others = field("others_s"),
          .room = field("room_s")};
}

std::string busy_warning(double others_share) {
  if (others_share <= kQuietShare) return {};
  return fmt::format(
      "Other programs had {:.0f} % of the machine while these times were taken: they are too long, and "
      "unlike "
      "one another by chance.",
      100 * others_share);
}

EffortClock::EffortClock() : wall_(wall_seconds()), own_(own_seconds()), all_(busy_seconds()) {}

CostLog EffortClock::effort() const {
  CostLog effort = {.wall = wall_seconds() - wall_, .processor = own_seconds() - own_};
  const auto processors = static_cast<double>(std::max<long>(1, sysconf(_SC_NPROCESSORS_ONLN)));
  effort.room = effort.wall * processors;
  effort.others = std::clamp(busy_seconds() - all_ - effort.processor, 0.0, effort.room);
  return effort;
}

}  // namespace lode
