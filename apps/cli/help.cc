// SPDX-License-Identifier: Apache-2.0
// How --help looks, and what is said of words that are no verb or flag.
#include "help.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>

#include "base/text.h"

namespace lode::cli {

namespace {

/// A default as it would be typed; the empty string and the empty list are no defaults worth a word.
std::string shown(std::string text) {
  if (text.starts_with('[') && text.ends_with(']')) text = text.substr(1, text.size() - 2);
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 2)
    text.replace(at, 1, "\\n");
  return text;
}

constexpr std::size_t kNames = 30;  // columns before an explanation

/// Columns that help may fill: the terminal's, if they make lines that can be read.
std::size_t width() {
  winsize size = {};
  if (isatty(STDOUT_FILENO) == 0 || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0)
    return 80;
  return std::clamp<std::size_t>(size.ws_col, 60, 100);
}

/// A line of help: a name and what it means, behind it or below it.
std::string entry(const std::string& name, std::string_view meaning) {
  std::string text = fmt::format("{:{}}", "  " + name, kNames);
  if (meaning.empty()) return "  " + name + "\n";
  if (name.size() + 2 >= kNames) text += "\n" + std::string(kNames, ' ');
  return text + wrapped(meaning, kNames) + "\n";
}

/// What stands for an option's value where "TEXT" would say nothing: a file is no text.
std::string value_name(const CLI::Option& option) {
  static const std::map<std::string, std::string, std::less<>> kValues = {
      {"model", "MODEL"},       {"tokenizer", "MODEL"},    {"file", "FILE"},       {"document", "FILE"},
      {"append", "FILE"},       {"samples", "FILE"},       {"questions", "FILE"},  {"prompts", "FILE"},
      {"api-key-file", "FILE"}, {"from", "FILE"},          {"checkpoint", "FILE"}, {"check", "FILE"},
      {"output", "FILE"},       {"haystack", "PATH"},      {"contexts", "FOLDER"}, {"include", "GLOB"},
      {"exclude", "GLOB"},      {"attention", "SPEC"},     {"gpu-memory", "SIZE"}, {"active-memory", "SIZE"},
      {"cache-memory", "SIZE"}, {"sample-memory", "SIZE"}, {"url", "URL"}};
  const bool positional = option.get_positional() && option.get_lnames().empty();
  const std::vector<std::string>& names = option.get_lnames();
  const std::string name = positional ? option.get_name() : names.empty() ? std::string() : names.front();
  if (positional && name == "context") return "FILE";
  if (name == "output" && option.get_description().starts_with("folder")) return "FOLDER";
  if (name == "contexts" && option.get_description().starts_with("keys")) return "LENGTHS";
  const auto found = kValues.find(name);
  return found == kValues.end() ? std::string() : found->second;
}

/// CLI11's own form, but a default stands behind the explanation, where it can be longer than a word, and
/// lines end where the terminal does.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_description(const CLI::App* app) const override {
    return wrapped(app->get_description(), 0) + "\n";
  }
  std::string make_option(const CLI::Option* option, bool positional) const override {
    return entry(make_option_name(option, positional) + make_option_opts(option), make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    return entry(verb->get_display_name(), verb->get_description());
  }

  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text = CLI::Formatter::make_option_opts(option);
    constexpr std::string_view kText = " TEXT";
    if (const std::string value = value_name(*option); !value.empty() && text.starts_with(kText))
      text.replace(1, kText.size() - 1, value);
    const std::string value = "=" + option->get_default_str();
    if (const std::size_t at = text.find(value); value.size() > 1 && at != std::string::npos)
      text.erase(at, value.size());
    return text;
  }

  std::string make_option_desc(const CLI::Option* option) const override {
    const std::string value = shown(option->get_default_str());
    const bool takes_value = option->get_type_size() != 0;
    if (value.empty() || !takes_value) return option->get_description();
    return fmt::format("{} [default: {}]", option->get_description(), value);
  }
};

std::vector<const CLI::App*> verbs_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::vector<std::string> verb_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* verb : verbs_of(app)) names.push_back(verb->get_name());
  return names;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& names) {
  const std::string found = nearest_name(word, names);
  return found.empty() ? "" : "; did you mean '" + found + "'?";
}

/// The verb that the words name as far as they do, and the first word behind it that is no flag.
struct Place {
  const CLI::App* verb;
  std::string path, next;
};
Place place_of(const CLI::App& app, int argc, char** argv) {
  Place place = {&app, "", ""};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with('-')) continue;
    const auto verbs = verbs_of(*place.verb);
    const auto found = std::find_if(verbs.begin(), verbs.end(),
                                    [&](const CLI::App* verb) { return verb->get_name() == word; });
    if (found == verbs.end()) {
      place.next = word;
      break;
    }
    place.verb = *found;
    place.path += word + " ";
  }
  if (place.verb == &app && place.next.empty() && argc > 1) place.next = argv[1];
  return place;
}

/// "; `lodestone index` takes it" for a flag that other verbs have, but for those that most of them have.
std::string takers_of(const CLI::App& verb, const std::string& flag) {
  const CLI::App* root = &verb;
  while (root->get_parent() != nullptr) root = root->get_parent();
  std::vector<std::string> names;
  for (const CLI::App* other : root->get_subcommands(nullptr))
    if (other->get_option_no_throw(flag) != nullptr) names.push_back("`lodestone " + other->get_name() + "`");
  if (names.empty() || names.size() > 3) return "";
  return fmt::format("; {} take{} it", fmt::join(names, " and "), names.size() == 1 ? "s" : "");
}

