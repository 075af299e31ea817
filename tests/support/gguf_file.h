// SPDX-License-Identifier: Apache-2.0
// GGUF files for tests, byte by byte, so that each may lie in one place.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace lode::test {

template <class T>
std::string raw(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}
inline std::string gguf_string(std::string_view text) {
  return raw(std::uint64_t{text.size()}) + std::string(text);
}

/// Metadata types by their numbers in the file.
enum : std::uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

struct GgufBuilder {
  std::uint32_t version = 3;
  std::vector<std::string> keys, tensors;
  std::string data = std::string(64, 'd');
  std::size_t alignment = 32;

  GgufBuilder& key(std::string_view name, std::uint32_t type, const std::string& value) {
    keys.push_back(gguf_string(name) + raw(type) + value);
    return *this;
  }
  GgufBuilder& text(std::string_view name, std::string_view value) {
    return key(name, kString, gguf_string(value));
  }
  GgufBuilder& number(std::string_view name, std::uint32_t value) { return key(name, kU32, raw(value)); }
  GgufBuilder& real(std::string_view name, float value) { return key(name, kF32, raw(value)); }
  GgufBuilder& texts(std::string_view name, const std::vector<std::string>& values) {
    std::string body = raw(std::uint32_t{kString}) + raw(std::uint64_t{values.size()});
    for (const std::string& value : values) body += gguf_string(value);
    return key(name, kArray, body);
  }
  template <class T>
  GgufBuilder& array(std::string_view name, std::uint32_t type, const std::vector<T>& values) {
    std::string body = raw(type) + raw(std::uint64_t{values.size()});
    for (const T value : values) body += raw(value);
    return key(name, kArray, body);
  }
  /// Dimensions fastest first, as in the file.
  GgufBuilder& tensor(std::string_view name, const std::vector<std::uint64_t>& dimensions, std::uint32_t type,
                      std::uint64_t offset) {
    std::string entry = gguf_string(name) + raw(static_cast<std::uint32_t>(dimensions.size()));
    for (const std::uint64_t n : dimensions) entry += raw(n);
    tensors.push_back(entry + raw(type) + raw(offset));
    return *this;
  }

  std::string header() const {
    std::string file =
        "GGUF" + raw(version) + raw(std::uint64_t{tensors.size()}) + raw(std::uint64_t{keys.size()});
    for (const std::string& entry : keys) file += entry;
    for (const std::string& entry : tensors) file += entry;
    return file;
  }
  std::string file() const {
    std::string all = header();
    all.resize((all.size() + alignment - 1) / alignment * alignment, '\0');
    return all + data;
  }
};

}  // namespace lode::test
