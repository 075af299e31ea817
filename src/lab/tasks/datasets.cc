// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/datasets.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <optional>

#include "base/file.h"
#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
constexpr std::pair<std::string_view, DatasetFormat> kFormats[] = {
    {"auto", DatasetFormat::automatic},      {"own", DatasetFormat::own},
    {"ruler", DatasetFormat::ruler},         {"infinitebench", DatasetFormat::infinitebench},
    {"longbench", DatasetFormat::longbench}, {"prefixqa", DatasetFormat::prefixqa},
    {"needle", DatasetFormat::needle}};

/// How a task of a data set is scored, how many tokens its authors let models write, whether they score the first line
/// of those alone, and whether they put it into no chat template: examples, or code, are gone on with.
struct TaskRule {
  std::string_view task;
  Match match;
  std::int64_t max_new;
  bool first_line = false, verbatim = false;
};

constexpr TaskRule kLongBench[] = {{"narrativeqa", Match::f1, 128},
                                   {"qasper", Match::f1, 128},
                                   {"multifieldqa_en", Match::f1, 64},
                                   {"multifieldqa_zh", Match::characters, 64},
                                   {"hotpotqa", Match::f1, 32},
                                   {"2wikimqa", Match::f1, 32},
                                   {"musique", Match::f1, 32},
                                   {"dureader", Match::rouge_l_characters, 128},
                                   {"gov_report", Match::rouge_l, 512},
                                   {"qmsum", Match::rouge_l, 512},
                                   {"multi_news", Match::rouge_l, 512},
                                   {"vcsum", Match::rouge_l_characters, 512},
                                   {"trec", Match::classes, 64, true, true},
                                   {"triviaqa", Match::f1, 32, true, true},
                                   {"samsum", Match::rouge_l, 128, true, true},
                                   {"lsht", Match::classes, 64, true, true},
                                   {"passage_count", Match::count, 32},
                                   {"lcc", Match::code, 64, false, true},
                                   {"passage_retrieval_en", Match::passage, 32},
                                   {"passage_retrieval_zh", Match::passage, 32},
                                   {"repobench-p", Match::code, 64, false, true}};

constexpr TaskRule kInfiniteBench[] = {{"passkey", Match::number, 6},
                                       {"number_string", Match::number, 12},
                                       {"kv_retrieval", Match::word, 50},
                                       {"math_find", Match::decimal, 3},
                                       {"math_calc", Match::values, 30'000},
                                       {"code_run", Match::last_number, 5},
                                       {"code_debug", Match::debug, 5},
                                       {"longbook_qa_eng", Match::f1, 40},
                                       {"longbook_choice_eng", Match::choice, 40},
                                       {"longbook_sum_eng", Match::rouge_lsum, 1'200},
                                       {"longbook_qa_chn", Match::characters, 40},
                                       {"longdialogue_qa_eng", Match::speaker, 40}};

template <std::size_t n>
const TaskRule& rule_of(const TaskRule (&rules)[n], std::string_view task, const std::string& where) {
  std::vector<std::string> names;
  for (const TaskRule& rule : rules) {
    if (rule.task == task) return rule;
    names.emplace_back(rule.task);
  }
  throw InputError(where + ": expected one of the tasks " + join(names) + "; found '" + excerpt(task) + "'");
}

/// A text, or a number as text; of numbers with a fraction only where those are `decimals`.
std::string text_or_number(const Json& value, const std::string& where, const char* key, bool decimals) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_integer() || (decimals && value.is_number())) return value.dump();
  throw InputError(where + ": field '" + std::string(key) + "': expected a string or a " +
                   (decimals ? "number" : "whole number"));
}

