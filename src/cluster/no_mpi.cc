// SPDX-License-Identifier: Apache-2.0
// In a build without MPI.
#include "cluster/mpi.h"
#include "lodestone/error.h"

namespace lode {

std::unique_ptr<Ranks> connect_ranks(std::chrono::milliseconds) {
  throw InputError(
      "expected one process, found several started by mpirun: this build has no MPI; install libopenmpi-dev "
      "and "
      "openmpi-bin, then build again");
}

}  // namespace lode
