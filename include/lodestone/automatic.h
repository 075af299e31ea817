// SPDX-License-Identifier: Apache-2.0
// The spec `auto`: when a text is indexed a few methods are indexed for and their error on this very text is measured;
// a question is answered by the cheapest one that is good enough, or by full attention.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/document.h"

namespace lode {

/// The attachment that holds what was measured.
inline constexpr const char* kAutoAttachment = "auto";

/// `auto[:error=E,share=on|off]`.
struct AutoSpec {
  /// Largest mean relative error of attention outputs. None: kAutoError, and the method recites nearly all
  /// that full attention recites.
  std::optional<double> error;
  /// Beside enough others about the same document a sequence attends fully, since they read it together.
  bool share = false;
};
inline constexpr double kAutoError = 0.03;

/// None when the text names another method. InputError when a key or value is not one of auto's.
std::optional<AutoSpec> parse_auto(std::string_view text);

/// What `auto` indexes a text of so many tokens for; nothing for short ones, which full attention reads as fast.
std::vector<Spec> automatic_methods(const Model& model, std::int64_t tokens);

struct AutoChoice {
  Spec spec;
  std::string why;      ///< a clause for people; empty where nothing was chosen
  double density = 1;   ///< bytes that a generated token reads, beside full attention's
  int full_beside = 0;  ///< for Request::full_beside
};

/// Where the text is attended to. A GPU reads all keys of a short text in the time that a choice takes.
struct AutoPlace {
  bool gpu = false;  ///< which has all keys in its own memory
  /// Of keys and values that full attention reads in a layer; where several GPUs share it, those of one.
  std::int64_t layer_bytes = 0;
};
AutoPlace auto_place(const Context& context);

/// `methods`: those that the document is indexed for. InputError when the attachment is damaged.
AutoChoice choose_attention(const AutoSpec& wanted, const Attachments& attachments,
                            std::span<const Spec> methods, const AutoPlace& place = {});
/// Of a document's own attachments and methods, where it lies.
AutoChoice choose_attention(const AutoSpec& wanted, const Document& document);

/// What a question attends by that names no method: what `auto` chooses where the text was measured, else the methods
/// that it is indexed for, else `full`. At least one; whoever gives one answer takes the first.
std::vector<AutoChoice> usual_attention(const Attachments& attachments, std::span<const Spec> methods,
                                        const AutoPlace& place = {});
std::vector<AutoChoice> usual_attention(const Document& document);

}  // namespace lode
