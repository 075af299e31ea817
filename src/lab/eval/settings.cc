// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "select/artefacts.h"
#include "select/plan/plan.h"

namespace lode {

namespace {

namespace fs = std::filesystem;

/// What answers by a spec depend on beside its text.
struct Inputs {
  std::set<fs::path> files;
  std::string revisions;  ///< MethodInfo::revision of each method that takes part and has one
};

/// Adds those of a spec, where `model` is the place of the model.
void add_inputs(const Spec& spec, const fs::path& model, Inputs& inputs) {
  const fs::path folder = artefact_folder(model);
  const auto add = [&](const fs::path& file) {
    if (fs::is_regular_file(file)) inputs.files.insert(file);
  };
  const MethodInfo& info = find_method(spec.name);
  if (info.revision > 0) inputs.revisions += std::to_string(info.revision);
  if (const auto file = spec.name == "plan" ? spec.file("file") : std::nullopt) {
    add(*file);
    Spec of_plan = spec;
    of_plan.given.emplace("folder", folder.string());
    const Plan plan = read_plan(*file);
    for (int layer = 0; layer < std::ssize(plan.heads); ++layer)
      for (const PlanHeads& heads : heads_by_spec(plan, layer, of_plan))
        add_inputs(heads.spec, model, inputs);
    return;
  }
  if (const auto weights = spec.file("weights")) {
    add(*weights);
  } else if (info.trained) {
    add(folder / (info.name + ".safetensors"));
  }
}

/// Settings of older runs say "1 threads", and are compared as text: so the caller says how threads are told.
std::string machine(Device device, std::string_view threads) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line, name = "unknown processor";
  while (std::getline(cpuinfo, line)) {
    if (!line.starts_with("model name")) continue;
    name = line.substr(std::min(line.size(), line.find(':') + 2));
    break;
  }
  std::string text = fmt::format("{}, {}, {} kernels", name, threads, kernels().name);
  if (device == Device::cuda) text += ", " + gpu_info().name;
  return text;
}

}  // namespace

std::string machine_name(const Model& model, Device device) {
  return machine(device, counted(model.pool().size(), "thread"));
}

Json run_settings(const Model& model, const ContextOptions& context) {
  return {{"model", model.fingerprint()},
          {"tokenizer", model.tokenizer().fingerprint()},
          {"machine", machine(context.device, fmt::format("{} threads", model.pool().size()))},
          {"device", name_of(context.device)},
          {"gpu_memory", context.gpu_memory},
          {"kv_type", name_of(context.kv_type)},
          {"kv_tier", static_cast<int>(context.kv_tier)},
          {"active_memory", context.active_memory},
          {"rope_factor", context.rope_factor ? Json(*context.rope_factor) : Json()},
          {"max_tokens", context.max_tokens},
          {"chunk", context.chunk},
          {"seed", context.seed},
          {"audit", context.audit}};
}

std::set<fs::path> files_of(const Spec& spec, const fs::path& model) {
  Inputs inputs;
  add_inputs(spec, model, inputs);
  return inputs.files;
}

std::string files_hash(const Spec& spec, const fs::path& model) {
  Inputs inputs;
  add_inputs(spec, model, inputs);
  std::string hashes = inputs.revisions;
  if (inputs.files.empty() && hashes.empty()) return {};
  for (const fs::path& file : inputs.files) hashes += hash_hex(MappedFile(file).bytes());
  return hash_hex(hashes).substr(0, 16);
}

}  // namespace lode
