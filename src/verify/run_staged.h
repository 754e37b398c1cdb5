// SPDX-License-Identifier: Apache-2.0
#pragma once
// One call of a variant on arrays of the host, in the memory of an executor (verify/stage.h).
#include <string>
#include <vector>

#include "ops/variant.h"
#include "verify/op_arrays.h"
#include "verify/variant_weight.h"

namespace tessera::verify {

// `args` as the op takes them, but in host memory and, in their weights, as weight_for() made them; outputs hold
// poison, and what was written after. A workspace is taken care of. Returns what was wrong (Stage::run).
template <class Op>
std::vector<std::string> run_staged(StageMemory& memory, const ops::Variant<Op>& variant, const typename Op::Desc& desc,
                                    const typename Op::Args& args) {
  typename Op::Args mine = args;
  Stage stage(memory, layout_for(variant, desc));
  add_arrays(stage, desc, mine);
  device::Buffer workspace;
  if constexpr (requires { mine.workspace; }) {
    int64_t num_tokens = 1;
    if constexpr (requires { mine.num_tokens; }) num_tokens = mine.num_tokens;
    if constexpr (requires { mine.num_rows; }) num_tokens = mine.num_rows;
    const int64_t bytes = variant.workspace_bytes == nullptr ? 0 : variant.workspace_bytes(desc, num_tokens);
    workspace = device::Buffer(static_cast<size_t>(bytes));
    mine.workspace = workspace.data();
    stage.add(mine.workspace, bytes, Access::kScratch);
  }
  return stage.run([&](device::Queue& queue) {
    queue.begin_op({Op::kName, variant.name});
    variant.run(desc, mine, queue);
    queue.end_op();
  });
}

}  // namespace tessera::verify
