// SPDX-License-Identifier: Apache-2.0
// The part of a grid that asks questions: which texts there are, what is asked about each, and the answers.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>

#include "base/cancel.h"
#include "lab/report/grid.h"
#include "lab/report/grid_group.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Of a text that needs its far past; shorter ones may be refused.
constexpr std::int64_t kSurelyLongEnough = 4096;

const std::string kAnswers = "answers";

}  // namespace

/// Lists stand alone, facts may share a text.
std::string MeasurementRunner::group_name(const SuiteRun& run, const std::string& task) const {
  if (!options_.samples.empty()) return "";
  const std::vector<std::string> mixed = mixed_tasks();
  const bool shares = run.shared > 0 && std::find(mixed.begin(), mixed.end(), task) != mixed.end();
  return shares ? std::string(kMixed) : task;
}

MeasurementRunner::Group* MeasurementRunner::find_group(const SuiteRun& run, const std::string& task,
                                                        std::int64_t length) const {
  const std::string name = group_name(run, task);
  for (const auto& g : groups_) {
    if (g->task == name &&
        (name.empty() || (g->length == length && g->seed == run.seed && g->questions == run.questions)))
      return g.get();
  }
  return nullptr;
}

void MeasurementRunner::plan_groups(std::span<const Suite> suites) {
  for (const Suite& suite : suites) {
    for (const SuiteRun& run : suite.runs) {
      runs_.push_back(run);
      // A length that is too short for such a text is known before hours of work.
      for (const std::int64_t length : run.lengths)
        if ((run.kind == RunKind::probe || run.kind == RunKind::clusters || !has_methods(run.kind)) &&
            length < kSurelyLongEnough)
          naming(run.where, [&] { probe_text(run, length); });
      if (run.kind == RunKind::eval) plan_questions(run);
    }
  }
  for (auto& group : groups_) {
    naming(group->where, [&] { make_samples_of(*group); });
    for (const Protocol& protocol : group->protocols) records(protocol);
  }
}

void MeasurementRunner::plan_questions(const SuiteRun& run) {
  const NamedSpec full = {"full", parse_spec("full")};
  const bool own = !options_.samples.empty();
  for (const std::string& task : own ? std::vector<std::string>{""} : run.tasks) {
    for (const std::int64_t length : own ? std::vector<std::int64_t>{0} : run.lengths) {
      Group* group = find_group(run, task, length);
      if (group == nullptr) {
        groups_.push_back(std::make_unique<Group>());
        group = groups_.back().get();
        group->where = run.where;
        group->task = group_name(run, task);
        group->length = length;
        group->questions = run.questions;
        group->seed = run.seed;
      }
      group->timed = group->timed || std::ranges::find(run.show, Show::score_time) != run.show.end();
      group->count = std::max(group->count, samples_at(run, length));
      if (group->task == kMixed) group->contexts = std::max(group->contexts, shared_texts(run, length));
      for (const Protocol& protocol : run.protocols) {
        group->add(task, full, protocol, group->extent(run));
        for (const GridMethod& m : methods(run)) group->add(task, m.named, protocol, group->extent(run));
      }
    }
  }
}

void MeasurementRunner::make_samples_of(Group& group) const {
  for (const Sample& sample : options_.samples) group.take(sample);
  if (!options_.samples.empty()) return;
  const bool mixed = group.task == kMixed;  // then the number of contexts is what counts
  make_samples({.task = group.task,
                .tokens = group.length,
                .count = mixed ? std::numeric_limits<std::int64_t>::max() : group.count,
                .contexts = group.contexts,
                .seed = group.seed,
                .questions = group.questions},
               Language::built_in(), *haystack(group.seed, group.length), [&](const Sample& sample, bool) {
                 Sample numbered = sample;
                 if (group.questions > 0) numbered.id += fmt::format("-of-{}", group.questions);
                 group.take(numbered);
               });
}

