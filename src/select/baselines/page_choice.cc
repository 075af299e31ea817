// SPDX-License-Identifier: Apache-2.0
#include "select/baselines/page_choice.h"

#include <cmath>
#include <limits>

#include "select/shared/best_keys.h"

namespace lode {

namespace {

/// The last in rank: of the lowest score, the oldest.
Position last_in_rank(std::span<const Position> pages, std::span<const float> scores) {
  const auto rank = [&](Position page) {
    const float score = scores[static_cast<std::size_t>(page)];
    return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
  };
  Position last = pages[0];
  for (const Position page : pages) {
    if (rank(page) < rank(last)) last = page;
  }
  return last;
}

}  // namespace

void add_best_pages(const SelectUnit& unit, std::int64_t page, std::int64_t budget,
                    std::span<const float> scores, std::vector<Position>& pages, Selection& out) {
  const std::int64_t tail = std::min(unit.far_keys() % page, budget), whole = (budget - tail) / page,
                     rest = (budget - tail) % page;
  pages.clear();
  if (whole + rest > 0) top_count(scores, whole + (rest > 0 ? 1 : 0), 0, pages);
  const Position partial = rest > 0 ? last_in_rank(pages, scores) : -1;
  Run run = {unit.far_begin, unit.far_begin};
  const auto take = [&](std::int64_t begin, std::int64_t end) {
    if (begin != run.end) {
      out.add_run(run.begin, run.end);
      run.begin = static_cast<Position>(begin);
    }
    run.end = static_cast<Position>(end);
  };
  for (const Position p : pages) {
    const std::int64_t end = unit.far_begin + (p + 1) * page;
    take(end - (p == partial ? rest : page), end);
  }
  if (tail > 0) take(unit.far_end - tail, unit.far_end);
  out.add_run(run.begin, run.end);
}

}  // namespace lode
