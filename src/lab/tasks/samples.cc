// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/samples.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/text.h"
#include "lab/tasks/draw.h"
#include "lab/tasks/families.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::string_view kWhere = "task language, tasks";
constexpr double kGoldenRatio =
    0.6180339887498949;  // multiples of it, modulo 1, fill [0, 1) evenly from the first on

constexpr std::int64_t kMixedShare = 4;
constexpr std::int64_t kMixedQuestion = 256;  // room for the longest recited question and its answer, mostly

/// Questions about one context, ready to be written.
struct Draft {
  std::string context;
  std::int64_t context_tokens = 0;
  std::vector<Question> questions;            // text includes header and form
  std::vector<std::optional<double>> depths;  // per question
};

InputError too_short(const TaskOptions& options, std::int64_t needed) {
  return InputError("task " + options.task + ": expected --tokens to hold its facts and questions, " +
                    std::to_string(needed) + " tokens at least, found " + std::to_string(options.tokens));
}

class TaskMaker {
 public:
  TaskMaker(const TaskOptions& options, const Language& language, const Haystack& haystack)
      : options_(options),
        language_(language),
        noise_(noise_of(options.task, language, haystack.meter())),
        haystack_(noise_ ? *noise_ : haystack),
        meter_(haystack.meter()),
        depth_shift_(Rng(hash_seed(options.seed, crc32(options.task))).uniform()) {}

  Draft draft(std::int64_t index) {
    Rng rng(hash_seed(options_.seed, crc32(options_.task), options_.tokens, index));
    if (options_.task == kMixed) return mixed_draft(index, rng);
    const std::string family = language_.task(options_.task).value("family", "");
    if (family == "cwe" || family == "fwe" || hay_of(options_.task, language_) == "needles")
      return list_draft(rng);
    if (family == "recite") return recite_draft(index, rng);
    return fact_draft(index, rng);
  }

  Match match(const std::string& task) const {
    return language_.task(task).at("match") == "exact"
               ? Match::exact
               : Match::contains;  // recall and prefix: `answers` says of what
  }

 private:
  /// What a task says of its haystack; most take any.
  static std::string hay_of(const std::string& task, const Language& language) {
    return task == kMixed ? "" : language.task(task).value("haystack", "");
  }

  static std::optional<Haystack> noise_of(const std::string& task, const Language& language,
                                          const TokenMeter& meter) {
    if (hay_of(task, language) != "noise") return std::nullopt;
    return Haystack(language.noise() + "\n", meter);
  }

  std::int64_t questions_wanted() const {
    if (options_.questions > 0) return options_.questions;
    return options_.tokens <= 4096 ? 1 : options_.tokens <= 16384 ? 4 : 8;
  }

  /// Depth of fact `fact` of `facts` in context `index`, before sorting.
  double depth(std::int64_t index, std::size_t facts, Rng& rng) const {
    if (facts > 1) return rng.uniform();
    const double place = depth_shift_ + kGoldenRatio * static_cast<double>(index);
    return place - std::floor(place);
  }

  std::string asked(const std::string& question) const {
    return language_.prompt().header + fill(language_.prompt().question, {{"question", question}});
  }

  std::int64_t answer_tokens(const Question& q) const {
    return meter_.count(fill(language_.prompt().answer, {{"answer", q.answer}}));
  }

  /// Tokens of the longest question with its answer. `before` is how the context ends: joined with it, a
  /// question may take a token more than alone.
  std::int64_t longest(const std::vector<Question>& questions, std::string_view before) const {
    std::int64_t most = 0;
    for (const Question& q : questions) {
      const std::int64_t alone = meter_.count(q.text);
      const std::int64_t after =
          before.empty() ? 0 : meter_.count(std::string(before) + q.text) - meter_.count(before);
      most = std::max(most, std::max(alone, after) + answer_tokens(q));
    }
    return most;
  }

  void choose_questions(std::vector<Question>& questions, std::int64_t most, Rng& rng) const {
    shuffle(questions, rng);
    if (std::ssize(questions) > most) questions.resize(static_cast<std::size_t>(most));
    for (Question& q : questions) q.text = asked(q.text);
  }

  // ---- Facts in a haystack ----

  std::size_t facts_wanted() const {
    if (options_.facts == 0) return fact_count(language_, options_.task, options_.tokens);
    expect_facts(language_, options_.task, options_.facts);
    return static_cast<std::size_t>(options_.facts);
  }

