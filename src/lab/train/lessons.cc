// SPDX-License-Identifier: Apache-2.0
#include "lab/train/lessons.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <unordered_set>

#include "base/cancel.h"
#include "base/rng.h"
#include "base/text.h"
#include "lab/tasks/samples.h"
#include "lodestone/error.h"
#include "lodestone/tokenizer.h"

namespace lode {

namespace {

constexpr std::int64_t kTokensPerQuestion = 4096;  // and task: what fills the room for questions

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Tokens of a text, from a sample of it where it is long.
std::int64_t about_tokens(const Tokenizer& tokenizer, std::string_view text) {
  constexpr std::size_t kPiece = std::size_t{1} << 17, kPieces = 4;
  const auto count = [&](std::string_view piece) {
    return std::ssize(tokenizer.encode(piece, Tokenizer::Bos::none));
  };
  if (text.size() <= kPiece * kPieces) return count(text);
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < kPieces; ++i) {
    std::size_t begin = text.size() / kPieces * i, end = begin + kPiece;
    const auto inside = [&](std::size_t p) { return (static_cast<unsigned char>(text[p]) & 0xC0u) == 0x80u; };
    while (begin < text.size() && inside(begin)) ++begin;
    while (end > begin && inside(end)) --end;
    tokens += count(text.substr(begin, end - begin));
  }
  return static_cast<std::int64_t>(static_cast<double>(tokens) * static_cast<double>(text.size()) /
                                   static_cast<double>(kPiece * kPieces));
}

/// All texts, one after the other, cut at a character: the first is trained on, the second is held out.
struct Split {
  std::string trained, held_out;
};

Split split(const std::vector<std::string>& texts, double held_out) {
  Split parts;
  std::size_t total = 0;
  for (const std::string& text : texts) total += text.size();
  const auto kept = static_cast<std::size_t>((1.0 - held_out) * static_cast<double>(total));
  for (const std::string& text : texts) {
    std::size_t cut = std::min(text.size(), kept - std::min(kept, parts.trained.size()));
    while (cut > 0 && cut < text.size() && (static_cast<unsigned char>(text[cut]) & 0xC0u) == 0x80u) --cut;
    parts.trained.append(text, 0, cut);
    if (cut > 0) parts.trained += "\n\n";
    if (cut < text.size()) parts.held_out.append(text, cut).append("\n\n");
  }
  std::erase(parts.trained, '\r');
  std::erase(parts.held_out, '\r');
  return parts;
}

/// Passages of a text that come back word for word.
class Copies {
 public:
  Copies(std::string_view text, std::int64_t words, Rng& rng) : text_(text), most_words_(words), rng_(rng) {
    for (std::size_t i = 1; i + 1 < text.size(); ++i)
      if (is_sentence_gap(text, i)) gaps_.push_back(i);
    if (gaps_.size() >= kFewestGaps) return;
    gaps_.clear();  // no sentences: from any word to any other
    for (std::size_t i = 1; i + 1 < text.size(); ++i)
      if (text[i] == ' ' || text[i] == '\n') gaps_.push_back(i);
  }

  std::string draw() {
    if (gaps_.size() < 2) return {};
    std::size_t gap = rng_.below(gaps_.size() - 1);
    const std::size_t begin = gaps_[gap] + 1;
    std::size_t end = begin;
    for (; gap < gaps_.size() && words(begin, end) < most_words_ && gaps_[gap] < begin + kMost; ++gap)
      end = std::max(end, gaps_[gap]);
    return std::string(text_.substr(begin, end - begin));
  }

 private:
  static constexpr std::size_t kFewestGaps = 16, kMost = 400;
  std::int64_t words(std::size_t begin, std::size_t end) const {
    return std::count(text_.begin() + static_cast<std::ptrdiff_t>(begin),
                      text_.begin() + static_cast<std::ptrdiff_t>(end), ' ');
  }
  std::string_view text_;
  std::int64_t most_words_;
  Rng& rng_;
  std::vector<std::size_t> gaps_;
};

/// A document's end: questions with their answers and copied passages in turn, up to `room` tokens.
std::string ending(const std::vector<Sample>& asked, const PromptForm& form, const Haystack& haystack,
                   const LessonOptions& options, std::int64_t room, Rng& rng) {
  std::string text = form.header;
  Copies copies(*asked.front().context, options.copied_words, rng);
  std::size_t next = 0;
  for (std::int64_t used = haystack.meter().count(text); used < room;) {
    std::string one;
    if (next == asked.size() || static_cast<int>(rng.below(10)) < options.copies_of_ten) {
      one = copies.draw();
      if (one.empty() && next == asked.size()) break;
    } else {
      const Sample& sample = asked[next++];
      one = sample.question.substr(form.header.size()) + " " + sample.written;
    }
    text += one += form.terminator;
    used += haystack.meter().count(one);
  }
  return text;
}

Prompt make_lesson(const Tokenizer& tokenizer, const Haystack& haystack, const LessonOptions& options,
                   std::int64_t index) {
  const Language& language = Language::built_in(Language::Side::trained);
  const std::int64_t room = options.question_tokens();
  const TaskOptions task = {
      .task = std::string(kMixed),
      .tokens = options.tokens - room,
      .count = 1 << 20,
      .contexts = 1,
      .seed = hash_seed(options.seed, crc32("lesson"), index),
      .questions = std::max<std::int64_t>(1, options.tokens / kTokensPerQuestion),
  };
  std::vector<Sample> asked;
  make_samples(task, language, haystack, [&](const Sample& sample, bool) { asked.push_back(sample); });
  Rng rng(hash_seed(task.seed, 1));
  shuffle(asked, rng);
  const std::string text =
      *asked.front().context + ending(asked, language.prompt(), haystack, options, 2 * room, rng);
  const std::vector<TokenId> plain = tokenizer.encode(text, Tokenizer::Bos::none);
  const std::span<const TokenId> front = tokenizer.prefix();
  Prompt lesson = {fmt::format("lesson {}", index + 1), {front.begin(), front.end()}};
  const auto fitting = std::min(plain.size(), at(options.tokens) - front.size());
  lesson.tokens.insert(lesson.tokens.end(), plain.begin(),
                       plain.begin() + static_cast<std::ptrdiff_t>(fitting));
  return lesson;
}

/// Share of the text's runs of eight words that were there before.
double repeated_share(const std::vector<std::string>& texts) {
  constexpr std::size_t kRun = 8, kMostRuns = std::size_t{1} << 20;
  std::unordered_set<std::size_t> seen;
  std::size_t runs = 0, again = 0;
  for (const std::string& text : texts) {
    std::vector<std::size_t> starts;  // of words
    for (std::size_t i = 0; i < text.size() && runs < kMostRuns; ++i) {
      if (i > 0 && text[i - 1] != ' ' && text[i - 1] != '\n') continue;
      starts.push_back(i);
      if (starts.size() % kRun != 1 || starts.size() == 1) continue;
      const std::size_t begin = starts[starts.size() - 1 - kRun];
      ++runs;
      again +=
          seen.insert(std::hash<std::string_view>{}(std::string_view(text).substr(begin, i - begin))).second
              ? 0
              : 1;
    }
  }
  return runs == 0 ? 0.0 : static_cast<double>(again) / static_cast<double>(runs);
}

}  // namespace

