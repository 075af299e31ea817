// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/language.h"

#include <algorithm>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

extern const std::string_view kTaskLanguage;  // assets/tasks.json, put into the program by cmake/assets.cmake

namespace {

constexpr std::string_view kHex = "0123456789abcdef";
constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
constexpr std::pair<std::string_view, std::string_view> kListOfSlot[] = {{"city", "cities"},
                                                                         {"place", "places"},
                                                                         {"attribute", "attributes"},
                                                                         {"adjective", "adjectives"},
                                                                         {"noun", "nouns"}};

const Json& member(const Json& object, std::string_view key, std::string_view where) {
  if (!json_has(object, key)) {
    throw InputError(std::string(where) + ": expected a member '" + std::string(key) + "', found none");
  }
  return object.at(std::string(key));
}

std::vector<std::string> strings(const Json& list, const std::string& where) {
  const bool all =
      list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& s) { return s.is_string(); });
  if (!all || list.empty())
    throw InputError(where + ": expected a list of strings, found " + list.dump().substr(0, 60));
  return list.get<std::vector<std::string>>();
}

InputError bad_slot(std::string_view text_template, std::string_view name) {
  return InputError("template '" + std::string(text_template) + "': nothing is known for slot '" +
                    std::string(name) + "'");
}

/// Replaces every "{name}" by lookup(name).
template <class Lookup>
std::string expand(std::string_view text_template, const Lookup& lookup) {
  std::string out;
  for (std::size_t at = 0; at < text_template.size();) {
    const std::size_t open = std::min(text_template.find('{', at), text_template.size());
    out += text_template.substr(at, open - at);
    if (open == text_template.size()) break;
    const std::size_t close = text_template.find('}', open);
    if (close == std::string_view::npos) throw bad_slot(text_template, text_template.substr(open + 1));
    out += lookup(text_template.substr(open + 1, close - open - 1));
    at = close + 1;
  }
  return out;
}

}  // namespace

std::uint32_t crc32(std::string_view bytes) {
  std::uint32_t crc = 0xffffffffu;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

std::string fill(std::string_view text_template, Slots slots) {
  return expand(text_template, [&](std::string_view name) {
    const auto* slot =
        std::find_if(slots.begin(), slots.end(), [&](const auto& s) { return s.first == name; });
    if (slot == slots.end()) throw bad_slot(text_template, name);
    return std::string(slot->second);
  });
}

AnswerMarks PromptForm::answer_marks() const {
  constexpr std::string_view kSlot = "{question}";
  LODE_ASSERT(question.find(kSlot) != std::string::npos);
  return {.before = question.substr(question.find(kSlot) + kSlot.size()), .after = terminator};
}

const Language& Language::built_in(Side side) {
  constexpr std::string_view kWhere = "the built-in task language";
  static const Language held_out = parse(kTaskLanguage, kWhere, Side::held_out),
                        trained = parse(kTaskLanguage, kWhere, Side::trained);
  return side == Side::held_out ? held_out : trained;
}

Language Language::parse(std::string_view json, std::string_view where, Side side) {
  const Json root = parse_json(json, where);
  if (!root.is_object()) throw InputError(std::string(where) + ": expected an object");
  Language language;
  language.side_ = side;
  const Json& prompt = member(root, "prompt", where);
  language.prompt_ = {.header = json_string(prompt, "header", where),
                      .question = json_string(prompt, "question", where),
                      .answer = json_string(prompt, "answer", where),
                      .terminator = json_string(prompt, "terminator", where),
                      .stop = json_string(prompt, "stop", where)};
  const Json& held = member(root, "held_out", where);
  const auto rule = [&](std::string_view name) {
    const Json& entry = member(held, name, where);
    const std::int64_t modulus = json_int(entry, "modulus", where, 1, 1'000'000);
    return Rule{static_cast<std::uint64_t>(modulus),
                static_cast<std::uint64_t>(json_int(entry, "residue", where, 0, modulus - 1))};
  };
  language.held_words_ = rule("words");
  language.held_strings_ = rule("strings");
  language.held_numbers_ = rule("numbers");
  language.held_books_ = rule("books");
  language.read_words(root, where);
  language.read_kinds(root, where);
  language.noise_ = json_string(root, "noise", where);
  language.families_ = member(root, "families", where);
  language.tasks_ = member(root, "tasks", where);
  return language;
}

void Language::read_words(const Json& root, std::string_view where) {
  const std::string place(where);
  const std::vector<std::string> split =
      strings(member(member(member(root, "held_out", where), "words", where), "lists", where),
              place + ": held_out.words.lists");
  for (const auto& [name, list] : member(root, "words", where).items()) {
    std::vector<std::string> words = strings(list, place + ": words." + name);
    if (std::find(split.begin(), split.end(), name) != split.end()) {
      std::erase_if(words, [&](const std::string& w) { return !is_ours(word_is_held_out(w)); });
    }
    if (words.empty())
      throw InputError(place + ": words." + name + ": no word is " +
                       (side_ == Side::held_out ? "held out" : "left for training"));
    words_.emplace(name, std::move(words));
  }
}

void Language::read_kinds(const Json& root, std::string_view where) {
  for (const auto& [name, entry] : member(root, "values", where).items()) {
    const std::string place = std::string(where) + ": values." + name;
    Kind kind{.type = json_string(entry, "type", place), .text_template = "", .length = 0, .alphabet = 0};
    if (kind.type == "template") {
      kind.text_template = json_string(entry, "template", place);
    } else if (kind.type == "digits" || kind.type == "hex" || kind.type == "letters") {
      kind.length = json_int(entry, "length", place, 1, 18);
      if (json_has(entry, "alphabet")) kind.alphabet = json_int(entry, "alphabet", place, 2, 9);
    } else if (kind.type != "invented" && kind.type != "uuid") {
      throw InputError(place + ": expected type digits, hex, letters, uuid, template or invented, found '" +
                       kind.type + "'");
    }
    kinds_.emplace(name, kind);
  }
  const std::string place = std::string(where) + ": invented";
  const Json& parts = member(root, "invented", where);
  onsets_ = strings(member(parts, "onsets", place), place + ".onsets");
  vowels_ = strings(member(parts, "vowels", place), place + ".vowels");
  codas_ = strings(member(parts, "codas", place), place + ".codas");
  syllables_ = member(parts, "syllables", place).get<std::vector<std::int64_t>>();
}

const Json& Language::family(std::string_view name) const {
  return member(families_, name, "task language, families");
}

const Json& Language::task(std::string_view name) const {
  const std::vector<std::string> names = task_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    throw InputError("expected a task (" + join(names) + "), found '" + std::string(name) + "'");
  }
  return tasks_.at(std::string(name));
}

