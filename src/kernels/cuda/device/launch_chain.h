// SPDX-License-Identifier: Apache-2.0
// Kernels that go to the driver together. To launch one takes some 4 us of the host's time, and to launch a graph 2, whether
// it has one kernel or five: so a call that enqueues the same kernels again and again keeps them as a graph, in which only
// their arguments change.
#pragma once

#include <memory>

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// The graphs of calls that are alike, one for each order of kernels that they had. Calls take turns.
class LaunchGraphs {
 public:
  LaunchGraphs();
  ~LaunchGraphs();  ///< none of them may be running
  LaunchGraphs(const LaunchGraphs&) = delete;
  LaunchGraphs& operator=(const LaunchGraphs&) = delete;

  /// Whether kernels that were held back could not be enqueued: what they were to change is as it was.
  bool has_lost() const;

  struct Parts;  // launch_chain.cu has it
  Parts& parts() { return *parts_; }

 private:
  std::unique_ptr<Parts> parts_;
};

/// While one lives, the kernels that its thread launches in the stream are held back, until flush. All else that the
/// library tells a stream, waits for or frees in this thread flushes first; memory that another thread may free must be
/// there until flush. The stream is not captured, and a thread has one chain at a time.
class LaunchChain {
 public:
  LaunchChain(LaunchGraphs& graphs, StreamHandle stream);
  ~LaunchChain();  ///< flushes; has_lost says whether that failed
  LaunchChain(const LaunchChain&) = delete;
  LaunchChain& operator=(const LaunchChain&) = delete;

  /// Throws where it fails, and from then on.
  void flush();
  StreamHandle stream() const { return stream_; }
  LaunchGraphs::Parts& parts() { return graphs_.parts(); }

 private:
  LaunchGraphs& graphs_;
  StreamHandle stream_;
};

/// Whether what this thread launches in the stream is held back.
bool holds_back(StreamHandle stream);
/// Enqueues what a chain of this thread holds back.
void flush_launches();
/// The same where nothing may be thrown: the chain's next flush says what failed.
void flush_launches_quietly() noexcept;

}  // namespace lode::cuda
