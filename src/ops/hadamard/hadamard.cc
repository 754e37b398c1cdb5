// SPDX-License-Identifier: Apache-2.0
#include "ops/hadamard/hadamard.h"

#include <fmt/format.h>

#include <cmath>

#include "numeric/mxfp4.h"
#include "ops/reference_rows.h"

namespace tessera::ops {

std::string Hadamard::Desc::to_string() const {
  return fmt::format("[{}]{}", width, is_fp4 ? " -> fp4" : "");
}

bool hadamard_reference_supports(const Hadamard::Desc& desc, std::string& why_not) {
  const bool is_power = desc.width > 0 && (desc.width & (desc.width - 1)) == 0;
  if (!is_power || desc.width > kMaxHadamardWidth || (desc.is_fp4 && desc.width % numeric::kMxfp4Block != 0)) {
    why_not = fmt::format("a power of two up to {}{}, not {}", kMaxHadamardWidth,
                          desc.is_fp4 ? " and a multiple of 32" : "", desc.width);
    return false;
  }
  return true;
}

void hadamard_reference(const Hadamard::Desc& desc, const Hadamard::Args& args, device::Queue& queue) {
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(desc.width)));
  queue.parallel_for(args.num_rows, 64, [&](int64_t begin, int64_t end) {
    float x[kMaxHadamardWidth];
    uint8_t codes[kMaxHadamardWidth / 2], scales[kMaxHadamardWidth / numeric::kMxfp4Block];
    for (int64_t row = begin; row < end; ++row) {
      load_floats(args.x, row * desc.width, desc.width, x);
      for (int64_t step = 1; step < desc.width; step *= 2) {
        for (int64_t base = 0; base < desc.width; base += 2 * step) {
          for (int64_t i = base; i < base + step; ++i) {
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
          }
        }
      }
      for (int64_t i = 0; i < desc.width; ++i) x[i] = round_to(desc.activation, x[i] * scale);
      if (desc.is_fp4) {
        numeric::q4_quantize(x, desc.width, codes, scales);
        numeric::q4_dequantize(codes, scales, desc.width, x);
      }
      store_floats(args.x, row * desc.width, desc.width, x);
    }
  });
}

}  // namespace tessera::ops
