// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/loaded_model.h"

#include <fmt/format.h>

#include "base/text.h"
#include "serve/backend.h"

namespace lode::serve {

const LoadedModel& model_named(std::span<const LoadedModel> models, const std::string& id) {
  for (const LoadedModel& model : models)
    if (id.empty() || model.id == id) return model;
  throw ApiError(
      404, fmt::format("there is no model '{}'; GET /v1/models lists those that are there", excerpt(id)),
      "model_not_found");
}

}  // namespace lode::serve
