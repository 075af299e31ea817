// SPDX-License-Identifier: Apache-2.0
// Cuts a text into the pieces that BPE never merges across: the "pre_tokenizer" of tokenizer.json.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/json.h"

namespace lode {

/// GPT-2's, by which ByteLevel cuts where no step in front has: the parts that match, and what lies between them.
inline constexpr std::string_view kGpt2Cut =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct Piece {
  std::string_view text;
  bool at_start;  ///< begins where the whole text begins
};

/// A reference to something that takes pieces; what it refers to must outlive it.
class PieceSink {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, PieceSink>) PieceSink(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, Piece piece) { (*static_cast<std::remove_reference_t<F>*>(object))(piece); }) {
  }
  void operator()(Piece piece) const { call_(object_, piece); }

 private:
  void* object_;
  void (*call_)(void*, Piece);
};

/// Strings that pieces view; they stay where they are until the whole text is encoded. Together they are at most
/// max_growth of the text: a chain of components that each add a character to every piece doubles it each time.
class Arena {
 public:
  void allow_for(std::size_t text_bytes);  ///< more text to come
  std::string_view keep(std::string text);

 private:
  std::deque<std::string> strings_;
  std::size_t text_bytes_ = 0, bytes_ = 0, most_ = 0;
};

class PreTokenizer {
 public:
  /// One component that cuts.
  class Step {
   public:
    virtual ~Step() = default;
    virtual void cut(Piece piece, Arena& arena, PieceSink out) const = 0;
  };

  /// `json` may be null: one piece. InputError names a component that is unknown or not supported.
  PreTokenizer(const Json& json, const std::string& where);

  static constexpr std::size_t kMaxSteps = 64;  ///< cut() is as deep as there are steps

  /// Whether bytes, not characters, are what BPE begins with (the component ByteLevel, which must come last).
  bool byte_level() const { return byte_level_; }
  void cut(Piece piece, Arena& arena, PieceSink out) const { cut_from(0, piece, arena, out); }

 private:
  void add(const Json& json, const std::string& where);
  void add_split(const Json& json, const std::string& where);
  void add_byte_level(const Json& json, const std::string& where);
  void cut_from(std::size_t step, Piece piece, Arena& arena, PieceSink out) const;

  std::vector<std::unique_ptr<Step>> steps_;
  bool byte_level_ = false;
};

}  // namespace lode