  Draft fact_draft(std::int64_t index, Rng& rng) {
    std::set<std::string> names;
    Material material = make_material(language_, options_.task, facts_wanted(), options_.wording, rng, names);
    choose_questions(material.questions, questions_wanted(), rng);
    std::vector<double> depths(material.facts.size());
    for (double& d : depths) d = depth(index, depths.size(), rng);
    std::sort(depths.begin(), depths.end());
    return fit(material, depths, haystack_.random_start(rng), {});
  }

  struct Recited {
    std::size_t first = 0, last = 0;  // pieces, inclusive
    Question question;
  };

  /// As much of the haystack from `start` on as leaves room for the facts, which rise with `depths`. What is
  /// recited must be in it: what was chosen behind its end is not asked.
  Draft fit(Material& material, const std::vector<double>& depths, std::size_t start,
            std::vector<Recited> recited) const {
    std::vector<Question> questions = material.questions;
    for (const Recited& r : recited) questions.push_back(r.question);
    std::int64_t fixed = meter_.prefix + longest(questions, "");
    for (std::string& fact : material.facts) fixed += meter_.count(fact = " " + fact);
    std::int64_t room = options_.tokens - fixed;
    for (int tries = 0; tries < 8;
         ++tries) {  // mostly once: the parts' tokens add up unless the tokenizer joins them
      if (room < 16) throw too_short(options_, fixed + 16);
      const Passage passage = haystack_.cut_from(start, room);
      std::erase_if(recited, [&](const Recited& r) { return r.last + 1 >= passage.pieces.size(); });
      Draft draft = lay_out(passage, material, depths, recited);
      const std::int64_t excess =
          meter_.prefix + draft.context_tokens + longest(questions, end_of(draft)) - options_.tokens;
      if (excess <= 0) return draft;
      room -= excess;
    }
    throw RunError("task " + options_.task + ": cannot fit a context into " +
                   std::to_string(options_.tokens) + " tokens");
  }

  static std::string_view end_of(const Draft& draft) {
    const std::string_view text = draft.context;
    const std::size_t space = text.size() > 200 ? text.find(' ', text.size() - 200) : 0;
    return space == std::string_view::npos ? text : text.substr(space);
  }

  /// Puts fact i into the first gap at or after depths[i] of the passage (rising), none into what is recited.
  Draft lay_out(const Passage& passage, const Material& material, const std::vector<double>& depths,
                const std::vector<Recited>& recited) const {
    const bool any_gap =
        std::any_of(passage.pieces.begin(), passage.pieces.end(), [](const auto& p) { return p.gap; });
    std::vector<double> places;  // tokens of the context before each fact, about
    Draft draft;
    std::size_t fact = 0;
    std::int64_t text_tokens = 0;  // of the passage so far
    double laid = 0;               // of passage and facts so far
    const auto add_fact = [&] {
      places.push_back(laid);
      draft.context += material.facts[fact];
      laid += static_cast<double>(meter_.count(material.facts[fact++]));
    };
    std::vector<double> recited_places(recited.size(), 0.0);
    for (std::size_t i = 0; i < passage.pieces.size(); ++i) {
      const Passage::Piece& piece = passage.pieces[i];
      const bool inside = std::any_of(recited.begin(), recited.end(),
                                      [&](const Recited& r) { return r.first < i && i <= r.last; });
      const bool may = i > 0 && (piece.gap || !any_gap) && !inside;
      while (may && fact < depths.size() &&
             depths[fact] * static_cast<double>(passage.tokens) <= static_cast<double>(text_tokens)) {
        add_fact();
      }
      for (std::size_t r = 0; r < recited.size(); ++r)
        if (recited[r].first == i) recited_places[r] = laid;
      draft.context += piece.text;
      text_tokens += piece.tokens;
      laid += static_cast<double>(piece.tokens);
    }
    while (fact < depths.size()) add_fact();
    draft.context_tokens = meter_.count(draft.context);
    draft.questions = material.questions;
    for (const Question& q : draft.questions) {
      draft.depths.push_back(q.needs.empty() ? std::nullopt : std::optional(places[q.needs.front()] / laid));
    }
    for (std::size_t r = 0; r < recited.size(); ++r) {
      draft.questions.push_back(recited[r].question);
      draft.depths.push_back(recited_places[r] / laid);
    }
    return draft;
  }

  // ---- Facts of all tasks in a haystack ----