/// What stands behind the context where --prompts has nothing for a task: who has no instruction cannot know that
/// passages are to be counted. The words are ours, for models with and without chat training; examples in the context
/// of trec, triviaqa, samsum and lsht show how an answer looks, and code is only to go on.
struct TaskPrompt {
  std::string_view task, text;
};
constexpr TaskPrompt kPrompts[] = {
    {"narrativeqa",
     "\n\nAnswer the question about the story above in as few words as possible.\n\nQuestion: "
     "{input}\nAnswer:"},
    {"qasper",
     "\n\nAnswer the question about the article above with one phrase or sentence, with yes or no where it "
     "asks "
     "for that, or with unanswerable where the article does not say.\n\nQuestion: {input}\nAnswer:"},
    {"gov_report", "\n\nWrite a summary of the report above, about a page long.\n\nSummary:"},
    {"qmsum",
     "\n\nAnswer the query about the meeting above in one or more sentences.\n\nQuery: {input}\nAnswer:"},
    {"multi_news", "\n\nWrite a summary of all the news above, about a page long.\n\nSummary:"},
    {"trec", "\n{input}"},
    {"triviaqa", "\n\n{input}"},
    {"samsum", "\n\n{input}"},
    {"lsht", "\n{input}"},
    {"passage_count",
     "\n\nSome of the paragraphs above stand there more than once. How many different paragraphs are there, "
     "without repetitions? Answer with the number alone.\n\nNumber of different paragraphs:"},
    {"passage_retrieval_en",
     "\n\nThis is a summary of one of the paragraphs above:\n\n{input}\n\nOf which paragraph? Answer with "
     "its "
     "number, such as Paragraph 1.\n\nAnswer:"},
    {"lcc", "{input}"},
    {"repobench-p", "{input}"},
    {"multifieldqa_zh", "\n\n请根据上文，用中文简短地回答问题。\n\n问题：{input}\n回答："},
    {"dureader", "\n\n请根据上面的几篇文章回答问题。\n\n问题：{input}\n回答："},
    {"vcsum", "\n\n请总结上面的会议记录。\n\n总结："},
    {"passage_retrieval_zh",
     "\n\n这段摘要说的是上面的某一段：\n\n{input}\n\n是哪一段？请只写它的编号，例如：段落1。\n\n回答："},
    {"kv_retrieval", "\n\n{input}"},
    {"math_calc",
     "\n\nWork the expression above out from left to right, and write its first number and the value after "
     "every operation, as [1, 4, 8] for 1 + 3 + 4.\n\nValues:"},
    {"code_run", "\n\n{input}\n\nReturn value:"},
    {"longbook_sum_eng", "\n\nWrite a summary of the book above.\n\nSummary:"},
    {"longbook_qa_chn", "\n\n问题：{input}\n答案："},
    {"longdialogue_qa_eng",
     "\n\nIn the script above, $$MASK$$ stands for the name of one who speaks. Answer with that name "
     "alone.\n\nName:"}};
constexpr std::string_view kPlainPrompt = "\n\nQuestion: {input}\nAnswer:";

std::string_view prompt_of(std::string_view task) {
  for (const TaskPrompt& prompt : kPrompts)
    if (prompt.task == task) return prompt.text;
  return kPlainPrompt;
}

/// By name, what a template may name as {NAME}.
using Fields = std::map<std::string, std::string, std::less<>>;

/// Texts and numbers of a sample, but for its answers. The context is put apart.
Fields fields_of(const Json& object) {
  Fields fields;
  for (const auto& [key, value] : object.items()) {
    if (key == "context" || key == "answer" || key == "answers" || key == "outputs") continue;
    if (value.is_string()) fields[key] = value.get<std::string>();
    if (value.is_number()) fields[key] = value.dump();
    if (!value.is_array()) continue;
    std::string& list = fields[key];
    for (const Json& item : value)
      if (item.is_string()) list += (list.empty() ? "" : "\n") + item.get<std::string>();
  }
  return fields;
}

/// What is put in is not looked at again; braces around other words stay.
std::string filled(std::string_view text, const Fields& fields) {
  std::string result;
  while (!text.empty()) {
    const std::size_t open = std::min(text.find('{'), text.size());
    result += text.substr(0, open);
    text.remove_prefix(open);
    const std::size_t close = text.find('}');
    const auto field =
        close == std::string_view::npos ? fields.end() : fields.find(text.substr(1, close - 1));
    if (field != fields.end()) {
      result += field->second;
      text.remove_prefix(close + 1);
    } else if (!text.empty()) {
      result += text.front();
      text.remove_prefix(1);
    }
  }
  return result;
}

/// One or a list of them, none empty; where all are, one that is: nothing that is written is right then.
std::vector<std::string> texts_of(const Json& object, const char* key, const std::string& where,
                                  bool decimals = false) {
  const Json& value = json_member(object, key);
  std::vector<std::string> texts;
  if (value.is_array()) {
    const bool nested = value.size() == 1 && value.front().is_array();  // of some copies of Math.Calc
    for (const Json& item : nested ? value.front() : value)
      texts.push_back(text_or_number(item, where, key, decimals));
  } else {
    texts.push_back(text_or_number(value, where, key, decimals));
  }
  if (texts.empty())
    throw InputError(where + ": field '" + std::string(key) + "': expected an answer, found none");
  std::erase_if(texts, [](const std::string& t) { return t.empty(); });
  if (texts.empty()) texts.emplace_back();
  return texts;
}

