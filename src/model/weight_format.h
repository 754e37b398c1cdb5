// SPDX-License-Identifier: Apache-2.0
#pragma once
// How one tensor of the weight table is stored: which tensors of the checkpoint hold it, under which names, in which
// format. The evidence is the tensors themselves; config.json's quantization_config decides nothing.
#include <set>
#include <string>

#include "checkpoint/checkpoint.h"
#include "model/weight_spec.h"
#include "ops/weight_view.h"

namespace tessera::model {

// Formats on disk; docs/formats/checkpoints.md has the evidence for each.
enum class StoredFormat : uint8_t {
  kF32,
  kBf16,
  kFp8Block,
  kNvfp4,            // ModelOpt: the tensor scale multiplies
  kNvfp4Reciprocal,  // compressed-tensors: the stored number is 1 / tensor scale
  kMxfp4,            // becomes NVFP4 when it is read (numeric/mxfp4_to_nvfp4.h)
};

std::string_view to_string(StoredFormat format);
// How many consecutive rows share scales, but for one of the whole tensor.
int64_t rows_of_a_scale(StoredFormat format);

struct StoredTensor {
  StoredFormat format = StoredFormat::kF32;
  checkpoint::LocatedTensor codes;         // or the values themselves
  int64_t row_offset = 0;                  // first row inside `codes` (fused experts)
  checkpoint::LocatedTensor block_scales;  // NVFP4: E4M3 [n, k/16]; kMxfp4: E8M0 or its bytes as U8 [n, k/32];
                                           // kFp8Block: E8M0, F32 or BF16 [n/128, k/128], rounded up
  checkpoint::LocatedTensor tensor_scale;  // NVFP4: one F32
};

// Finds a row's tensors under their official or Hugging Face names and checks dtypes and shapes. Names that belong to
// it are added to `used`. Throws kDataLoss naming file, tensor, expected and found, for a tensor that is missing, of
// another dtype or shape, or described twice in ways that disagree.
StoredTensor resolve_weight(const checkpoint::Checkpoint& checkpoint, const Config& config, const WeightRow& row,
                            std::set<std::string>& used);

}  // namespace tessera::model