  /// As many as a text a quarter as long holds, and as questions need.
  std::size_t mixed_facts(const std::string& task) const {
    const auto questions = static_cast<std::size_t>(questions_wanted());
    if (task == "needle") return questions;
    const std::size_t usual = fact_count(language_, task, options_.tokens / kMixedShare);
    if (task == "passkey" || task == "number" || task == "freq") return usual;
    const std::size_t chain = task == "vt" ? count_of(language_.task(task), "hops") + 1 : 1;
    return std::max(usual, questions * chain);
  }

  Draft mixed_draft(std::int64_t index, Rng& rng) {
    struct Placed {
      double depth = 0;
      std::size_t part = 0, fact = 0;
    };
    std::vector<Placed> placed;
    std::vector<Material> parts;
    std::set<std::string> names;
    for (const std::string& task : mixed_tasks()) {
      std::int64_t wanted = questions_wanted();
      // A text has four lists: two sets of them are worth eight questions.
      for (int again = task == "freq" ? 2 : task == "recite" ? 0 : 1; again > 0; --again) {
        Material part = make_material(language_, task, mixed_facts(task), options_.wording, rng, names);
        choose_questions(part.questions, wanted, rng);
        wanted -= std::ssize(part.questions);
        for (Question& q : part.questions) q.task = task;
        std::vector<double> depths(part.facts.size());
        for (double& d : depths) d = rng.uniform();
        std::sort(depths.begin(), depths.end());
        for (std::size_t f = 0; f < depths.size(); ++f) {
          // Needles lie at all depths alike.
          const auto n = static_cast<double>(depths.size());
          const double depth = task == "needle" ? (static_cast<double>(f) + rng.uniform()) / n : depths[f];
          placed.push_back({depth, parts.size(), f});
        }
        parts.push_back(std::move(part));
      }
    }
    std::stable_sort(placed.begin(), placed.end(),
                     [](const Placed& a, const Placed& b) { return a.depth < b.depth; });
    std::vector<double> depths;
    Material material;
    std::vector<std::vector<std::size_t>> places(parts.size());  // of each part's facts among all
    for (const Placed& p : placed) {
      places[p.part].push_back(depths.size());
      depths.push_back(p.depth);
      material.facts.push_back(std::move(parts[p.part].facts[p.fact]));
    }
    for (std::size_t part = 0; part < parts.size(); ++part) {
      for (Question& q : parts[part].questions) {
        for (std::size_t& fact : q.needs) fact = places[part][fact];
        material.questions.push_back(std::move(q));
      }
    }
    const std::size_t start = haystack_.random_start(rng);
    std::int64_t of_facts = meter_.prefix;
    for (const std::string& fact : material.facts) of_facts += meter_.count(" " + fact);
    const std::int64_t asked_room = std::max(kMixedQuestion, longest(material.questions, "")),
                       room = options_.tokens - of_facts - asked_room;
    if (room < 16) throw too_short(options_, of_facts + asked_room + 16);
    std::vector<Recited> recited = choose_recited(index, haystack_.cut_from(start, room), rng);
    for (Recited& r : recited) r.question.task = "recite";
    return fit(material, depths, start, recited);
  }

  // ---- A list as the whole context ----

  /// A draft whose context is `items` items, behind an intro.
  struct ListDraft {
    Draft draft;
    std::int64_t intro_tokens = 0;
  };

  ListDraft words_draft(std::size_t items, Rng& rng) const {
    ListMaterial list = make_list(language_, options_.task, items, options_.wording, rng);
    list.question.text = asked(list.question.text);
    return {.draft = {.context = list.intro + join(list.items, list.separator),
                      .questions = {list.question},
                      .depths = {std::nullopt}},
            .intro_tokens = meter_.count(list.intro)};
  }

  /// Needles and nothing else.
  ListDraft needles_draft(std::size_t items, Rng& rng) const {
    std::set<std::string> names;
    Material material = make_material(language_, options_.task, items, options_.wording, rng, names);
    choose_questions(material.questions, questions_wanted(), rng);
    ListDraft list = {.draft = {.context = join(material.facts, " "), .questions = material.questions}};
    for (const Question& q : material.questions)
      list.draft.depths.push_back(static_cast<double>(q.needs.front()) / static_cast<double>(items));
    return list;
  }