class DatasetReader {
 public:
  DatasetReader(const fs::path& path, std::int64_t limit, const fs::path& prompts,
                const TokenCount& tokens_of)
      : path_(path), prompts_path_(prompts), limit_(limit), tokens_of_(tokens_of) {
    if (prompts.empty()) return;
    prompts_ = parse_json(read_file(prompts), prompts.string());
    if (!prompts_.is_object())
      throw InputError(prompts.string() + ": expected an object with a template for each task, found " +
                       prompts_.type_name());
    for (const auto& [task, text] : prompts_.items())
      if (json_string(prompts_, task, prompts.string()).find("{context}") == std::string::npos)
        throw InputError(prompts.string() + ": '" + task + "': expected {context}, found none");
  }

  Dataset read(DatasetFormat format, std::string_view text);

 private:
  void unless_bad(const std::string& where, const Json& object, const std::function<void()>& add);
  void add(const Json& object, DatasetFormat format, const std::string& where);
  void add_ruler(const Json& object, const std::string& where);
  void add_infinitebench(const Json& object, const std::string& where);
  void add_longbench(const Json& object, const std::string& where);
  void add_prefixqa(const Json& object, const std::string& where);
  void add_needles(const Json& object, const std::string& where);
  void put(Sample sample, std::string context);
  void put_with_prompt(Sample sample, const std::string& context, std::string_view task,
                       const Fields& fields);
  /// "validation.jsonl" says nothing: then the folder is the task's name.
  std::string task_of_file() const {
    const std::string stem = path_.stem().string();
    const bool split = stem == "validation" || stem == "test" || stem == "train";
    return split ? fs::absolute(path_).parent_path().filename().string() : stem;
  }

  fs::path path_, prompts_path_;
  std::int64_t limit_;
  const TokenCount& tokens_of_;
  Json prompts_;
  Dataset dataset_;
  std::map<std::pair<std::string, std::int64_t>, std::int64_t> counts_;
  std::map<std::string, std::shared_ptr<const std::string>> contexts_;  // equal texts are one
};

DatasetFormat detect(const Json& object, const std::string& where) {
  const auto has = [&](std::initializer_list<const char*> keys) {
    return std::all_of(keys.begin(), keys.end(), [&](const char* key) { return json_has(object, key); });
  };
  if (json_has(object, "match") || json_has(object, "task")) return DatasetFormat::own;
  if (has({"input", "outputs"})) return DatasetFormat::ruler;
  if (has({"dataset", "input", "context", "answers"})) return DatasetFormat::longbench;
  if (has({"input", "context", "answer"})) return DatasetFormat::infinitebench;
  if (has({"context", "question", "answer"})) return DatasetFormat::prefixqa;
  if (has({"needle", "haystack"})) return DatasetFormat::needle;
  if (has({"context", "answers"})) return DatasetFormat::own;  // whose reader says what it lacks
  throw InputError(
      where +
      ": expected the fields of one of the formats own, ruler, infinitebench, longbench, prefixqa, needle; "
      "found others; --format names one");
}

/// By which a data set names a sample; empty where it names none.
std::string id_of(const Json& object) {
  for (const char* key : {"_id", "id", "question_id", "index"}) {
    const Json& id = json_member(object, key);
    if (id.is_string()) return id.get<std::string>();
    if (id.is_number_integer()) return id.dump();
  }
  return {};
}

/// Notes the sample at `where` where `add` refuses it: a bad one does not cost the others their run. `object` is what
/// is known of it by then.
void DatasetReader::unless_bad(const std::string& where, const Json& object,
                               const std::function<void()>& add) {
  try {
    add();
  } catch (const InputError& error) {
    std::string_view reason = error.what();
    if (reason.starts_with(where + ": ")) reason.remove_prefix(where.size() + 2);
    dataset_.unread.push_back({where, id_of(object), std::string(reason)});
  }
}