std::vector<Prompt> make_lessons(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                                 const LessonOptions& options) {
  if (options.tokens < LessonOptions::kFewestTokens)
    throw InputError(fmt::format(
        "--tokens: expected at least {} tokens, which hold text, facts and questions, found {}: raise it, or "
        "train on the texts as they are (--lessons off)",
        LessonOptions::kFewestTokens, options.tokens));
  const double share =
      static_cast<double>(options.held_out) / static_cast<double>(std::max<std::int64_t>(1, options.count));
  const Split parts = split(texts, options.held_out > 0 ? std::max(share, 0.1) : 0.0);
  const auto expect_enough = [&](const std::string& text, std::string_view what) {
    const std::int64_t found = about_tokens(tokenizer, text);
    if (found >= options.tokens) return;
    throw InputError(fmt::format(
        "expected at least {} tokens of text {}, so that no document of {} repeats itself, found about {}: "
        "give more text ({}), or shorter documents (--tokens)",
        options.tokens, what, options.tokens, found, options.given_by));
  };
  expect_enough(parts.trained, options.held_out > 0
                                   ? "to make documents of, beside what is held out for the test"
                                   : "to make documents of");
  if (options.held_out > 0)
    expect_enough(parts.held_out,
                  fmt::format("held out for the test, the last {:.0f} %", 100 * std::max(share, 0.1)));
  const Haystack trained(parts.trained, make_meter(tokenizer));
  std::optional<Haystack> held_out;
  if (options.held_out > 0) held_out.emplace(parts.held_out, make_meter(tokenizer));
  std::vector<Prompt> lessons;
  for (std::int64_t i = 0; i < options.count; ++i) {
    check_cancel();
    const bool test = i >= options.count - options.held_out;
    lessons.push_back(make_lesson(tokenizer, test ? *held_out : trained, options, i));
  }
  return lessons;
}

AnswerMarks lesson_marks() {
  return Language::built_in(Language::Side::trained).prompt().answer_marks();
}

std::vector<std::string> texts_of(const Tokenizer& tokenizer, const std::vector<Prompt>& lessons) {
  constexpr std::string_view kCut = "\xEF\xBF\xBD";  // what half a character is decoded to
  std::vector<std::string> texts;
  for (const Prompt& lesson : lessons) {
    texts.push_back(tokenizer.decode(std::span(lesson.tokens).subspan(tokenizer.prefix().size())));
    while (texts.back().ends_with(kCut)) texts.back().resize(texts.back().size() - kCut.size());
  }
  return texts;
}

std::vector<std::string> doubts_about(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                                      std::int64_t wanted_tokens) {
  constexpr double kRepeated = 0.2, kFewSentences = 1.0 / 400;  // of bytes
  std::vector<std::string> doubts;
  std::int64_t tokens = 0;
  std::size_t bytes = 0, gaps = 0;
  for (const std::string& text : texts) {
    tokens += about_tokens(tokenizer, text);
    bytes += text.size();
    for (std::size_t i = 1; i + 1 < text.size(); ++i) gaps += is_sentence_gap(text, i) ? 1 : 0;
  }
  if (tokens < wanted_tokens)
    doubts.push_back(
        fmt::format("the texts have about {} tokens for {} of training: the functions may learn "
                    "them by heart; more text generalises better",
                    tokens, wanted_tokens));
  if (texts.size() == 1)
    doubts.push_back(
        "one text: functions learn its kind and may fail on others; give several of the kinds you will ask "
        "about");
  if (const double again = repeated_share(texts); again > kRepeated)
    doubts.push_back(
        fmt::format("{:.0f} % of the texts repeats what stands in them before, and teaches "
                    "nothing new",
                    100 * again));
  if (static_cast<double>(gaps) < kFewSentences * static_cast<double>(bytes))
    doubts.push_back(
        "the texts have hardly any sentences (a table, a list, code?): what is learned may not hold for "
        "prose");
  return doubts;
}

}  // namespace lode