  Draft list_draft(Rng& rng) {
    const bool needles = hay_of(options_.task, language_) == "needles";
    const std::uint64_t seed = rng.next();
    Draft best;
    std::int64_t items = options_.tokens / (needles ? 64 : 6);
    for (int tries = 0; tries < 16 && items > 0; ++tries) {
      Rng fresh(seed);
      const auto count = static_cast<std::size_t>(items);
      auto [draft, intro] = needles ? needles_draft(count, fresh) : words_draft(count, fresh);
      draft.context_tokens = meter_.count(draft.context);
      const std::int64_t fixed = meter_.prefix + longest(draft.questions, end_of(draft)) + intro;
      const std::int64_t of_items = std::max<std::int64_t>(1, draft.context_tokens - intro);
      const std::int64_t left = options_.tokens - fixed - of_items;
      const double per_item = static_cast<double>(of_items) / static_cast<double>(items);
      if (left >= 0 && draft.context.size() > best.context.size()) best = std::move(draft);
      const auto step = static_cast<std::int64_t>(std::floor(static_cast<double>(left) / per_item));
      if (left >= 0 && (step == 0 || left * 200 < options_.tokens)) break;
      items += step;  // floor: at least one less when it was too long
    }
    if (best.context.empty()) throw too_short(options_, kFewestTokens);
    return best;
  }

  // ---- Recitation ----

  Draft recite_draft(std::int64_t index, Rng& rng) {
    const std::size_t start = haystack_.random_start(rng);
    const Passage all = haystack_.cut_from(start, options_.tokens - meter_.prefix);
    const std::vector<Recited> chosen = choose_recited(index, all, rng);
    if (chosen.empty()) {
      throw InputError(
          "task recite: expected sentences of 14 words or more that begin unlike any other, found none in " +
          std::to_string(options_.tokens) + " tokens of haystack");
    }
    return recite_context(start, all, chosen);
  }

  std::vector<Recited> choose_recited(std::int64_t index, const Passage& all, Rng& rng) const {
    std::string text;
    std::vector<std::size_t> ends;  // per piece: bytes of the text up to its end
    for (const auto& piece : all.pieces) ends.push_back((text += piece.text).size());
    const std::size_t usable = all.pieces.size() - std::min(all.pieces.size(), all.pieces.size() / 50 + 8);
    std::vector<Recited> chosen;
    for (std::int64_t q = 0; q < questions_wanted() && usable > 0; ++q) {
      const auto from =
          static_cast<std::size_t>(depth(index, q == 0 ? 1 : 2, rng) * static_cast<double>(usable));
      for (std::size_t i = 0; i < usable; ++i) {
        if (auto found = recite_at(all, text, (from + i) % usable, chosen, rng)) {
          chosen.push_back(std::move(*found));
          break;
        }
      }
    }
    return chosen;
  }

  Draft recite_context(std::size_t start, const Passage& all, const std::vector<Recited>& chosen) const {
    Draft draft;
    std::size_t last = 0;
    for (const Recited& r : chosen) {
      draft.questions.push_back(r.question);
      last = std::max(last, r.last);
    }
    std::int64_t room = options_.tokens - meter_.prefix - longest(draft.questions, "");
    for (int tries = 0; tries < 8; ++tries) {
      const Passage passage = haystack_.cut_from(start, room);
      if (passage.pieces.size() < last + 2) break;
      draft.context.clear();
      for (const auto& piece : passage.pieces) draft.context += piece.text;
      draft.context_tokens = meter_.count(draft.context);
      const std::int64_t excess =
          meter_.prefix + draft.context_tokens + longest(draft.questions, end_of(draft)) - options_.tokens;
      room -= std::max<std::int64_t>(0, excess);
      if (excess > 0) continue;
      for (const Recited& r : chosen) {
        std::int64_t before = 0;
        for (std::size_t i = 0; i < r.first; ++i) before += all.pieces[i].tokens;
        draft.depths.push_back(static_cast<double>(before) / static_cast<double>(draft.context_tokens));
      }
      return draft;
    }
    throw too_short(options_, 2 * options_.tokens);
  }

