// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is wrong with a machine's GPUs, and what to do about it.
#include <string>
#include <vector>

#include "device/gpu_facts.h"

namespace tessera::device {

struct GpuDiagnosis {
  enum class Weight {
    kProblem,  // the GPUs can't be used
    kWarning,  // they can, but slower, fewer, or with a trap ahead
  };
  Weight weight = Weight::kProblem;
  std::string finding;  // one line, with the values that say so
  std::string advice;   // one line: what to do
};

// Problems first, the cause before what follows from it. Nothing on a machine without NVIDIA GPUs, or on one where all
// is well.
std::vector<GpuDiagnosis> diagnose_gpus(const GpuFacts& facts);

}  // namespace tessera::device
