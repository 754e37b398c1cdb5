// SPDX-License-Identifier: Apache-2.0
// grouped_linear: a row of a group has the bits that the same backend's `linear` gives it, whatever the sizes of the
// groups and wherever they lie; other rows of out keep what they had; sizes out of range touch nothing else.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "backends/sm90/sum_plans.h"
#include "base/error.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/packed_layout.h"
#include "ops/reference_rows.h"
#include "testing/op_harness.h"
#include "testing/sanitized.h"

namespace tessera {
namespace {

using ops::GroupedLinear;
using ops::InputMode;
using ops::Linear;
using ops::RowLayout;
using ops::RowRange;
using Desc = GroupedLinear::Desc;
using Sizes = std::vector<int32_t>;

constexpr int32_t kMin = std::numeric_limits<int32_t>::min(), kMax = std::numeric_limits<int32_t>::max();

Linear::Desc linear_of(const Desc& desc) {
  return {.in = desc.in, .out = desc.out, .format = desc.format, .input = desc.input, .output = desc.output};
}

std::vector<RowRange> ranges_of(const Desc& desc, const Sizes& sizes, int64_t num_rows) {
  std::vector<RowRange> ranges(static_cast<size_t>(desc.num_groups));
  ops::row_ranges(desc, {.sizes = sizes.data(), .num_rows = num_rows}, ranges.data());
  return ranges;
}

// The variant of `linear` that is held to have the same bits: of the same backend, of that name, or that which rounds
// inputs first.
struct LinearVariant {
  const ops::Variant<Linear>* variant = nullptr;
  bool is_on_gpu = false;
};
LinearVariant linear_variant(const ops::Variant<GroupedLinear>& grouped, const Linear::Desc& desc) {
  const auto* original = testing::is_on_gpu(grouped) ? testing::staged_variant<GroupedLinear>() : &grouped;
  for (const ops::Backend* backend : backends::all_backends()) {
    bool is_its = false;
    for (const auto& variant : backend->variants_of<GroupedLinear>()) is_its = is_its || &variant == original;
    if (!is_its) continue;
    const std::string own = grouped.name, rounded = desc.input != InputMode::kA16 && own != "simple" ? "rounded" : own;
    for (const auto& variant : backend->variants_of<Linear>()) {
      std::string why_not;
      const std::string name = variant.name;
      if ((name == own || name == rounded) && variant.supports(desc, why_not)) {
        return {&variant, backend->is_on_gpu};
      }
    }
  }
  return {};
}

std::vector<float> run_linear(const LinearVariant& chosen, const Linear::Desc& desc, const device::Tensor& x,
                              const ops::WeightView& weight, const RowRange& rows) {
  ops::Variant<Linear> variant = *chosen.variant;
  if (chosen.is_on_gpu) {
    testing::staged_variant<Linear>() = chosen.variant;
    variant.run = testing::run_on_gpu<Linear>;
  }
  return testing::run_linear(variant, desc, x, weight, rows.begin, rows.count, 2);
}

class GroupedLinearTest : public testing::RandomTest {
 protected:
  void check(const Desc& desc, const Sizes& sizes, int64_t num_rows, int64_t expected_rows = 0, bool has_nans = false);
  int64_t below(int64_t count) { return static_cast<int64_t>(rng_.below(static_cast<uint64_t>(count))); }
};

// All of out as floats, rows of no group too: those are poison.
std::vector<float> run_grouped(const ops::Variant<GroupedLinear>& variant, const Desc& desc, GroupedLinear::Args args) {
  const device::Buffer workspace = testing::workspace_for(variant, desc, args.num_rows);
  args.workspace = workspace.data();
  testing::PoisonedTensor out(desc.output, {args.num_rows, desc.out});
  args.out = out.view();
  device::Queue queue(2);
  variant.run(desc, args, queue);
  EXPECT_TRUE(out.is_guard_intact());
  return out.floats();
}

void GroupedLinearTest::check(const Desc& desc, const Sizes& sizes, int64_t num_rows, int64_t expected_rows,
                              bool has_nans) {
  SCOPED_TRACE(std::to_string(num_rows) + " rows");
  const std::vector<RowRange> ranges = ranges_of(desc, sizes, num_rows);
  std::vector<testing::RandomWeight> weights;
  for (int64_t e = 0; e < desc.num_groups; ++e) {
    weights.push_back(testing::random_weight(rng_, desc.format, desc.out, desc.in));
    if (!has_nans || e % 3 == 2) continue;
    auto* scales = static_cast<uint8_t*>(const_cast<void*>(weights.back().view.block_scales));
    scales[below(weights.back().view.scale_bytes())] = 0x7F;
  }
  std::vector<float> values = testing::adversarial(rng_, num_rows, desc.in);
  if (has_nans) values[static_cast<size_t>(below(std::ssize(values)))] = std::numeric_limits<float>::quiet_NaN();
  if (has_nans) values[static_cast<size_t>(below(std::ssize(values)))] = std::numeric_limits<float>::infinity();
  const device::Tensor x = testing::as_tensor(values, DType::kBF16, {num_rows, desc.in});
  const Linear::Desc linear = linear_of(desc);
  bool is_checked = false;
  testing::for_each_variant<GroupedLinear>(desc, [&](const ops::Variant<GroupedLinear>& variant, bool) {
    const LinearVariant same = linear_variant(variant, linear);
    ASSERT_NE(same.variant, nullptr);
    std::vector<testing::VariantWeight> packed;
    std::vector<ops::WeightView> views;
    for (const testing::RandomWeight& weight : weights) {
      packed.push_back(testing::weight_for(variant, desc, weight.view));
      views.push_back(packed.back().view);
    }
    const std::vector<float> found = run_grouped(variant, desc,
                                                 {.x = x.view(),
                                                  .sizes = sizes.data(),
                                                  .weights = views.data(),
                                                  .num_rows = num_rows,
                                                  .expected_rows = expected_rows});
    // What nobody writes, by PoisonedTensor.
    std::vector<float> expected = testing::PoisonedTensor(desc.output, {num_rows, desc.out}).floats();
    for (int64_t e = 0; e < desc.num_groups; ++e) {
      const RowRange rows = ranges[static_cast<size_t>(e)];
      if (rows.count == 0) continue;
      // The whole group, or a row by itself.
      const bool is_one = rng_.below(4) == 0;
      const RowRange some = is_one ? RowRange{rows.begin + below(rows.count), 1} : rows;
      const std::vector<float> alone = run_linear(same, linear, x, views[static_cast<size_t>(e)], some);
      std::copy_n(found.begin() + rows.begin * desc.out, rows.count * desc.out,
                  expected.begin() + rows.begin * desc.out);
      std::copy(alone.begin(), alone.end(), expected.begin() + some.begin * desc.out);
    }
    EXPECT_TRUE(has_nans ? testing::same_bits_or_nan(found, expected) : testing::same_bits(found, expected));
    is_checked = true;
  });
  EXPECT_TRUE(is_checked);
}

Sizes offsets_of(const std::vector<int32_t>& counts, int32_t first = 0) {
  Sizes offsets = {first};
  for (const int32_t count : counts) offsets.push_back(offsets.back() + count);
  return offsets;
}

constexpr InputMode kModes[] = {InputMode::kA16, InputMode::kA8, InputMode::kA4};

TEST_F(GroupedLinearTest, RowsHaveTheBitsOfLinear) {
  for (const InputMode mode : kModes) {
    SCOPED_TRACE(ops::to_string(mode));
    for (const DType output : {DType::kBF16, DType::kF32}) {
      const auto desc = [&](int64_t in, int64_t out, RowLayout layout) {
        return Desc{.in = in, .out = out, .num_groups = 4, .layout = layout, .input = mode, .output = output};
      };
      const int32_t some = 1 + static_cast<int32_t>(below(12));
      const Sizes counts = {some, 0, 17, 3}, offsets = offsets_of(counts, 2);
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>{512, 80}, {128, 33}, {208, 67}, {1040, 16}}) {
        if (testing::kIsSanitized && below(2) == 0) continue;
        check(desc(in, out, RowLayout::kContiguous), offsets, offsets.back() + 5);
        check(desc(in, out, RowLayout::kMasked), counts, 4 * 17);
      }
    }
  }
}

