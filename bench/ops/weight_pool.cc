// SPDX-License-Identifier: Apache-2.0
#include "bench/ops/weight_pool.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "backends/cuda_common/packed_units.h"
#include "base/rng.h"
#include "numeric/bf16.h"

namespace tessera::bench {

using ops::WeightFormat;

WeightPool::WeightPool(int64_t bytes, device::MemorySpace& memory)
    : codes_(static_cast<size_t>(bytes), memory),
      scales_(static_cast<size_t>(bytes / 8), memory),
      block_scales_(kBlockScaleBytes, memory),
      values_(static_cast<size_t>(bytes), memory) {
  constexpr int64_t kSeedBytes = 1 << 20;
  Rng rng(7);
  std::vector<uint8_t> codes(kSeedBytes), scales(kSeedBytes);
  std::vector<uint16_t> values(kSeedBytes / 2);
  for (auto& code : codes) {
    do code = static_cast<uint8_t>(rng.below(256));
    while ((code & 0x7F) == 0x7F);  // no NaN in E4M3 either
  }
  for (auto& scale : scales) scale = static_cast<uint8_t>(0x20 + rng.below(0x40));
  // In pairs also FP32 values of ordinary size: the upper half decides.
  for (auto& value : values) value = numeric::bf16_from_float(rng.normal());
  for (int64_t at = 0; at < bytes; at += kSeedBytes) {
    memory.upload(codes_.as<char>() + at, codes.data(), kSeedBytes);
    memory.upload(values_.as<char>() + at, values.data(), kSeedBytes);
  }
  for (int64_t at = 0; at < bytes / 8; at += kSeedBytes) {
    memory.upload(scales_.as<char>() + at, scales.data(), static_cast<size_t>(std::min(kSeedBytes, bytes / 8 - at)));
  }
  // As packed matrices have them on GPUs; kernels for the checkpoint's layout multiply by NaN.
  const auto scale = std::bit_cast<uint32_t>(0x1p-10f);
  const std::vector<uint32_t> block_scales(block_scales_.size() / sizeof(uint32_t),
                                           memory.is_host() ? scale : backends::cuda_common::folded_scale(scale));
  memory.upload(block_scales_.data(), block_scales.data(), block_scales_.size());
}

ops::WeightView WeightPool::weight(WeightFormat format, int64_t rows, int64_t cols, int64_t index) const {
  ops::WeightView view{format, rows, cols};
  const int64_t data = view.data_bytes(), scales = view.scale_bytes();
  const int64_t at = index % (bytes() / data);
  const bool is_plain = format == WeightFormat::kBf16 || format == WeightFormat::kF32;
  view.data = (is_plain ? values_ : codes_).as<char>() + at * data;
  view.block_scales = format == WeightFormat::kNvfp4      ? scales_.as<char>() + at * scales
                      : format == WeightFormat::kFp8Block ? block_scales_.as<char>()
                                                          : nullptr;
  view.tensor_scale = format == WeightFormat::kNvfp4 ? 1e-4f : 1.0f;
  view.scales_fold = format == WeightFormat::kFp8Block && !block_scales_.memory().is_host();
  return view;
}

}  // namespace tessera::bench