Dataset DatasetReader::read(DatasetFormat format, std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  const bool is_list = first != std::string_view::npos && text[first] == '[';
  if (is_list || format == DatasetFormat::needle) {
    const Json json = parse_json(text, path_.string());
    std::int64_t item = 0;
    for (const Json& object : is_list ? json : Json::array({json})) {
      const std::string where = path_.string() + " item " + std::to_string(++item);
      unless_bad(where, object, [&] { add(object, format, where); });
    }
  } else {
    for_each_line(text, path_.string(), [&](std::string_view line, const std::string& where) {
      Json object;
      unless_bad(where, object, [&] {
        object = parse_json(line, where);
        add(object, format, where);
      });
    });
  }
  if (!dataset_.samples.empty()) return std::move(dataset_);
  if (dataset_.unread.empty()) throw InputError(path_.string() + ": expected one sample or more, found none");
  const UnreadSample& bad = dataset_.unread.front();
  const std::size_t others = dataset_.unread.size() - 1;
  throw InputError(bad.where + ": " + bad.reason +
                   (others > 0 ? fmt::format("; the file has no good sample, {} more are bad", others) : ""));
}

void DatasetReader::add(const Json& object, DatasetFormat format, const std::string& where) {
  if (!object.is_object())
    throw InputError(where + ": expected a JSON object, found " + std::string(object.type_name()));
  switch (format) {
    case DatasetFormat::ruler:
      return add_ruler(object, where);
    case DatasetFormat::infinitebench:
      return add_infinitebench(object, where);
    case DatasetFormat::longbench:
      return add_longbench(object, where);
    case DatasetFormat::prefixqa:
      return add_prefixqa(object, where);
    default:
      return add_needles(object, where);
  }
}

void DatasetReader::put(Sample sample, std::string context) {
  if (limit_ > 0 && counts_[{sample.task, sample.tokens}] >= limit_) return;
  const auto number = counts_[{sample.task, sample.tokens}]++;
  if (sample.id.empty())
    sample.id = sample.task + "-" + std::to_string(sample.tokens) + "-" + std::to_string(number);
  auto& known = contexts_[context];
  if (!known) known = std::make_shared<const std::string>(std::move(context));
  sample.context = known;
  dataset_.samples.push_back(std::move(sample));
}

/// By the template for its task where there is one: what stands before the question is the context.
void DatasetReader::put_with_prompt(Sample sample, const std::string& context, std::string_view task,
                                    const Fields& fields) {
  const bool given = json_has(prompts_, sample.task);
  if (!given && !json_has(prompts_, task)) {
    sample.question = filled(prompt_of(task), fields);
    return put(std::move(sample), context);
  }
  const std::string text =
      json_string(prompts_, given ? std::string_view(sample.task) : task, prompts_path_.string());
  const std::size_t at = text.find("{context}");
  sample.question = filled(std::string_view(text).substr(at + 9), fields);
  put(std::move(sample), filled(std::string_view(text).substr(0, at), fields) + context);
}

/// The length that a RULER file was made for: its samples stay a little below it, each by itself, and their
/// lengths are powers of two.
std::int64_t nominal(std::int64_t length) {
  return length == 0 ? 0 : static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(length)));
}

void DatasetReader::add_ruler(const Json& object, const std::string& where) {
  Sample sample = {.task = task_of_file()};
  sample.answers = texts_of(object, "outputs", where);
  if (json_has(object, "length")) sample.tokens = nominal(json_int(object, "length", where, 0, kMostTokens));
  sample.match = sample.task.starts_with("qa") ? Match::any : Match::substring;
  sample.max_new = sample.task.starts_with("niah")  ? 128
                   : sample.task.starts_with("cwe") ? 120
                   : sample.task.starts_with("fwe") ? 50
                   : sample.task.starts_with("qa")  ? 32
                                                    : 30;
  const std::string input = json_string(object, "input", where);
  std::size_t cut = input.rfind("\nQuestion:");
  if (cut == std::string::npos) cut = input.rfind("\nWhat ");
  if (cut == std::string::npos) cut = input.rfind('\n');
  if (cut == std::string::npos) cut = 0;
  sample.question = input.substr(cut);
  if (json_has(object, "answer_prefix")) sample.question += json_string(object, "answer_prefix", where);
  put(std::move(sample), input.substr(0, cut));
}

