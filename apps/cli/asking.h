// SPDX-License-Identifier: Apache-2.0
// What `ask` and `chat` share: an indexed text that is opened to be asked, and answers that are printed as they come.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli.h"
#include "engine/context_file.h"
#include "prompts.h"
#include "text/blanks.h"

namespace lode::cli {

struct AskedFlags {
  CommonFlags common;
  ModelFlags model;
  std::string context;
  std::vector<std::string> joined;  ///< further texts, to attend to all of them at once
  PromptFlags prompts;
  bool kv_type_given = false;
};
void add_asked_flags(CLI::App& verb, AskedFlags& flags);
/// Looks which of them were given.
void note_asked_flags(const CLI::App& verb, AskedFlags& flags);
/// "--temp" and the others, for verbs that generate.
void add_sampling_flags(CLI::App& verb, Sampling& sampling);
/// Says which of them change nothing.
void note_sampling_flags(const CLI::App& verb, const Sampling& sampling, const CommonFlags& common);

/// "-a" for what is asked: auto too.
void add_asked_attention_flag(CLI::App& verb, std::vector<std::string>& specs);

struct AskedText {
  std::shared_ptr<const Model> model;
  Context context;
  Attachments attachments;
};
/// InputError when flags and file do not fit, or when texts cannot be joined. Says how far joined texts are from one
/// reading.
AskedText open_asked(const AskedFlags& flags, LoadIndexes indexes = LoadIndexes::all);
/// Also says what the user should know of how questions are put.
Prompts prompts_of(const AskedFlags& flags, const AskedText& text);
/// What a question attends by.
struct AskedMethod {
  Spec spec;
  std::string why;  ///< why `auto` took it; empty: it was asked for
  MethodId id = kDense;
};
/// InputError when one of -a is no method, or names a file that is neither there nor one of the indexed text's own.
void check_specs(const std::vector<std::string>& specs, const std::string& context);
/// The indexed text's own method where `text` is its name, whatever folder its files are named from; else as typed.
Spec asked_spec(const std::string& text, const std::vector<Spec>& stored);
/// Those of -a, attached. Without it: what `auto` chooses where it was measured, else all that the text was indexed
/// for, else full attention.
std::vector<AskedMethod> asked_methods(const std::vector<std::string>& specs, AskedText& text);
/// Says what `auto` took, and with `exact` that it drafts alone.
void say_why(const AskedMethod& method, const CommonFlags& common, bool exact = false);
/// Builds what the file holds no index for (`stored`: its methods), and says so where that takes its time.
void build_missing(const AskedFlags& flags, Context& context, const std::vector<Spec>& stored);

/// Without the blanks at both ends.
std::string trimmed(const std::string& text);
/// A question as a model can be asked it; `where` names it in errors.
std::string checked_question(const std::string& text, const std::string& where);

/// What ended an answer: "stop" for a stop string or EOS, "predict" for the limit of --predict, or "context" for the
/// context's room.
std::string end_of(const Generation& answer, std::int64_t most_tokens);
/// "; cut off behind token 3, by --predict", or nothing where it was not.
std::string cut_off(const std::string& ended_by, std::int64_t tokens);

/// Prints an answer as it comes, but for the blanks around it. Thoughts before it are shown on a terminal while they
/// come, in dim type on stderr, or printed in front of it where they are asked for.
class AnswerStream {
 public:
  AnswerStream(const CommonFlags& common, bool show_thoughts);
  void push(std::string_view text);
  void push_thought(std::string_view text);
  /// Of thoughts that no answer has followed.
  void end_thoughts();

 private:
  enum class Thoughts { hidden, dim, printed } thoughts_;
  bool thinking_ = false;
  BlankTrimmer trimmer_;
};
/// "--show-thoughts".
void add_thoughts_flag(CLI::App& verb, bool& show);

}  // namespace lode::cli
