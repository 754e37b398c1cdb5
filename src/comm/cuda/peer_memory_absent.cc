// SPDX-License-Identifier: Apache-2.0
// Of builds without CUDA, and of those for an emulated GPU, which is one process's and has no peers.
#include "comm/cuda/peer_memory.h"
#include "comm/shared_part.h"

namespace tessera::comm {

std::unique_ptr<PeerMemory> make_peer_memory(int, int, const PeerMemorySize&, std::string& why_not) {
  why_not = "this build has no GPUs that reach each other's memory";
  return nullptr;
}

std::unique_ptr<SharedPart> make_gpu_part(size_t, std::string& why_not) {
  why_not = "this build has no GPUs that reach each other's memory";
  return nullptr;
}

}  // namespace tessera::comm
