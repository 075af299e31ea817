// SPDX-License-Identifier: Apache-2.0
// How --help looks, and what is said of words that are no verb or flag.
#include "help.h"

#include <fmt/format.h>

#include <algorithm>
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

/// CLI11's own form, but a default stands behind the explanation, where it can be longer than a word.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text = CLI::Formatter::make_option_opts(option);
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

/// "; did you mean '--json'?" for the first flag that the verb does not have, else nothing.
std::string flag_suggestion(const CLI::App& verb, int argc, char** argv) {
  std::vector<std::string> names;
  for (const CLI::Option* option : verb.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  for (int i = 1; i < argc; ++i) {
    const std::string_view whole = argv[i];
    const std::string_view word = whole.substr(0, whole.find('='));
    if (word.starts_with("--") && std::find(names.begin(), names.end(), word) == names.end())
      return did_you_mean(word, names);
  }
  return "";
}

}  // namespace

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
  return error.what() + flag_suggestion(*place.verb, argc, argv);
}

}  // namespace lode::cli
