// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the jobs of a plan, one after the other, rows in parallel.
#include <atomic>
#include <cstdint>
#include <vector>

#include "base/log.h"
#include "convert/convert.h"
#include "convert/plan.h"
#include "convert/shard_output.h"
#include "convert/source_bands.h"
#include "device/queue.h"

namespace tessera::convert {

class JobRunner {
 public:
  // The reader must read the jobs in the order in which run() is called.
  JobRunner(const Plan& plan, const Options& options, SourceReader& reader, ShardOutput& output, ProgressSink* progress,
            const std::atomic<bool>* is_cancelled);

  // Adds to `measured`. Throws kDataLoss for a NaN or an infinity, naming the tensor; kUnsupported for MXFP4 blocks
  // that can't be kept; kCancelled.
  void run(size_t job, FamilyStatistics& measured);

 private:
  Band next_band();
  void copy(const Job& job);
  void convert_matrices(const Job& job, FamilyStatistics& measured);
  float rounding_scale(const Job& job, std::vector<Band>& kept);
  float exact_scale(const Job& job, std::vector<Band>& kept, Statistics& measured);
  float band_amax(const PlannedMatrix& matrix, const Band& band);
  void convert_band(const Job& job, const Band& band, float tensor_scale, Statistics& measured);
  void write_scalar(size_t tensor, float value);

  const Plan& plan_;
  const Options& options_;
  SourceReader& reader_;
  ShardOutput& output_;
  ProgressSink* progress_;
  const std::atomic<bool>* is_cancelled_;
  device::Queue queue_;
};

}  // namespace tessera::convert
