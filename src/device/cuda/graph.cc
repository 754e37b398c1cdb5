// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/graph.h"

#include "device/cuda/check.h"

namespace tessera::device::cuda {

void Graph::begin(const StreamQueue& queue) {
  // Thread-local: what is forbidden while recording is forbidden to this thread, not to the program's others.
  TESSERA_CUDA_CHECK(cudaStreamBeginCapture(queue.handle(), cudaStreamCaptureModeThreadLocal));
}

void Graph::abandon(const StreamQueue& queue) {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(queue.handle(), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // the call that failed has told
}

void Graph::end(const StreamQueue& queue) {
  cudaGraph_t graph = nullptr;
  TESSERA_CUDA_CHECK(cudaStreamEndCapture(queue.handle(), &graph));
  size_t num_nodes = 0;
  cudaError_t code = cudaGraphGetNodes(graph, nullptr, &num_nodes);
  if (code == cudaSuccess && num_nodes > 0) code = cudaGraphInstantiate(&executable_, graph, 0);
  cudaGraphDestroy(graph);
  TESSERA_CUDA_CHECK(code);
}

Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
}

void Graph::launch(const StreamQueue& queue) const {
  if (executable_ != nullptr) TESSERA_CUDA_CHECK(cudaGraphLaunch(executable_, queue.handle()));
}

}  // namespace tessera::device::cuda
