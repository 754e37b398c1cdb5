// SPDX-License-Identifier: Apache-2.0
// The tile kernels on emulated tiles, against the reference op and row by row.
#include "backends/amx_emulation.h"

#include <gtest/gtest.h>

#include "backends/cpu_common/input_rows.h"
#include "backends/cpu_common/panel_layout.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using backends::cpu_common::PanelJob;
using ops::WeightFormat;

class AmxEmulationTest : public testing::RandomTest {};

// sums of `count` rows of x from `first`, [count][rows of the weight].
std::vector<float> sums_of(const ops::WeightView& packed, const device::Tensor& x, int64_t first, int64_t count) {
  namespace common = backends::cpu_common;
  const common::PanelKernel kernel = packed.format == WeightFormat::kNvfp4      ? backends::amx_emulated::nvfp4
                                     : packed.format == WeightFormat::kFp8Block ? backends::amx_emulated::fp8
                                                                                : backends::amx_emulated::bf16;
  const device::Buffer sums(sizeof(float) * common::kJobPanels * common::kSumRows * common::kPanelRows);
  std::vector<float> out(static_cast<size_t>(count * packed.rows));
  const int64_t all = common::num_panels(packed.rows);
  for (int64_t begin = 0; begin < all; begin += common::kJobPanels) {
    PanelJob job{};
    job.num_panels = std::min(common::kJobPanels, all - begin);
    for (int64_t p = 0; p < job.num_panels; ++p) job.panels[p] = common::panel_of(packed, begin + p);
    job.cols = packed.cols;
    job.rows = x.as<uint16_t>() + first * packed.cols;
    job.row_stride = packed.cols * 2;
    job.num_rows = count;
    job.sums = sums.as<float>();
    kernel(job);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t n = 0; n < job.num_panels * 16 && begin * 16 + n < packed.rows; ++n) {
        out[static_cast<size_t>(t * packed.rows + begin * 16 + n)] =
            job.sums[(n / 16 * common::kSumRows + t) * common::kPanelRows + n % 16] *
            common::format_factor(packed.format) * packed.tensor_scale;
      }
    }
  }
  return out;
}

TEST_F(AmxEmulationTest, EqualsTheReferenceAtEveryNumberOfRows) {
  if (!device::probe_machine().cpu.avx512) GTEST_SKIP() << "needs AVX-512 with VBMI";
  for (const auto format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16}) {
    for (const int64_t count : {1, 2, 15, 16, 17, 31, 32, 33, 50}) {
      const int64_t in = 32 * (1 + static_cast<int64_t>(rng_.below(36))),
                    out = 1 + static_cast<int64_t>(rng_.below(90));
      SCOPED_TRACE(std::string(ops::to_string(format)) + " " + std::to_string(out) + " x " + std::to_string(in) + ", " +
                   std::to_string(count) + " rows");
      const testing::RandomWeight weight = testing::random_weight(rng_, format, out, in);
      const ops::Linear::Desc desc{.in = in, .out = out, .format = format, .output = DType::kF32};
      const device::Tensor x = testing::as_tensor(testing::adversarial(rng_, count, in), DType::kBF16, {count, in});
      testing::PoisonedTensor expected(DType::kF32, {count, out});
      const device::Buffer workspace(static_cast<size_t>(ops::linear_reference_workspace(desc, count)));
      device::Queue queue(1);
      ops::linear_reference(
          desc,
          {.x = x, .weight = weight.view, .y = expected.view(), .num_tokens = count, .workspace = workspace.data()},
          queue);
      const ops::PackedLayout& layout = *backends::cpu_common::panel_layout();
      const device::Buffer data(static_cast<size_t>(layout.data_bytes(weight.view))),
          scales(static_cast<size_t>(layout.scale_bytes(weight.view)));
      ops::WeightView packed = weight.view;
      packed.data = data.data(), packed.block_scales = scales.data();
      layout.pack(weight.view, packed, queue);
      const std::vector<float> found = sums_of(packed, x, 0, count);
      EXPECT_TRUE(testing::is_close(found, expected.floats(), testing::kF32Bound));
      const int64_t t = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(count)));
      EXPECT_TRUE(testing::same_bits(sums_of(packed, x, t, 1),
                                     std::span(found).subspan(static_cast<size_t>(t * out), static_cast<size_t>(out))))
          << "row " << t << " alone";
    }
  }
}

}  // namespace
}  // namespace tessera
