// SPDX-License-Identifier: Apache-2.0
#include "lab/report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include "base/text.h"
#include "base/threads.h"
#include "lab/report/explanation.h"
#include "lab/report/ranking.h"
#include "lab/report/sections.h"
#include "lab/report/svg.h"

namespace lode {

namespace {

constexpr const char* kLeftOut = "Left out";

/// One line a reason, with all specs that it holds for.
std::vector<std::string> skipped_lines(const MeasurementRunner& grid) {
  std::vector<std::pair<std::string, std::string>> by_reason;  // reason, specs
  for (const Skipped& s : grid.skipped()) {
    const std::string spec = "`" + excerpt(s.spec) + "`";
    const auto found = std::find_if(by_reason.begin(), by_reason.end(),
                                    [&](const auto& known) { return known.first == s.reason; });
    if (found != by_reason.end()) {
      found->second += ", " + spec;
    } else {
      by_reason.emplace_back(s.reason, spec);
    }
  }
  std::vector<std::string> lines;
  for (const auto& [reason, specs] : by_reason)
    lines.push_back(fmt::format("{}: {}", specs, excerpt(reason, 400)));
  return lines;
}

/// Whether a run shows its methods alone; others have full attention beside them.
bool shows_only_methods(RunKind kind) {
  return kind == RunKind::probe || kind == RunKind::recall || kind == RunKind::clusters;
}

void write_run(const Section& section) {
  if (!section.run.title.empty()) section.page.heading(3, section.run.title);
  const RunKind kind = section.run.kind;
  if (shows_only_methods(kind) && section.grid.methods(section.run).empty())
    return section.page.paragraph("All of its methods are left out.");
  switch (kind) {
    case RunKind::eval:
      return write_eval(section);
    case RunKind::probe:
      return write_probe(section);
    case RunKind::recall:
      return write_recall(section);
    case RunKind::clusters:
      return write_clusters(section);
    case RunKind::key_query:
      return write_key_query(section);
    case RunKind::drift:
      return write_drift(section);
    case RunKind::training:
      return write_training(section);
    default:
      return write_bench(section);
  }
}

}  // namespace

std::string series_of(std::string_view label) {
  const std::size_t colon = label.find(':');
  if (colon == std::string_view::npos) return std::string(label);
  const std::string_view keys = label.substr(colon + 1);
  const std::size_t comma = keys.find(',');
  std::string name(label.substr(0, colon));
  if (comma != std::string_view::npos) name += ":" + std::string(keys.substr(comma + 1));
  return name;
}

std::optional<double> budget_of(std::string_view label) {
  const std::size_t equals = label.find('=');
  if (equals == std::string_view::npos) return std::nullopt;
  const std::string_view text = label.substr(equals + 1, label.find(',', equals) - equals - 1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

int style_of(std::string_view label) {
  // The methods that are most often shown together come first, so that no two of them share a colour.
  static const std::vector<std::string> names = {
      "saap",   "hash",   "squeezed", "retrieval", "kmeans",          "topk",  "streaming", "quest",
      "infllm", "snapkv", "h2o",      "pqcache",   "double-sparsity", "ideal", "full",      "magicpig",
      "ivf",    "hnsw",   "reformer", "kdeformer", "hyperplanes",     "random"};
  const std::string name(label.substr(0, label.find(':')));
  const auto found = std::find(names.begin(), names.end(), name);
  const auto index = static_cast<int>(found - names.begin());
  // A variant of a method looks like none of the methods: hollow, dashed.
  return series_of(label) == name ? index : index + 8;
}

namespace {

/// Names of parts are keys of files, older ones too, and say "1 queries".
std::string told_name(std::string name) {
  constexpr std::string_view kOne = " x 1 queries";
  const std::size_t at = name.find(kOne);
  if (at != std::string::npos) name.replace(at, kOne.size(), " x 1 query");
  return name;
}

/// What the work took, the longest part first, and what that says of the times in this report.
void write_effort(const MeasurementRunner& grid, Page& page) {
  const std::map<std::string, CostLog> efforts = grid.efforts();
  if (efforts.empty()) return;
  std::vector<std::pair<std::string, CostLog>> parts(efforts.begin(), efforts.end());
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return a.second.processor > b.second.processor; });
  CostLog sum;
  for (const auto& [name, effort] : parts) sum += effort;
  page.heading(2, "What it took");
  const double threads = static_cast<double>(grid.model().pool().size());
  page.paragraph(fmt::format(
      "{:.1f} minutes on the clock and {:.1f} minutes of processors: about {:.1f} minutes where "
      "nothing else runs. {}",
      sum.wall / 60, sum.processor / 60, sum.processor / 60 / threads, busy_warning(sum.others_share())));
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, effort] : parts)
    rows.push_back({told_name(name), fmt::format("{:.1f}", effort.wall),
                    fmt::format("{:.1f}", effort.processor), percent(effort.others_share(), 0)});
  page.table("Work by what was measured, in seconds.", {"part", "clock", "processors", "others had"},
             std::move(rows));
}

