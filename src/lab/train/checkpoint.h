// SPDX-License-Identifier: Apache-2.0
// Where a training run stands: named float arrays and strings in one file that is replaced atomically.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "lab/train/adam.h"
#include "lab/train/mlp.h"

namespace lode {

class Checkpoint {
 public:
  std::map<std::string, std::vector<float>> arrays;
  std::map<std::string, std::string> notes;  ///< settings, steps done, what has been finished

  /// Parameters and buffers of a module and, unless null, its optimiser, under `prefix`.
  void put(const std::string& prefix, Module& module, Adam* adam = nullptr);
  /// InputError when an array is missing or has another size; names the file as `where`.
  void get(const std::string& prefix, Module& module, Adam* adam, const std::string& where) const;
  /// The array `name`, which must have `numbers` numbers; InputError otherwise, names the file as `where`.
  const std::vector<float>& array(const std::string& name, std::int64_t numbers,
                                  const std::string& where) const;
  /// A note that is a whole number from 0 on; InputError otherwise.
  std::int64_t number(const std::string& note, const std::string& where) const;
  /// Forgets everything under `prefix`.
  void erase(const std::string& prefix);

  /// A safetensors file; the old one stays until the new one is complete.
  void write(const std::filesystem::path& path) const;
  static Checkpoint read(const std::filesystem::path& path);
};

}  // namespace lode
