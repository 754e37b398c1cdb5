// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which GPU computes.
#include <optional>
#include <string>

#include "device/gpu_facts.h"

namespace tessera::device::cuda {

// The `ordinal`-th GPU that CUDA shows; none where there is no such GPU or no usable driver, and then `why_not` says
// so. Never throws for what the driver does.
std::optional<GpuDevice> find_gpu(int ordinal, std::string& why_not);

}  // namespace tessera::device::cuda
