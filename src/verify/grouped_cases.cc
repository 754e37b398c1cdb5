// SPDX-License-Identifier: Apache-2.0
// Linear maps of rows that are sorted by expert.
#include <algorithm>
#include <cstring>
#include <limits>

#include "verify/cases.h"
#include "verify/fills.h"

namespace tessera::verify {

using ops::GroupedLinear;
using ops::InputMode;
using ops::RowLayout;

namespace {

constexpr InputMode kModes[] = {InputMode::kA16, InputMode::kA8, InputMode::kA4};
constexpr RowLayout kLayouts[] = {RowLayout::kContiguous, RowLayout::kMasked};

// How many rows each group has of `most` it may have, in all no more than `total`.
std::vector<int64_t> random_counts(Rng& rng, Form form, int64_t num_groups, int64_t most, int64_t total) {
  const int64_t chosen = static_cast<int64_t>(rng.below(static_cast<uint64_t>(num_groups)));
  std::vector<int64_t> counts;
  for (int64_t e = 0; e < num_groups; ++e) {
    const bool has_none = (form == Form::kOneExpert && e != chosen) || (form == Form::kNoneOfSome && e % 2 == 1);
    const bool has_all = form == Form::kOneExpert || rng.below(4) == 0;
    const int64_t wanted = has_all ? most : static_cast<int64_t>(rng.below(static_cast<uint64_t>(most) + 1));
    counts.push_back(has_none ? 0 : std::min(wanted, total));
    total -= counts.back();
  }
  return counts;
}

// Offsets or counts as the op takes them; with kBadSizes some are none.
std::vector<int32_t> random_sizes(Rng& rng, const GroupedLinear::Desc& desc, Form form, int64_t num_rows) {
  constexpr int32_t kBad[] = {-1, -1000, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  std::vector<int32_t> sizes;
  if (desc.layout == RowLayout::kMasked) {
    for (const int64_t count : random_counts(rng, form, desc.num_groups, num_rows / desc.num_groups, num_rows)) {
      sizes.push_back(static_cast<int32_t>(count));
    }
  } else {
    // Some rows before the first group and behind the last are nobody's.
    const int64_t first = form == Form::kOneExpert ? 0 : static_cast<int64_t>(rng.below(2)) * (num_rows / 8);
    const int64_t total = num_rows - first - (form == Form::kOneExpert ? 0 : num_rows / 9);
    const int64_t most = form == Form::kOneExpert ? total : 2 * total / desc.num_groups + 1;
    sizes.push_back(static_cast<int32_t>(first));
    for (const int64_t count : random_counts(rng, form, desc.num_groups, most, total)) {
      sizes.push_back(sizes.back() + static_cast<int32_t>(count));
    }
  }
  if (form != Form::kBadSizes) return sizes;
  for (int32_t& size : sizes) {
    const uint64_t what = rng.below(3);
    if (what == 0) size = kBad[rng.below(std::size(kBad))];
    if (what == 1) size = static_cast<int32_t>(rng.below(static_cast<uint64_t>(2 * num_rows)));
  }
  return sizes;
}

}  // namespace

std::vector<Spec<GroupedLinear>> specs_of(GroupedLinear, bool is_quick) {
  std::vector<Spec<GroupedLinear>> specs;
  // Rows for each group; masked: that all of them may have.
  const auto add = [&](GroupedLinear::Desc desc, int64_t rows_each, Fill fill, const char* label,
                       Form form = Form::kUsual) {
    for (const RowLayout layout : kLayouts) {
      desc.layout = layout;
      specs.push_back({desc, desc.num_groups * rows_each, fill, 0, label, form});
    }
  };
  for (const InputMode mode : kModes) {
    for (const DType output : {DType::kBF16, DType::kF32}) {
      // An odd width, and those that are packed, whole units and parts of them.
      const GroupedLinear::Desc odd{.in = 208, .out = 67, .num_groups = 5, .input = mode, .output = output};
      GroupedLinear::Desc part = odd, whole = odd;
      part.in = 640, part.out = 33;
      whole.in = 512, whole.out = 80;
      for (const GroupedLinear::Desc& desc : {odd, part, whole}) {
        for (const int64_t rows_each : {1, 11}) add(desc, rows_each, Fill::kMixed, "small");
      }
      if (output == DType::kF32) continue;
      for (const Form form : {Form::kOneExpert, Form::kNoneOfSome, Form::kBadSizes}) {
        add(whole, 3, Fill::kMixed, "small", form);
        add(whole, 17, Fill::kMixed, "small", form);
        add(part, 9, Fill::kMixed, "small", form);
        add(odd, 9, Fill::kMixed, "small", form);
      }
      for (const Fill fill : {Fill::kNormal, Fill::kZero, Fill::kDenormal}) {
        add(part, 4, fill, "small");
        add(whole, 7, fill, "small");
      }
      GroupedLinear::Desc one = whole;
      one.num_groups = 1;
      for (const int64_t rows : {1, 130}) add(one, rows, Fill::kMixed, "one group");
    }
  }
  // More groups than a block of the kernel that cuts them takes at once.
  add({.in = 128, .out = 16, .num_groups = 300}, 2, Fill::kMixed, "many groups");
  add({.in = 128, .out = 16, .num_groups = 300}, 2, Fill::kMixed, "many groups", Form::kBadSizes);
  if (is_quick) return specs;
  for (const InputMode mode : kModes) {
    for (const int64_t rows_each : {1, 8, 60}) {
      const GroupedLinear::Desc w1{.in = 4096, .out = 2048, .num_groups = 8, .input = mode};
      GroupedLinear::Desc w2 = w1;
      w2.in = 2048, w2.out = 4096;
      add(w1, rows_each, rows_each == 1 ? Fill::kNormal : Fill::kMixed, "Flash w1, 8 of 256 experts");
      add(w2, rows_each, rows_each == 1 ? Fill::kNormal : Fill::kMixed, "Flash w2, 8 of 256 experts");
    }
  }
  return specs;
}

Case<GroupedLinear> make_case(Rng& rng, const Spec<GroupedLinear>& spec) {
  const GroupedLinear::Desc& desc = spec.desc;
  const int64_t num_rows = spec.num_tokens;
  Case<GroupedLinear> one;
  const std::vector<int32_t> sizes = random_sizes(rng, desc, spec.form, num_rows);
  one.args.sizes = one.arrays.array(sizes);
  one.args.x = one.arrays.tensor(filled(rng, spec.fill, num_rows, desc.in), DType::kBF16, {num_rows, desc.in});
  one.args.num_rows = num_rows;
  one.args.expected_rows = rng.below(2) == 0 ? 0 : 1 + static_cast<int64_t>(rng.below(20));
  // Rows that are nobody's are NaN: whatever reads them shows.
  std::vector<ops::RowRange> ranges(static_cast<size_t>(desc.num_groups));
  ops::row_ranges(desc, one.args, ranges.data());
  std::vector<char> is_used(static_cast<size_t>(num_rows));
  for (const ops::RowRange& rows : ranges) {
    std::fill_n(is_used.begin() + rows.begin, rows.count, char{1});
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    if (is_used[static_cast<size_t>(r)] != 0) continue;
    std::memset(one.args.x.as<uint16_t>() + r * desc.in, 0xFF, static_cast<size_t>(desc.in) * 2);
  }
  std::vector<ops::WeightView> weights;
  for (int64_t e = 0; e < desc.num_groups; ++e) {
    weights.push_back(one.arrays.weight(rng, desc.format, desc.out, desc.in));
  }
  one.args.weights = one.arrays.array(weights);
  one.args.out = one.arrays.output("out", desc.output, {num_rows, desc.out}, Rule::kValues);
  return one;
}

}  // namespace tessera::verify
