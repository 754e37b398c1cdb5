// SPDX-License-Identifier: Apache-2.0
// The tile kernels on emulated tiles, against the reference op and row by row.
#include "backends/amx_emulation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

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

class Packed {
 public:
  explicit Packed(const ops::WeightView& weight)
      : layout_(*backends::cpu_common::panel_layout()),
        data_(static_cast<size_t>(layout_.data_bytes(weight))),
        scales_(static_cast<size_t>(layout_.scale_bytes(weight))),
        view_(weight) {
    view_.data = data_.data(), view_.block_scales = scales_.data();
    device::Queue queue(1);
    layout_.pack(weight, view_, queue);
  }
  const ops::WeightView& view() const { return view_; }

 private:
  const ops::PackedLayout& layout_;
  device::Buffer data_, scales_;
  ops::WeightView view_;
};

TEST_F(AmxEmulationTest, EqualsTheReferenceAtEveryNumberOfRows) {
  if (!device::probe_machine().cpu.avx512) GTEST_SKIP() << "needs AVX-512 with VBMI";
  for (const auto format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16}) {
    for (const int64_t count : {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 50}) {
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
      const Packed packed(weight.view);
      const std::vector<float> found = sums_of(packed.view(), x, 0, count);
      EXPECT_TRUE(testing::is_close(found, expected.floats(), testing::kF32Bound));
      const int64_t t = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(count)));
      EXPECT_TRUE(testing::same_bits(sums_of(packed.view(), x, t, 1),
                                     std::span(found).subspan(static_cast<size_t>(t * out), static_cast<size_t>(out))))
          << "row " << t << " alone";
    }
  }
}

// BF16 bits that arithmetic treats specially. Rows differ in what they hold, so that not all sums are NaN.
uint16_t special_bits(Rng& rng, uint64_t kind) {
  const uint16_t sign = rng.below(2) == 0 ? 0 : 0x8000;
  const uint64_t pick = rng.below(40);
  if (pick < 3) return sign;
  if (kind == 0 || pick < 8) return static_cast<uint16_t>(sign | rng.below(0x80));  // denormals
  if (kind == 1) return static_cast<uint16_t>(sign | (0x80 + rng.below(0x500)));    // products are or become denormal
  if (kind == 2 && pick == 8 && rng.below(20) == 0) return static_cast<uint16_t>(sign | 0x7F80);  // infinite
  if (kind == 3 && pick == 8 && rng.below(20) == 0) return static_cast<uint16_t>(sign | 0x7FC1);
  if (kind == 4) return static_cast<uint16_t>(sign | (0x7E00 + rng.below(0x180)));  // sums overflow
  return static_cast<uint16_t>(sign | (0x3E00 + rng.below(0x200)));
}

TEST_F(AmxEmulationTest, FewRowsAreTheSameBitsAsTiles) {
  if (!device::probe_machine().cpu.avx512) GTEST_SKIP() << "needs AVX-512 with VBMI";
  constexpr int64_t kMost = 64;
  for (const auto format : {WeightFormat::kNvfp4, WeightFormat::kFp8Block, WeightFormat::kBf16}) {
    for (const int64_t in : {32, 96, 1024 + 160, 4096 + 32}) {
      const int64_t out = 1 + static_cast<int64_t>(rng_.below(100));
      testing::RandomWeight weight = testing::random_weight(rng_, format, out, in);
      const Packed packed(weight.view);
      if (format == WeightFormat::kBf16) {
        uint16_t* words = const_cast<uint16_t*>(static_cast<const uint16_t*>(packed.view().data));
        for (int64_t i = 0; i < out * in; ++i) {
          if (rng_.below(8) == 0) words[i] = static_cast<uint16_t>(words[i] & 0x807F);
        }
      }
      device::Tensor x(DType::kBF16, {kMost, in});
      for (int64_t t = 0; t < kMost; ++t) {
        const uint64_t kind = rng_.below(7);
        for (int64_t k = 0; k < in; ++k) x.as<uint16_t>()[t * in + k] = special_bits(rng_, kind);
      }
      const std::vector<float> all = sums_of(packed.view(), x, 0, kMost);
      for (const int64_t count : {1, 1, 2, 2, 3, 3, 4, 4, 5, 16, 17}) {
        const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(kMost - count + 1)));
        const std::vector<float> found = sums_of(packed.view(), x, first, count);
        for (size_t i = 0; i < found.size(); ++i) {
          const float expected = all[static_cast<size_t>(first * out) + i];
          if (std::isnan(expected) && std::isnan(found[i])) continue;
          ASSERT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(found[i]))
              << ops::to_string(format) << " [" << out << ", " << in << "], " << count << " rows from " << first
              << ", at " << i << ": " << found[i] << ", tiles " << expected;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
