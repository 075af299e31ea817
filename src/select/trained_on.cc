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

/// Whether keys are so coarse that what was made on exact ones may choose others.
bool few_bits(DType type) {
  return type == DType::q8 || type == DType::q4;
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
  if (const Json& type = json_member(made, "kv_type"); type.is_string())
    trained.kv_type = type.get<std::string>();
  trained.longest = static_cast<std::int64_t>(number("longest"));
  const std::uint64_t prompts = number("prompts"), ends = number("shift_to");
  if (prompts == 0) return trained;
  const std::uint64_t read = number("tokens") / prompts, shift = number("shift");
  trained.reach =
      static_cast<std::int64_t>(read + (ends == 0 ? shift : std::min(shift, std::max(ends, read) - read)));
  return trained;
}

std::string TrainedOn::remark(std::string_view what, const LayerGeometry& geometry) const {
  if (!said) return {};
  const Rope* const turned_by = geometry.rope;
  if (turned_by != nullptr && !rope.empty() && rope != rope_fingerprint(*turned_by))
    return fmt::format(
        "{} that was made under another RoPE (--rope-factor) than this context has: expect it to miss what "
        "is far, or "
        "make one with this factor",
        what);
  if (turned_by != nullptr && rope.empty() && turned_by->attention_scaling() != 1.0f)
    return fmt::format(
        "a context with a stretched RoPE, and {} that does not say that it was made for one: expect it to "
        "miss what is "
        "far, or make one with this --rope-factor",
        what);
  if (!kv_type.empty() && few_bits(geometry.kv_type) && kv_type != name_of(geometry.kv_type))
    return fmt::format(
        "{} that was made on keys in {}, and this context's are in {}: expect it to miss some, or make one "
        "with this "
        "--kv-type",
        what, kv_type, name_of(geometry.kv_type));
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
