// SPDX-License-Identifier: Apache-2.0
#include "io/container.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::array<char, 8> kMagic = {'L', 'O', 'D', 'E', '\r', '\n', '\x1a', '\n'};
constexpr std::uint32_t kMajor = 1, kSharing = 2;  // the latter where sections lie in one place
constexpr std::uint32_t kMinor = 0, kOrderMark = 0x01020304;
constexpr std::uint64_t kPage = 4096, kMaxTable = 64 << 20;
constexpr std::size_t kMaxName = 512;

/// At offset 0, zero-filled to a page. The hash covers everything before it.
struct Header {
  std::array<char, 8> magic = kMagic;
  std::uint32_t order_mark = kOrderMark;
  std::uint32_t major = kMajor, minor = kMinor, reserved = 0;
  std::uint64_t table_offset = 0, table_bytes = 0;
  std::uint64_t file_bytes = 0;
  std::array<char, 32> table_hash = {};   // XXH3-128 of the table, hex
  std::array<char, 32> header_hash = {};  // XXH3-128 of the fields before, hex
};
static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) == 112);

/// The last bytes of the file: a cut copy is seen at once.
struct Footer {
  std::uint64_t file_bytes = 0;
  std::array<char, 8> magic = kMagic;
};

std::array<char, 32> hash_field(std::span<const std::byte> bytes) {
  std::array<char, 32> field = {};
  std::memcpy(field.data(), hash_hex(bytes).data(), field.size());
  return field;
}

std::span<const std::byte> hashed_part(const Header& header) {
  return std::as_bytes(std::span(&header, 1)).first(offsetof(Header, header_hash));
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& reason) {
  throw InputError(path.string() + ": " + reason);
}

Header read_header(const MappedFile& file) {
  const auto bytes = file.bytes();
  Header header;
  if (!is_container(bytes))
    refuse(file.path(),
           "expected a .lode file, found something else; `lodestone index -f` makes one of a document");
  if (bytes.size() < kPage + sizeof(Footer))
    refuse(file.path(), fmt::format("the file is cut short at {} bytes", bytes.size()));
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.header_hash != hash_field(hashed_part(header)))
    refuse(file.path(), "its header is damaged: the checksum does not match");
  if (header.order_mark != kOrderMark)
    throw UnreadableError(
        fmt::format("{}: it was written on a machine of another byte order", file.path().string()));
  if (header.major != kMajor && header.major != kSharing) {
    throw UnreadableError(
        fmt::format("{}: expected format version {} or {}, found {}: another release of lodestone wrote it",
                    file.path().string(), kMajor, kSharing, header.major));
  }
  Footer footer;
  std::memcpy(&footer, bytes.data() + bytes.size() - sizeof footer, sizeof footer);
  if (header.file_bytes != bytes.size() || footer.file_bytes != bytes.size() || footer.magic != kMagic) {
    refuse(file.path(), fmt::format("expected {} bytes, found {}: the file is cut short or was added to",
                                    header.file_bytes, bytes.size()));
  }
  if (!all_zero(bytes.subspan(sizeof(Header), kPage - sizeof(Header))))
    refuse(file.path(), "its header is damaged: expected zeros behind it");
  return header;
}

/// Sections must lie in order between header and table, page-aligned, apart, but for those that are where an
/// earlier one of the same bytes is.
void check_place(const SectionInfo& section, std::uint64_t& at, const Header& header,
                 const std::filesystem::path& path) {
  const bool fits = section.shared || (section.offset % kPage == 0 && section.offset >= at &&
                                       section.offset <= header.table_offset &&
                                       section.bytes <= header.table_offset - section.offset);
  if (!fits || section.name.empty() || section.name.size() > kMaxName || section.checksum.size() != 32) {
    refuse(path, fmt::format("its table is damaged at section '{}'", excerpt(section.name)));
  }
  if (!section.shared) at = section.offset + section.bytes;
}

