// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/sample_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/file.h"
#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;

constexpr std::pair<std::string_view, Match> kMatches[] = {{"contains", Match::contains},
                                                           {"exact", Match::exact},
                                                           {"f1", Match::f1},
                                                           {"substring", Match::substring},
                                                           {"any", Match::any},
                                                           {"number", Match::number},
                                                           {"word", Match::word},
                                                           {"decimal", Match::decimal},
                                                           {"debug", Match::debug},
                                                           {"choice", Match::choice},
                                                           {"rouge-l", Match::rouge_l},
                                                           {"classes", Match::classes},
                                                           {"count", Match::count},
                                                           {"passage", Match::passage},
                                                           {"code", Match::code},
                                                           {"values", Match::values},
                                                           {"last-number", Match::last_number},
                                                           {"speaker", Match::speaker},
                                                           {"rouge-lsum", Match::rouge_lsum},
                                                           {"characters", Match::characters},
                                                           {"rouge-l-characters", Match::rouge_l_characters}};

Match parse_match(const std::string& text, const std::string& where) {
  std::vector<std::string> names;
  for (const auto& [name, match] : kMatches) {
    if (text == name) return match;
    names.emplace_back(name);
  }
  throw InputError(where + ": field 'match': expected one of " + join(names) + "; found '" + excerpt(text) +
                   "'");
}

std::vector<std::string> read_texts(const Json& object, const char* key, const std::string& where) {
  const Json& list = json_member(object, key);
  const auto is_text = [](const Json& a) {
    return a.is_string() && !a.get_ref<const std::string&>().empty();
  };
  if (!list.is_array() || list.empty() || !std::all_of(list.begin(), list.end(), is_text)) {
    throw InputError(where + ": field '" + key + "': expected a list of one string or more, none empty");
  }
  return list.get<std::vector<std::string>>();
}

/// Reads samples in order and gives later ones of a context_id the context of the first.
class Reader {
 public:
  Sample read(std::string_view line, const std::string& where) {
    const Json object = parse_json(line, where);
    if (!object.is_object())
      throw InputError(where + ": expected a JSON object, found " + std::string(object.type_name()));
    std::vector<std::string> lacking;
    for (const char* key : {"id", "task", "tokens", "question", "answers", "match"})
      if (!json_has(object, key)) lacking.emplace_back(key);
    if (!lacking.empty())
      throw InputError(
          fmt::format("{}: expected a sample's fields id, task, tokens, context, question, answers and "
                      "match, found none called {}",
                      where, join(lacking)));
    Sample sample;
    sample.id = json_string(object, "id", where);
    if (!ids_.insert(sample.id).second)
      throw InputError(where + ": the id '" + excerpt(sample.id) + "' occurs twice");
    sample.task = json_string(object, "task", where);
    sample.tokens = json_int(object, "tokens", where, 0, kMostTokens);
    sample.question = json_string(object, "question", where);
    sample.answers = read_texts(object, "answers", where);
    sample.match = parse_match(json_string(object, "match", where), where);
    if (json_has(object, "depth") && object.at("depth") != -1)  // some write -1 where they do not know
      sample.depth = json_number(object, "depth", where, 0.0, 1.0);
    if (json_has(object, "max_new")) sample.max_new = json_int(object, "max_new", where, 0, kMostTokens);
    if (json_has(object, "first_line")) sample.first_line = json_bool(object, "first_line", where);
    if (json_has(object, "verbatim")) sample.verbatim = json_bool(object, "verbatim", where);
    if (json_has(object, "classes")) sample.classes = read_texts(object, "classes", where);
    if (json_has(object, "length")) sample.length = json_int(object, "length", where, 0, kMostTokens);
    read_context(object, sample, where);
    return sample;
  }

 private:
  void read_context(const Json& object, Sample& sample, const std::string& where) {
    if (json_has(object, "context_id")) sample.context_id = json_string(object, "context_id", where);
    if (json_has(object, "context")) {
      sample.context = shared(json_string(object, "context", where));
      if (sample.context_id.empty()) return;
      const auto [entry, is_new] = contexts_.emplace(sample.context_id, sample.context);
      if (!is_new && *entry->second != *sample.context) {
        throw InputError(where + ": context_id '" + excerpt(sample.context_id) +
                         "' stood for another context before");
      }
      sample.context = entry->second;
      return;
    }
    const auto known = contexts_.find(sample.context_id);
    if (known == contexts_.end()) {
      throw InputError(
          where +
          ": expected a field 'context' or a 'context_id' that an earlier line gave a context, found " +
          (sample.context_id.empty() ? "neither" : "the unknown id '" + excerpt(sample.context_id) + "'"));
    }
    sample.context = known->second;
  }

  /// Equal texts are one document, with or without an id: it is read once, and counts once in intervals.
  /// Samples without a context have none in common.
  std::shared_ptr<const std::string> shared(std::string text) {
    auto context = std::make_shared<const std::string>(std::move(text));
    return context->empty() ? context : texts_.emplace(*context, context).first->second;
  }

  std::set<std::string> ids_;
  std::map<std::string, std::shared_ptr<const std::string>> contexts_;    // by context_id
  std::map<std::string_view, std::shared_ptr<const std::string>> texts_;  // each a view of what it holds
};

}  // namespace

std::string_view name_of(Match match) {
  for (const auto& [name, m] : kMatches) {
    if (m == match) return name;
  }
  return "";
}

std::string sample_line(const Sample& sample, bool with_context) {
  nlohmann::ordered_json object = {{"id", sample.id}, {"task", sample.task}, {"tokens", sample.tokens}};
  if (sample.length > 0) object["length"] = sample.length;
  if (!sample.context_id.empty()) object["context_id"] = sample.context_id;
  if (with_context) object["context"] = *sample.context;
  object["question"] = sample.question;
  object["answers"] = sample.answers;
  object["match"] = name_of(sample.match);
  if (sample.depth) object["depth"] = *sample.depth;
  if (!sample.classes.empty()) object["classes"] = sample.classes;
  if (sample.max_new > 0) object["max_new"] = sample.max_new;
  if (sample.first_line) object["first_line"] = true;
  if (sample.verbatim) object["verbatim"] = true;
  return object.dump();
}

void for_each_line(std::string_view text, std::string_view where,
                   const std::function<void(std::string_view, const std::string&)>& body) {
  std::int64_t number = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    ++number;
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    body(line, std::string(where) + " line " + std::to_string(number));
  }
}

std::vector<Sample> parse_samples(std::string_view text, std::string_view where, std::int64_t limit) {
  std::vector<Sample> samples;
  std::map<std::pair<std::string, std::int64_t>, std::int64_t> counts;  // of each task and length
  Reader reader;
  for_each_line(text, where, [&](std::string_view line, const std::string& place) {
    Sample sample = reader.read(line, place);
    if (++counts[{sample.task, sample.tokens}] <= limit || limit == 0) samples.push_back(std::move(sample));
  });
  if (text.empty())
    throw InputError(std::string(where) + ": expected one sample a line, found an empty file");
  if (samples.empty()) throw InputError(std::string(where) + ": expected one sample a line, found none");
  return samples;
}

std::vector<Sample> read_samples(const std::filesystem::path& path, std::int64_t limit) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return parse_samples({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string(), limit);
}

}  // namespace lode
