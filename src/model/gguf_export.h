// SPDX-License-Identifier: Apache-2.0
// Models as GGUF files with llama.cpp's names, in another type of weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "kernels/weight_type.h"

namespace lode {

class ThreadPool;

/// Of a type that quantise.h takes; matrices whose rows it does not divide become Q8_0, or F16. As in llama.cpp,
/// Q4_K leaves the output's matrix six bits. `tensors_done` is told how many of how many tensors are written.
struct GgufExport {
  WeightType type = WeightType::q4_k;
  std::function<void(std::int64_t done, std::int64_t all)> tensors_done = {};
  std::function<void(const std::string&)> remark =
      {};  ///< hears what of the model other programs will not see
};

/// How many matrices of a file have a type, by the type's name.
using MatrixTypes = std::map<std::string, std::int64_t>;

/// `model`: a folder or a GGUF file, whose metadata are kept. A folder's experts in MXFP4 stay so. InputError for a
/// model or a tokenizer that the format has no words for, or a weight that the type cannot hold.
MatrixTypes export_gguf(const std::filesystem::path& model, const std::filesystem::path& to,
                        const GgufExport& options, ThreadPool& pool);

/// Random weights of a named shape (config.h), of any type, with the tokenizer of a model's folder: for trials at
/// real size.
MatrixTypes export_random_gguf(std::string_view shape, const std::filesystem::path& tokenizer,
                               const std::filesystem::path& to, const GgufExport& options, ThreadPool& pool);

}  // namespace lode
