// SPDX-License-Identifier: Apache-2.0
// A model that is served, and what answers with it.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "gpu/backend.h"
#include "lodestone/scheduler.h"
#include "serve/engine/prompting.h"

namespace lode::serve {

struct LoadedModel {
  std::string id;
  std::shared_ptr<const Model> model;
  std::shared_ptr<Scheduler> scheduler;
  std::shared_ptr<Prompting> prompting;
  std::shared_ptr<const GpuModel> on_gpu =
      {};  ///< where documents are whose keys and values are of a type that it takes
};

/// The one that a request names, or the first where it names none. ApiError 404 for a name that no model has.
const LoadedModel& model_named(std::span<const LoadedModel> models, const std::string& id);

}  // namespace lode::serve
