// SPDX-License-Identifier: Apache-2.0
#include "engine/source_sections.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kVersion = 1;
constexpr std::int64_t kMost = std::int64_t{1} << 40;

Json json_of(const SourceText& source, std::int64_t first_token) {
  Json files = Json::array(), unread = Json::array();
  for (const SourceFile& f : source.files)
    files.push_back({{"path", f.path},
                     {"kind", f.kind},
                     {"xxh3", f.checksum},
                     {"begin", f.begin},
                     {"end", f.end},
                     {"pages", f.pages}});
  for (const UnreadFile& f : source.unread) unread.push_back({{"path", f.path}, {"why", f.why}});
  return {{"version", kVersion},
          {"first_token", first_token},
          {"files", files},
          {"unread", unread},
          {"inputs", source.inputs}};
}

const Json& list_of(const Json& json, const char* key, const std::string& where) {
  const Json& list = json_member(json, key);
  if (!list.is_array()) throw InputError(fmt::format("{}: expected a list '{}', found none", where, key));
  return list;
}

void read_files(const Json& json, const std::string& where, SourceText& source) {
  std::size_t end = 0;
  const auto size = static_cast<std::int64_t>(source.text.size());
  for (const Json& f : list_of(json, "files", where)) {
    SourceFile file = {.path = json_string(f, "path", where),
                       .kind = json_string(f, "kind", where),
                       .checksum = json_string(f, "xxh3", where),
                       .begin = static_cast<std::size_t>(json_int(f, "begin", where, 0, size)),
                       .end = static_cast<std::size_t>(json_int(f, "end", where, 0, size)),
                       .pages = json_int(f, "pages", where, 0, kMost)};
    if (file.begin < end || file.end < file.begin)
      throw InputError(where + ": expected files one behind the other, found others");
    end = file.end;
    source.files.push_back(std::move(file));
  }
  for (const Json& f : list_of(json, "unread", where))
    source.unread.push_back({json_string(f, "path", where), json_string(f, "why", where)});
  for (const Json& path : list_of(json, "inputs", where)) {
    if (!path.is_string()) throw InputError(where + ": expected strings in 'inputs', found another type");
    source.inputs.push_back(path.get<std::string>());
  }
}

void read_marks(const ContainerReader& file, const std::filesystem::path& path, SourceText& source) {
  const auto marks = SectionReader(file, "").values<PlaceMark>("places");
  source.marks.assign(marks.begin(), marks.end());
  for (std::size_t i = 0; i < source.marks.size(); ++i) {
    const PlaceMark& m = source.marks[i];
    const bool rising = i == 0 || m.begin > source.marks[i - 1].begin;
    if (rising && m.begin <= source.text.size() && m.page >= 0 && m.line >= 0) continue;
    throw InputError(fmt::format(
        "{}: section 'places': expected rising places of the text, found another at {}", path.string(), i));
  }
}

}  // namespace

void add_source(ContainerWriter& out, std::string_view text, const SourceText* source,
                std::int64_t first_token) {
  out.add("text", std::as_bytes(std::span(text)));
  if (source == nullptr || source->files.empty()) return;
  LODE_ASSERT(source->text == text);
  const std::string json = json_of(*source, first_token).dump(-1, ' ', false, Json::error_handler_t::replace);
  out.add("sources", std::as_bytes(std::span(json)));
  out.add("places", std::as_bytes(std::span(source->marks)));
}

StoredSource read_source(const ContainerReader& file, const std::filesystem::path& path) {
  StoredSource stored;
  const auto text = file.bytes("text");
  stored.source.text.assign(reinterpret_cast<const char*>(text.data()), text.size());
  if (!file.has("sources")) return stored;
  const std::string where = path.string() + ": section 'sources'";
  const auto raw = file.bytes("sources");
  const Json json = parse_json({reinterpret_cast<const char*>(raw.data()), raw.size()}, where);
  json_int(json, "version", where, kVersion, kVersion);
  stored.first_token = json_int(json, "first_token", where, 0, kMost);
  read_files(json, where, stored.source);
  read_marks(file, path, stored.source);
  return stored;
}

}  // namespace lode