// Hopper's kernels of few rows and of many, whichever the hint asks for; on other machines whatever there is.
TEST_F(GroupedLinearTest, TheHintChangesNoBit) {
  const int64_t out = testing::kGpuIsEmulated ? 144 : 4112, hint_of_few = testing::kGpuIsEmulated ? 5 : 3;
  for (const InputMode mode : kModes) {
    SCOPED_TRACE(ops::to_string(mode));
    const DType output = below(2) == 0 ? DType::kBF16 : DType::kF32;
    const Desc desc{.in = 1024, .out = out, .num_groups = 3, .input = mode, .output = output};
    const Sizes offsets = offsets_of({static_cast<int32_t>(1 + below(9)), 40, 0}, 1);
    for (const int64_t hint : {int64_t{0}, hint_of_few, int64_t{1}}) check(desc, offsets, offsets.back() + 3, hint);
  }
  using backends::sm90::ExpertKernels, backends::sm90::grouped_kernels;
  const Desc few{.in = 1024, .out = 144, .num_groups = 3};
  EXPECT_EQ(grouped_kernels(few, 50, 0, 3), ExpertKernels::kWide);
  EXPECT_EQ(grouped_kernels(few, 50, 5, 3), ExpertKernels::kFew);
  EXPECT_EQ(grouped_kernels(few, 50, 1, 3), ExpertKernels::kPortable);
}