void DatasetReader::add_infinitebench(const Json& object, const std::string& where) {
  Sample sample = {.task = task_of_file()};
  const TaskRule& rule = rule_of(kInfiniteBench, sample.task, where);
  sample.match = rule.match;
  sample.max_new = rule.max_new;
  sample.answers = texts_of(object, "answer", where, rule.match == Match::decimal);
  Fields fields = fields_of(object);
  std::string& input = fields["input"] = json_string(object, "input", where);
  if (rule.match == Match::choice || rule.match == Match::debug) {
    std::string lettered;
    const std::vector<std::string> options = texts_of(object, "options", where);
    const auto right = std::find(options.begin(), options.end(), sample.answers.front());
    if (options.size() > 4 || right == options.end())
      throw InputError(where + ": expected at most four options and the answer among them");
    for (std::size_t i = 0; i < options.size(); ++i) {
      const std::string letter(1, static_cast<char>('A' + i));
      fields["OPTION_" + letter] = options[i];
      lettered += "\n" + letter + ". " + options[i];
    }
    fields["options"] = lettered.substr(1);
    if (!json_has(prompts_, sample.task)) input += lettered;  // a template says where they go
    sample.answers = {*right, std::string(1, static_cast<char>('A' + (right - options.begin())))};
  }
  const std::string task = sample.task;
  put_with_prompt(std::move(sample), json_string(object, "context", where), task, fields);
}

void DatasetReader::add_longbench(const Json& object, const std::string& where) {
  Sample sample = {.task = json_string(object, "dataset", where)};
  // The even version's names end in _e.
  const std::string name =
      sample.task.ends_with("_e") ? sample.task.substr(0, sample.task.size() - 2) : sample.task;
  const TaskRule& rule = rule_of(kLongBench, name, where);
  sample.match = rule.match;
  sample.max_new = rule.max_new;
  sample.first_line = rule.first_line;
  sample.verbatim = rule.verbatim;
  sample.answers = texts_of(object, "answers", where);
  if (rule.match == Match::classes) sample.classes = texts_of(object, "all_classes", where);
  Fields fields = fields_of(object);
  fields["input"] = object.contains("input") ? json_string(object, "input", where) : "";
  put_with_prompt(std::move(sample), json_string(object, "context", where), name, fields);
}

void DatasetReader::add_prefixqa(const Json& object, const std::string& where) {
  Sample sample = {.task = "prefixqa"};
  sample.match = Match::f1;
  sample.answers = texts_of(object, "answer", where);
  Fields fields = fields_of(object);
  fields["input"] = json_string(object, "question", where);
  put_with_prompt(std::move(sample), json_string(object, "context", where), "prefixqa", fields);
}

