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

struct StoredTensor {
  ops::WeightFormat format = ops::WeightFormat::kF32;
  checkpoint::LocatedTensor codes;         // or the values themselves
  int64_t row_offset = 0;                  // first row inside `codes` (fused experts)
  checkpoint::LocatedTensor block_scales;  // kNvfp4: E4M3 [n, k/16]; kFp8Block: E8M0, F32 or BF16 [n/128, k/128]
  checkpoint::LocatedTensor tensor_scale;  // kNvfp4: F32 scalar
};

// Finds a row's tensors under their official or Hugging Face names and checks dtypes and shapes. Names that belong to
// it are added to `used`.
StoredTensor resolve_weight(const checkpoint::Checkpoint& checkpoint, const Config& config, const WeightRow& row,
                            std::set<std::string>& used);

}  // namespace tessera::model
