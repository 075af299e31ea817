// SPDX-License-Identifier: Apache-2.0
// Any file as a document: refused, or a text in UTF-8 whose places lie in it. PDF is left to its program.
#include "documents/readers.h"
#include "engine/sentences.h"
#include "fuzz/target.h"

LODE_FUZZ_TARGET(document) {
  constexpr std::size_t kMost = 1 << 20;
  if (input.empty() || lode::recognise(input, "x") == lode::DocumentKind::pdf) return;
  const lode::ReadOptions options = {.headings = lode::ReadOptions::Headings::on, .largest_text = kMost};
  const lode::SourceText source = lode::read_document(input, "x", options);
  LODE_ASSERT(source.files.size() == 1 && source.files[0].end == source.text.size());
  LODE_ASSERT(lode::invalid_utf8(source.text) == std::string::npos);
  for (std::size_t i = 1; i < source.marks.size(); ++i)
    LODE_ASSERT(source.marks[i].begin > source.marks[i - 1].begin);
  LODE_ASSERT(source.marks.empty() || source.marks.back().begin <= source.text.size());
  std::size_t end = 0;
  for (const lode::Sentence& s : lode::sentences_of(source)) {
    LODE_ASSERT(s.begin >= end && s.end > s.begin && s.end <= source.text.size());
    const lode::Place place = lode::place_of(source, s.begin);
    LODE_ASSERT(place.file != nullptr && place.line > 0 && place.character >= 0);
    end = s.end;
  }
}