/// For readers who go no further: what came out of the suites that rank methods.
void write_outcome(std::span<const Suite* const> suites, const std::map<const Suite*, Ladders>& ladders,
                   Page& page) {
  for (const Suite* suite : suites) {
    const auto found = ladders.find(suite);
    if (found == ladders.end()) continue;
    std::vector<std::string> sentences = outcome_of(found->second);
    if (sentences.empty()) continue;
    sentences.insert(
        sentences.begin(),
        fmt::format("{} compares {} a part of what full attention reads.", link_to(suite->title, suite->name),
                    found->second.methods.size() == 1
                        ? std::string("1 method that reads")
                        : fmt::format("{} methods that read", found->second.methods.size())));
    page.paragraph(join(sentences, " "));
  }
}

/// How the page was made, and what it counts.
void write_front(const MeasurementRunner& grid, std::span<const Suite> suites, const Provenance& provenance,
                 Page& page) {
  page.paragraph(fmt::format("Model `{}`. Machine: {}. Commit {}, {}.", provenance.model, provenance.machine,
                             provenance.commit, provenance.date));
  std::string command = provenance.program;
  for (const Suite& suite : suites) command += " " + suite.given;
  page.code(command + " " + provenance.options);
  page.paragraph(
      "Density is the share of bytes that were read, those of the index, of sink, window and exact layers "
      "included, over "
      "what full attention reads; far keys are the share of the keys outside sink and window that were "
      "attended. Scores "
      "are in percent. What reads fewer bytes stands further left; what answers like full attention stands "
      "higher.");
  if (!grid.skipped().empty())
    page.paragraph(fmt::format("{} left out; {} says what, and why.",
                               grid.skipped().size() == 1
                                   ? std::string("One spec is")
                                   : fmt::format("{} specs are", grid.skipped().size()),
                               link_to("the end of this page", kLeftOut)));
}

}  // namespace

Page make_report(const MeasurementRunner& grid, std::span<const Suite> suites, const Provenance& provenance) {
  Page page(suites.size() == 1 ? suites.front().title : "Attention by retrieval, measured alike");
  std::vector<const Suite*> ordered;  // a reader wants to know first how all compare
  for (const Suite& suite : suites) ordered.push_back(&suite);
  std::stable_partition(ordered.begin(), ordered.end(), [](const Suite* suite) { return suite->ranking; });
  std::map<const Suite*, Ladders> ladders;
  for (const Suite* suite : ordered)
    if (suite->ranking) ladders.emplace(suite, read_ladders(grid, *suite));
  if (grid.so_far())
    page.paragraph(
        "This page shows what has been measured so far; the same command without --so-far goes on.");
  write_outcome(ordered, ladders, page);
  write_front(grid, suites, provenance, page);
  for (const Suite* suite : ordered) {
    page.heading(2, suite->title, suite->name);
    if (!suite->source.empty()) page.paragraph("Follows " + suite->source + ".");
    page.paragraph(suite->note);
    int figures = 0;
    const auto section_of = [&](const SuiteRun& run) {
      return Section{grid,
                     *suite,
                     run,
                     fmt::format("`{} {} {}`, commit {}, {}, seed {}.", provenance.program, suite->given,
                                 provenance.options, provenance.commit, provenance.machine, run.seed),
                     page,
                     figures};
    };
    if (suite->ranking) write_ranking(section_of(suite->runs.front()), ladders.at(suite));
    for (const SuiteRun& run : suite->runs) write_run(section_of(run));
  }
  write_effort(grid, page);
  if (!grid.skipped().empty()) {
    page.heading(2, kLeftOut);
    page.list(skipped_lines(grid));
  }
  return page;
}

}  // namespace lode
