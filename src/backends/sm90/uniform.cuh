// SPDX-License-Identifier: Apache-2.0
#pragma once
// What keeps the loop of products in uniform registers.

namespace tessera::backends::sm90 {

// A value that all lanes have anyway, so that the compiler knows it: around a loop that it thinks lanes may leave one
// by one it puts reconvergence, and what products need into other registers first. By all lanes of the warp.
__device__ inline int uniform(int value) {
  return __shfl_sync(~0u, value, 0);
}

}  // namespace tessera::backends::sm90
