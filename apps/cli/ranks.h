// SPDX-License-Identifier: Apache-2.0
// The program as several ranks that mpirun starts: rank 0 speaks, the others work along in silence.
#pragma once

#include <string>

#include "cluster/mpi.h"

namespace lode::cli {

/// All processes of this run; null when it is alone.
Ranks* ranks();
/// Connects them, if a launcher started several. From then on all but rank 0 print nothing and read no standard input.
/// InputError for a verb that several ranks would each do by themselves.
void join_ranks(int argc, char** argv);
/// Tells the others of a failure, before leave_ranks.
void tell_ranks(const std::string& failure);
/// Ends all ranks: at once when this one failed. Returns the exit code.
int leave_ranks(int exit_code);

/// Between lines on standard output and on standard error: a launcher reads them from two pipes, and would print one in the
/// middle of the other.
void settle_output();

/// The next line of standard input, of rank 0 on all of them; false at its end.
bool next_line(std::string& line);

}  // namespace lode::cli
