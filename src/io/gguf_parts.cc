// SPDX-License-Identifier: Apache-2.0
// Split GGUF files: the first part holds the metadata, every part its own tensors, and split.no, split.count
// and split.tensors.count say what belongs together.
#include <fmt/format.h>

#include <charconv>
#include <fstream>
#include <optional>
#include <system_error>

#include "base/text.h"
#include "io/gguf.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kMaxParts = 4096;
constexpr std::string_view kSuffix = ".gguf";

/// NAME-00002-of-00003.gguf
struct PartName {
  std::string stem;  // NAME
  int number = 0, count = 0;
};

std::optional<int> five_digits(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.size() != 5 || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<PartName> part_name(const std::filesystem::path& path) {
  constexpr std::size_t kTail = 15;  // -00002-of-00003
  std::string name = path.filename().string();
  if (!name.ends_with(kSuffix)) return std::nullopt;
  name.resize(name.size() - kSuffix.size());
  if (name.size() <= kTail) return std::nullopt;
  const std::string_view tail = std::string_view(name).substr(name.size() - kTail);
  const auto number = five_digits(tail.substr(1, 5)), count = five_digits(tail.substr(10));
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || !number || !count) return std::nullopt;
  if (*number < 1 || *number > *count || *count > kMaxParts) return std::nullopt;
  return PartName{name.substr(0, name.size() - kTail), *number, *count};
}

/// What a file says of itself: {split.no, split.count, split.tensors.count}; one of one when it says nothing.
struct PartFacts {
  std::int64_t number = 0, count = 1, tensors = -1;
};

PartFacts facts_of(const GgufMetadata& metadata) {
  PartFacts facts;
  if (!metadata.has("split.count")) return facts;
  facts.count = metadata.integer("split.count", 0, kMaxParts);
  if (facts.count < 2) return {};
  facts.number = metadata.integer("split.no", 0, facts.count - 1);
  facts.tensors = metadata.integer("split.tensors.count", 0, INT32_MAX);
  return facts;
}

/// Parts of two models that were split alike have the same names; what they say of themselves tells them
/// apart.
void expect_same_model(const GgufMetadata& first, const GgufMetadata& part) {
  for (const char* key : {"general.architecture", "general.name", "general.basename", "general.file_type"}) {
    if (!first.has(key) || !part.has(key)) continue;
    const auto &a = first.values().find(key)->second, &b = part.values().find(key)->second;
    if (a.type == b.type && std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin(), b.bytes.end()))
      continue;
    throw InputError(
        fmt::format("{}: expected a part of the model in {}, found another '{}': it belongs to "
                    "another model",
                    part.where(), first.where(), key));
  }
}

void expect_place(const PartFacts& found, const PartFacts& first, std::size_t index,
                  const std::string& where) {
  if (found.number == static_cast<std::int64_t>(index) && found.count == first.count &&
      found.tensors == first.tensors)
    return;
  throw InputError(fmt::format(
      "{}: expected part {} of {} of a model of {} tensors, found part {} of {} of one of {}: it belongs to "
      "another model or was renamed",
      where, index + 1, first.count, first.tensors, found.number + 1, found.count, found.tensors));
}

}  // namespace

bool GgufModel::is_file(const std::filesystem::path& path) {
  std::error_code failed;
  if (std::filesystem::is_directory(path, failed)) return false;
  if (path.extension() == kSuffix) return true;
  if (!std::filesystem::is_regular_file(path, failed)) return false;
  char magic[4] = {};
  std::ifstream(path, std::ios::binary).read(magic, sizeof magic);
  return is_gguf(std::as_bytes(std::span(magic)));
}

std::vector<std::filesystem::path> GgufModel::parts_of(const std::filesystem::path& path) {
  const auto name = part_name(path);
  if (!name) return {path};
  std::vector<std::filesystem::path> parts;
  for (int i = 1; i <= name->count; ++i)
    parts.push_back(path.parent_path() /
                    fmt::format("{}-{:05}-of-{:05}{}", name->stem, i, name->count, kSuffix));
  return parts;
}

GgufModel GgufModel::of(GgufFile&& file) {
  GgufModel model;
  model.metadata_ = std::move(file.metadata);
  model.tensors = std::move(file.tensors);
  return model;
}

GgufModel GgufModel::open(const std::filesystem::path& path) {
  GgufModel model;
  const auto parts = parts_of(path);
  PartFacts first;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::error_code failed;
    if (parts.size() > 1 && !std::filesystem::exists(parts[i], failed))
      throw InputError(fmt::format("{}: expected all {} parts in its folder, found no {}", path.string(),
                                   parts.size(), parts[i].filename().string()));
    const std::string where = parts[i].string();
    GgufFile file = parse_gguf(model.files.emplace_back(parts[i]).bytes(), where);
    const PartFacts facts = facts_of(file.metadata);
    if (i == 0) first = facts;
    if (static_cast<std::size_t>(facts.count) != parts.size())
      throw InputError(
          fmt::format("{}: expected a file named NAME-{:05}-of-{:05}.gguf, as it is part {} of {}, "
                      "beside the others",
                      where, facts.number + 1, facts.count, facts.number + 1, facts.count));
    expect_place(facts, first, i, where);
    if (i > 0) expect_same_model(model.metadata_, file.metadata);
    for (auto& [name, tensor] : file.tensors) {
      if (!model.tensors.emplace(name, std::move(tensor)).second)
        throw InputError(fmt::format("{}: tensor '{}': found in another part too", where, excerpt(name)));
    }
    if (i == 0) model.metadata_ = std::move(file.metadata);
  }
  if (first.tensors >= 0 && std::ssize(model.tensors) != first.tensors)
    throw InputError(fmt::format("{}: expected {} tensors in all parts, found {}", path.string(),
                                 first.tensors, model.tensors.size()));
  return model;
}

}  // namespace lode
