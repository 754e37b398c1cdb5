// SPDX-License-Identifier: Apache-2.0
#pragma once
// Launching kernels on the emulated GPU's streams.
#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "device/cuda/emulated/block.h"

namespace tessera::device::emulated {

// Runs the grid, or records it where the stream is being captured.
cudaError_t launch_code(const cudaLaunchConfig_t& config, const void* kernel, std::shared_ptr<const ThreadCode> code);

template <class Function>
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, Function function) {
  class Code final : public ThreadCode {
   public:
    explicit Code(Function f) : function_(std::move(f)) {}
    void run() const override { function_(); }

   private:
    Function function_;
  };
  return launch_code(config, kernel, std::make_shared<const Code>(std::move(function)));
}

}  // namespace tessera::device::emulated