/// Our name of a flag that other tools have by this one; empty: none is known.
std::string name_here(std::string_view flag) {
  if (flag == "--temperature") return "--temp";
  for (const std::string_view limit : {"--max-tokens", "--max-new-tokens", "--n-predict"})
    if (flag == limit) return "--predict";
  return "";
}

/// "; did you mean '--json'?" for a flag that the verb does not have, else which verb has it, else nothing.
std::string flag_suggestion(const CLI::App& verb, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::Option* option : verb.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  const std::string flag = word.substr(0, word.find('='));
  if (const std::string known = name_here(flag); std::find(names.begin(), names.end(), known) != names.end())
    return "; did you mean '" + known + "'?";
  const auto begins = [&](const std::string& name) { return flag.size() > 3 && name.starts_with(flag); };
  const auto longer = std::find_if(names.begin(), names.end(), begins);
  if (longer != names.end()) return "; did you mean '" + *longer + "'?";
  const std::string takers = takers_of(verb, flag);
  return takers.empty() ? did_you_mean(flag, names) : takers;
}

/// "lodestone ask --help" says what a verb takes.
std::string see_help(const std::string& path) {
  return fmt::format("`lodestone {}--help`", path);
}

/// A flag as it is; an argument that has a place alone, whose name a user does not type, with what it is.
std::string described(const CLI::App& verb, const std::string& name) {
  const CLI::Option* const option = name.starts_with('-') ? nullptr : verb.get_option_no_throw(name);
  return option == nullptr ? name : fmt::format("{} ({})", name, option->get_description());
}

/// "a,b" as "a, b".
std::string spaced(std::string list) {
  for (std::size_t at = 0; (at = list.find(',', at)) != std::string::npos; at += 2) list.insert(at + 1, " ");
  return list;
}

/// What CLI11 found, in the form of all messages: what was expected, what was found, where.
std::string reworded(const CLI::App& verb, const std::string& path, const CLI::ParseError& error) {
  const std::string said = error.what(), where = path.empty() ? "" : path.substr(0, path.size() - 1) + ": ";
  const std::string name = said.substr(0, said.find(": "));
  const auto between = [&](std::string_view before, std::string_view after) -> std::string {
    const std::size_t begin = said.find(before) + before.size();
    return said.substr(begin, said.rfind(after) - begin);
  };
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    const std::vector<std::string> extras = verb.remaining();
    const std::string first = extras.empty() ? said.substr(said.find(": ") + 2) : extras.front();
    if (first.starts_with('-'))
      return fmt::format("{}expected a flag of {}, found '{}'{}", where, see_help(path), excerpt(first),
                         flag_suggestion(verb, first));
    return fmt::format("{}expected no further argument, found '{}'", where, excerpt(first));
  }
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && said.ends_with(" is required"))
    return fmt::format("{}expected {}, found none; {} says what it is", where,
                       described(verb, said.substr(0, said.rfind(" is required"))), see_help(path));
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr &&
      said.find(": At Most 1 ") < said.size())
    return fmt::format("{}: expected one value, found {}", name, said.substr(said.rfind(' ') + 1));
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr && said.ends_with(" missing"))
    return name + ": expected a value, found none";
  if (dynamic_cast<const CLI::ExcludesError*>(&error) != nullptr)
    return fmt::format("{}expected one of {} and {}, found both", where, between("", " excludes "),
                       said.substr(said.rfind(' ') + 1));
  if (dynamic_cast<const CLI::ValidationError*>(&error) != nullptr && said.ends_with('}'))
    return fmt::format("{}: expected one of {}, found '{}'", name, spaced(between(" not in {", "}")),
                       excerpt(between(": ", " not in {")));
  return said;
}

}  // namespace

std::string wrapped(std::string_view words, std::size_t indent) {
  const std::size_t end = width();
  std::string text;
  std::size_t column = indent;
  while (!words.empty()) {
    const std::size_t length = std::min(words.find(' '), words.size());
    if (column > indent && column + 1 + length > end) {
      text += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      text += ' ';
      ++column;
    }
    text += words.substr(0, length);
    column += length;
    words.remove_prefix(std::min(length + 1, words.size()));
  }
  return text;
}

void set_help_style(CLI::App& app) {
  app.formatter(std::make_shared<HelpFormatter>());
  app.option_defaults()->always_capture_default();
}

std::string usage_error(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  const Place place = place_of(app, argc, argv);
  const std::vector<std::string> verbs = verb_names(*place.verb);
  if (!verbs.empty()) {
    const std::string expected = fmt::format(
        "{}expected one of the verbs {}",
        place.path.empty() ? "" : place.path.substr(0, place.path.size() - 1) + ": ", join(verbs));
    if (!place.next.empty())
      return fmt::format("{}; found '{}'{}", expected, excerpt(place.next), did_you_mean(place.next, verbs));
    if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr)
      return fmt::format("{}; `lodestone {}--help` says what each does", expected, place.path);
  }
  return reworded(*place.verb, place.path, error);
}

}  // namespace lode::cli
