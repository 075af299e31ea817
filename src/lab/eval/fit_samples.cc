// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/fit_samples.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>

#include "base/cancel.h"
#include "base/text.h"
#include "lodestone/error.h"
#include "model/config.h"

namespace lode {

namespace {

/// Tokens that an answer may take beyond the expected one: enough to see that the model goes on.
constexpr std::int64_t kAnswerMargin = 8;

std::vector<TokenId> tokens_of(const Model& model, std::string_view text) {
  return model.tokenizer().encode(text, Tokenizer::Bos::as_template);
}

std::int64_t prompt_tokens(const Model& model, const Sample& sample) {
  return std::ssize(tokens_of(model, *sample.context + sample.question));
}

/// Without encoding: a token is a byte or more.
bool fits_surely(const Sample& sample, std::int64_t most) {
  constexpr std::size_t kSpare = 4096;  // for the answer, and what the tokenizer puts in front
  return sample.context->size() + sample.question.size() + kSpare <= static_cast<std::size_t>(most);
}

/// The context without its middle, so that with the rest of a prompt it takes `most` tokens. Empty when the question
/// alone is more than half of them. Two ends may become more tokens where they meet: then a few less are kept.
std::string without_middle(const Model& model, const Sample& longest, std::int64_t most) {
  const std::vector<TokenId> context = tokens_of(model, *longest.context);
  const auto behind = prompt_tokens(model, longest) - std::ssize(context);
  for (std::int64_t room = most; room > 0; room -= 16) {
    const std::int64_t front = room / 2, back = room - front - behind;
    if (back < 0) return {};
    const auto all = std::span(context);
    Sample cut = longest;
    cut.context = std::make_shared<const std::string>(
        model.tokenizer().decode(all.first(static_cast<std::size_t>(front))) +
        model.tokenizer().decode(all.last(static_cast<std::size_t>(back))));
    if (prompt_tokens(model, cut) <= most) return *cut.context;
  }
  return {};
}

/// Samples of one context.
class Document {
 public:
  Document(const Model& model, std::span<Sample* const> samples, std::int64_t most)
      : model_(model), samples_(samples), most_(most) {}

  void fit(Truncate truncate, FittedSamples& fitted) {
    if (std::all_of(samples_.begin(), samples_.end(),
                    [&](const Sample* s) { return fits_surely(*s, most_); }))
      return;
    const Sample* longest = nullptr;
    std::int64_t tokens = 0, answer = 0;
    for (const Sample* sample : samples_) {
      const std::int64_t own = prompt_tokens(model_, *sample);
      if (own < most_) continue;
      answer = std::max(answer, std::min(most_ / 4, most_new_tokens(model_.tokenizer(), *sample)));
      if (own > tokens) longest = sample, tokens = own;
      lengths_[sample] = own;
    }
    if (longest == nullptr) return;
    std::string cut = truncate == Truncate::middle ? without_middle(model_, *longest, most_ - answer) : "";
    if (cut.empty()) {
      for (const auto& [sample, own] : lengths_) fitted.left_out.push_back({sample->id, own});
      return;
    }
    const auto shorter = std::make_shared<const std::string>(std::move(cut));
    for (Sample* sample : samples_) sample->context = shorter;
    fitted.cut += std::ssize(samples_);
    lengths_.clear();
  }
  bool left_out(const Sample* sample) const { return lengths_.contains(sample); }

 private:
  const Model& model_;
  std::span<Sample* const> samples_;
  std::int64_t most_;
  std::map<const Sample*, std::int64_t> lengths_;  // of prompts that are too long
};

}  // namespace

std::int64_t most_new_tokens(const TokenCount& tokens_of, const Sample& sample) {
  if (sample.max_new > 0) return sample.max_new;
  std::int64_t longest = 0, sum = 0;
  for (const std::string& answer : sample.answers) {
    const std::int64_t n = tokens_of(" " + answer);
    longest = std::max(longest, n);
    sum += n + 2;  // two for what parts it from the next
  }
  const bool all = sample.match == Match::contains || sample.match == Match::substring;
  return kAnswerMargin + (all ? sum : longest);
}

std::int64_t most_new_tokens(const Tokenizer& tokenizer, const Sample& sample) {
  const auto tokens_of = [&](std::string_view text) {
    return static_cast<std::int64_t>(std::ssize(tokenizer.encode(text, Tokenizer::Bos::none)));
  };
  return most_new_tokens(tokens_of, sample);
}

std::int64_t most_tokens(const Model& model, const ContextOptions& options) {
  const double stretched =
      static_cast<double>(model.config().max_positions) * options.rope_factor.value_or(1.0);
  const auto most = static_cast<std::int64_t>(stretched);
  return options.max_tokens > 0 ? std::min(most, options.max_tokens) : most;
}

Truncate parse_truncate(std::string_view text) {
  if (text == "none") return Truncate::none;
  if (text == "middle") return Truncate::middle;
  throw InputError("--truncate: expected none or middle, found '" + excerpt(text) + "'");
}

FittedSamples fit_samples(const Model& model, std::vector<Sample> samples, std::int64_t most,
                          Truncate truncate) {
  std::vector<std::vector<Sample*>> documents;
  std::map<const std::string*, std::size_t> known;
  for (Sample& sample : samples) {
    const auto [entry, is_new] = known.emplace(sample.context.get(), documents.size());
    if (is_new) documents.emplace_back();
    documents[entry->second].push_back(&sample);
  }
  FittedSamples fitted;
  std::map<const Sample*, bool> gone;
  for (const std::vector<Sample*>& of_document : documents) {
    check_cancel();
    Document document(model, of_document, most);
    document.fit(truncate, fitted);
    for (const Sample* sample : of_document)
      if (document.left_out(sample)) gone[sample] = true;
  }
  for (Sample& sample : samples)
    if (!gone.contains(&sample)) fitted.samples.push_back(std::move(sample));
  return fitted;
}

}  // namespace lode
