// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes, on one machine or many, as mpirun or srun start them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/communicator.h"

namespace lode {

/// A communicator that knows which ranks live: each says so four times a second, in the background, whatever it
/// computes. One of which nothing is heard for `patience` (killed, stopped, out of memory, its network gone) ends
/// what the others wait for.
class Ranks : public Communicator {
 public:
  /// Whether another rank has failed, or is heard no more: what others then say follows from that.
  virtual bool other_failed() const = 0;
  /// Tells the others that this rank has said why all end, so that they keep silent. Comes back once that is on its
  /// way, or after a second.
  virtual void tell_spoken() = 0;
  /// Whether rank 0 has told so.
  virtual bool first_has_spoken() = 0;
  /// Ends the connection of ranks that are all done.
  virtual void finish() = 0;
  /// Ends this process and all other ranks at once.
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

/// Whether a launcher has started several of this process.
bool several_started();
/// This process's number among them, known before it has joined the others.
int started_rank();
/// Seconds that mpirun leaves its processes between its SIGTERM and its SIGKILL; none where it has not started this one.
std::optional<double> seconds_to_kill();
/// InputError in a build without MPI, with what to install.
std::unique_ptr<Ranks> connect_ranks(std::chrono::milliseconds patience);

}  // namespace lode
