// SPDX-License-Identifier: Apache-2.0
// What a launcher says of the processes that it starts.
#include <algorithm>
#include <cstdlib>

#include "cluster/mpi.h"

namespace lode {

bool several_started() {
  for (const char* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"})
    if (const char* const size = std::getenv(name); size != nullptr && std::atoi(size) > 1) return true;
  // srun names a rank; a job of one task has no use for one.
  const char* const tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  return std::getenv("PMIX_RANK") != nullptr && tasks != nullptr && std::atoi(tasks) > 1;
}

int started_rank() {
  for (const char* const name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
    if (const char* const rank = std::getenv(name); rank != nullptr) return std::atoi(rank);
  return 0;
}

std::optional<double> seconds_to_kill() {
  if (std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) return std::nullopt;
  const char* const wanted = std::getenv("OMPI_MCA_odls_base_sigkill_timeout");
  return wanted != nullptr ? std::max(0.0, std::atof(wanted)) : 1.0;
}

}  // namespace lode
