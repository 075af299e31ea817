// SPDX-License-Identifier: Apache-2.0
#include "text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "base/cancel.h"
#include "base/text.h"
#include "lodestone/error.h"
#include "text/utf8.h"

namespace lode {

namespace {

// Steps that one match may take: honest expressions take a few for each character of a run that they try in
// vain.
constexpr std::size_t kFewestSteps = 10'000'000, kMostSteps = 0xffff'ffff, kStepsPerByte = 4;
// PCRE2 does not say how many steps a match took: it is tried with few, then with more, and these are counted.
constexpr std::size_t kUncountedSteps = 4096, kMoreSteps = 16;
constexpr std::size_t kFewestInAll = 64'000'000, kStepsPerByteInAll = 256;
constexpr std::size_t kPatternBytes = 64 << 10;
constexpr std::size_t kJitStack = 32 << 10, kJitStackLimit = 4 << 20;  // bytes

std::string message_of(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

/// What a running match needs; one for each thread.
struct Scratch {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kJitStack, kJitStackLimit, nullptr);

  Scratch() {
    if (data == nullptr || context == nullptr) throw std::bad_alloc();
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Scratch() {
    if (stack != nullptr) pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

thread_local RegexBudget* budget_of_thread = nullptr;

}  // namespace

RegexBudget::RegexBudget(std::size_t text_bytes)
    : left_(kFewestInAll + kStepsPerByteInAll * text_bytes), before_(budget_of_thread) {
  budget_of_thread = this;
}
RegexBudget::~RegexBudget() {
  budget_of_thread = before_;
}
bool RegexBudget::take(std::size_t steps) {
  if (steps > left_) return false;
  left_ -= steps;
  return true;
}
RegexBudget* RegexBudget::current() {
  return budget_of_thread;
}

struct Regex::Code {
  std::string where, shown;
  pcre2_code* code = nullptr;
  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(std::string pcre, std::string_view shown, std::string_view where)
    : code_(std::make_unique<Code>()) {
  code_->where = where;
  code_->shown = excerpt(shown, 400);
  if (pcre.size() > kPatternBytes) {
    throw InputError(code_->where + ": expected a regular expression of at most " +
                     std::to_string(kPatternBytes) + " bytes, found " + std::to_string(pcre.size()));
  }
  // Ruby's ^ and $ are at every line; NEVER_BACKSLASH_C keeps matches at whole characters.
  constexpr std::uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  if (context == nullptr) throw std::bad_alloc();
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE at = 0;
  code_->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre.data()), pcre.size(), kOptions, &error, &at, context);
  pcre2_compile_context_free(context);
  if (code_->code == nullptr) {
    throw InputError(code_->where + ": the regular expression '" + code_->shown +
                     "' is not valid: " + message_of(error));
  }
  // Without executable memory the interpreter runs it, more slowly.
  pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE);
}

Regex::Regex(std::string_view pattern, std::string_view where)
    : Regex(to_pcre2(pattern, where), pattern, where) {}

Regex Regex::literal(std::string_view text, std::string_view where) {
  if (text.empty()) throw InputError(std::string(where) + ": expected a pattern, found an empty string");
  std::string escaped;
  for (const char c : text) {
    if (std::string_view(R"(\^$.[]|()?*+{}-#)").find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return Regex(std::move(escaped), text, where);
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

std::string Regex::replace_all(std::string_view text, std::string_view content) const {
  std::string result;
  result.reserve(text.size());
  Matches matches(*this, text);
  std::size_t done = 0;
  for (Range match; matches.next(match); done = match.end) {
    result.append(text.substr(done, match.begin - done)).append(content);
    if (result.size() <= max_growth(text.size())) continue;
    throw InputError(code_->where + ": replacing '" + code_->shown + "' makes a text of " +
                     std::to_string(text.size()) + " bytes more than 64 times as long");
  }
  return result.append(text.substr(done));
}

int Regex::Matches::match_here() const {
  Scratch& scratch = scratch_of_thread();
  RegexBudget* const budget = RegexBudget::current();
  const std::size_t most = std::clamp(kStepsPerByte * text_.size(), kFewestSteps, kMostSteps);
  for (std::size_t steps = kUncountedSteps;; steps = std::min(steps * kMoreSteps, most)) {
    check_cancel();
    if (steps > kUncountedSteps && budget != nullptr && !budget->take(steps)) return PCRE2_ERROR_MATCHLIMIT;
    pcre2_set_match_limit(scratch.context, static_cast<std::uint32_t>(steps));
    const int found = pcre2_match(regex_.code_->code, reinterpret_cast<PCRE2_SPTR>(text_.data()),
                                  text_.size(), from_, PCRE2_NO_UTF_CHECK, scratch.data, scratch.context);
    if (found != PCRE2_ERROR_MATCHLIMIT || steps == most) return found;
  }
}

bool Regex::Matches::next(Range& match) {
  const Code& code = *regex_.code_;
  while (from_ <= text_.size()) {
    const int found = match_here();
    if (found == PCRE2_ERROR_NOMATCH) return false;
    if (found < 0) {
      throw InputError(code.where + ": the regular expression '" + code.shown +
                       "' fails on this text at byte " + std::to_string(from_) + ": " + message_of(found));
    }
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(scratch_of_thread().data);
    match = {ends[0], ends[1]};
    const bool empty_again = match.begin == match.end && match.end == last_end_;
    if (!empty_again) {
      from_ = last_end_ = match.end;
      return true;
    }
    from_ += from_ < text_.size() ? first_code_point(text_.substr(from_)).bytes : 1;
  }
  return false;
}

}  // namespace lode
