// SPDX-License-Identifier: Apache-2.0
#include "lab/report/explanation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "lab/report/sections.h"

namespace lode {

namespace {

constexpr std::size_t kNamed = 3;  // methods that a sentence praises, if they keep half
constexpr double kHalf = 0.5;

std::string code(const std::string& text) {
  return "`" + text + "`";
}

/// "a, b and c".
std::string listed(std::vector<std::string> items) {
  if (items.size() < 2) return join(items);
  const std::string last = std::move(items.back());
  items.pop_back();
  return join(items) + " and " + last;
}

/// " (3.0 % to choose, 2.1 % to attend)", where the probe tells.
std::string parts_of(const LadderStep& step) {
  if (!std::isfinite(step.selector)) return {};
  return fmt::format(" ({} to choose, {} to attend)", percent(step.selector, 1),
                     percent(step.density - step.selector, 1));
}

std::vector<const LadderStep*> measured_steps(const Ladders& ladders) {
  std::vector<const LadderStep*> steps;
  for (const Ladder& l : ladders.methods)
    for (const LadderStep& step : l.steps)
      if (std::isfinite(step.recovered) && step.density < 1) steps.push_back(&step);
  return steps;
}

/// Who keeps nearly all for the fewest bytes, or, where nobody does, who keeps most.
std::string cheapest(const std::vector<const LadderStep*>& steps) {
  const LadderStep* best = nullptr;
  for (const LadderStep* step : steps)
    if (step->recovered >= kPass && (best == nullptr || step->density < best->density)) best = step;
  if (best != nullptr)
    return fmt::format(
        "{} keeps {} of what far context is worth to the model (the recovered gap) and reads {} of full "
        "attention's bytes{}: no method keeps {} for fewer.",
        code(best->label), percent(best->recovered, 0), percent(best->density, 1), parts_of(*best),
        percent(kPass, 0));
  best = *std::max_element(steps.begin(), steps.end(),
                           [](const auto* a, const auto* b) { return a->recovered < b->recovered; });
  return fmt::format(
      "No method keeps {} of what far context is worth to the model (the recovered gap). {} keeps most, {}, "
      "and "
      "reads {} of full attention's bytes{}.",
      percent(kPass, 0), code(best->label), percent(best->recovered, 0), percent(best->density, 1),
      parts_of(*best));
}

std::string leaders(const Ladders& ladders) {
  std::vector<std::string> names;
  for (const Ladder& l : ladders.methods) {
    const auto kept = l.at(kMiddle, &LadderStep::recovered);
    if (kept && names.size() < kNamed && (names.empty() || *kept >= kHalf))
      names.push_back(fmt::format("{} ({})", code(l.label), percent(*kept, 0)));
  }
  if (names.empty()) return {};
  return fmt::format("At {} of the bytes {} keep{} most of it.", percent(kMiddle, 0), listed(names),
                     names.size() == 1 ? "s" : "");
}

/// The most that a method keeps without reading more than the largest budget.
std::optional<double> kept_at_most(const Ladder& l) {
  std::optional<double> most = l.at(kLarge, &LadderStep::recovered);
  for (const LadderStep& step : l.steps)
    if (step.density <= kLarge && std::isfinite(step.recovered))
      most = std::max(most.value_or(step.recovered), step.recovered);
  return most;
}

std::string losers(const Ladders& ladders) {
  std::vector<std::string> names;
  for (const Ladder& l : ladders.methods) {
    const auto kept = kept_at_most(l);
    if (kept && *kept < kHalf) names.push_back(fmt::format("{} ({})", code(l.label), percent(*kept, 0)));
  }
  if (names.empty()) return {};
  return fmt::format("With up to {} of the bytes, {} keep{} less than half.", percent(kLarge, 0),
                     listed(names), names.size() == 1 ? "s" : "");
}

/// The leader's answers beside full attention's.
std::string answers_of_leader(const Ladders& ladders) {
  if (ladders.columns.empty() || !ladders.methods.front().at(kMiddle, &LadderStep::recovered)) return {};
  double score = 0, full = 0;
  for (const std::string& column : ladders.columns) {
    const auto of_leader = ladders.methods.front().score_at(kMiddle, column);
    if (!of_leader) return {};
    score += *of_leader;
    full += ladders.full.at(column);
  }
  const auto n = static_cast<double>(ladders.columns.size());
  return fmt::format(
      "Asked questions at {} of the bytes, {} scores {:.1f} on average, full attention {:.1f}.",
      percent(kMiddle, 0), code(ladders.methods.front().label), score / n, full / n);
}

void add(std::vector<std::string>& sentences, std::string sentence) {
  if (!sentence.empty()) sentences.push_back(std::move(sentence));
}

std::string most_to_choose(const Ladders& ladders) {
  const Ladder* most = nullptr;
  for (const Ladder& l : ladders.methods)
    if (l.selector_at(kMiddle).value_or(0) > (most == nullptr ? 0 : *most->selector_at(kMiddle))) most = &l;
  if (most == nullptr) return {};
  return fmt::format("{} reads most to choose: {:.1f} of the {}.", code(most->label),
                     100 * *most->selector_at(kMiddle), percent(kMiddle, 0));
}

/// Those whose bytes go into the search and not into what it finds.
std::string searchers(const Ladders& ladders) {
  std::vector<std::string> names;
  for (const Ladder& l : ladders.methods) {
    const auto selector = l.at(kMiddle, &LadderStep::selector), keys = l.at(kMiddle, &LadderStep::far_keys);
    if (selector && keys && *selector > kHalf * kMiddle)
      names.push_back(fmt::format("{} ({} to choose {} of the far keys)", code(l.label),
                                  percent(*selector, 1), percent(*keys, 1)));
  }
  if (names.empty()) return {};
  return fmt::format("At {}, more than half of the bytes go into choosing with {}.", percent(kMiddle, 0),
                     listed(names));
}

/// Why a method has no place, where its points do not reach it.
std::string without_place(const Ladder& l) {
  const auto nearest = [&](bool least) {
    const LadderStep* found = nullptr;
    for (const LadderStep& step : l.steps)
      if (std::isfinite(step.recovered) && (found == nullptr || (step.density < found->density) == least))
        found = &step;
    return found;
  };
  const LadderStep *least = nearest(true), *most = nearest(false);
  if (least == nullptr) return {};
  const auto sentence = [&](const char* what, const char* which, const LadderStep& step) {
    const std::string who = least == most ? "it" : fmt::format("its {} budget, {},", which, code(step.label));
    return fmt::format("{} {} {}: {} reads {}{}.", code(l.label), what, percent(kMiddle, 0), who,
                       percent(step.density, 1), parts_of(step));
  };
  if (least->density > kMiddle) return sentence("does not come down to", "smallest", *least);
  if (most->density < kMiddle) return sentence("stays below", "largest", *most);
  return {};
}

std::string largest_index(const Ladders& ladders) {
  if (ladders.methods.empty()) return {};
  const auto most =
      std::max_element(ladders.methods.begin(), ladders.methods.end(),
                       [](const Ladder& a, const Ladder& b) { return a.index.held < b.index.held; });
  if (most->index.held <= 0) return {};
  return fmt::format("{} holds the largest index, {} of the bytes of the keys and values.", code(most->label),
                     percent(most->index.held, 0));
}

std::string fails_a_single_fact(const Ladders& ladders) {
  std::vector<std::string> names;
  for (const Ladder& l : ladders.methods) {
    const bool fails = std::any_of(ladders.columns.begin(), ladders.columns.end(), [&](const std::string& c) {
      const auto score = is_pass_mark(c) ? l.score_at(kMiddle, c) : std::nullopt;
      return score && *score < pass_mark(ladders, c);
    });
    if (fails) names.push_back(code(l.label));
  }
  if (names.empty()) return {};
  return fmt::format("At {}, {} miss{} single facts that full attention finds.", percent(kMiddle, 0),
                     listed(names), names.size() == 1 ? "es" : "");
}

}  // namespace

std::vector<std::string> outcome_of(const Ladders& ladders) {
  const std::vector<const LadderStep*> steps = measured_steps(ladders);
  if (steps.empty()) return {};
  std::vector<std::string> sentences = {cheapest(steps)};
  add(sentences, leaders(ladders));
  add(sentences, losers(ladders));
  add(sentences, answers_of_leader(ladders));
  return sentences;
}

std::vector<std::string> explanation_of(const Ladders& ladders) {
  std::vector<std::string> sentences;
  add(sentences, most_to_choose(ladders));
  add(sentences, searchers(ladders));
  add(sentences, fails_a_single_fact(ladders));
  add(sentences, largest_index(ladders));
  for (const Ladder& l : ladders.methods) add(sentences, without_place(l));
  return sentences;
}

}  // namespace lode
