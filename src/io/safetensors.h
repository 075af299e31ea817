// SPDX-License-Identifier: Apache-2.0
// Reading and writing safetensors, with every offset, size and shape checked before use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "lodestone/types.h"

namespace lode {

/// One tensor in place.
struct Tensor {
  std::string type;                 ///< as written: "F32", "BF16", "I64", ...
  std::vector<std::int64_t> shape;  ///< empty = a scalar
  std::span<const std::byte> bytes;
  std::int64_t elements() const;
};

/// Whether a file begins as safetensors do, whatever it is called.
bool is_safetensors(std::span<const std::byte> file);
/// Whether it has a checksum of its tensors, which only files of ours have.
bool has_checksum(std::span<const std::byte> file, std::string_view where);

/// Parses a whole file held in memory: a pure function of its bytes. InputError: `where`, the tensor,
/// expected, found. Rules: header at most 100 MB and JSON; no holes, no overlaps, nothing beyond the end;
/// sizes equal shape times type; the checksums that
/// write_safetensors leaves, which are no metadata, are right.
std::map<std::string, Tensor> parse_safetensors(std::span<const std::byte> file, std::string_view where,
                                                std::map<std::string, std::string>* metadata = nullptr);
/// Likewise of a file. Artefacts are opened once a layer: the checksum of what has not changed since is not worked
/// out again.
std::map<std::string, Tensor> parse_safetensors(const MappedFile& file,
                                                std::map<std::string, std::string>* metadata = nullptr);

/// Float types as ours; InputError for the others, naming tensor and type.
DType float_type(const Tensor& tensor, std::string_view name, std::string_view where);

/// Tensors to be written; data stays the caller's. The type q8 is written as I8, its scales are a tensor of
/// their own.
struct TensorToWrite {
  std::string name;
  DType type = DType::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};
/// Writes one file atomically; tensors in the given order, data aligned to 64 bytes.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorToWrite> tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace lode