  /// The question for the sentences from piece `first` on, if they are long enough, in one paragraph and
  /// begin unlike everything else.
  std::optional<Recited> recite_at(const Passage& all, const std::string& text, std::size_t first,
                                   const std::vector<Recited>& chosen, Rng& rng) const {
    const Json& entry = language_.family("recite");
    const auto first_words = entry.at("first_words").get<std::vector<std::int64_t>>();
    const auto answer_words = entry.at("answer_words").get<std::vector<std::int64_t>>();
    const std::int64_t prefix = json_int(language_.task("recite"), "prefix_tokens", kWhere, 1, 1000);
    if (first == 0 || !all.pieces[first].gap) return std::nullopt;
    const auto words =
        first_words[0] +
        static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(first_words[1] - first_words[0] + 1)));
    std::string sentence;
    std::size_t last = first;
    std::optional<std::size_t> cut;
    for (; last + 1 < all.pieces.size() && last < first + 3; ++last) {
      sentence += all.pieces[last].text;
      if (sentence.find('\n') != std::string::npos || !all.pieces[last + 1].gap) return std::nullopt;
      cut = opening_end(sentence, words);
      if (cut && count_words(sentence.substr(*cut)) >= answer_words[0]) break;
      cut.reset();
    }
    if (!cut || count_words(sentence.substr(*cut)) > answer_words[1]) return std::nullopt;
    for (const Recited& r : chosen) {
      if (first <= r.last && last >= r.first) return std::nullopt;
    }
    const std::string opening = sentence.substr(0, *cut), rest = sentence.substr(*cut);
    if (meter_.count(rest) < prefix || text.find(opening) != text.rfind(opening)) return std::nullopt;
    const std::string& wording = language_.wording(entry, "questions", options_.wording, rng);
    const std::string expected = meter_.first(rest, prefix);
    if (expected.size() < 2) return std::nullopt;  // a tokenizer that does not know such text
    return Recited{
        first,
        last,
        {asked(fill(wording, {{"words", opening.substr(1)}})), rest.substr(1), {expected.substr(1)}, {}}};
  }

  static std::int64_t count_words(std::string_view text) { return std::count(text.begin(), text.end(), ' '); }

  /// Where the first `words` words of " A sentence like this." end: before a space and a letter, after a
  /// letter.
  static std::optional<std::size_t> opening_end(std::string_view sentence, std::int64_t words) {
    const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
    std::int64_t seen = 0;
    for (std::size_t at = 0; at + 1 < sentence.size(); ++at) {
      if (sentence[at] != ' ') continue;
      if (++seen > words && is_letter(sentence[at - 1]) && is_letter(sentence[at + 1])) return at;
    }
    return std::nullopt;
  }

  const TaskOptions& options_;
  const Language& language_;
  const std::optional<Haystack> noise_;  ///< of tasks that bring their own
  const Haystack& haystack_;
  const TokenMeter& meter_;
  double depth_shift_;
};

}  // namespace

std::vector<std::string> mixed_tasks() {
  return {"needle",     "passkey", "number", "kv",   "multikey", "multivalue",
          "multiquery", "vt",      "qa",     "freq", "recite"};
}

void make_samples(const TaskOptions& options, const Language& language, const Haystack& haystack,
                  const std::function<void(const Sample&, bool first)>& emit) {
  TaskMaker maker(options, language, haystack);
  if (options.tokens < kFewestTokens) throw too_short(options, kFewestTokens);
  const std::string stem = options.task + "-" + std::to_string(options.tokens) + "-" +
                           (options.facts > 0 ? "facts" + std::to_string(options.facts) + "-" : "") +
                           std::to_string(options.seed) + "-";
  std::int64_t made = 0;
  const std::int64_t contexts =
      options.contexts > 0 ? options.contexts : std::numeric_limits<std::int64_t>::max();
  for (std::int64_t index = 0; made < options.count && index < contexts; ++index) {
    Draft draft = maker.draft(index);
    const auto shared = std::make_shared<const std::string>(std::move(draft.context));
    for (std::size_t q = 0; q < draft.questions.size() && made < options.count; ++q) {
      const Question& question = draft.questions[q];
      const std::string& task = question.task.empty() ? options.task : question.task;
      const std::string answer = fill(language.prompt().answer, {{"answer", question.answer}});
      Sample sample = {.id = stem + std::to_string(made++),
                       .task = task,
                       .tokens = options.tokens,
                       .context_id = draft.questions.size() > 1 ? stem + "c" + std::to_string(index) : "",
                       .context = shared,
                       .question = question.text,
                       .answers = question.answers,
                       .written = question.answer,
                       .match = maker.match(task),
                       .depth = draft.depths[q],
                       .length = haystack.meter().prefix + draft.context_tokens +
                                 haystack.meter().count(question.text) + haystack.meter().count(answer)};
      emit(sample, q == 0);
    }
  }
}

}  // namespace lode
