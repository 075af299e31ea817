// SPDX-License-Identifier: Apache-2.0
// What the trainers of learned selectors read: documents made from the user's texts (lab/train/lessons.h), or the texts
// as they are.
#pragma once

#include "cli.h"
#include "lab/train/lessons.h"

namespace lode::cli {

struct LessonFlags {
  std::string lessons = "on";
  bool on() const { return lessons == "on"; }
};

/// Documents that are made where --prompts says nothing.
inline constexpr std::int64_t kUsualLessons = 24;

CLI::Option* add_lesson_flag(CLI::App& verb, LessonFlags& flags);
/// Doubts about the texts go to stderr before anything takes long.
std::vector<Prompt> read_lessons(const Model& model, const std::vector<std::string>& paths,
                                 const LessonOptions& options, bool quiet);

}  // namespace lode::cli
