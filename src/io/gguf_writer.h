// SPDX-License-Identifier: Apache-2.0
// Writing GGUF files (version 3): metadata, then tensors one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/weight_type.h"

namespace lode {

class GgufWriter {
 public:
  /// Keys are unique; arrays may be empty.
  void add(std::string_view key, std::string_view text);
  void add(std::string_view key, bool value);
  void add_u32(std::string_view key, std::uint32_t value);
  void add_f32(std::string_view key, float value);
  void add_texts(std::string_view key, std::span<const std::string> texts);
  void add_i32s(std::string_view key, std::span<const std::int32_t> values);
  void add_f32s(std::string_view key, std::span<const float> values);
  void add_bools(std::string_view key, const std::vector<bool>& values);
  /// A value of another file as it lies there: `type` is the format's number, `bytes` what follows it.
  void add_raw(std::string_view key, std::uint32_t type, std::span<const std::byte> bytes);

  /// Shape: the outermost dimension first, as everywhere here; the innermost is whole blocks.
  void add_tensor(std::string name, WeightType type, std::vector<std::int64_t> shape);

  /// A file of these metadata and no tensors.
  std::string metadata_alone() const;
  std::int64_t tensors() const { return static_cast<std::int64_t>(tensors_.size()); }
  std::int64_t tensor_bytes(std::int64_t tensor) const;
  /// Writes everything; `fill` gives the bytes of each tensor in turn. The file appears when it is whole.
  void write(const std::filesystem::path& path,
             const std::function<void(std::int64_t tensor, std::span<std::byte> bytes)>& fill) const;

 private:
  struct Tensor {
    std::string name;
    WeightType type;
    std::vector<std::int64_t> shape;
    std::int64_t bytes() const;
  };
  void begin(std::string_view key, std::uint32_t type);
  std::string head(std::span<const Tensor> tensors) const;

  std::string metadata_;
  std::uint64_t keys_ = 0;
  std::vector<Tensor> tensors_;
};

}  // namespace lode
