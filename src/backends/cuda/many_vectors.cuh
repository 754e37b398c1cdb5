// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a token's vectors go through, where there are so many that their bytes count and no longer their latency: the
// steps of norm_rope, rms_norm and hadamard with a warp for several vectors instead of a thread block for one.
#include <cstdint>

#include "backends/cuda_common/values.cuh"
#include "device/queue.h"

namespace tessera::backends::cuda {

struct ManyVectors {
  cuda_common::Values x, out;          // [rows, vectors, width]; the same memory or another
  const int64_t* positions = nullptr;  // [rows], where rope_dim is not 0
  const float* frequencies = nullptr;  // [rope_dim / 2]
  int64_t num_rows = 0;
  int vectors = 1, width = 0, rope_dim = 0;
  float eps = 0, hadamard_scale = 0;
  bool has_norm = false, is_inverse = false, has_hadamard = false, is_fp4 = false;
};

// Queues the work where there is a kernel for it: BF16, a norm without weights and then rope, of 512 channels; or rope
// and then hadamard, of 128; enough vectors. The bits are those of row_parts.cuh.
bool run_many_vectors(const char* name, const ManyVectors& all, device::Queue& queue);

// Rows of rms_norm that are no such vectors.
struct NormRows {
  cuda_common::Values x, weight, out;  // [rows, width]; [width], data null: none; [rows, width]
  int64_t num_rows = 0;
  int width = 0;
  float eps = 0;
};

// Queues the work where there is a kernel for it: BF16 (weights in F32 or BF16), a multiple of 64 values up to
// 2,048, enough rows. The bits are those of row_parts.cuh.
bool run_norm_rows(const char* name, const NormRows& job, device::Queue& queue);

}  // namespace tessera::backends::cuda
