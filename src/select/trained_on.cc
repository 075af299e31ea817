// SPDX-License-Identifier: Apache-2.0
#include "select/trained_on.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/hash.h"
#include "base/json.h"
#include "kernels/rope.h"

namespace lode {

namespace {

/// Layers without RoPE have one that turns nothing.
bool turns(const Rope* rope) {
  return rope != nullptr && std::ranges::any_of(rope->frequencies(), [](float f) { return f != 0.0f; });
}

}  // namespace

TrainedOn TrainedOn::parse(std::string_view training) {
  const Json made = Json::parse(training, nullptr, false);
  const auto number = [&](const char* key) {
    const bool there = made.is_object() && made.contains(key) && made[key].is_number_unsigned();
    return there ? std::min(made[key].get<std::uint64_t>(), std::uint64_t{1} << 40) : 0;
  };
  TrainedOn trained;
  trained.said = made.is_object();
  if (const Json& rope = json_member(made, "rope_fingerprint"); rope.is_string())
    trained.rope = rope.get<std::string>();
  trained.longest = static_cast<std::int64_t>(number("longest"));
  const std::uint64_t prompts = number("prompts"), ends = number("shift_to");
  if (prompts == 0) return trained;
  const std::uint64_t read = number("tokens") / prompts, shift = number("shift");
  trained.reach =
      static_cast<std::int64_t>(read + (ends == 0 ? shift : std::min(shift, std::max(ends, read) - read)));
  return trained;
}

std::string TrainedOn::rope_remark(std::string_view what, std::string_view maker,
                                   const Rope* turned_by) const {
  if (!said || !turns(turned_by)) return {};
  if (!rope.empty() && rope != rope_fingerprint(*turned_by))
    return fmt::format(
        "{} that was made under another RoPE (--rope-factor) than this context has: it may miss what is far; "
        "`{}` with "
        "this factor makes one that does not",
        what, maker);
  if (rope.empty() && turned_by->attention_scaling() != 1.0f)
    return fmt::format(
        "a context with a stretched RoPE, and {} that does not say that it was made for one: it may miss "
        "what is far; "
        "`{}` with this --rope-factor makes one that does not",
        what, maker);
  return {};
}

std::string rope_fingerprint(const Rope& rope) {
  Hasher hasher;
  const float scaling = rope.attention_scaling();
  hasher.add(std::as_bytes(rope.frequencies()));
  hasher.add(std::as_bytes(std::span(&scaling, 1)));
  return hasher.hex();
}

}  // namespace lode
