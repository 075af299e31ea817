// SPDX-License-Identifier: Apache-2.0
// lodestone chat: a conversation about an indexed text, in the terminal or from a script's lines.
#include "chat.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "asker.h"
#include "asking.h"
#include "base/cancel.h"
#include "base/file.h"
#include "base/text.h"
#include "cli.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "shell_word.h"
#include "show_sources.h"

namespace lode::cli {

namespace {

constexpr const char* kHelp =
    "A line is a question; questions before it and their answers are remembered.\n"
    "  /sources       the passages that the last answer rests on\n"
    "  /method SPEC   attend by another method, or auto, from here on; without SPEC: which one it is\n"
    "  /back          forget the last question and its answer\n"
    "  /new           forget the whole conversation\n"
    "  /save FILE     write the conversation to a new file\n"
    "  /help          this list\n"
    "  /quit          leave, as Ctrl-D does; Ctrl-C stops an answer\n"
    "What cannot be obeyed is said, and the conversation goes on; where its lines come from a\n"
    "pipe or file it ends there, with exit code 2.\n";

struct ChatVerbFlags {
  AskedFlags asked;
  std::vector<std::string> specs;
  Sampling sampling;
  std::int64_t max_new_tokens = 512;
  bool show_thoughts = false;
};

class Conversation {
 public:
  Conversation(const ChatVerbFlags& flags, AskedText text)
      : flags_(flags),
        prompts_(prompts_of(flags.asked, text)),
        stored_(text.context.methods()),
        attachments_(text.attachments) {
    const AskedMethod method = asked_methods(flags.specs, text).front();
    say_why(method, flags.asked.common);
    spec_ = method.spec;
    method_ = method.id;
    build_missing(flags.asked, text.context, stored_);
    asker_.emplace(std::move(text), audit_limit(flags.asked.model));
    const std::string neutral = kNeutralQuestion;
    asker_->set_neutral(prompts_.of({&neutral, 1}));
  }

  /// False when the conversation is to end.
  bool obey(const std::string& line);
  Json to_json() const;
  std::int64_t text_tokens() const { return asker_->context().indexed_tokens(); }

 private:
  void ask(const std::string& question);
  using Hear = std::function<void(std::string_view)>;
  Answer answer(bool want_sources, std::int64_t most, const Hear& on_text, const Hear& on_thought);
  void use(const std::string& method);
  void show_sources();
  void save(const std::string& path) const;
  void forget(std::size_t turns);
  void say_forgotten(std::size_t turns);
  void say(const std::string& line) const {
    if (!flags_.asked.common.json) print_text(line);
  }

