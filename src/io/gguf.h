// SPDX-License-Identifier: Apache-2.0
// Reading GGUF files (version 2 and 3): metadata and tensors in place, with every length, offset, type and
// count checked before use. A file is untrusted input.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "kernels/weight_type.h"

namespace lode {

enum class GgufType : std::uint32_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64
};

/// One metadata value; it views the file.
struct GgufValue {
  GgufType type = GgufType::u8;
  std::span<const std::byte> bytes;       ///< of a scalar, of a string's text, or of an array's numbers
  GgufType element = GgufType::u8;        ///< of an array
  std::uint64_t count = 0;                ///< elements of an array
  std::vector<std::string_view> strings;  ///< of an array of strings
  std::vector<GgufValue> arrays;          ///< of an array of arrays
};

/// Metadata by key, with getters that name the file and the key when something is off.
class GgufMetadata {
 public:
  explicit GgufMetadata(std::string where = {}) : where_(std::move(where)) {}
  /// InputError when the key is there already.
  void add(std::string_view key, GgufValue value);

  const std::string& where() const { return where_; }
  bool has(std::string_view key) const { return values_.contains(key); }
  /// A whole number of any width, or a boolean as 0 or 1. InputError: missing, another type, out of range.
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high) const;
  double number(std::string_view key, double low, double high) const;
  bool boolean(std::string_view key) const;
  std::string_view text(std::string_view key) const;  ///< valid UTF-8
  /// Arrays; `integers` also takes a single number, as a list of one.
  std::vector<std::string_view> texts(std::string_view key) const;
  std::vector<std::int64_t> integers(std::string_view key, std::int64_t low, std::int64_t high) const;
  std::vector<float> numbers(std::string_view key) const;
  bool is_array(std::string_view key) const;
  const std::map<std::string, GgufValue, std::less<>>& values() const { return values_; }

 private:
  const GgufValue& find(std::string_view key) const;
  std::map<std::string, GgufValue, std::less<>> values_;
  std::string where_;
};

struct GgufTensor {
  WeightType type = WeightType::f32;
  std::vector<std::int64_t> shape;  ///< outermost first, as everywhere here; the file has it the other way
  std::span<const std::byte> bytes;
  std::string where;  ///< the file
};
using GgufTensors = std::map<std::string, GgufTensor, std::less<>>;

/// One file.
struct GgufFile {
  GgufMetadata metadata;
  GgufTensors tensors;
};

/// Parses a whole file held in memory: a pure function of its bytes. InputError: `where`, the key or tensor,
/// expected, found. Tensors may neither overlap nor reach beyond the end, and begin at multiples of
/// general.alignment.
GgufFile parse_gguf(std::span<const std::byte> file, std::string_view where);

/// Whether a file begins as GGUF files do, whatever it is called.
bool is_gguf(std::span<const std::byte> file);

/// A model's GGUF files, mapped: one, or all parts of a split one (NAME-00001-of-00003.gguf), of which `path`
/// may be any.
class GgufModel {
 public:
  /// InputError: a part that is missing or belongs to another model.
  static GgufModel open(const std::filesystem::path& path);
  /// A file that is parsed already, and stays where it is.
  static GgufModel of(GgufFile&& file);
  /// Whether this is to be read as a GGUF file: a file, no folder, that begins as one or is called .gguf.
  static bool is_file(const std::filesystem::path& path);
  /// The paths of all parts of the file at `path`, itself included; looks at names alone.
  static std::vector<std::filesystem::path> parts_of(const std::filesystem::path& path);

  const GgufMetadata& metadata() const { return metadata_; }  ///< of the first part
  GgufTensors tensors;                                        ///< of all parts; they point into `files`
  std::vector<MappedFile> files;

 private:
  GgufMetadata metadata_;
};

}  // namespace lode
