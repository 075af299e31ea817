// SPDX-License-Identifier: Apache-2.0
#include "source_check.h"

#include <fmt/format.h>

#include "asking.h"
#include "base/text.h"

namespace lode::cli {

Json SourceCheck::check(Asker& asker, Asker::Question question, const std::string& answer,
                        const std::vector<Citation>& citations) {
  const std::vector<Run> cited = runs_of(citations);
  if (cited.empty()) return nullptr;
  question.method = blanking_.method();
  question.want_sources = false;
  question.options.on_text = question.options.on_thought = {};
  const auto without = [&](std::vector<Run> blanked) {
    blanking_.set(std::move(blanked));
    return trimmed(asker.ask(question).generation.text);
  };
  Json checked = {{"without_sources", without(cited)}};
  checked["rests_on_sources"] = checked["without_sources"] != answer;
  if (const auto others = runs_beside(cited, asker.context().indexed_tokens(), others_); !others.empty()) {
    checked["without_others"] = without(others);
    checked["rests_on_others"] = checked["without_others"] != answer;
  }
  return checked;
}

std::string source_check_text(const Json& checked) {
  if (checked.is_null()) return "";
  const auto shown = [&](const char* key) { return excerpt(checked[key].get<std::string>(), 200); };
  std::string line =
      checked["rests_on_sources"].get<bool>()
          ? fmt::format("  without these passages the answer is '{}'", shown("without_sources"))
          : "  without these passages the answer is the same";
  if (!checked.contains("without_others")) return line + "\n";
  return line + (checked["rests_on_others"].get<bool>()
                     ? fmt::format("; without as many others it is '{}'\n", shown("without_others"))
                     : "; without as many others it is the same\n");
}

}  // namespace lode::cli
