// SPDX-License-Identifier: Apache-2.0
// What the engine asks a context on the GPU for when it builds an index.
#pragma once

#include <functional>

#include "gpu/backend.h"
#include "select/device_keys.h"

namespace lode {

/// Of a context whose keys are on one GPU; null: they lie elsewhere. Lives as long as the context.
DeviceKeys* device_keys_of(GpuContext& context);

/// Writes the rows that the store lacks of a context that has device keys behind its own, and calls done(layer) when
/// a layer has them; the caller commits them.
void download_by_layer(const GpuContext& context, KvStore& store, const std::function<void(int layer)>& done);

/// Whether a step writes its keys into the host's store too, which must then be up to date: somebody listens to
/// more than some of its queries (HearsQueries).
bool writes_to_host(const GpuContext& context, const Step& step);

}  // namespace lode