Records& MeasurementRunner::records(const Protocol& protocol) {
  std::unique_ptr<Records>& records = records_[protocol.str()];
  if (!records) {
    std::string name = "answers-" + protocol.str() + ".jsonl";
    std::replace(name.begin(), name.end(), ':', '-');
    records =
        std::make_unique<Records>(options_.folder / "raw" / name,
                                  record_settings(*model_, protocol, options_.context, options_.chat.get()));
  }
  return *records;
}

void MeasurementRunner::plan_answers(std::vector<Part>& parts) {
  struct Work {
    std::unique_ptr<Answering> answering;
    EvalOptions options;
    std::vector<EvalPass> passes;
  };
  for (const auto& group : groups_) {
    const auto w = std::make_shared<Work>();
    w->options.context = options_.context;
    w->options.chat = options_.chat;
    if (group->timed) w->options.together = 1;  // the time of a question alone
    w->options.wanted = [&group = *group](const Sample& s, const NamedSpec& spec, const Protocol& p) {
      return group.asks(s, spec, p);
    };
    for (const Protocol& p : group->protocols) w->passes.push_back({p, &records(p)});
    w->answering = std::make_unique<Answering>(model_, group->samples, group->specs, w->passes, w->options);
    const std::int64_t cost = w->answering->cost();
    if (cost == 0) continue;
    parts.push_back(
        {.name = kAnswers + (group->task.empty() ? "" : fmt::format(", {} {}", group->task, group->length)),
         .cost = cost,
         .work = [w](const std::function<void(std::int64_t)>& progress) { w->answering->run(progress); }});
  }
}

std::vector<Sample> MeasurementRunner::samples(const SuiteRun& run) const {
  std::vector<Sample> samples = planned_samples(run);
  if (options_.so_far) std::erase_if(samples, [&](const Sample& s) { return !is_answered(run, s); });
  return samples;
}

std::vector<Sample> MeasurementRunner::planned_samples(const SuiteRun& run) const {
  std::vector<Sample> samples = options_.samples;
  const bool own = !samples.empty();
  for (const std::int64_t length : own ? std::vector<std::int64_t>{} : run.lengths) {
    for (const std::string& task : run.tasks) {
      const Group* group = find_group(run, task, length);
      if (group == nullptr) throw RunError("report: a run that was not planned");
      const Group::Extent extent = group->extent(run);
      std::copy_if(group->samples.begin(), group->samples.end(), std::back_inserter(samples),
                   [&](const Sample& s) { return s.task == task && extent.holds(group->places.at(s.id)); });
    }
  }
  return samples;
}

bool MeasurementRunner::is_answered(const SuiteRun& run, const Sample& sample) const {
  std::vector<NamedSpec> specs = {{"full", parse_spec("full")}};
  for (const GridMethod& m : methods(run)) specs.push_back(m.named);
  return std::all_of(run.protocols.begin(), run.protocols.end(), [&](const Protocol& protocol) {
    const Records& records = *records_.at(protocol.str());
    return std::all_of(specs.begin(), specs.end(), [&](const NamedSpec& spec) {
      return records.find(sample, spec.name, spec.files) != nullptr;
    });
  });
}

EvalReport MeasurementRunner::eval(const SuiteRun& run, const Protocol& protocol) const {
  std::vector<NamedSpec> specs = {{"full", parse_spec("full")}};
  for (const GridMethod& m : methods(run)) {
    if (m.named.spec.name != "full") specs.push_back(m.named);
  }
  return summarise(*model_, samples(run), specs, {protocol, records_.at(protocol.str()).get()},
                   options_.context);
}

const AnswerRecord& MeasurementRunner::answer(const Sample& sample, const NamedSpec& spec,
                                              const Protocol& protocol) const {
  const AnswerRecord* found = records_.at(protocol.str())->find(sample, spec.name, spec.files);
  if (found == nullptr) throw RunError("report: an answer that was not planned");
  return *found;
}

CostLog MeasurementRunner::effort_of_answers() const {
  CostLog sum;
  for (const auto& [name, effort] : efforts())
    if (name.starts_with(kAnswers)) sum += effort;
  return sum;
}

}  // namespace lode