/// Every *.txt of a folder in the order of names, or one file.
std::string haystack_text(const fs::path& path) {
  const auto checked = [](const fs::path& file) {
    std::string text = read_file(file);
    expect_utf8(text, file.string());
    return text;
  };
  if (!fs::is_directory(path)) {
    std::string text = checked(path);
    if (text.empty()) throw InputError(path.string() + ": expected a text, found an empty file");
    return text;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::string text;
  for (const fs::path& file : files) text += checked(file);
  if (text.empty()) throw InputError(path.string() + ": expected text files (*.txt), found none");
  return text;
}

/// The needle goes behind the last full stop before its depth, as in the published test.
void DatasetReader::add_needles(const Json& object, const std::string& where) {
  const std::string needle = json_string(object, "needle", where);
  const std::string question = json_string(object, "question", where);
  const fs::path named = fs::path(json_string(object, "haystack", where)).lexically_normal();
  if (named.is_absolute() || *named.begin() == "..")  // a file of samples does not say what else to read
    throw InputError(where + ": field 'haystack': expected a text or folder beside the file, found '" +
                     excerpt(named.string()) + "'");
  const std::string hay = haystack_text(path_.parent_path() / named);
  const auto numbers = [&](const char* key, double low, double high) {
    const Json& list = json_member(object, key);
    if (!list.is_array() || list.empty())
      throw InputError(where + ": field '" + std::string(key) + "': expected a list of numbers");
    std::vector<double> values;
    for (const Json& item : list) values.push_back(json_number({{key, item}}, key, where, low, high));
    return values;
  };
  for (const double length : numbers("lengths", 1, 1e9)) {
    const auto characters = static_cast<std::size_t>(length);
    std::string text;
    while (text.size() + needle.size() < characters) text += hay;
    std::size_t end = characters > needle.size() ? characters - needle.size() : 0;
    // A byte of the form 10xxxxxx is not a character's first.
    while (end > 0 && end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
    text.resize(end);
    const std::string asked = "\n\nQuestion: " + question + "\nAnswer:";
    const std::vector<std::string> answers = texts_of(object, "answer", where);
    // The same of all depths, which the tokenizer may tell apart by a token or two.
    const std::int64_t tokens =
        tokens_of_ ? tokens_of_(text + " " + needle + asked + " " + answers.front()) : 0;
    for (const double depth : numbers("depths", 0, 100)) {
      auto at = static_cast<std::size_t>(depth / 100 * static_cast<double>(text.size()));
      const std::size_t stop = at == 0 ? std::string::npos : text.rfind('.', at - 1);
      at = stop == std::string::npos ? 0 : stop + 1;
      Sample sample = {.task = "needle", .tokens = tokens};
      sample.question = asked;
      sample.answers = answers;
      sample.depth = depth / 100;
      put(std::move(sample), text.substr(0, at) + " " + needle + text.substr(at));
    }
  }
}

}  // namespace

DatasetFormat parse_dataset_format(std::string_view text) {
  std::vector<std::string> names;
  for (const auto& [name, format] : kFormats) {
    if (name == text) return format;
    names.emplace_back(name);
  }
  throw InputError("--format: expected one of " + join(names) + "; found '" + excerpt(text) + "'");
}

std::string_view name_of(DatasetFormat format) {
  for (const auto& [name, f] : kFormats) {
    if (f == format) return name;
  }
  return "";
}

namespace {

/// The format of the first line that has the fields of one, or, where none has, what is wrong with the first that is JSON.
/// The format of one sample; none of a bad one, of which the first fault is kept.
std::optional<DatasetFormat> detected(const Json& sample, const std::string& where,
                                      std::optional<InputError>& fault) {
  try {
    return detect(sample, where);
  } catch (const InputError& error) {
    if (!fault) fault = error;
    return std::nullopt;
  }
}

DatasetFormat detect_by_lines(std::string_view text, const std::string& name) {
  std::optional<DatasetFormat> found;
  std::optional<InputError> fault;
  for_each_line(text, name, [&](std::string_view line, const std::string& where) {
    if (!found && Json::accept(line)) found = detected(parse_json(line, where), where, fault);
  });
  if (!found && fault) throw InputError(*fault);
  return found.value_or(DatasetFormat::own);  // whose reader says what is wrong
}

DatasetFormat detect_by_items(const Json& list, const std::string& name) {
  std::optional<DatasetFormat> found;
  std::optional<InputError> fault;
  for (std::size_t i = 0; i < list.size() && !found; ++i)
    found = detected(list[i], fmt::format("{} item {}", name, i + 1), fault);
  if (!found && fault) throw InputError(*fault);
  return found ? *found : detect(Json(), name + " item 1");  // says what an item is
}

DatasetFormat detect_by_text(std::string_view text, const std::string& name) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos)
    throw InputError(name + ": expected one sample a line, found an empty file");
  if (text[first] == '[') {
    return detect_by_items(parse_json(text.substr(first), name), name);
  }
  // A file of one object over several lines is a needle's; others have an object a line.
  const std::string_view line = text.substr(first, text.find('\n', first) - first);
  if (!Json::accept(line) && Json::accept(text)) return detect(parse_json(text, name), name + " line 1");
  return detect_by_lines(text, name);
}

}  // namespace

std::string remark_of(const UnreadSample& sample) {
  const std::string id = sample.id.empty() ? "" : ", sample '" + excerpt(sample.id) + "'";
  return fmt::format("{}{}: {}: left out", sample.where, id, sample.reason);
}

Dataset read_dataset(const fs::path& path, DatasetFormat format, std::int64_t limit, const fs::path& prompts,
                     const TokenCount& tokens_of) {
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  if (format == DatasetFormat::automatic) format = detect_by_text(text, path.string());
  if (format == DatasetFormat::own) {
    if (prompts.empty()) return {read_samples(path, limit), {}};
    throw InputError(
        fmt::format("{}: expected a data set whose prompts are made by templates (--prompts), "
                    "found samples with prompts of their own",
                    path.string()));
  }
  return DatasetReader(path, limit, prompts, tokens_of).read(format, text);
}

}  // namespace lode
