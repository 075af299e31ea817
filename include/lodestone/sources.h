// SPDX-License-Identifier: Apache-2.0
// Which passages of the indexed text an answer rests on, by the attention that it gave them.
//
//   lode::set_source(context, lode::read_documents(paths, {}));   // before prefill; kept by save and load
//   lode::SourceFinder finder(context, neutral_prompt);
//   lode::SourceMass mass;
//   context.generate(prompt, method, options, &mass);
//   context.roll_back(context.indexed_tokens());
//   for (const lode::Citation& c : finder.find(mass, method, 3)) ...
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lodestone/documents.h"
#include "lodestone/engine.h"

namespace lode {

/// A passage of the text and its place. Characters, pages and positions are [start, end).
struct Citation {
  std::string document_title;                 ///< its file's path; empty: not known
  std::string cited_text;                     ///< whole sentences, as they stand in the text
  std::int64_t start_page = 0, end_page = 0;  ///< from 1; both 0: the file has no pages
  std::int64_t start_char = 0, end_char = 0;  ///< of the file's text
  std::int64_t line = 0;                      ///< where it begins, from 1; of the page, if there are pages
  double weight = 0;  ///< share of the answer's attention (SourceMass) that the question explains
  std::int64_t token_begin = 0, token_end = 0;
};

/// Says what the tokens of a context are made from; `first_token` is the number of tokens in front of the
/// text (a BOS, a chat template's head). `save` keeps it.
void set_source(Context& context, SourceText source, std::int64_t first_token);
/// What set_source was told, or the text of a file that was saved without one.
const SourceText& source_of(const Context& context);
/// Where each token's text begins, bytes of source_of(context).text; one more for the end. Tokens in front of
/// the text begin at 0.
std::vector<std::size_t> token_offsets(const Context& context);

/// Finds the passages that an answer depends on: what a question that asks for nothing attends to, too, is
/// taken off.
class SourceFinder {
 public:
  /// The context must outlive this. `neutral_prompt` is such a question as the context is asked; it is
  /// answered once a method, when first needed.
  SourceFinder(Context& context, std::vector<TokenId> neutral_prompt);
  /// The same where `ask` answers, so that the context itself is only looked at.
  using Ask =
      std::function<SourceMass(const std::vector<TokenId>& prompt, MethodId, std::int64_t max_new_tokens)>;
  SourceFinder(const Context& context, std::vector<TokenId> neutral_prompt, Ask ask);
  /// At most `count` passages, heaviest first; none when nothing stands out. The context must have been rolled
  /// back to the indexed text.
  std::vector<Citation> find(const SourceMass& answer, MethodId method, std::size_t count);

 private:
  const std::vector<double>& neutral(MethodId method);

  const Context& context_;
  std::vector<TokenId> neutral_prompt_;
  Ask ask_;
  std::map<MethodId, std::vector<double>> neutral_;  // [indexed tokens], shares of its attention
};

/// The same with nothing taken off, or what the caller measured (shares of the attention, [tokens]; may be empty).
std::vector<Citation> cite(const Context& context, const SourceMass& answer,
                           const std::vector<double>& neutral, std::size_t count);

}  // namespace lode
