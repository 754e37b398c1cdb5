// SPDX-License-Identifier: Apache-2.0
#include "ops/grouped_linear/grouped_linear.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "ops/linear/linear.h"
#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int64_t kGrain = 1 << 15;  // multiply-adds worth waking a thread for

// The workspace.
struct Scratch {
  RowRange* ranges;  // [num_groups]
  float* x;          // [num_rows, in] as the multiply sees it, of rows that are some group's
  float* factors;    // [num_rows]
};

Scratch scratch_of(const GroupedLinear::Desc& desc, const GroupedLinear::Args& args) {
  auto* ranges = static_cast<RowRange*>(args.workspace);
  float* x = reinterpret_cast<float*>(ranges + desc.num_groups);
  return {ranges, x, x + args.num_rows * desc.in};
}

Linear::Desc linear_of(const GroupedLinear::Desc& desc) {
  return {.in = desc.in, .out = desc.out, .format = desc.format, .input = desc.input, .output = desc.output};
}

}  // namespace

std::string_view to_string(RowLayout layout) {
  return layout == RowLayout::kMasked ? "masked" : "contiguous";
}

std::string GroupedLinear::Desc::to_string() const {
  return fmt::format("{} {} of {}", num_groups, ops::to_string(layout), linear_of(*this).to_string());
}

void check_num_rows(const GroupedLinear::Desc& desc, int64_t num_rows) {
  TESSERA_CHECK(desc.layout != RowLayout::kMasked || num_rows % desc.num_groups == 0,
                "groups of a masked layout have room for as many rows each");
  TESSERA_CHECK(num_rows + 8 * desc.num_groups <= std::numeric_limits<int32_t>::max(), "more rows than 32 bits count");
}

void row_ranges(const GroupedLinear::Desc& desc, const GroupedLinear::Args& args, RowRange* ranges) {
  check_num_rows(desc, args.num_rows);
  if (desc.layout == RowLayout::kMasked) {
    const int64_t max_rows = args.num_rows / desc.num_groups;
    for (int64_t e = 0; e < desc.num_groups; ++e) {
      ranges[e] = {e * max_rows, std::clamp<int64_t>(args.sizes[e], 0, max_rows)};
    }
    return;
  }
  int64_t begin = std::clamp<int64_t>(args.sizes[0], 0, args.num_rows);
  for (int64_t e = 0; e < desc.num_groups; ++e) {
    const int64_t end = std::max(begin, std::clamp<int64_t>(args.sizes[e + 1], 0, args.num_rows));
    ranges[e] = {begin, end - begin};
    begin = end;
  }
}

int64_t grouped_linear_reference_workspace(const GroupedLinear::Desc& desc, int64_t max_rows) {
  return desc.num_groups * static_cast<int64_t>(sizeof(RowRange)) +
         max_rows * (desc.in + 1) * static_cast<int64_t>(sizeof(float));
}

bool grouped_linear_reference_supports(const GroupedLinear::Desc& desc, std::string& why_not) {
  if (desc.num_groups < 1) {
    why_not = "there is no group";
    return false;
  }
  if (desc.input == InputMode::kF32) {
    why_not = "inputs are BF16";
    return false;
  }
  return linear_reference_supports(linear_of(desc), why_not);
}

void grouped_linear_reference(const GroupedLinear::Desc& desc, const GroupedLinear::Args& args, device::Queue& queue) {
  if (args.num_rows == 0) return;
  const Scratch scratch = scratch_of(desc, args);
  row_ranges(desc, args, scratch.ranges);
  queue.parallel_for(desc.num_groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      const RowRange rows = scratch.ranges[e];
      for (int64_t r = rows.begin; r < rows.begin + rows.count; ++r) {
        float* row = scratch.x + r * desc.in;
        load_floats(args.x, r * desc.in, desc.in, row);
        scratch.factors[r] = prepare_input_row(desc.input, row, desc.in, 0) * args.weights[e].tensor_scale;
      }
    }
  });
  const int64_t rows_each = std::max<int64_t>(1, args.num_rows / desc.num_groups);
  const int64_t grain = std::max<int64_t>(1, kGrain / (desc.in * rows_each));
  queue.parallel_for(desc.num_groups * desc.out, grain, [&](int64_t begin, int64_t end) {
    float weight[kMaxLinearIn];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t e = item / desc.out, n = item % desc.out;
      const RowRange rows = scratch.ranges[e];
      if (rows.count == 0) continue;
      decode_weight_row(args.weights[e], n, weight);
      for (int64_t r = rows.begin; r < rows.begin + rows.count; ++r) {
        const float y = dot(scratch.x + r * desc.in, weight, desc.in) * scratch.factors[r];
        store_floats(args.out, r * desc.out + n, 1, &y);
      }
    }
  });
}

}  // namespace tessera::ops
