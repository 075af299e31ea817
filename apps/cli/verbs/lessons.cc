// SPDX-License-Identifier: Apache-2.0
#include "lessons.h"

#include <fmt/format.h>

#include <iostream>

#include "base/text.h"

namespace lode::cli {

CLI::Option* add_lesson_flag(CLI::App& verb, LessonFlags& flags) {
  return verb
      .add_option(
          "--lessons", flags.lessons,
          "on: documents with facts, questions and copied passages, which need their far past, are made "
          "from the texts; off: the texts as they are")
      ->check(CLI::IsMember({"on", "off"}));
}

std::vector<Prompt> read_lessons(const Model& model, const std::vector<std::string>& paths,
                                 const LessonOptions& options, bool quiet) {
  std::vector<std::string> texts;
  texts.reserve(paths.size());
  for (const std::string& path : paths) texts.push_back(read_text(path));
  const std::int64_t wanted = options.tokens * options.count;
  for (const std::string& doubt : doubts_about(model.tokenizer(), texts, wanted))
    if (!quiet) std::cerr << "train: " << doubt << '\n';
  return make_lessons(model.tokenizer(), texts, options);
}

}  // namespace lode::cli
