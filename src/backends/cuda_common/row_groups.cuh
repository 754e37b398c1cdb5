// SPDX-License-Identifier: Apache-2.0
#pragma once
// The groups of grouped_linear as tiles take them: entries of work, some rows of one group each, made on the GPU of the
// sizes that lie there. Both layouts make the same: a group's rows follow one another in x, wherever it begins.
#include <cstdint>

#include "backends/cuda_common/expert_slots.cuh"
#include "ops/grouped_linear/grouped_linear.h"

namespace tessera::backends::cuda_common {

// Some rows of a group, as many as a tile takes at most.
struct RowWork {
  const void *data, *scales;  // of the group's matrix
  float tensor_scale;
  int32_t first_row, count;  // in x and out
  int32_t position;          // of the first row where each group's rows begin at a multiple of 8 and none is left out
};

// Part of the workspace: what grouping makes.
struct RowGroups {
  int32_t* totals;  // {positions, entries of work, first row of any group, end of the last's}
  RowWork* work;
};

// At most, of so many rows of x, for tiles of `tile_rows` rows, a multiple of 8.
int64_t most_row_work(const ops::GroupedLinear::Desc& desc, int64_t num_rows, int32_t tile_rows);
int64_t most_row_positions(const ops::GroupedLinear::Desc& desc, int64_t num_rows);

void take_row_groups(const ops::GroupedLinear::Desc& desc, int64_t num_rows, int32_t tile_rows, Workspace& workspace,
                     RowGroups& groups);
// tile_step: of its products (entry_cut.h).
void group_rows(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args, int32_t tile_rows,
                int32_t tile_step, const RowGroups& groups, const device::Queue& queue);

// The inputs as they are multiplied, [num_rows, in]: x itself, or in `a4` and `a8` what it is rounded to, in the
// workspace.
struct GroupInputs {
  uint16_t* rounded;  // null: x itself
  float* factors;     // [num_rows] of the rows' sums; null: 1
  int32_t* marks;     // [num_rows]: 0 where the row is some group's, else -1
};
void take_group_inputs(const ops::GroupedLinear::Desc& desc, int64_t num_rows, Workspace& workspace,
                       GroupInputs& inputs);
// Rounds the groups' rows, where the mode does; returns where the inputs are. After group_rows().
const uint16_t* round_group_inputs(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args,
                                   const RowGroups& groups, const GroupInputs& inputs, const device::Queue& queue);

}  // namespace tessera::backends::cuda_common
