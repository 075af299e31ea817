// SPDX-License-Identifier: Apache-2.0
#include "base/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "base/printable.h"

namespace lode {

namespace {

constexpr int kMostCells = 24, kFewestCells = 4;  // of a bar

/// "42 s", "3 min 5 s", "2 h 10 min".
std::string duration(double seconds) {
  const auto s = static_cast<long long>(std::ceil(seconds));
  if (s < 60) return std::to_string(s) + " s";
  if (s < 3600) return std::to_string(s / 60) + " min " + std::to_string(s % 60) + " s";
  return std::to_string(s / 3600) + " h " + std::to_string(s / 60 % 60) + " min";
}

/// ", 450 tokens/s"; empty as long as next to no time has passed: what takes none has no speed.
std::string speed(double done, double seconds, const std::string& unit) {
  constexpr double kShort = 0.2;  // seconds
  if (seconds < kShort) return {};
  const double rate = done / seconds;
  char text[80];
  std::snprintf(text, sizeof text, rate < 10 ? ", %.1f %s/s" : ", %.0f %s/s", rate, unit.c_str());
  return text;
}

bool on_terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && term != nullptr && std::string_view(term) != "dumb";
}

/// A line that is redrawn must not be broken: what is left of it could not be drawn over.
std::size_t terminal_columns() {
  winsize size = {};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

/// "title [###...] counts" in at most so many columns: the bar gives way first.
std::string bar_line(const std::string& title, const std::string& counts, double share, std::size_t columns) {
  const auto room = static_cast<std::int64_t>(columns) - std::ssize(title) - std::ssize(counts) - 4;
  std::string line = title;
  if (room >= kFewestCells) {
    const auto cells = static_cast<std::size_t>(std::min<std::int64_t>(room, kMostCells)),
               filled = std::min(cells, static_cast<std::size_t>(share * static_cast<double>(cells)));
    line += " [" + std::string(filled, '#') + std::string(cells - filled, '.') + "]";
  }
  return (line + " " + counts).substr(0, columns);
}

}  // namespace

void GrowingCost::add(std::int64_t done, double seconds) {
  const double units = static_cast<double>(done) - done_;
  if (units <= 0) return;
  const double x = done_ + units / 2, y = (seconds - seconds_) / units;
  w_ += units;
  wx_ += units * x;
  wy_ += units * y;
  wxx_ += units * x * x;
  wxy_ += units * x * y;
  done_ = static_cast<double>(done);
  seconds_ = seconds;
}

double GrowingCost::left(std::int64_t total) const {
  if (w_ <= 0) return 0;
  const double mean_x = wx_ / w_, mean_y = wy_ / w_, spread = wxx_ / w_ - mean_x * mean_x;
  const double slope = spread > 0 ? (wxy_ / w_ - mean_x * mean_y) / spread : 0;
  // Neither part can be negative: a first step that was slow by chance does not promise speed later.
  const double b = std::clamp(slope, 0.0, mean_y / mean_x), a = mean_y - b * mean_x;
  const double end = static_cast<double>(total);
  return a * (end - done_) + b / 2 * (end * end - done_ * done_);
}

Progress::Progress(std::string title, std::int64_t total, std::string unit, Mode mode, Cost cost)
    : title_(printable(title)),  // often a file's name
      unit_(std::move(unit)),
      total_(total),
      quiet_(mode == Mode::quiet),
      terminal_(on_terminal()),
      start_(std::chrono::steady_clock::now()),
      last_draw_(start_) {
  if (cost == Cost::growing) growing_.emplace();
}

Progress::~Progress() {
  if (drawn_ && terminal_) std::fputc('\n', stderr);
}

void Progress::at(std::int64_t done) {
  const bool ended = drawn_ && done_ >= total_;  // and has been said
  done_ = done;
  if (quiet_ || total_ <= 0 || ended) return;
  if (growing_) growing_->add(done, seconds());
  const auto now = std::chrono::steady_clock::now();
  const bool last = done >= total_;
  const std::int64_t tenth = done * 10 / total_;
  const bool due = terminal_ ? now - last_draw_ >= std::chrono::milliseconds(100) : tenth != last_tenth_;
  if (!due && !last) return;
  last_draw_ = now;
  last_tenth_ = tenth;
  draw(done, last);
}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Progress::draw(std::int64_t done, bool last) {
  const double passed = seconds();
  const std::int64_t own = std::max<std::int64_t>(0, done - skipped_);
  const double rate = passed > 0 ? static_cast<double>(own) / passed : 0;
  const double left = growing_   ? growing_->left(total_)
                      : rate > 0 ? static_cast<double>(total_ - done) / rate
                                 : 0;
  // A guess from the first few steps misleads: caches are cold, and how cost grows does not show yet.
  const bool early = done - skipped_ < (total_ - skipped_) / 20;
  const std::string tail = last                 ? "in " + duration(passed)
                           : rate > 0 && !early ? "ETA " + duration(left)
                                                : "...";
  char counts[160];
  std::snprintf(counts, sizeof counts, "%lld/%lld %s%s, %s", static_cast<long long>(done),
                static_cast<long long>(total_), unit_.c_str(),
                speed(static_cast<double>(own), passed, unit_).c_str(), tail.c_str());
  if (terminal_) {
    const double share = static_cast<double>(done) / static_cast<double>(total_);
    std::fprintf(stderr, "\r%s\033[K", bar_line(title_, counts, share, terminal_columns() - 1).c_str());
  } else {
    std::fprintf(stderr, "%s: %s\n", title_.c_str(), counts);
  }
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace lode
