// SPDX-License-Identifier: Apache-2.0
// Any bytes as a safetensors file: refused, or tensors that cover the data exactly.
#include "io/safetensors.h"

#include "fuzz/target.h"

LODE_FUZZ_TARGET(safetensors) {
  const auto file = std::as_bytes(std::span(input));
  std::map<std::string, std::string> metadata;
  std::size_t data = 0;
  for (const auto& [name, tensor] : lode::parse_safetensors(file, "fuzz", &metadata)) {
    LODE_ASSERT(tensor.bytes.empty() ||
                (tensor.bytes.data() >= file.data() + 8 &&
                 tensor.bytes.data() + tensor.bytes.size() <= file.data() + file.size()));
    LODE_ASSERT(tensor.elements() >= 0 && static_cast<std::size_t>(tensor.elements()) <= tensor.bytes.size());
    data += tensor.bytes.size();
  }
  LODE_ASSERT(data < file.size());
}
