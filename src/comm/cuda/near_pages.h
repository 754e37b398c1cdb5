// SPDX-License-Identifier: Apache-2.0
#pragma once
// bring_near() of a GPU; `stream` is a cudaStream_t.
#include "comm/near_pages.h"

namespace tessera::comm {

constexpr int64_t kNearBytes = 16;     // that a thread copies at once
constexpr size_t kNearSequences = 64;  // of a launch

struct NearCall {
  NearPages pages;
  int count = 0;
  NearSequence sequences[kNearSequences];
};

void bring_near_on_gpu(const NearCall& call, void* stream);

}  // namespace tessera::comm
