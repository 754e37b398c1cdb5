// SPDX-License-Identifier: Apache-2.0
#pragma once
// From a checkpoint's folder to something that runs.
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "comm/communicator.h"
#include "device/machine.h"
#include "model/bypass.h"
#include "model/config.h"
#include "model/runner.h"
#include "model/weight_spec.h"
#include "ops/planner.h"

namespace tessera::model {

struct LoadOptions {
  ops::Precision precision;
  int num_threads = 0;           // 0: one per processor
  int64_t max_step_tokens = 64;  // of answers and pieces of prompts together
  int64_t sequence_tokens = 0;   // counted into the memory that must fit, besides the weights
  int64_t extra_bytes = 0;       // that the caller will take besides; counted too
  std::vector<std::pair<std::string, std::string>> forced;  // ops::parse_forced
  Bypass bypass;
  bool allow_inexact = false;  // round MXFP4 blocks that NVFP4 can't hold exactly, instead of refusing them
  bool with_draft = true;      // load the draft block where the checkpoint has one
  // What this rank holds of the model, and the ranks that hold the rest: a communicator that outlives the runner, or
  // null for one rank.
  Shard shard;
  comm::Communicator* comm = nullptr;
};

struct LoadedModel {
  Config config;
  std::unique_ptr<Runner> runner;
  std::vector<ops::PlanLine> plan;
  double load_seconds = 0;  // from the first weight read to the last one in its place
};

// What is best where nobody says otherwise. A processor's time grows with each token of a step. A GPU reads the weights
// once for all of them, and prompts are fastest in the largest steps.

// Answers that are made at once.
// `device`: "cpu" or "cuda:N".
int64_t default_running(std::string_view device);
// Tokens of a step, on each of `world` ranks of such machines: of a GPU as many, from 512 to 8,192, as an eighth of the
// memory that the folder's weights leave has work space for, and, of one rank, what is left beside sequence_tokens and
// extra_bytes.
int64_t default_step_tokens(const std::string& directory, const Config& config, const LoadOptions& options,
                            const device::Machine& machine, int64_t world);
// Tokens of a step in which answers wait for what prompts take: few, and enough for the answers themselves.
int64_t default_mixed_step_tokens(const device::Machine& machine, int64_t max_step_tokens, int64_t max_running);

// Classic draft blocks of a checkpoint, which this program runs: 0 or 1. DSpark's stages are kept aside.
int64_t num_draft_layers(const checkpoint::Checkpoint& checkpoint, const Config& config);

// Throws kNotFound, kDataLoss, kUnsupported for what is wrong with the checkpoint, kResourceExhausted (before anything
// is read) where weights and state do not fit into machine.memory_available_bytes. Sinks may be null.
LoadedModel load_model(const std::string& directory, const LoadOptions& options,
                       std::span<const ops::Backend* const> backends, const device::Machine& machine, LogSink* log,
                       ProgressSink* progress);

}  // namespace tessera::model