// All rows in one group: more than a tile of the widest kernel; and one group alone.
TEST_F(GroupedLinearTest, OneGroupHasAll) {
  const int32_t rows = 129 + static_cast<int32_t>(below(8));
  for (const RowLayout layout : {RowLayout::kContiguous, RowLayout::kMasked}) {
    const bool is_masked = layout == RowLayout::kMasked;
    Desc desc{.in = 512, .out = 48, .num_groups = 3, .layout = layout};
    check(desc, is_masked ? Sizes{0, rows, 0} : offsets_of({0, rows, 0}), is_masked ? 3 * rows : rows);
    desc.num_groups = 1;
    check(desc, is_masked ? Sizes{rows} : offsets_of({rows}), rows);
    check(desc, is_masked ? Sizes{1} : offsets_of({1}), 1);
    check(desc, is_masked ? Sizes{0} : offsets_of({0}), 7);  // nobody's
  }
}

TEST_F(GroupedLinearTest, ManyGroups) {
  for (const RowLayout layout : {RowLayout::kContiguous, RowLayout::kMasked}) {
    const Desc desc{.in = 512, .out = 16, .num_groups = 270, .layout = layout};
    Sizes counts;
    for (int64_t e = 0; e < desc.num_groups; ++e) counts.push_back(below(20) == 0 ? 2 : 0);
    const Sizes offsets = offsets_of(counts, 1);
    const bool is_masked = layout == RowLayout::kMasked;
    check(desc, is_masked ? counts : offsets, is_masked ? 2 * desc.num_groups : offsets.back() + 1);
  }
}

