// SPDX-License-Identifier: Apache-2.0
#include "testing/fills.h"

#include <cmath>
#include <cstring>

#include "ops/reference_rows.h"

namespace tessera::testing {

namespace {

constexpr size_t kGuardBytes = 256;
constexpr uint8_t kGuard = 0xA5;

}  // namespace

void set_fp8_scales(RandomWeight& weight, Rng& rng, bool fold) {
  auto* const scales = weight.scales.as<float>();
  for (int64_t i = 0; i < weight.view.scale_bytes() / 4; ++i) {
    const uint64_t kind = rng.below(10);
    scales[i] = !fold       ? std::ldexp(rng.uniform() + 0.5f, -8)
                : kind == 0 ? 0
                : kind == 1 ? 0x1p-100f
                : kind == 2 ? 0x1p7f
                            : std::ldexp(1.0f, -5 - static_cast<int>(rng.below(8)));
  }
  if (!fold) scales[0] = 3.0f / 512;
}

PoisonedTensor::PoisonedTensor(DType dtype, const Shape& shape) : view_{nullptr, dtype, shape} {
  const size_t bytes = static_cast<size_t>(view_.num_bytes());
  buffer_ = device::Buffer(bytes + kGuardBytes);
  std::memset(buffer_.data(), 0xFF, bytes);  // a NaN in FP32 and BF16
  std::memset(buffer_.as<uint8_t>() + bytes, kGuard, kGuardBytes);
  view_.data = buffer_.data();
}

std::vector<float> PoisonedTensor::floats() const {
  std::vector<float> out(static_cast<size_t>(view_.shape.num_elements()));
  ops::load_floats(view_, 0, view_.shape.num_elements(), out.data());
  return out;
}

bool PoisonedTensor::is_guard_intact() const {
  const uint8_t* guard = buffer_.as<uint8_t>() + view_.num_bytes();
  for (size_t i = 0; i < kGuardBytes; ++i) {
    if (guard[i] != kGuard) return false;
  }
  return true;
}

}  // namespace tessera::testing
