// SPDX-License-Identifier: Apache-2.0
// The `.lode` file: named sections, each page-aligned and checksummed, written atomically, mapped for
// reading.
//
//   [header 4096 B: magic, version, byte-order mark, table position, XXH3-128 of the header]
//   [section 0, aligned to 4096][section 1] ... [table: name, offset, bytes, XXH3-128 per section][footer:
//   table hash, size]
//
// Names are paths such as "meta", "tokens", "text", "kv/3/0/k", "select/kmeans:probes=8/3/labels".
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lode {

class MappedFile;

struct SectionInfo {
  std::string name;
  std::uint64_t offset = 0, bytes = 0;
  std::string checksum;  ///< XXH3-128, hex
  bool shared = false;   ///< its bytes are those of a section before it
};

/// Writes one container; nothing appears at `path` before finish().
class ContainerWriter {
 public:
  explicit ContainerWriter(const std::filesystem::path& path);
  ~ContainerWriter();
  /// Bytes that are already there are not written again.
  void add(std::string_view name, std::span<const std::byte> bytes);
  /// For sections that come in pieces: begin, append..., end.
  void begin(std::string_view name);
  void append(std::span<const std::byte> bytes);
  void end();
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether it begins as a .lode file does, damaged or not.
bool is_container(std::span<const std::byte> file);

/// Opens and checks header, footer and table (InputError: truncated, altered, newer version, not a .lode
/// file).
class ContainerReader {
 public:
  explicit ContainerReader(const std::filesystem::path& path);
  ~ContainerReader();
  ContainerReader(ContainerReader&&) noexcept;

  const std::vector<SectionInfo>& sections() const&;
  std::vector<SectionInfo> sections() &&;  // of a temporary reader they outlive it
  bool has(std::string_view name) const;
  const SectionInfo& info(std::string_view name) const;  ///< InputError when missing
  /// Bytes of a section, its checksum verified at the first call (InputError names the section when altered).
  std::span<const std::byte> bytes(std::string_view name) const;
  /// Verifies every section and the zeros between them: what is wrong with the first that is damaged, or
  /// nothing. Zeros mean nothing, so that only who asks for every byte looks at them.
  std::string verify_all() const;
  const MappedFile& file() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The sections of one selector: names are prefixed.
class SectionWriter {
 public:
  SectionWriter(ContainerWriter& out, std::string prefix) : out_(out), prefix_(std::move(prefix)) {}
  void add(std::string_view name, std::span<const std::byte> bytes) {
    out_.add(prefix_ + std::string(name), bytes);
  }
  template <class T>
  void add(std::string_view name, std::span<const T> values) {
    add(name, std::as_bytes(values));
  }
  /// For what a selector holds inside: names get "FOLDER/" in front.
  SectionWriter within(std::string_view folder) const { return {out_, prefix_ + std::string(folder) + "/"}; }

 private:
  ContainerWriter& out_;
  std::string prefix_;
};

class SectionReader {
 public:
  SectionReader(const ContainerReader& in, std::string prefix) : in_(in), prefix_(std::move(prefix)) {}
  bool has(std::string_view name) const { return in_.has(prefix_ + std::string(name)); }
  std::span<const std::byte> bytes(std::string_view name) const {
    return in_.bytes(prefix_ + std::string(name));
  }
  /// As values of T; InputError when the size is no multiple of sizeof(T).
  template <class T>
  std::span<const T> values(std::string_view name) const {
    const auto raw = bytes(name);
    check_multiple(name, raw.size(), sizeof(T));
    return {reinterpret_cast<const T*>(raw.data()), raw.size() / sizeof(T)};
  }
  const std::string& prefix() const { return prefix_; }
  SectionReader within(std::string_view folder) const { return {in_, prefix_ + std::string(folder) + "/"}; }

 private:
  void check_multiple(std::string_view name, std::size_t bytes, std::size_t of) const;
  const ContainerReader& in_;
  std::string prefix_;
};

}  // namespace lode
