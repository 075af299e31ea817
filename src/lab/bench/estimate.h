// SPDX-License-Identifier: Apache-2.0
// What a document will take before it is read: does it fit, how long will prefill, indexes, the first answer
// and a token take under each method, and which method pays. Everything is measured on this machine with the
// model itself, for a few seconds, on made-up keys of the document's length.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/link_speed.h"
#include "lodestone/engine.h"

namespace lode {

struct EstimateOptions {
  std::int64_t tokens = 0;     ///< of the document
  std::int64_t question = 64;  ///< tokens of a question
  DType kv_type = DType::f16;
  Device device = Device::cpu;
  std::int64_t gpu_memory = 0;  ///< as in ContextOptions
  std::int64_t free_disk = 0;   ///< bytes where the file would lie
  int machines = 1;             ///< that share the document, each like this one; on the CPU
  LinkSpeed link = {};          ///< between them
};

struct MethodEstimate {
  std::string attention;
  double index_seconds = 0;        ///< of the index over the document, after its prefill
  double first_token_seconds = 0;  ///< from the question to the answer's first token
  double ms_token = 0;             ///< of each further token
  double ms_communication = 0;     ///< of that, where several machines share the document
};

struct Estimate {
  bool fits = false;        ///< host, GPU and disk hold it
  std::string recommended;  ///< a spec
  std::string why;          ///< one sentence, of what fits and what pays
  std::int64_t host_bytes = 0, gpu_bytes = 0, file_bytes = 0;
  double prefill_seconds = 0;
  double prefill_efficiency = 1;        ///< share that machines do not spend on telling each other
  std::vector<MethodEstimate> methods;  ///< `full` first
};

/// Bytes are those of one machine. Of several, each is measured with its share of the document, and what they tell each
/// other is added. InputError when the model has fewer positions than document and question need, on one machine;
/// more machines are then estimated on paper, and do not fit. `note` is told what is
/// done next.
Estimate estimate_document(const std::shared_ptr<const Model>& model, const EstimateOptions& options,
                           std::span<const Spec> specs, const std::function<void(std::string_view)>& note);

}  // namespace lode
