// SPDX-License-Identifier: Apache-2.0
// Where the trained functions of a method lie when no spec names them.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "lodestone/spec.h"

namespace lode {

/// The model's folder, or the one that its .gguf file, or the link to it, lies in: an absolute path; of no model none.
std::filesystem::path artefact_folder(const std::filesystem::path& model);

/// The method's artefact there, METHOD.safetensors, if there is one. Beside a .gguf file, where other models may lie, one that
/// is not of the model with this fingerprint counts as none; InputError when it cannot be read.
std::optional<std::filesystem::path> artefact_of(std::string_view method, const std::filesystem::path& model,
                                                 std::string_view fingerprint);

/// The spec with that artefact, where its method needs one and it names none.
Spec with_artefact(Spec spec, const std::filesystem::path& model, std::string_view fingerprint);

}  // namespace lode
