// SPDX-License-Identifier: Apache-2.0
#include "text/jinja/template.h"

#include <fmt/format.h>

#include "base/text.h"
#include "lodestone/error.h"
#include "text/jinja/machine.h"
#include "text/jinja/parser.h"

namespace lode::jinja {

namespace {

constexpr std::size_t kLongest = 500;  // bytes of what is wrong, which may quote the template

}  // namespace

struct Template::Tree {
  Body body;
};

Template::Template(std::string_view source, std::string where) : where_(std::move(where)) {
  expect_utf8(source, where_);
  if (source.size() > kMaxSource)
    throw InputError(fmt::format("{}: expected a template of at most {}, found {}", where_,
                                 human_bytes(kMaxSource),
                                 human_bytes(static_cast<std::int64_t>(source.size()))));
  try {
    tree_.reset(new Tree{parse(source)});
  } catch (const InputError& error) {
    throw InputError(where_ + ": " + excerpt(error.what(), kLongest));
  }
}
Template::~Template() = default;
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;

Text Template::render(Globals globals, std::time_t now, std::size_t input_bytes) const {
  Limits limits;
  limits.steps += 4 * input_bytes;
  limits.bytes += 64 * input_bytes;
  Machine machine(limits, now);
  try {
    return machine.run(tree_->body, std::move(globals));
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: line {}: {}", where_, machine.line(), excerpt(error.what(), kLongest)));
  }
}

}  // namespace lode::jinja