std::vector<SectionInfo> read_table(const MappedFile& file, const Header& header) {
  const std::uint64_t size = file.bytes().size();
  const std::uint64_t end = size - sizeof(Footer);
  if (header.table_bytes > kMaxTable || header.table_offset < kPage || header.table_offset > end ||
      header.table_bytes != end - header.table_offset) {
    refuse(file.path(), fmt::format("expected its table of sections between header and footer, found {} "
                                    "bytes at offset {} of {}",
                                    header.table_bytes, header.table_offset, size));
  }
  const auto raw = file.bytes().subspan(header.table_offset, header.table_bytes);
  if (header.table_hash != hash_field(raw))
    refuse(file.path(), "its table of sections is damaged: the checksum does not match");
  const std::string where = file.path().string() + ": table";
  const Json json = parse_json({reinterpret_cast<const char*>(raw.data()), raw.size()}, where);
  if (!json.is_array()) refuse(file.path(), "its table of sections is no list");
  std::vector<SectionInfo> sections;
  std::set<std::tuple<std::uint64_t, std::uint64_t, std::string>> places;
  std::uint64_t at = kPage;
  for (const Json& entry : json) {
    SectionInfo section = {
        .name = json_string(entry, "name", where),
        .offset = static_cast<std::uint64_t>(json_int(entry, "offset", where, 0, INT64_MAX)),
        .bytes = static_cast<std::uint64_t>(json_int(entry, "bytes", where, 0, INT64_MAX)),
        .checksum = json_string(entry, "xxh3", where)};
    const bool first = places.emplace(section.offset, section.bytes, section.checksum).second;
    section.shared = !first && section.bytes > 0 && header.major == kSharing;
    check_place(section, at, header, file.path());
    sections.push_back(std::move(section));
  }
  return sections;
}

}  // namespace

bool is_container(std::span<const std::byte> file) {
  return file.size() >= kMagic.size() && std::memcmp(file.data(), kMagic.data(), kMagic.size()) == 0;
}

struct ContainerWriter::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path, AtomicFile::Readers::owner) {}
  AtomicFile file;
  std::vector<SectionInfo> sections;
  std::map<std::pair<std::uint64_t, std::string>, std::uint64_t> places;  // offsets, by size and checksum
  bool shares = false;
  SectionInfo open;              // that comes in pieces
  std::optional<Hasher> hasher;  // of it, while it does

  void note(SectionInfo section) {
    places.try_emplace({section.bytes, section.checksum}, section.offset);
    sections.push_back(std::move(section));
  }

  void pad_to_page() {
    static constexpr std::array<std::byte, kPage> kZeros = {};
    file.write(std::span(kZeros).first((kPage - file.size() % kPage) % kPage));
  }
};

ContainerWriter::ContainerWriter(const std::filesystem::path& path) : impl_(std::make_unique<Impl>(path)) {
  static constexpr std::array<std::byte, kPage> kZeros = {};
  impl_->file.write(kZeros);
}
ContainerWriter::~ContainerWriter() = default;

/// Indexes of several specs have much in common.
void ContainerWriter::add(std::string_view name, std::span<const std::byte> bytes) {
  LODE_ASSERT(!impl_->hasher && !name.empty() && name.size() <= kMaxName);
  SectionInfo section = {
      .name = std::string(name), .offset = 0, .bytes = bytes.size(), .checksum = hash_hex(bytes)};
  const auto place = impl_->places.find({section.bytes, section.checksum});
  section.shared = place != impl_->places.end() && section.bytes >= kPage;
  if (section.shared) {
    section.offset = place->second;
    impl_->shares = true;
  } else {
    impl_->pad_to_page();
    section.offset = impl_->file.size();
    impl_->file.write(bytes);
  }
  impl_->note(std::move(section));
}

void ContainerWriter::begin(std::string_view name) {
  LODE_ASSERT(!impl_->hasher && !name.empty() && name.size() <= kMaxName);
  impl_->pad_to_page();
  impl_->open = {.name = std::string(name), .offset = impl_->file.size(), .bytes = 0, .checksum = {}};
  impl_->hasher.emplace();
}

void ContainerWriter::append(std::span<const std::byte> bytes) {
  impl_->file.write(bytes);
  impl_->hasher->add(bytes);
  impl_->open.bytes += bytes.size();
}

void ContainerWriter::end() {
  impl_->open.checksum = impl_->hasher->hex();
  impl_->hasher.reset();
  impl_->note(std::move(impl_->open));
}

