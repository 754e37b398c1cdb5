// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a conversion will write: which tensors in which shards, and how each comes from the source. Decided from headers
// alone, so that errors and sizes are known before any data is read.
//
// The output has official names, whatever the source's: ModelOpt's layout, which every reader of NVFP4 DeepSeek-V4
// knows. Tensors that the weight table does not know (DSpark stages) are copied under their own names.
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors_writer.h"
#include "convert/family.h"
#include "model/config.h"
#include "model/weight_format.h"
#include "numeric/nvfp4.h"

namespace tessera::convert {

// What happens to a matrix, or to a tensor that is none.
enum class Treatment : uint8_t {
  kCopy,        // bytes as they are
  kReciprocal,  // one F32 value, inverted (compressed-tensors' scales)
  kRound,       // F32, BF16 or FP8 values to NVFP4
  kExact,       // MXFP4 to NVFP4, values unchanged
  kAsIs,        // NVFP4: codes and block scales as they are
};

// A linear map that is NVFP4 in the output, as the source has it.
struct PlannedMatrix {
  std::string name;  // official, without ".weight"
  Family family = Family::kExperts;
  int64_t rows = 0, cols = 0;
  model::StoredTensor stored;
};

// A step of the conversion. Matrices of one job share a tensor scale (w1 and w3 of an expert).
struct Job {
  Treatment treatment = Treatment::kCopy;
  checkpoint::LocatedTensor source;     // kCopy, kReciprocal
  std::vector<PlannedMatrix> matrices;  // the others: one or two
  size_t first_tensor = 0;              // of `Plan::tensors`: one, or per matrix codes, block scales, tensor scale
  uint64_t output_bytes = 0;
};
constexpr size_t kTensorsPerMatrix = 3;

inline size_t num_tensors(const Job& job) {
  return job.matrices.empty() ? 1 : kTensorsPerMatrix * job.matrices.size();
}

struct PlannedShard {
  std::string file;
  size_t job_begin = 0, job_end = 0;  // half open
  uint64_t bytes = 0;                 // of data
};

// Linear maps that keep their format, for the report.
struct KeptMatrix {
  std::string name;
  model::StoredFormat format = model::StoredFormat::kF32;
  Family family = Family::kExperts;
};

struct Plan {
  std::vector<checkpoint::TensorSpec> tensors;
  std::vector<Job> jobs;
  std::vector<PlannedShard> shards;
  std::vector<KeptMatrix> kept;
  bool keeps_fp8 = false;        // FP8 blocks remain
  bool has_input_scale = false;  // static activation scales are handed on
  uint64_t output_bytes = 0;
};

struct PlanOptions {
  FamilySet families;
  uint64_t max_shard_bytes = 0;  // of data; a job that is larger gets a shard of its own
};

// Throws kDataLoss, kNotFound for what is wrong with the checkpoint, kUnsupported for a chosen matrix whose rows are
// not whole blocks of 16, kInvalidArgument for more than 99,999 shards.
Plan make_plan(const checkpoint::Checkpoint& checkpoint, const model::Config& config, const PlanOptions& options);

// Index into Plan::tensors of matrix `m` of a job.
inline size_t codes_of(const Job& job, size_t m) {
  return job.first_tensor + kTensorsPerMatrix * m;
}
inline size_t scales_of(const Job& job, size_t m) {
  return codes_of(job, m) + 1;
}
inline size_t global_of(const Job& job, size_t m) {
  return codes_of(job, m) + 2;
}

}  // namespace tessera::convert
