// SPDX-License-Identifier: Apache-2.0
// What a document will take before it is read: does it fit, how long will prefill, indexes, the first answer
// and a token take under each method, and which method pays. Everything is measured on this machine with the
// model itself, for a few seconds, on made-up keys of the document's length.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lodestone/engine.h"

namespace lode {

struct EstimateOptions {
  std::int64_t tokens = 0;     ///< of the document
  std::int64_t question = 64;  ///< tokens of a question
  DType kv_type = DType::f16;
  Device device = Device::cpu;
  std::int64_t gpu_memory = 0;  ///< as in ContextOptions
  std::int64_t free_disk = 0;   ///< bytes where the file would lie
};

struct MethodEstimate {
  std::string attention;
  double index_seconds = 0;        ///< of the index over the document, after its prefill
  double first_token_seconds = 0;  ///< from the question to the answer's first token
  double ms_token = 0;             ///< of each further token
};

struct Estimate {
  bool fits = false;        ///< host, GPU and disk hold it
  std::string recommended;  ///< a spec
  std::string why;          ///< one sentence, of what fits and what pays
  std::int64_t host_bytes = 0, gpu_bytes = 0, file_bytes = 0;
  double prefill_seconds = 0;
  std::vector<MethodEstimate> methods;  ///< `full` first
};

/// InputError when the model has fewer positions than document and question need. `note` is told what is
/// measured.
Estimate estimate_document(const std::shared_ptr<const Model>& model, const EstimateOptions& options,
                           std::span<const Spec> specs, const std::function<void(std::string_view)>& note);

}  // namespace lode
