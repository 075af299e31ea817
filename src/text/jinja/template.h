// SPDX-License-Identifier: Apache-2.0
// A Jinja template that was parsed once: the part of the language that chat templates use, as transformers renders it
// (trim_blocks, lstrip_blocks, an immutable sandbox, tojson without escapes, raise_exception, strftime_now, break and
// continue, {% generation %}).
//
// Left out: inheritance and imports, generators (lists stand in), whole numbers beyond 63 bits, HTML escaping by itself.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace lode::jinja {

class Template {
 public:
  static constexpr std::size_t kMaxSource = 1 << 20;
  using Globals = std::vector<std::pair<std::string, Value>>;

  /// InputError "WHERE: line N: ..." on what is no template.
  Template(std::string_view source, std::string where);
  ~Template();
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;

  /// InputError "WHERE: line N: ..." when the template raises, errs or exceeds a limit. Limits grow with `input_bytes`.
  Text render(Globals globals, std::time_t now, std::size_t input_bytes) const;

 private:
  struct Tree;
  std::string where_;
  std::unique_ptr<Tree> tree_;
};

}  // namespace lode::jinja
