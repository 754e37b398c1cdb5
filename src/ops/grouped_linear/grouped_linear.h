// SPDX-License-Identifier: Apache-2.0
#pragma once
// out[r] = W_e x[r] for each row r of group e: rows that are sorted by expert already, and an NVFP4 matrix for each
// expert. A group's rows are those of x and out alike:
//   contiguous  [offsets[e], offsets[e + 1]) of [rows, in]: groups one after another
//   masked      the first counts[e] of [num_groups, max_rows, in]: each group has room for as many
// Rows of no group (before offsets[0], from offsets[num_groups] on, a group's from counts[e] on) are neither read nor
// written: in out they keep what they had.
// How many rows a group has is known to the memory of the backend alone; nothing of the host reads it. So bad sizes are
// no error but count as something else, and no row outside x is ever touched:
//   offsets  below 0 as 0, above num_rows as num_rows, below one before it as that one (so a group that would begin
//            again where another has rows has those that are left, or none)
//   counts   below 0 as 0, above max_rows as max_rows
// Errors, of what the host knows: num_rows that is no multiple of num_groups in the masked layout, or too large.
// A call that was recorded may be launched again with other sizes.
// Rounding: that of `linear` with one group (ops/linear/linear.h). Out's bits are those that the backend's `linear` of
// that name ("packed" and "wgmma" of a GPU: also "rounded") gives for the row, whatever the groups' sizes.
// Cost: each group's matrix once where it has rows, all rows of x and out once.
// Source: DeepSeek-V4 inference/model.py, Expert; the two layouts are those of DeepGEMM's grouped products.
#include <cstdint>
#include <string>
#include <string_view>

#include "ops/precision.h"
#include "ops/variant.h"
#include "ops/weight_view.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

enum class RowLayout : uint8_t { kContiguous, kMasked };
std::string_view to_string(RowLayout layout);  // "contiguous", "masked"

struct GroupedLinear {
  static constexpr const char* kName = "grouped_linear";
  struct Desc {
    int64_t in = 0, out = 0;
    int64_t num_groups = 0;
    RowLayout layout = RowLayout::kContiguous;
    InputMode input = InputMode::kA16;  // not kF32
    DType output = DType::kBF16;        // or kF32
    static constexpr WeightFormat format = WeightFormat::kNvfp4;
    std::string to_string() const;
  };
  // Everything lies in the backend's memory.
  struct Args {
    TensorView x = {};                    // [num_rows, in] BF16; masked: [num_groups, max_rows, in]
    const int32_t* sizes = nullptr;       // offsets [num_groups + 1], or counts [num_groups]
    const WeightView* weights = nullptr;  // [num_groups] of [out, in]
    TensorView out = {};                  // as x, of width out
    int64_t num_rows = 0;                 // of x; masked: num_groups * max_rows. With 8 * num_groups up to 2^31 - 1
    int64_t expected_rows = 0;            // a hint that changes no bit: of a group; 0: all there is room for
    void* workspace = nullptr;
  };
};

int64_t grouped_linear_reference_workspace(const GroupedLinear::Desc& desc, int64_t max_rows);
bool grouped_linear_reference_supports(const GroupedLinear::Desc& desc, std::string& why_not);
void grouped_linear_reference(const GroupedLinear::Desc& desc, const GroupedLinear::Args& args, device::Queue& queue);

// What backends share ----------------------------------------------------------------------------------------------

// Throws where the host's figures are none.
void check_num_rows(const GroupedLinear::Desc& desc, int64_t num_rows);

struct RowRange {
  int64_t begin, count;
};
// Each group's rows, by the rules above, of sizes in host memory. `ranges` [num_groups].
void row_ranges(const GroupedLinear::Desc& desc, const GroupedLinear::Args& args, RowRange* ranges);

}  // namespace tessera::ops