void ContainerWriter::finish() {
  Json table = Json::array();
  for (const SectionInfo& s : impl_->sections) {
    table.push_back({{"name", s.name}, {"offset", s.offset}, {"bytes", s.bytes}, {"xxh3", s.checksum}});
  }
  const std::string text = table.dump();
  impl_->pad_to_page();
  Header header;
  if (impl_->shares) header.major = kSharing;
  header.table_offset = impl_->file.size();
  header.table_bytes = text.size();
  header.file_bytes = header.table_offset + text.size() + sizeof(Footer);
  header.table_hash = hash_field(std::as_bytes(std::span(text)));
  header.header_hash = hash_field(hashed_part(header));
  const Footer footer = {.file_bytes = header.file_bytes};
  impl_->file.write(std::as_bytes(std::span(text)));
  impl_->file.write(std::as_bytes(std::span(&footer, 1)));
  impl_->file.write_at(0, std::as_bytes(std::span(&header, 1)));
  impl_->file.commit();
}

struct ContainerReader::Impl {
  explicit Impl(const std::filesystem::path& path)
      : file(path), header(read_header(file)), sections(read_table(file, header)), verified(sections.size()) {
    for (std::size_t i = 0; i < sections.size(); ++i) {
      if (!by_name.emplace(sections[i].name, i).second)
        refuse(path, fmt::format("section '{}' stands twice", excerpt(sections[i].name)));
    }
  }
  MappedFile file;
  Header header;
  std::vector<SectionInfo> sections;
  std::map<std::string, std::size_t, std::less<>> by_name;
  mutable std::vector<std::atomic<bool>> verified;  // sections may be read by several threads

  std::size_t find(std::string_view name) const {
    const auto at = by_name.find(name);
    if (at == by_name.end()) refuse(file.path(), fmt::format("expected a section '{}', found none", name));
    return at->second;
  }
  std::span<const std::byte> raw(std::size_t index) const {
    return file.bytes().subspan(sections[index].offset, sections[index].bytes);
  }
  bool intact(std::size_t index) const {
    if (verified[index].load()) return true;
    const bool matches = hash_hex(raw(index)) == sections[index].checksum;
    verified[index].store(matches);
    return matches;
  }
  /// What is wrong with a section; empty when nothing is.
  std::string damage(std::size_t index) const {
    if (intact(index)) return {};
    return fmt::format("section '{}' is damaged: its checksum does not match", excerpt(sections[index].name));
  }
  /// Of the bytes behind `end` up to the next section or the table, which belong to nothing.
  bool zeros_behind(std::uint64_t end, std::size_t next) const {
    while (next < sections.size() && sections[next].shared) ++next;
    const std::uint64_t until = next < sections.size() ? sections[next].offset : header.table_offset;
    return all_zero(file.bytes().subspan(end, until - end));
  }
};

ContainerReader::ContainerReader(const std::filesystem::path& path) : impl_(std::make_unique<Impl>(path)) {}
ContainerReader::~ContainerReader() = default;
ContainerReader::ContainerReader(ContainerReader&&) noexcept = default;

const std::vector<SectionInfo>& ContainerReader::sections() const& {
  return impl_->sections;
}
std::vector<SectionInfo> ContainerReader::sections() && {
  return impl_->sections;
}
bool ContainerReader::has(std::string_view name) const {
  return impl_->by_name.contains(name);
}
const SectionInfo& ContainerReader::info(std::string_view name) const {
  return impl_->sections[impl_->find(name)];
}
const MappedFile& ContainerReader::file() const {
  return impl_->file;
}

std::span<const std::byte> ContainerReader::bytes(std::string_view name) const {
  const std::size_t index = impl_->find(name);
  if (const std::string damage = impl_->damage(index); !damage.empty()) refuse(impl_->file.path(), damage);
  return impl_->raw(index);
}

std::string ContainerReader::verify_all() const {
  if (!impl_->zeros_behind(kPage, 0)) return "expected zeros before its first section, found other bytes";
  for (std::size_t i = 0; i < impl_->sections.size(); ++i) {
    if (std::string damage = impl_->damage(i); !damage.empty()) return damage;
    const SectionInfo& section = impl_->sections[i];
    if (!section.shared && !impl_->zeros_behind(section.offset + section.bytes, i + 1))
      return fmt::format("expected zeros behind section '{}', found other bytes", excerpt(section.name));
  }
  return {};
}

void SectionReader::check_multiple(std::string_view name, std::size_t bytes, std::size_t of) const {
  if (bytes % of == 0) return;
  throw InputError(fmt::format("{}: section '{}{}': expected a multiple of {} bytes, found {}",
                               in_.file().path().string(), prefix_, name, of, bytes));
}

}  // namespace lode