// Sizes that are none: what they count as, and that nothing else is touched (guards around all arrays, and poison).
TEST_F(GroupedLinearTest, SizesOutOfRange) {
  const Desc contiguous{.in = 512, .out = 48, .num_groups = 4};
  const auto begins = [&](const Sizes& sizes, int64_t num_rows) {
    std::vector<int64_t> found;
    for (const RowRange& rows : ranges_of(contiguous, sizes, num_rows)) {
      found.insert(found.end(), {rows.begin, rows.count});
    }
    return found;
  };
  using Expected = std::vector<int64_t>;
  EXPECT_EQ(begins({-3, 4, 2, 9, 40}, 20), (Expected{0, 4, 4, 0, 4, 5, 9, 11}));
  EXPECT_EQ(begins({5, kMax, 3, kMin, 20}, 20), (Expected{5, 15, 20, 0, 20, 0, 20, 0}));
  EXPECT_EQ(begins({30, 0, 0, 0, 0}, 20), (Expected{20, 0, 20, 0, 20, 0, 20, 0}));
  const Sizes bad_offsets[] = {{-3, 4, 2, 9, 40},     {5, kMax, 3, kMin, 20}, {kMax, kMin, 0, 5, 5},
                               {0, 15, 5, 15, 10},    {20, 15, 10, 5, 0},     {-1, -1, -1, -1, -1},
                               {kMin, kMin, 7, 7, 7}, {0, 20, 0, 20, 0},      {kMax, kMax, kMax, 1, 2}};
  const Sizes bad_counts[] = {{-1, 6, 0, 5}, {kMax, kMin, 4, 5}, {-1, kMin, -7, 0}, {6, 7, kMax, 1000}};
  for (const InputMode mode : kModes) {
    SCOPED_TRACE(ops::to_string(mode));
    for (const int64_t in : {512, 208}) {  // kernels of packed weights, and of odd widths
      Desc desc = contiguous;
      desc.input = mode, desc.in = in;
      for (const Sizes& sizes : bad_offsets) check(desc, sizes, 20, 1 + 7 * below(2));
      desc.layout = RowLayout::kMasked;
      for (const Sizes& sizes : bad_counts) check(desc, sizes, 20, 1 + 7 * below(2));
    }
  }
}

// A NaN or infinity among a row's inputs is that row's; one among a group's scales is its matrix row's. Compared by
// bits with `linear`, and no other row or group has any.
TEST_F(GroupedLinearTest, NansStayWhereTheyAre) {
  for (const RowLayout layout : {RowLayout::kContiguous, RowLayout::kMasked}) {
    const Desc desc{.in = 512, .out = 48, .num_groups = 3, .layout = layout, .output = DType::kF32};
    const Sizes counts = {4, 9, 2};
    const bool is_masked = layout == RowLayout::kMasked;
    for (const int64_t hint : {0, 1}) {
      check(desc, is_masked ? counts : offsets_of(counts), is_masked ? 27 : 15, hint, true);
    }
  }
}