std::vector<std::string> Language::task_names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : tasks_.items()) {
    if (entry.value("match", "") != "loss") names.push_back(name);
  }
  return names;
}

const std::vector<std::string>& Language::words(std::string_view list) const {
  const auto found = words_.find(list);
  if (found == words_.end())
    throw InputError("task language: there is no word list '" + std::string(list) + "'");
  return found->second;
}

std::string Language::word(std::string_view slot, Rng& rng) const {
  for (const auto& [name, list] : kListOfSlot) {
    if (name == slot) return pick(words(list), rng);
  }
  return value(slot, rng);
}

std::string Language::value(std::string_view kind, Rng& rng) const {
  const auto found = kinds_.find(kind);
  if (found == kinds_.end())
    throw InputError("task language: there is no kind of values '" + std::string(kind) + "'");
  const Kind& k = found->second;
  if (k.type == "digits") return digits(k, rng);
  if (k.type == "template") return of_lists(k, rng);
  while (true) {
    std::string text = k.type == "invented" ? invented(rng)
                       : k.type == "uuid"   ? uuid(rng)
                                            : characters(k.type == "hex" ? kHex : kLetters, k.length, rng);
    if (is_ours(string_is_held_out(text))) return text;
  }
}

/// With an alphabet of n, only n different digits occur, drawn anew for each string; the first digit is never
/// 0.
std::string Language::digits(const Kind& kind, Rng& rng) const {
  while (true) {
    std::string text;
    if (kind.alphabet > 0) {
      std::vector<char> alphabet = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};
      shuffle(alphabet, rng);
      text = characters({alphabet.data(), static_cast<std::size_t>(kind.alphabet)}, kind.length, rng);
    } else {
      text = characters("123456789", 1, rng) + characters("0123456789", kind.length - 1, rng);
    }
    if (is_ours(number_is_held_out(std::stoull(text)))) return text;
  }
}

std::string Language::characters(std::string_view alphabet, std::int64_t length, Rng& rng) const {
  std::string text;
  for (std::int64_t i = 0; i < length; ++i) text += alphabet[rng.below(alphabet.size())];
  return text;
}

std::string Language::invented(Rng& rng) const {
  std::string text;
  for (std::int64_t left = pick(syllables_, rng); left > 0; --left) {
    text += pick(onsets_, rng);
    text += pick(vowels_, rng);
    text += pick(codas_, rng);
  }
  text[0] = static_cast<char>(text[0] - 'a' + 'A');  // onsets are lower-case ASCII
  return text;
}

/// Of version 4, that is random, in the usual form.
std::string Language::uuid(Rng& rng) const {
  std::string text = characters(kHex, 8, rng) + "-" + characters(kHex, 4, rng) + "-4";
  text += characters(kHex, 3, rng) + "-" + characters("89ab", 1, rng);
  return text + characters(kHex, 3, rng) + "-" + characters(kHex, 12, rng);
}

std::string Language::of_lists(const Kind& kind, Rng& rng) const {
  return expand(kind.text_template, [&](std::string_view list) { return pick(words(list), rng); });
}

const std::string& Language::wording(const Json& entry, std::string_view name, Wording side, Rng& rng) const {
  const std::string key = std::string(name) + (side == Wording::held_out ? "_held_out" : "");
  const Json& list = member(entry, key, "task language, wordings");
  return list.at(rng.below(list.size())).get_ref<const std::string&>();
}

const std::string& Language::count_word(std::size_t count) const {
  const std::vector<std::string>& counts = words("counts");
  if (count == 0 || count > counts.size())
    throw InputError("task language: no word for the count " + std::to_string(count));
  return counts[count - 1];
}

}  // namespace lode
