// SPDX-License-Identifier: Apache-2.0
#pragma once
// Any readable checkpoint to NVFP4, in ModelOpt's layout: MXFP4 exactly, BF16, F32 and FP8 rounded, NVFP4 as it is.
// docs/formats/conversion.md says what comes out. The output's bytes depend on source and options alone: not on the
// number of threads, nor on how often it was interrupted and resumed. Memory stays below 2 GiB besides the headers.
#include <atomic>
#include <string>

#include "base/log.h"
#include "convert/family.h"
#include "convert/statistics.h"
#include "convert/work_folder.h"
#include "numeric/nvfp4.h"

namespace tessera::convert {

struct Options {
  FamilySet families;  // what becomes NVFP4; the rest keeps its bits
  numeric::Nvfp4WeightRule rule = numeric::Nvfp4WeightRule::kAmax;
  uint64_t max_shard_bytes = uint64_t{5} * 1000 * 1000 * 1000;
  bool allow_inexact = false;  // round MXFP4 blocks that NVFP4 can't hold exactly, instead of refusing them
  Existing existing = Existing::kRefuse;
  bool is_trial = false;  // read and measure everything, write nothing
  int num_threads = 0;    // 0: one per processor
  std::string version;    // of the program, for config.json's producer
};

struct Result {
  FamilyStatistics families;
  uint64_t source_bytes = 0, output_bytes = 0;  // of tensor data
  size_t num_shards = 0, num_resumed_shards = 0;
};

// Converts folder `in` into folder `out`. Sinks may be null. `is_cancelled` (may be null) is asked often; once true,
// the conversion ends with kCancelled and can be resumed. Throws kNotFound, kDataLoss, kUnsupported for what is wrong
// with the source, naming file and tensor; kInvalidArgument for what is wrong with `out`; kResourceExhausted where the
// disk is too small (before anything is written, as far as can be known) or full. After any of these `out` has no
// config.json: nothing loads it by mistake.
Result convert(const std::string& in, const std::string& out, const Options& options, LogSink* log,
               ProgressSink* progress, const std::atomic<bool>* is_cancelled);

// Whether `out` holds a conversion that was interrupted and can be resumed.
bool is_unfinished(const std::string& out);

}  // namespace tessera::convert