// Sizes are read where the kernels run: a recording that is launched again takes those that lie there by then.
TEST_F(GroupedLinearTest, ARecordedCallTakesOtherSizes) {
  constexpr int64_t kRows = 40;
  const Desc desc{.in = 512, .out = 48, .num_groups = 3, .input = kModes[rng_.below(std::size(kModes))]};
  const Sizes some_sizes[] = {offsets_of({7, 0, 20}, 3), offsets_of({0, 40, 0}), {-5, 9, 2, kMax}, {0, 0, 0, 0}};
  const device::Tensor x =
      testing::as_tensor(testing::adversarial(rng_, kRows, desc.in), DType::kBF16, {kRows, desc.in});
  std::vector<testing::RandomWeight> weights;
  for (int64_t e = 0; e < desc.num_groups; ++e) {
    weights.push_back(testing::random_weight(rng_, desc.format, desc.out, desc.in));
  }
  testing::for_each_variant<GroupedLinear>(desc, [&](const ops::Variant<GroupedLinear>& variant, bool) {
    if (!testing::is_on_gpu(variant)) return;
    const ops::Variant<GroupedLinear>& original = *testing::staged_variant<GroupedLinear>();
    device::Executor& executor = testing::gpu_stage_memory().executor();
    if (!executor.can_record()) return;
    device::MemorySpace& memory = executor.memory();
    const auto placed = [&](const void* host, int64_t bytes) {
      device::Buffer buffer(static_cast<size_t>(bytes), memory);
      memory.upload(buffer.data(), host, buffer.size());
      return buffer;
    };
    const ops::PackedLayout* layout = verify::layout_for(variant, desc);
    std::vector<testing::VariantWeight> packed;
    std::vector<ops::WeightView> views, placed_views;
    std::vector<device::Buffer> buffers;
    for (const testing::RandomWeight& weight : weights) {
      const ops::WeightView& view =
          views.emplace_back(packed.emplace_back(testing::weight_for(variant, desc, weight.view)).view);
      ops::WeightView& there = placed_views.emplace_back(view);
      buffers.push_back(placed(view.data, layout == nullptr ? view.data_bytes() : layout->data_bytes(view)));
      there.data = buffers.back().data();
      const int64_t scale_bytes = layout == nullptr ? view.scale_bytes() : layout->scale_bytes(view);
      if (scale_bytes > 0) buffers.push_back(placed(view.block_scales, scale_bytes));
      there.block_scales = scale_bytes > 0 ? buffers.back().data() : nullptr;
    }
    const device::Buffer all = placed(placed_views.data(), std::ssize(placed_views) * sizeof(ops::WeightView));
    const device::Buffer inputs = placed(x.view().data, x.view().num_bytes());
    const device::Buffer sizes(some_sizes[0].size() * sizeof(int32_t), memory);
    const testing::PoisonedTensor out(desc.output, {kRows, desc.out});
    const device::Buffer outputs(static_cast<size_t>(out.view().num_bytes()), memory);
    const device::Buffer workspace(static_cast<size_t>(original.workspace_bytes(desc, kRows)), memory);
    const GroupedLinear::Args args{.x = {inputs.data(), DType::kBF16, {kRows, desc.in}},
                                   .sizes = sizes.as<int32_t>(),
                                   .weights = all.as<ops::WeightView>(),
                                   .out = {outputs.data(), desc.output, {kRows, desc.out}},
                                   .num_rows = kRows,
                                   .workspace = workspace.data()};
    const auto recording = executor.record([&] { original.run(desc, args, executor.queue()); });
    const std::vector<uint8_t> poison(outputs.size(), 0xFF);
    for (const Sizes& those : some_sizes) {
      memory.upload(sizes.data(), those.data(), sizes.size());
      memory.upload(outputs.data(), poison.data(), poison.size());
      recording->launch();
      device::Tensor found(desc.output, {kRows, desc.out});
      memory.download(found.view().data, outputs.data(), outputs.size());
      executor.synchronize();
      std::vector<float> values(static_cast<size_t>(kRows * desc.out));
      ops::load_floats(found.view(), 0, std::ssize(values), values.data());
      EXPECT_TRUE(testing::same_bits(
          values, run_grouped(variant, desc,
                              {.x = x.view(), .sizes = those.data(), .weights = views.data(), .num_rows = kRows})));
    }
  });
}

TEST_F(GroupedLinearTest, RefusesWhatTheHostKnowsToBeWrong) {
  const Desc masked{.in = 512, .out = 16, .num_groups = 3, .layout = RowLayout::kMasked};
  EXPECT_NO_THROW(ops::check_num_rows(masked, 0));
  EXPECT_NO_THROW(ops::check_num_rows(masked, 6));
  EXPECT_THROW(ops::check_num_rows(masked, 7), Error);
  EXPECT_THROW(ops::check_num_rows(masked, int64_t{3} << 30), Error);
  const Desc contiguous{.in = 512, .out = 16, .num_groups = 3};
  EXPECT_NO_THROW(ops::check_num_rows(contiguous, 7));
  EXPECT_NO_THROW(ops::check_num_rows(contiguous, kMax - 24));
  EXPECT_THROW(ops::check_num_rows(contiguous, kMax - 23), Error);
}

TEST_F(GroupedLinearTest, DeclinesWhatIsNoSuchMap) {
  std::string why_not;
  EXPECT_FALSE(ops::grouped_linear_reference_supports({.in = 512, .out = 16}, why_not));
  EXPECT_FALSE(ops::grouped_linear_reference_supports({.in = 500, .out = 16, .num_groups = 1}, why_not));
  EXPECT_FALSE(ops::grouped_linear_reference_supports({.in = 512, .out = 16, .num_groups = 1, .input = InputMode::kF32},
                                                      why_not));
  EXPECT_TRUE(ops::grouped_linear_reference_supports({.in = 512, .out = 16, .num_groups = 1}, why_not));
}

}  // namespace
}  // namespace tessera