  const ChatVerbFlags& flags_;
  Prompts prompts_;
  std::vector<Spec> stored_;
  Attachments attachments_;  // what `auto` chooses by
  std::optional<Asker> asker_;
  Spec spec_;
  MethodId method_ = kDense;
  std::vector<std::string> turns_;     // question, answer, question, ...
  std::vector<std::int64_t> lengths_;  // tokens of each answer
  std::vector<std::string> ended_by_;  // each answer
  std::vector<std::string> thoughts_;  // in front of each; the model is not told of them again
};

void Conversation::use(const std::string& method) {
  AskedMethod asked;
  if (const auto automatic = parse_auto(method)) {
    const AutoChoice choice =
        choose_attention(*automatic, attachments_, stored_, auto_place(asker_->context()));
    asked = {.spec = choice.spec, .why = choice.why};
  } else {
    asked.spec = asked_spec(method, stored_);
  }
  const Spec& spec = asked.spec;
  MethodId id = kDense;
  asker_->change([&](Context& context) {  // what was read by another method is read again
    id = context.attach(spec);
    build_missing(flags_.asked, context, stored_);
  });
  method_ = id;
  spec_ = spec;
  say_why(asked, flags_.asked.common);
}

/// The answer to the last question of turns_. What is held of the conversation already is not read again.
Answer Conversation::answer(bool want_sources, std::int64_t most, const Hear& on_text,
                            const Hear& on_thought) {
  Asker::Question question = {
      .prompt = prompts_.of(turns_), .method = method_, .want_sources = want_sources, .goes_on = true};
  question.options.max_new_tokens = most;
  question.options.sampling = flags_.sampling;
  question.options.on_text = on_text;
  question.options.on_thought = on_thought;
  prompts_.set_ends(question.options);
  return asker_->ask(question);
}

void Conversation::ask(const std::string& question) {
  const bool people = !flags_.asked.common.json;
  if (people && isatty(STDIN_FILENO) == 0) say(fmt::format("> {}\n", excerpt(question, 1000)));
  turns_.push_back(question);
  AnswerStream stream(flags_.asked.common, flags_.show_thoughts);
  std::string given, thought;
  Generation g;
  bool stopped = false;
  try {
    const auto on_text = [&](std::string_view text) {
      given += text;
      if (people) stream.push(text);
    };
    const auto on_thought = [&](std::string_view text) {
      thought += text;
      if (people) stream.push_thought(text);
    };
    g = answer(false, flags_.max_new_tokens, on_text, on_thought).generation;
  } catch (const Interrupted&) {
    set_cancel(false);
    stopped = true;
    g.text = given;
  } catch (...) {
    turns_.pop_back();
    throw;
  }
  turns_.push_back(g.text);
  lengths_.push_back(std::max<std::int64_t>(1, std::ssize(g.tokens)));
  ended_by_.push_back(stopped ? "interrupt" : end_of(g, flags_.max_new_tokens));
  thoughts_.push_back(thought);
  stream.end_thoughts();
  say("\n");
  if (stopped) print_remark("(stopped; what was said so far is remembered)");
  if (const std::string why =
          stopped ? "" : why_empty(prompts_, asker_->context().model(), g, flags_.max_new_tokens);
      !why.empty())
    print_remark("(no answer: " + why + ")");
  if (!stopped && !flags_.asked.common.quiet && people)
    std::cerr << fmt::format("{}: looked at {:.2f} % of the KV bytes; {:.2f} s{}\n", spec_.str(),
                             100 * g.work.density(), g.prompt_seconds + g.decode_seconds,
                             cut_off(end_of(g, flags_.max_new_tokens), std::ssize(g.tokens)));
}

void Conversation::show_sources() {
  if (turns_.empty()) throw InputError("/sources: expected a question before it, found none");
  const std::string given = turns_.back();
  turns_.pop_back();
  asker_->forget();
  Answer again;
  try {  // the same answer, now with a look at what it attends to
    again = answer(true, lengths_.back(), {}, {});
  } catch (...) {
    turns_.push_back(given);
    throw;
  }
  turns_.push_back(given);
  asker_->forget();
  const Json sources = sources_json(asker_->sources(again, method_, kShownSources));
  say(sources_text(sources));
}

void Conversation::save(const std::string& path) const {
  if (path.empty()) throw InputError("/save: expected the name of a file, found none");
  std::error_code failed;
  if (std::filesystem::exists(path, failed))
    throw InputError(fmt::format("/save: expected a new file, found '{}' there already", excerpt(path)));
  std::string text;
  for (std::size_t i = 0; i < turns_.size(); ++i)
    text += i % 2 == 0 ? "> " + turns_[i] + "\n" : trimmed(turns_[i]) + "\n\n";
  AtomicFile file(path,
                  AtomicFile::Readers::owner);  // it says what the text says, which is the owner's alone
  file.write(std::as_bytes(std::span(text)));
  file.commit();
  const std::size_t asked = turns_.size() / 2;
  say(fmt::format("{} in {}\n",
                  asked == 1 ? "1 question and its answer" : fmt::format("{} questions and answers", asked),
                  excerpt(path)));
}

void Conversation::say_forgotten(std::size_t turns) {
  const std::string last = turns_.empty() ? std::string() : turns_[turns_.size() - 2];
  const bool all = turns >= turns_.size();
  forget(turns);
  if (flags_.asked.common.quiet) return;
  if (last.empty()) return print_remark("(there is no question to forget)");
  print_remark(turns > 2 ? "(the conversation is forgotten)"
                         : fmt::format("(\"{}\" and its answer are forgotten{})", excerpt(last),
                                       all ? "; the conversation is empty" : ""));
}

void Conversation::forget(std::size_t turns) {
  turns_.resize(turns_.size() - std::min(turns, turns_.size()));
  lengths_.resize(turns_.size() / 2);
  ended_by_.resize(turns_.size() / 2);
  thoughts_.resize(turns_.size() / 2);
}

bool Conversation::obey(const std::string& line) {
  const std::string text = trimmed(line);
  if (text.empty()) return true;
  if (text[0] != '/') {
    ask(checked_question(text, "standard input"));
    return true;
  }
  const std::string name = text.substr(0, text.find(' ')), rest = trimmed(text.substr(name.size()));
  const std::vector<std::string> known = {"/sources", "/method", "/back", "/new", "/save", "/help", "/quit"};
  if (name == "/quit" || name == "/exit") return false;
  if (name == "/help")
    say(kHelp);
  else if (name == "/sources")
    show_sources();
  else if (name == "/method" && rest.empty())
    say(spec_.str() + "\n");
  else if (name == "/method")
    use(rest);
  else if (name == "/back")
    say_forgotten(2);
  else if (name == "/new")
    say_forgotten(turns_.size());
  else if (name == "/save")
    save(rest);
  else
    throw InputError(
        fmt::format("expected one of {}, or a question, found '{}'", join(known), excerpt(name)));
  return true;
}

Json Conversation::to_json() const {
  Json turns = Json::array();
  for (std::size_t i = 0; i + 1 < turns_.size(); i += 2) {
    turns.push_back(
        {{"question", turns_[i]}, {"answer", trimmed(turns_[i + 1])}, {"ended_by", ended_by_[i / 2]}});
    if (const std::string& thoughts = thoughts_[i / 2]; !thoughts.empty())
      turns.back()["thoughts"] = thoughts;
  }
  return {{"context", flags_.asked.context},
          {"attention", spec_.str()},
          {"chat", prompts_.chat()},
          {"turns", turns}};
}

/// A line, or false at the end of the input. Ctrl-C at the prompt is not the end.
bool next_line(bool terminal, std::string& line) {
  for (;;) {
    if (terminal) std::cerr << "> " << std::flush;
    if (std::getline(std::cin, line)) return true;
    if (!terminal || !cancel_requested()) return false;
    set_cancel(false);
    std::cin.clear();
    clearerr(stdin);
    std::cerr << "\n(/quit or Ctrl-D leaves)\n";
  }
}

void run(const ChatVerbFlags& flags) {
  const bool terminal = isatty(STDIN_FILENO) != 0;
  fill_template(flags.asked.prompts.question_template, "",
                "--template");  // refused before anything is loaded
  check_specs(flags.specs, flags.asked.context);
  Conversation conversation(flags, open_asked(flags.asked));
  if (terminal && !flags.asked.common.quiet)
    std::cerr << fmt::format("{} tokens of {}; /help lists the commands\n", conversation.text_tokens(),
                             as_word(flags.asked.context));
  for (std::string line; next_line(terminal, line);) {
    try {
      if (!conversation.obey(line)) break;
    } catch (const InputError& error) {
      if (!terminal) {  // a script should know; what is answered stays answered
        if (flags.asked.common.json) print_json(conversation.to_json());
        throw;
      }
      print_remark(excerpt(error.what(), 1000));
    }
  }
  if (!terminal) check_cancel();
  if (flags.asked.common.json) print_json(conversation.to_json());
}

}  // namespace

void add_chat(CLI::App& app) {
  auto flags = std::make_shared<ChatVerbFlags>();
  CLI::App* verb = app.add_subcommand(
      "chat",
      "A conversation about an indexed text: questions line by line, /help lists commands. In a terminal it "
      "goes "
      "on after a command that cannot be obeyed; lines from a pipe or file end there, with exit code 2");
  add_asked_flags(*verb, flags->asked);
  add_asked_attention_flag(*verb, flags->specs);
  verb->add_option("-n,--predict", flags->max_new_tokens, "most tokens of an answer")
      ->check(whole_number(1, 1 << 20));
  add_thoughts_flag(*verb, flags->show_thoughts);
  add_sampling_flags(*verb, flags->sampling);
  verb->callback([flags, verb] {
    if (flags->specs.size() > 1)
      throw InputError("--attention: expected one method, found several; /method changes it");
    note_sampling_flags(*verb, flags->sampling, flags->asked.common);
    note_asked_flags(*verb, flags->asked);
    run(*flags);
  });
}

}  // namespace lode::cli
